"""Whatever goes wrong with a machine, at whatever moment: it is named in time, nothing stays behind, the next run runs.

    python -m pytest tests/test_chaos.py -n 2 -m slow [-k "paused and c10d"]

Machines are those of `tests/machines.py`: torchrun's ranks on them share a network and nothing else. An entry runs
three cases in one command: a first one, one in which something goes wrong, and one after that. The next entry's command
runs on the same machines with their disks as they are, so its first case shows that the entry before left nothing in
its way. Root alone can run these. A table of all entries is printed in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.case_file import case_text
from tests.machines import Cluster, Machine, cluster_of, until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
WITHIN = 10.0
"""Seconds in which whoever goes wrong must be named, from the moment on at which that is due."""
ENDS_WITHIN = 60.0
PYTHON = str(ROOT / ".venv" / "bin" / "python")
PORT = "29500"
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/time.h>
#include <time.h>
static long days(void) {
    static long found = -1000000;
    if (found == -1000000) {
        FILE *file = fopen("/days", "r");
        if (!file || fscanf(file, "%ld", &found) != 1) found = 0;
        if (file) fclose(file);
    }
    return found * 86400;
}
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += days();
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""The time of day, off by as many days as a file on the machine says."""


@dataclass
class Attempt:
    """One entry's command at work: a torchrun on every machine."""

    cluster: Cluster
    entry: Entry
    folder: Path
    torchruns: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    older: set[Path] = field(default_factory=set)
    """Temporary folders that killed commands of earlier entries have left."""

    @property
    def victim(self) -> Machine:
        return self.cluster.machines[self.entry.node]

    def output(self, number: int) -> str:
        """What the torchrun of a machine, and its ranks, have printed."""
        path = self.folder / f"output{number}"
        return path.read_text(errors="replace") if path.exists() else ""

    def printed(self) -> str:
        """What all have printed whose machine can still show it."""
        return "\n".join(self.output(number) for number in self.torchruns if self.entry.is_heard(number))

    def has_agents_error(self, number: int) -> bool:
        """Whether a torchrun has logged an error of its own: to do so it imports Dynamo, which makes a folder."""
        return bool(re.search(r"^E\d{4} .*torch/distributed/elastic/", self.output(number), re.MULTILINE))

    def commands(self, number: int | None = None) -> list[psutil.Process]:
        """The commands of ours on a machine."""
        agents = {each.pid for each in self.processes("torch.distributed.run", number)}
        return [each for each in self.processes("run", number) if each.pid not in agents]

    def ends_agents_that_wait(self) -> None:
        """End torchruns that wait for each other when our commands have ended.

        Over c10d torchrun compares times of day: it takes a machine whose clock is off for gone, and may then stay for
        five minutes at its own end, whatever it has run.
        """
        until(ENDS_WITHIN, lambda: "report: " in self.output(0))
        until(ENDS_WITHIN, lambda: not any(self.commands(number) for number in self.torchruns))
        until(5, lambda: all(torchrun.poll() is not None for torchrun in self.torchruns.values()))
        for number in self.torchruns:
            for agent in self.processes("torch.distributed.run", number):
                agent.terminate()

    def goes_on(self) -> None:
        """Let go of the rank that waits."""
        for machine in self.cluster.machines:
            if machine.is_up:
                machine.path("/held").unlink(missing_ok=True)

    def processes(self, word: str, number: int | None = None) -> list[psutil.Process]:
        """The processes on a machine that were started with this word."""
        machine = self.victim if number is None else self.cluster.machines[number]
        found = []
        for each in machine.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if word in each.cmdline():
                    found.append(each)
        return found

    def start(self, number: int, rank: int | None = None) -> None:
        """Start torchrun on a machine."""
        entry, machine = self.entry, self.cluster.machines[number]
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"node0:{PORT}", "--rdzv-id", entry.name]
        if entry.rendezvous == "static":
            node_rank = str(number if rank is None else rank)
            where = ["--master-addr", "node0", "--master-port", PORT, "--node-rank", node_rank]
        size = ["--nnodes", str(entry.nodes), "--nproc-per-node", str(entry.ranks), "--log-dir", "/reports"]
        words = ["-m", "bitproof", "run", "--device", "cpu", "--no-control", "--timeout", str(entry.timeout)]
        for case in entry.cases():
            machine.path(f"/{case.name}.json").write_text(case_text(case))
            words += ["--case", f"/{case.name}.json"]
        variables = {"PATH": os.environ["PATH"], "HOME": "/root", "TMPDIR": "/scratch", "PYTHONPATH": str(ROOT)}
        variables |= {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TEST_HOLD": "/held",
            "BITPROOF_CACHE": "/cache",
        }
        self.torchruns[number] = machine.start(
            [PYTHON, "-m", "torch.distributed.run", *size, *where, *words, "--report-dir", "/reports"],
            self.folder / f"output{number}",
            str(ROOT),
            **variables | entry.environment(number),
        )

    def holds(self) -> bool:
        """Whether a rank has come to the moment of the entry, and waits there."""
        return any(machine.path("/held").exists() for machine in self.cluster.machines if machine.is_up)

    def is_there(self, number: int) -> bool:
        """Whether a rank of this machine has begun to come together with the others."""
        folders = self.cluster.machines[number].path("/scratch").glob("bitproof-*")
        return any(folder not in self.older for folder in folders)

    def has_loaded(self, number: int) -> bool:
        """Whether a host on this machine has said what it is made of, and waits for what else is asked."""
        is_idle = False
        for process in self.processes("bitproof.harness.execute.host.main", number):
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                is_loaded = "libtorch_python" in Path(f"/proc/{process.pid}/maps").read_text()
                is_idle = is_loaded and process.status() == psutil.STATUS_SLEEPING
        self.idle[number] = self.idle.get(number, 0) + 1 if is_idle else 0
        return self.idle.get(number, 0) > 3  # looks; one alone may be at a page that is read from disk


