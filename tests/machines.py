"""Machines of a cluster on this one: each has a network, processes, a host name, disks and shared memory of its own.

Each is a handful of Linux namespaces over an overlay of this machine's files, so that what one writes no other sees; a
bridge in a namespace of its own joins their networks. Its disks outlive its power, as disks do. Root alone may do so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

DISKS = {"scratch": "24m", "reports": "8m"}
"""What a machine keeps its temporary folders and its reports on, and how much each holds."""
_NETWORK = "10.77.0"
# From the kernel's numbers: a socket that listens, or is connected and not closed at this end.
_OPEN = {"0A": "listens", "01": "is connected", "08": "was left by its peer"}

_SWITCH = """
set -e
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
mount -t tmpfs switch "$FOLDER"
echo ready
exec cat > /dev/null
"""

_DISKS = """
set -e
mkdir -p "$FOLDER/$NAME"; cd "$FOLDER/$NAME"
mkdir system; mount -t tmpfs -o size=200m system system
mkdir system/own system/work root
for disk in $DISKS; do mkdir "${disk%=*}"; mount -t tmpfs -o "size=${disk#*=}" "${disk%=*}" "${disk%=*}"; done
"""

# The first process of a machine adopts what loses its parents, and reaps it. It ends when its input does.
_MACHINE = """
set -e
cd "$FOLDER/$NAME"
hostname "$NAME"
mount -t overlay overlay -o "lowerdir=/,upperdir=$PWD/system/own,workdir=$PWD/system/work" root
for name in dev sys; do mount --rbind "/$name" "root/$name"; done
mount -t proc proc root/proc
for name in tmp dev/shm; do mount -t tmpfs own "root/$name"; done
for disk in $DISKS; do mkdir -p "root/${disk%=*}"; mount --bind "${disk%=*}" "root/${disk%=*}"; done
{ echo 127.0.0.1 localhost; for i in $ALL; do echo "$NETWORK.$((i + 1)) node$i"; done; } > root/etc/hosts
ip link set lo up
echo ready
exec chroot root /bin/bash -c 'cat <&0 > /dev/null & wait $!'
"""


def _started(command: Sequence[str], script: str, variables: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """A process in namespaces that runs a script, and the script's own id, once it is ready."""
    process = subprocess.Popen(
        [*command, "--fork", "--kill-child", "/bin/bash", "-c", f"exec 2>&1\n{script}"],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # unshare complains there when its child is killed
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    while (word := process.stdout.readline()) != "ready\n":
        assert word, f"namespaces could not be made, which root alone may: {''.join(said)}"
        said.append(word)
    [child] = psutil.Process(process.pid).children()
    return process, child.pid


def _closed(process: subprocess.Popen[str]) -> None:
    with process:
        pass


class Machine:
    """One machine of a cluster: node `number`, with the host name `node0` and so on."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number, self.name = cluster, number, f"node{number}"
        self.address = f"{_NETWORK}.{number + 1}"
        self._process: subprocess.Popen[str] | None = None
        self._first = 0
        self._boots = 0
        cluster.at_switch(_DISKS, NAME=self.name)

    @property
    def is_up(self) -> bool:
        """Whether it has power."""
        return self._process is not None

    def boot(self) -> None:
        """Give it power: its disks are as they were, its clock since boot begins anew, and no program runs."""
        if self._process is not None:
            return
        kinds = ("--net", "--pid", "--mount", "--uts", "--ipc", "--time")
        age = str(1000 + 5000 * self.number + self._boots)  # no two agree, as on real ones
        enter = ["nsenter", "-t", str(self.cluster.switch), "-m", "--", "unshare", *kinds]
        self._process, self._first = _started(
            [*enter, "--monotonic", age, "--boottime", age],
            _MACHINE,
            self.cluster.variables | {"NAME": self.name, "ALL": " ".join(map(str, range(self.cluster.size)))},
        )
        self._boots += 1
        enter = ["nsenter", "-t", str(self._first), "-n", "--", "/bin/bash", "-c"]
        card = f"02:00:00:00:00:{self.number + 1:02x}"  # it keeps its card: others remember which has an address
        cable = f"ip link add eth0 address {card} type veth peer name {self.name} netns {self.cluster.switch}"
        cable += f" && ip addr add {self.address}/24 dev eth0 && ip link set eth0 up"
        subprocess.run([*enter, cable], check=True)
        self.cluster.at_switch(f"ip link set {self.name} master bridge; ip link set {self.name} up")

    def power_off(self) -> None:
        """End all that runs on it at one moment."""
        if self._process is None:
            return
        os.kill(self._first, signal.SIGKILL)
        _closed(self._process)
        self._process = None

    def plug(self, is_in: bool) -> None:
        """Put its network cable in, or pull it: nobody hears from it then, and nothing is closed."""
        self.cluster.at_switch(f"ip link set {self.name} {'up' if is_in else 'down'}")

    def path(self, inside: str) -> Path:
        """A path on it, as this machine reaches it."""
        return Path(f"/proc/{self._first}/root{inside}")

    def start(self, command: Sequence[str], output: Path, cwd: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program on it; what it prints goes to a file of this machine's."""
        enter = ["nsenter", "-t", str(self._first), "-m", "-u", "-i", "-n", "-p", "-T", "-r", f"-W{cwd}", "--"]
        with output.open("ab") as out:
            return subprocess.Popen(
                [*enter, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All that runs on it, but for its first process and what keeps that waiting."""
        if self._process is None:
            return []
        own = os.readlink(f"/proc/{self._first}/ns/pid")
        keeps = {self._first, *(child.pid for child in psutil.Process(self._first).children() if child.name() == "cat")}
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{pid}/ns/pid") == own and pid not in keeps:
                    found.append(psutil.Process(pid))
        return found

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all that runs on it, also to what is started meanwhile."""
        done: set[int] = set()
        while new := [each for each in self.processes() if each.pid not in done]:
            for process in new:
                done.add(process.pid)
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    def left(self) -> list[str]:
        """What is there that a command should not leave: processes, files, shared memory, sockets."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append(f"process {process.status()}: {' '.join(process.cmdline())[-150:] or process.name()}")
        if self._process is None:
            return found
        for folder in ("/scratch", "/dev/shm"):
            found += [f"{folder}/{path.name}" for path in self.path(folder).iterdir()]
        memory = self.path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        found += [f"shared memory {line.split()[1]}" for line in memory]
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self._first}/net/{kind}").read_text().splitlines()[1:]:
                state = line.split()[3]
                if state in _OPEN:
                    found.append(f"a {kind} socket that {_OPEN[state]}: {line.split()[1]}")
        return found


class Cluster:
    """Machines that reach each other by the network alone."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        disks = " ".join(f"{name}={size}" for name, size in DISKS.items())
        self.variables = {"FOLDER": str(folder), "DISKS": disks, "NETWORK": _NETWORK}
        self._process, self.switch = _started(["unshare", "--net", "--mount"], _SWITCH, self.variables)
        self.machines = [Machine(self, number) for number in range(size)]

    def at_switch(self, script: str, **variables: str) -> None:
        """Run a script beside the bridge and the disks."""
        enter = ["nsenter", "-t", str(self.switch), "-n", "-m", "--", "/bin/bash", "-c", script]
        subprocess.run(enter, env=os.environ | self.variables | variables, check=True)

    def close(self) -> None:
        """Switch all off, and throw it away."""
        for machine in self.machines:
            machine.power_off()
        os.kill(self.switch, signal.SIGKILL)
        _closed(self._process)


@contextlib.contextmanager
def cluster_of(folder: Path, size: int) -> Iterator[Cluster]:
    """A cluster whose machines all have power, until the block ends."""
    cluster = Cluster(folder, size)
    try:
        for machine in cluster.machines:
            machine.boot()
        yield cluster
    finally:
        cluster.close()


def until(seconds: float, is_so: object) -> bool:
    """Wait until a function returns what is true, or time is up; which of both."""
    assert callable(is_so)
    limit = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
