"""What the host must not do, as it is forked from: run autograd, in a build of torch that knows of a device.

A run on such a host is doctor's trial of two graph cases, in `commands/test_doctor.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "host_with_a_device.py"


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
