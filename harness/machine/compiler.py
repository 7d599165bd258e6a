"""Is there a C++ compiler that works? Inductor needs one on a CPU. Loads no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECONDS = 60


def compiler() -> str:
    """The compiler that Inductor calls: what CXX names, else g++."""
    return os.environ.get("CXX", "g++")


def compiler_problem() -> str | None:
    """Why a one-line program cannot be compiled, in words; None when it can."""
    command = compiler()
    if shutil.which(command) is None:
        return f"no program {command} is found"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one_line.cpp")
        source.write_text("int main() { return 0; }\n")
        arguments = [command, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command} cannot be run: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        return f"{command} ends with status {done.returncode} on a one-line program: {lines[0]}"
    return None