Act = Callable[[Attempt], None]


def _kill(attempt: Attempt) -> None:
    attempt.victim.power_off()


def _unplug(attempt: Attempt) -> None:
    attempt.victim.plug(False)


def _plug(attempt: Attempt) -> None:
    attempt.victim.plug(True)


def _pause(attempt: Attempt) -> None:
    attempt.victim.signal_all(signal.SIGSTOP)


def _resume(attempt: Attempt) -> None:
    attempt.victim.signal_all(signal.SIGCONT)


def _agent(number: signal.Signals) -> Act:
    def act(attempt: Attempt) -> None:
        found = attempt.processes("torch.distributed.run")
        assert found, f"no torchrun on {attempt.victim.name}"
        for process in found:
            process.send_signal(number)

    return act


def _command(number: signal.Signals) -> Act:
    def act(attempt: Attempt) -> None:
        found = attempt.commands()
        assert found, f"no command on {attempt.victim.name}"
        for process in found:
            process.send_signal(number)

    return act


def _agent_stops_for_a_while(attempt: Attempt) -> None:
    _agent(signal.SIGSTOP)(attempt)
    attempt.goes_on()
    until(60, lambda: "then: EQUAL" in attempt.output(0))
    _agent(signal.SIGCONT)(attempt)


def _pauses_briefly(attempt: Attempt) -> None:
    _pause(attempt)
    time.sleep(4.0)  # less than the silence after which a machine counts as gone
    _resume(attempt)
    attempt.goes_on()


def _comes_late(attempt: Attempt) -> None:
    _command(signal.SIGSTOP)(attempt)
    time.sleep(15.0)
    _command(signal.SIGCONT)(attempt)


def _is_slow(attempt: Attempt) -> None:
    """Give the machine a quarter of the time, until all is done."""
    attempt.goes_on()
    limit = time.monotonic() + 150
    while attempt.torchruns[0].poll() is None and time.monotonic() < limit:
        _pause(attempt)
        time.sleep(0.9)
        _resume(attempt)
        time.sleep(0.3)


def _real(file: str) -> str:
    """A path without links: followed from here, a link on a machine would lead to this machine's own file."""
    return str(Path(file).resolve())


def _edit(file: str) -> Act:
    def act(attempt: Attempt) -> None:
        path = attempt.victim.path(_real(file))
        path.write_text((path.read_text() if path.exists() else "") + "\n# edited\n")

    return act


