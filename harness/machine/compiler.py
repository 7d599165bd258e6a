"""Checks that a C++ compiler works, which Inductor needs on a CPU. Loads no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from bitproof.harness.processes.command import CommandError, run_command

_SECONDS = 60


def compiler() -> str:
    """Return the command of the compiler that Inductor calls: the variable CXX if set, else g++."""
    return os.environ.get("CXX", "g++")


def compiled_for() -> list[str]:
    """Return [compiler, version, processor]: the facts besides torch on which the code that Inductor compiles depends.

    `processor` is a digest of the instruction sets. Inductor lets the compiler use all of them, even those that torch
    itself does not use.
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
    # x86 calls the line `flags`, Arm calls it `Features`.
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()


def compiler_problem() -> str | None:
    """Check the C++ compiler with a program of one line. Return the reason why it fails, in words; None if it works."""
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
