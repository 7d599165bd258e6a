"""What this machine can run, and why not the rest. torch is asked in another process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compiler import compiler, compiler_problem

MAIN_CASES = ("transformer_batch", "moe_batch", "moe_seq")
MIN_TORCH, MAX_TORCH = (2, 11), (2, 15)
MIN_PYTHON = (3, 11)
NUM_RANKS = 8
NEEDED_GIB = 4.0
PROBE_SECONDS = 120

PROBE = """
import json, torch, torch.distributed as dist
available = dist.is_available()
print(json.dumps({
    "version": torch.__version__,
    "gloo": available and dist.is_gloo_available(),
    "nccl": available and dist.is_nccl_available(),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing a run may need. `is_required` says whether the main cases need it."""

    name: str
    is_ok: bool
    found: str
    fix: str | None = None
    is_required: bool = True

    def __str__(self) -> str:
        fix = f"; fix: {self.fix}" if self.fix and not self.is_ok else ""
        return f"{'ok' if self.is_ok else 'no'}  {self.name}: {self.found}{fix}"


def examine(report_dir: Path) -> Iterator[Check]:
    """Every check, cheapest first, each as soon as it is known."""
    yield check_python(sys.version_info[:3])
    yield check_cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield check_memory(available_gib())
    yield check_report_dir(report_dir)
    yield check_compiler(compiler_problem())
    yield check_program(
        "Chromium", ("chromium", "chromium-browser", "google-chrome"), "tests of HTML reports", "install chromium"
    )
    yield from check_torch(probe_torch())


def summarize(checks: list[Check]) -> Check:
    """Whether the main cases can run here, and what stops them if not."""
    missing = [check.name for check in checks if check.is_required and not check.is_ok]
    names = ", ".join(MAIN_CASES)
    found = f"{names} can run" if not missing else f"{names} cannot run, because of: {', '.join(missing)}"
    return Check(name="main cases", is_ok=not missing, found=found)


def check_python(version: tuple[int, ...]) -> Check:
    """Python is new enough."""
    found = ".".join(map(str, version))
    return Check(name="Python", is_ok=version >= MIN_PYTHON, found=found, fix="use Python 3.11 or newer")


def check_cores(num_cores: int) -> Check:
    """Cores are never too few: ranks share them, and only time is lost."""
    note = f"; {NUM_RANKS} ranks share them" if num_cores < NUM_RANKS else ""
    return Check(name="cores", is_ok=True, found=f"{num_cores}{note}", is_required=False)


def check_memory(gib: float | None) -> Check:
    """Eight ranks of a tiny model fit."""
    if gib is None:
        return Check(name="memory", is_ok=True, found="unknown on this system", is_required=False)
    return Check(
        name="memory",
        is_ok=gib >= NEEDED_GIB,
        found=f"{gib:.1f} GiB available, {NEEDED_GIB:.0f} needed for {NUM_RANKS} ranks",
        fix="end other programs, or use fewer ranks with --world-size",
    )


def check_report_dir(report_dir: Path) -> Check:
    """Files can be made in the report folder, or in the nearest folder above it that exists."""
    folder = next(folder for folder in (report_dir.absolute(), *report_dir.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = "choose another folder with --report-dir"
        return Check(name="report folder", is_ok=False, found=f"{report_dir}: {error.strerror or error}", fix=fix)
    return Check(name="report folder", is_ok=True, found=f"{report_dir} can be written")


def check_compiler(problem: str | None) -> Check:
    """Inductor compiles for the CPU with what CXX names, else g++. A program was compiled to see that it works."""
    found = f"{compiler()} compiles" if problem is None else f"{problem}; the cases of family backends need it"
    fix = "install g++, or name another compiler in CXX"
    return Check(name="C++ compiler", is_ok=problem is None, found=found, fix=fix, is_required=False)


def check_program(name: str, programs: tuple[str, ...], needed_by: str, fix: str) -> Check:
    """A program that later needs, and no main case does."""
    path = next((path for program in programs if (path := shutil.which(program))), None)
    found = path or f"none found, needed only by {needed_by}"
    return Check(name=name, is_ok=path is not None, found=found, fix=fix, is_required=False)


def check_torch(probe: dict[str, Any]) -> Iterator[Check]:
    """torch and what it can do: its version, gloo, GPUs."""
    supported = f"{'.'.join(map(str, MIN_TORCH))} to {'.'.join(map(str, MAX_TORCH))}"
    if "error" in probe:
        yield Check(name="torch", is_ok=False, found=probe["error"], fix=f"pip install torch, {supported}")
        return
    version = probe["version"]
    is_supported = MIN_TORCH <= _release(version) <= MAX_TORCH
    yield Check(
        name="torch", is_ok=is_supported, found=f"{version}, supported: {supported}", fix="install a supported torch"
    )
    found = "available" if probe["gloo"] else "not built into this torch"
    yield Check(name="gloo", is_ok=probe["gloo"], found=found, fix="install a torch built with gloo")
    yield _check_gpus(probe["gpus"], has_nccl=probe["nccl"])


def probe_torch() -> dict[str, Any]:
    """What torch says of itself, or {"error": ...}."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        if done.returncode == 0:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"importing it ended with exit status {done.returncode}"}
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        return {"error": f"asking it failed: {error}"}


def available_gib() -> float | None:
    """Memory that new processes can have, within the container's limit. None where /proc does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    gib = kib / 2**20
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(gib, (limit - used) / 2**30)
    except (OSError, ValueError):
        return gib


def _check_gpus(gpus: list[str], *, has_nccl: bool) -> Check:
    if not gpus:
        found = "none, or none that this torch can use; cases run on the CPU with gloo"
        return Check(name="GPUs", is_ok=False, found=found, is_required=False)
    backend = "NCCL" if has_nccl and len(gpus) >= NUM_RANKS else "gloo"
    sharing = "" if len(gpus) >= NUM_RANKS else f"; {NUM_RANKS} ranks share {len(gpus)}"
    found = f"{len(gpus)} ({', '.join(dict.fromkeys(gpus))}), {backend}{sharing}"
    return Check(name="GPUs", is_ok=True, found=found, is_required=False)


def _release(version: str) -> tuple[int, int]:
    """`2.13.0+cpu` as (2, 13); (0, 0) for what is no version."""
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return 0, 0