def _restore(file: str) -> Act:
    """As this machine has the file, or away."""

    def act(attempt: Attempt) -> None:
        if Path(file).exists():
            attempt.victim.path(_real(file)).write_bytes(Path(file).read_bytes())
        else:
            attempt.victim.path(_real(file)).unlink()

    return act


def _days_off(days: int) -> Act:
    def act(attempt: Attempt) -> None:
        source, library = attempt.folder / "clock.c", attempt.folder / "clock.so"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        for machine in attempt.cluster.machines:
            machine.path("/clock.so").write_bytes(library.read_bytes())
            machine.path("/days").write_text("0")
        attempt.victim.path("/days").write_text(str(days))

    return act


def _fill(disk: str, leaves: int = 0) -> Act:
    def act(attempt: Attempt) -> None:
        with attempt.victim.path(f"{disk}/.full").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(max(0, file.tell() - leaves))

    return act


def _empty(disk: str) -> Act:
    return lambda attempt: attempt.victim.path(f"{disk}/.full").unlink(missing_ok=True)


def _at_once(attempt: Attempt) -> bool:
    return True


def _holds(attempt: Attempt) -> bool:
    return attempt.holds()


def _victim_is_there(attempt: Attempt) -> bool:
    return attempt.is_there(attempt.entry.node) and attempt.is_there(0)


def _victims_command_is_there(attempt: Attempt) -> bool:
    return bool(attempt.commands())


def _a_rank_is_stopped(attempt: Attempt) -> bool:
    return any(each.status() == psutil.STATUS_STOPPED for each in attempt.victim.processes())


def _first_is_done(attempt: Attempt) -> bool:
    return "first: EQUAL" in attempt.output(0)


def _node0_is_there(attempt: Attempt) -> bool:
    return attempt.is_there(0)


def _all_have_loaded(attempt: Attempt) -> bool:
    is_named = re.search(attempt.entry.named or "", attempt.printed())
    return bool(is_named) or all([attempt.has_loaded(number) for number in attempt.torchruns])


def _third_has_loaded(attempt: Attempt) -> bool:
    return bool(re.search(attempt.entry.named or "", attempt.printed())) or attempt.has_loaded(2)


STEADY, DEEDS = "tests.harness.toy_systems:steady", "tests.harness.deeds"
EQUAL = ("EQUAL", "EQUAL", "EQUAL")
LOST = ("EQUAL", "ERROR", "ERROR")
FAILED = ("EQUAL", "ERROR", "EQUAL")
NOT_RUN = ("UNVERIFIED", "UNVERIFIED", "UNVERIFIED")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What goes wrong: where, when, who must be named, and what the three cases come to."""

    name: str
    rendezvous: str
    named: str | None
    verdicts: tuple[str, ...] | None
    or_else: tuple[str, ...] | None = None
    """What they come to where another comes first."""
    nodes: int = 2
    ranks: int = 1
    node: int = 1
    system: str = STEADY
    prepare: Act | None = None
    waits: Callable[[Attempt], bool] = _at_once
    act: Act | None = None
    due_after: float = 0.0
    undo: Act | None = None
    loses: bool = False
    """Whether nobody can read what the machine prints from then on."""
    leaves_folder: bool = False
    """Whether a killed command's temporary folder stays until the next command on its machine."""
    timeout: int = 60
    skewed: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    starts: tuple[tuple[int, float, int | None], ...] | None = None
    """The machines that start, the seconds after which each does, and another node rank than its number."""

    def __str__(self) -> str:
        return self.name

    def cases(self) -> list[Case]:
        """The three cases of its command."""
        size = Parallelism(world_size=self.nodes * self.ranks, ep=1)
        first = Case(name="first", family="toy", reference=STEADY, candidate=STEADY, steps=3, parallelism=size)
        return [first, replace(first, name="faulty", candidate=self.system), replace(first, name="then")]

    def is_heard(self, number: int) -> bool:
        """Whether what a machine prints can be read."""
        return not (self.loses and number == self.node)

    def environment(self, number: int) -> dict[str, str]:
        """What its machine's environment has beside that of the others."""
        skewed = {"LD_PRELOAD": "/clock.so"} if self.skewed else {}
        return skewed | (dict(self.variables) if number == self.node else {})


def rank_of(node: int, ranks: int = 1) -> int:
    """The last rank of a machine: torchrun numbers ranks by machine, and machines by name."""
    return node * ranks + ranks - 1


