"""Checks that there is a C++ compiler that works: Inductor needs it on a CPU. Loads no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from bitproof.harness.processes.command import CommandError, run_command

_SECONDS = 60


def compiler() -> str:
    """Return the compiler that Inductor calls: CXX if set, else g++."""
    return os.environ.get("CXX", "g++")


def compiled_for() -> list[str]:
    """Return the facts besides torch that decide code compiled here: compiler, its version, the processor's
    instructions.

    Inductor lets the compiler use all of the processor's instructions, whether torch itself uses them or not.
    """
    try:
        version = run_command([compiler(), "--version"], _SECONDS).out.partition("\n")[0]
    except CommandError as error:
        version = f"cannot be run: {error}"
    return [compiler(), version, _instructions()]


def _instructions() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()


def compiler_problem() -> str | None:
    """Return why a one-line program cannot be compiled, in words; None if it can."""
    command = compiler()
    if shutil.which(command) is None:
        return f"no program {command} is found"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one_line.cpp")
        source.write_text("int main() { return 0; }\n")
        arguments = [command, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        try:
            done = run_command(arguments, _SECONDS)
        except CommandError as error:
            return f"{command} cannot be run: {error}"
    if done.status:
        lines = done.err.strip().splitlines() or ["it says nothing"]
        return f"{command} ends with status {done.status} on a one-line program: {lines[0]}"
    return None
