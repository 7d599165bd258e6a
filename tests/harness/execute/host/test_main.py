"""What the host must not do, as it is forked from: run autograd, in a build of torch that knows of a device.

A run on such a host is doctor's trial of two graph cases, in `commands/test_doctor.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bitproof.harness.execute.host_process import HostProcess
from bitproof.harness.execute.requests import MachineRequest

HOST = Path(__file__).parents[1] / "host_with_a_device.py"


@pytest.mark.ranks
def test_where_torch_knows_of_a_device_what_ran_autograd_cannot_be_forked_from() -> None:
    """Else the trial would show nothing."""
    code = f"""
import os, runpy, torch
runpy.run_path({str(HOST)!r})["register"]()
def backward():
    torch.ones(2, requires_grad=True).sum().backward()
backward()
if not os.fork():
    try:
        backward()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Unable to handle autograd's threading in combination with fork" in done.stdout


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a host learns of its parent's end by its input alone")
def test_a_host_ends_with_its_parent_though_another_process_holds_its_input(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from bitproof.harness.execute.host_process import HostProcess
temporary = Path({str(tmp_path)!r}, "temporary")
temporary.mkdir()
host = HostProcess(Path({str(tmp_path)!r}, "log"), temporary=temporary)
holder = os.fork()
if not holder:
    time.sleep(600)
print(host._process.pid, holder, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        host, holder = map(int, parent.stdout.readline().split())
        wait_until(lambda: catches(host, signal.SIGTERM))
        parent.kill()
    try:
        wait_until(lambda: not Path(f"/proc/{host}").exists())
        wait_until(lambda: not (tmp_path / "temporary").exists())
    finally:
        os.kill(holder, signal.SIGKILL)


@pytest.mark.ranks
def test_a_host_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """Lanes and runs side by side replace hosts in threads of their own, which end long before the command does."""
    hosts: list[HostProcess] = []

    def begin() -> None:
        hosts.append(HostProcess(tmp_path / "log", temporary=tmp_path))
        hosts[0].ask(MachineRequest(), 60, lambda event: None)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(0.5)  # a signal would come at once
    try:
        assert hosts[0].ask(MachineRequest(), 60, lambda event: None).gpus >= 0
    finally:
        hosts[0].kill()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, as Linux tells it."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def wait_until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.05)