def vanished(node: int, ranks: int = 1) -> str:
    """What is said of a machine that is gone, by rank 0's or, where that is the one, by the others."""
    if node:
        each = " and ".join(str(node * ranks + i) for i in range(ranks))
        return rf"ranks? (\d+, )*{each} vanished|ranks? {node * ranks}\b.* vanished"
    return r"rank 0 vanished|the store at which ranks meet has ended, at node0"


def gone_at(deed: str, act: Act, moment: str, rendezvous: str, nodes: int = 2, node: int = 1, **more: object) -> Entry:
    """An entry in which something happens to a machine at a moment of a case, or while ranks come together."""
    held = "held_at_its_step"
    other = next(each for each in reversed(range(nodes)) if each != node)
    at = {
        "before": f"held_when_made_on_{node}",
        "between": f"{held}_on_{node}",
        "inside": f"{held}_on_{other}",
        "after": f"held_when_asked_for_its_manifest_on_{node}",
    }
    defaults: dict[str, object] = {"named": vanished(node), "verdicts": LOST, "waits": _holds}
    if not node:  # the others' machines report what they have heard from rank 0
        defaults["verdicts"] = ("EQUAL", "UNVERIFIED", "UNVERIFIED")
    if moment == "coming":
        found = rf"waiting for rank {node} of|rank {node} of {nodes} did not come|{vanished(node)}"
        defaults |= {"verdicts": NOT_RUN, "waits": _victim_is_there, "named": found, "timeout": 30}
    return Entry(
        name=f"{deed}-{moment}-node{node}of{nodes}-{rendezvous}",
        rendezvous=rendezvous,
        nodes=nodes,
        node=node,
        system=f"{DEEDS}:{at[moment]}" if moment in at else STEADY,
        act=act,
        **(defaults | more),  # type: ignore[arg-type]
    )


def of_a_rank(deed: str, rendezvous: str, nodes: int, ranks: int = 1, **more: object) -> Entry:
    """An entry in which a rank of the last machine goes wrong by itself, and the next case runs."""
    rank = rank_of(nodes - 1, ranks)
    system = f"{DEEDS}:{deed}_at_its_step_on_{rank}"
    defaults: dict[str, object] = {"named": rf"rank {rank} of {re.escape(system)} ", "verdicts": FAILED}
    defaults["waits"] = _first_is_done
    return Entry(
        name=f"rank_{deed}-{nodes}x{ranks}-{rendezvous}",
        rendezvous=rendezvous,
        nodes=nodes,
        ranks=ranks,
        node=nodes - 1,
        system=system,
        **(defaults | more),  # type: ignore[arg-type]
    )


KILLED = {"loses": True, "leaves_folder": True}
PAUSED = {"loses": True, "undo": _resume}
UNPLUGGED = {"loses": True, "undo": _plug}
AGENT_KILLED = _agent(signal.SIGKILL)
SITE = next(each for each in sys.path if each.endswith("site-packages"))
OTHER = r"rank 1 is not made of what the others are"


def other(what: str, rendezvous: str, **more: object) -> Entry:
    """An entry in which a machine is made of other things, and all is refused: exit status 2, and no report."""
    defaults: dict[str, object] = {"named": OTHER, "verdicts": None, "waits": _all_have_loaded}
    return Entry(name=f"other_{what}-{rendezvous}", rendezvous=rendezvous, **(defaults | more))  # type: ignore[arg-type]


def of_file(what: str, file: str, rendezvous: str, **more: object) -> Entry:
    """An entry in which a file differs on one machine."""
    return other(what, rendezvous, prepare=_edit(file), undo=_restore(file), **more)


def well(what: str, rendezvous: str, **more: object) -> Entry:
    """An entry that all machines survive."""
    return Entry(name=f"{what}-{rendezvous}", rendezvous=rendezvous, named=None, verdicts=EQUAL, **more)  # type: ignore[arg-type]


HELD = f"{DEEDS}:held_at_its_step_on_1"
LATE = {"waits": _victims_command_is_there, "act": _command(signal.SIGSTOP), "undo": _command(signal.SIGCONT)}
FULL_SCRATCH = {"undo": _empty("/scratch"), "named": r"No space left", "verdicts": LOST}
RAISES = f"{DEEDS}:raising_at_its_step_on_1"
AHEAD, BEHIND = {"prepare": _days_off(1), "skewed": True}, {"prepare": _days_off(-1), "skewed": True}
ENTRIES = [
    *(
        gone_at("node_killed", _kill, moment, kind, **KILLED)
        for kind in ("static", "c10d")
        for moment in ("coming", "before", "between", "inside", "after")
    ),
    gone_at("node_killed", _kill, "between", "static", node=0, **KILLED),
    gone_at("node_killed", _kill, "inside", "c10d", node=0, **KILLED),
    gone_at("node_killed", _kill, "inside", "static", 4, node=3, **KILLED),
    gone_at("node_killed", _kill, "between", "c10d", 4, node=2, **KILLED),
    gone_at("node_unplugged", _unplug, "between", "static", **UNPLUGGED),
    gone_at("node_unplugged", _unplug, "inside", "c10d", **UNPLUGGED),
    gone_at("node_unplugged", _unplug, "inside", "static", node=0, **UNPLUGGED),
    gone_at("node_unplugged", _unplug, "between", "static", 4, node=2, **UNPLUGGED),
    gone_at("node_paused", _pause, "before", "static", **PAUSED),
    gone_at("node_paused", _pause, "between", "c10d", **PAUSED),
    gone_at("node_paused", _pause, "inside", "static", **PAUSED),
    gone_at("node_paused", _pause, "between", "static", node=0, **PAUSED),
    gone_at("node_paused", _pause, "inside", "c10d", 4, node=3, **PAUSED),
    gone_at("agent_killed", AGENT_KILLED, "coming", "static"),
    gone_at("agent_killed", AGENT_KILLED, "between", "static"),
    gone_at("agent_killed", AGENT_KILLED, "inside", "c10d"),
    gone_at(
        "agent_killed",
        AGENT_KILLED,
        "between",
        "c10d",
        node=0,
        named=rf"{vanished(0)}|torchrun has ended on node0",
        verdicts=LOST,
    ),
    gone_at("agent_killed", AGENT_KILLED, "inside", "static", 4, node=2),
    gone_at("agent_terminated", _agent(signal.SIGTERM), "between", "static"),
    gone_at("agent_terminated", _agent(signal.SIGTERM), "inside", "c10d"),
    gone_at("command_killed", _command(signal.SIGKILL), "between", "c10d", leaves_folder=True),
    gone_at("command_killed", _command(signal.SIGKILL), "inside", "static", node=0, leaves_folder=True),
    of_a_rank("killed", "static", 2),
    of_a_rank("killed", "c10d", 2, 2),
    of_a_rank("raising", "c10d", 4),
    of_a_rank("disk_full", "static", 2),
    of_a_rank("leaving", "static", 2, 2),
    of_a_rank("host_killed", "static", 2, named=r"the process that starts rank 1 on node1 "),
    *(
        of_a_rank("stopped", kind, 2, waits=_a_rank_is_stopped, timeout=25, due_after=25.0, named=r"rank 1, \S*logs/")
        for kind in ("static", "c10d")
    ),
    well("agent_stopped", "static", system=HELD, waits=_holds, act=_agent_stops_for_a_while),
    well("node_paused_briefly", "c10d", system=HELD, waits=_holds, act=_pauses_briefly),
    well("node_crawls", "static", system=HELD, waits=_holds, act=_is_slow, timeout=120),
    well("torchrun_late", "static", starts=((0, 0.0, None), (1, 10.0, None))),
    well("torchrun_late", "c10d", starts=((1, 0.0, None), (0, 10.0, None))),
    well("rank_late", "static", waits=_victims_command_is_there, act=_comes_late),
    *(
        Entry(
            name=f"rank_too_late-{nodes}-{kind}",
            rendezvous=kind,
            nodes=nodes,
            node=nodes - 1,
            named=rf"rank {nodes - 1} of {nodes} did not come",
            verdicts=NOT_RUN,
            timeout=25,
            due_after=25.0,
            waits=lambda attempt: _node0_is_there(attempt) and _victims_command_is_there(attempt),
            act=_command(signal.SIGSTOP),
            undo=_command(signal.SIGCONT),
        )
        for nodes, kind in ((2, "static"), (2, "c10d"), (4, "static"))
    ),
    of_file("code", f"{ROOT}/reference/optimizer.py", "static"),
    of_file("code", f"{ROOT}/harness/capture/digest.py", "c10d"),
    of_file("torch", f"{SITE}/torch/nn/functional.py", "static"),
    of_file("start_up", f"{SITE}/sitecustomize.py", "c10d"),
    other("environment", "static", variables=(("MKL_CBWR", "COMPATIBLE"),)),
    other("environment", "c10d", variables=(("ATEN_CPU_CAPABILITY", "default"),)),
    Entry(
        name="rank_1_twice-static",
        rendezvous="static",
        named=r"a rank came that cannot be one of this run",
        verdicts=EQUAL,
        waits=_third_has_loaded,
        starts=((0, 0.0, 0), (1, 0.0, 1), (2, 4.0, 1)),
    ),
    Entry(
        name="rank_0_twice-static",
        rendezvous="static",
        named=r"this run has a rank 0 already",
        verdicts=EQUAL,  # where rank 0 of node 0 comes first; else its torchrun ends, and the store with it
        or_else=NOT_RUN,  # torchrun lets both go once two machines are there
        waits=_third_has_loaded,
        starts=((0, 0.0, 0), (2, 4.0, 0), (1, 8.0, 1)),
    ),
    well("node_too_many", "c10d", starts=((0, 0.0, None), (1, 0.0, None), (2, 5.0, None))),
    well("scratch_full-node1", "static", prepare=_fill("/scratch"), undo=_empty("/scratch")),  # Python takes /tmp
    well("scratch_full-node0", "c10d", node=0, prepare=_fill("/scratch"), undo=_empty("/scratch")),
    *(
        gone_at(
            "scratch_fills",
            lambda attempt: (_fill("/scratch")(attempt), attempt.goes_on()),
            "between",
            kind,
            node=node,
            **FULL_SCRATCH,
        )
        for kind, node in (("static", 1), ("c10d", 0))
    ),
    *(  # rank 0's; room is made as soon as it is named
        gone_at(
            "reports_fill",
            lambda attempt: (_fill("/reports")(attempt), attempt.goes_on()),
            "between",
            kind,
            node=0,
            undo=_empty("/reports"),
            named=r"the recording cannot be written",
            verdicts=("EQUAL", "UNVERIFIED", "EQUAL"),
        )
        for kind in ("static", "c10d")
    ),
    Entry(
        name="reports_full-node0-static",
        rendezvous="static",
        node=0,
        prepare=_fill("/reports"),
        undo=_empty("/reports"),
        verdicts=NOT_RUN,  # by the other machine's report
        named=r"the report folder cannot be written|rank 0 |the store at which ranks meet has ended",
    ),
    well("clock_a_day_ahead-node1", "static", **AHEAD),
    well("clock_a_day_behind-node0", "c10d", **(BEHIND | {"node": 0})),
    *(
        Entry(
            name=f"rank_raising-clock_{word}-node{node}-{kind}",
            rendezvous=kind,
            node=node,
            system=RAISES,
            waits=_first_is_done,
            named=rf"rank 1 of {RAISES} raised",
            verdicts=FAILED,
            **clock,
        )
        for word, node, kind, clock in (
            ("ahead", 1, "static", AHEAD),
            ("behind", 0, "c10d", BEHIND),
            ("behind", 1, "static", BEHIND),
        )
    ),
    gone_at("node_killed-clock_ahead", _kill, "inside", "static", **KILLED, **AHEAD),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four machines; entries on two use the first ones."""
    with cluster_of(tmp_path_factory.mktemp("machines"), 4) as made:
        yield made


def _has_ended(torchrun: subprocess.Popen[bytes]) -> bool:
    torchrun.send_signal(signal.SIGCONT)  # nsenter stops itself when what it started is stopped
    return torchrun.poll() is not None


def attempted(entry: Entry, cluster: Cluster, folder: Path) -> tuple[Attempt, float, float]:
    """Run an entry to its end; with the moment at which somebody was due to be named, and the one at which it was."""
    attempt = Attempt(cluster, entry, folder)
    for machine in cluster.machines:
        machine.boot()
        attempt.older |= set(machine.path("/scratch").glob("bitproof-*"))
        old = "/reports/*", "/held", "/scratch/torchinductor_*"  # the last is of a torchrun
        subprocess.run(f"rm -rf {' '.join(str(machine.path(each)) for each in old)}", shell=True, check=True)
    due = named = float("nan")
    try:
        if entry.prepare:
            entry.prepare(attempt)
        began = time.monotonic()
        for number, after, rank in entry.starts or [(number, 0.0, None) for number in range(entry.nodes)]:
            time.sleep(max(0.0, began + after - time.monotonic()))
            attempt.start(number, rank)
        at_work = attempt.torchruns.values()
        until(120, lambda: entry.waits(attempt) or all(each.poll() is not None for each in at_work))
        if entry.act:
            assert entry.waits(attempt), f"it did not come to its moment: {attempt.printed()[-3000:]}"
            time.sleep(0.5)  # by now the others wait within the collective
            entry.act(attempt)
        due = time.monotonic() + entry.due_after
        if entry.named is not None:
            until(entry.due_after + ENDS_WITHIN, lambda: re.search(entry.named or "", attempt.printed()))
            named = time.monotonic()
    finally:
        if entry.undo:
            entry.undo(attempt)
        if entry.skewed and entry.rendezvous == "c10d":
            attempt.ends_agents_that_wait()
        for number, torchrun in attempt.torchruns.items():
            if not until(ENDS_WITHIN, lambda torchrun=torchrun: _has_ended(torchrun)):
                print(f"torchrun of node{number} goes on after {ENDS_WITHIN:g} s")
                cluster.machines[number].power_off()
                torchrun.kill()
                torchrun.wait()
    return attempt, due, named


def report_of(attempt: Attempt) -> dict[str, object] | None:
    """The newest report of a machine that can show one."""
    for machine in attempt.cluster.machines[: attempt.entry.nodes]:
        if machine.is_up and attempt.entry.is_heard(machine.number):
            for path in sorted(machine.path("/reports").glob("*/report.json"), reverse=True):
                return json.loads(path.read_text())
    return None


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_it_is_named_in_time_and_reported_and_leaves_nothing(
    entry: Entry, cluster: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    attempt, due, named = attempted(entry, cluster, tmp_path)
    report = report_of(attempt)
    left: dict[str, list[str]] = {}

    def nothing_is_left() -> bool:
        left.clear()
        for machine in (cluster.machines[number] for number in attempt.torchruns):
            may = ("/scratch/bitproof-",) if entry.leaves_folder and machine is attempt.victim else ()
            if attempt.has_agents_error(machine.number):
                may += ("/scratch/torchinductor_",)
            if found := [each for each in machine.left() if not each.startswith(may)]:
                left[machine.name] = found
        return not left

    until(20, nothing_is_left)
    for machine in cluster.machines:  # whatever this entry left, the next one is not to suffer for
        if machine.name in left:
            machine.power_off()
    verdicts = report and tuple(case["verdict"] for case in report["cases"])  # type: ignore[attr-defined]
    statuses = {number: torchrun.poll() for number, torchrun in attempt.torchruns.items()}
    found = re.search(rf"[^\n]*({entry.named})[^\n]*", attempt.printed()) if entry.named else None
    row = {"entry": entry.name, "verdicts": verdicts, "named after": round(named - due, 1)}
    row |= {"seconds": round(time.monotonic() - began)}
    row |= {"said": found[0].strip()[:120] if found else "", "left": left, "statuses": statuses}
    record_property("row", {key: str(value) for key, value in row.items() if value not in ("", {})})
    if rows := os.environ.get("CHAOS_ROWS"):
        with open(rows, "a") as file:
            print(json.dumps(row), file=file)
    text = "\n".join(f"--- node{number}\n{attempt.output(number)[-3000:]}" for number in attempt.torchruns)
    print(json.dumps(row, indent=1), text)
    assert verdicts == entry.verdicts or (verdicts and verdicts == entry.or_else)
    assert left == {}
    if entry.named:
        assert found, "nobody is named"
        assert named - due < WITHIN
        if entry.verdicts not in (None, EQUAL):
            assert any(re.search(entry.named, str(case["error"])) for case in report["cases"])  # type: ignore[index]
