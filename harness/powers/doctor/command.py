"""`bitproof doctor`: checks of Python, torch, memory, compiler and GPUs, with a fix for each failure.

Facts about torch are read in a separate process, since this process never imports torch. The last checks run small
cases.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bitproof.harness import torch_versions
from bitproof.harness.machine.compiler import compiler, compiler_problem
from bitproof.harness.options import RunOptions
from bitproof.harness.processes.command import CommandError, run_command
from bitproof.harness.records import CaseResult, Verdict

MAIN_CASES = ("transformer_batch", "moe_batch", "moe_seq")
MIN_PYTHON = (3, 11)
NUM_RANKS = 8
NEEDED_GIB = 4.0
PROBE_SECONDS = 120
TRIAL_CASES = ("moe_batch", "moe_seq")
"""Two cases, because tracing a second graph after ranks were forked may fail although the first trace did not."""
TRIAL_SECONDS = 300.0  # a case; it takes about 10

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
class MachineCheck:
    """The result of checking whether this machine meets a requirement.

    `is_required`: whether the main cases need this requirement. Other requirements are only for optional features.
    """

    name: str
    is_ok: bool
    found: str
    fix: str | None = None
    is_required: bool = True

    def __str__(self) -> str:
        fix = f"; fix: {self.fix}" if self.fix and not self.is_ok else ""
        return f"{'ok' if self.is_ok else 'no'}  {self.name}: {self.found}{fix}"


@dataclass(frozen=True, kw_only=True)
class Torch:
    """Facts about the installed torch."""

    version: str
    gloo: bool
    nccl: bool
    gpus: list[str]


def examine(report_dir: Path, *, needs_gpus: bool = False) -> Iterator[MachineCheck]:
    """Yield the result of each check, the cheapest first. `needs_gpus`: whether runs will use GPUs."""
    yield check_python(sys.version_info[:3])
    # The cores that this process may use, where the system knows them: a container may have fewer than the machine.
    yield check_cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield check_memory(available_gib())
    yield check_report_dir(report_dir)
    yield check_compiler(compiler_problem())
    yield check_program(
        "Chromium", ("chromium", "chromium-browser", "google-chrome"), "tests of HTML reports", "install chromium"
    )
    torch_checks = list(check_torch(probe_torch(), needs_gpus=needs_gpus))
    yield from torch_checks
    # The last two checks run cases, which would fail with a less clear error.
    if all(check.is_ok for check in torch_checks if check.is_required):
        yield check_trial(run_trial())
        yield check_ranks_code(trace_as_two_ranks())


def summarize(checks: list[MachineCheck]) -> MachineCheck:
    """Return a check that passes if the main cases can run here. If it fails, it lists the missing requirements."""
    missing = [check.name for check in checks if check.is_required and not check.is_ok]
    names = ", ".join(MAIN_CASES)
    found = f"{names} can run" if not missing else f"{names} cannot run, because of: {', '.join(missing)}"
    return MachineCheck(name="main cases", is_ok=not missing, found=found)


def check_python(version: tuple[int, ...]) -> MachineCheck:
    found = ".".join(map(str, version))
    return MachineCheck(name="Python", is_ok=version >= MIN_PYTHON, found=found, fix="use Python 3.11 or newer")


def check_cores(num_cores: int) -> MachineCheck:
    # Every number passes: with fewer cores, runs only take longer.
    note = f"; {NUM_RANKS} ranks share them" if num_cores < NUM_RANKS else ""
    return MachineCheck(name="cores", is_ok=True, found=f"{num_cores}{note}", is_required=False)


def check_memory(gib: float | None) -> MachineCheck:
    """Check that eight ranks of a tiny model fit into memory. `gib` is the available memory in GiB, None if unknown."""
    if gib is None:
        return MachineCheck(name="memory", is_ok=True, found="unknown on this system", is_required=False)
    return MachineCheck(
        name="memory",
        is_ok=gib >= NEEDED_GIB,
        found=f"{gib:.1f} GiB available, {NEEDED_GIB:.0f} needed for {NUM_RANKS} ranks",
        fix="end other programs, or use fewer ranks with --world-size",
    )


def check_report_dir(report_dir: Path) -> MachineCheck:
    # The report folder itself need not exist, and is not created here.
    folder = next(folder for folder in (report_dir.absolute(), *report_dir.absolute().parents) if folder.exists())
    try:
        # Only a file that is really created shows that the disk and the rights allow it.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = "choose another folder with --report-dir"
        return MachineCheck(
            name="report folder", is_ok=False, found=f"{report_dir}: {error.strerror or error}", fix=fix
        )
    return MachineCheck(name="report folder", is_ok=True, found=f"{report_dir} can be written")


def check_compiler(problem: str | None) -> MachineCheck:
    found = f"{compiler()} compiles" if problem is None else f"{problem}; the cases of family backends need it"
    fix = "install g++, or name another compiler in CXX"
    return MachineCheck(name="C++ compiler", is_ok=problem is None, found=found, fix=fix, is_required=False)


def check_program(name: str, programs: tuple[str, ...], needed_by: str, fix: str) -> MachineCheck:
    path = next((path for program in programs if (path := shutil.which(program))), None)
    found = path or f"none found, needed only by {needed_by}"
    return MachineCheck(name=name, is_ok=path is not None, found=found, fix=fix, is_required=False)


def check_torch(torch: Torch | str, *, needs_gpus: bool = False) -> Iterator[MachineCheck]:
    """Check the version of torch, gloo, and GPUs. If torch cannot be imported, `torch` is the reason as a string."""
    supported = torch_versions.SUPPORTED
    if isinstance(torch, str):
        yield MachineCheck(name="torch", is_ok=False, found=torch, fix=f"pip install torch, {supported}")
        return
    version = torch.version
    tested = (
        f"{'one' if torch_versions.is_tested(version) else 'none'} of the tested {', '.join(torch_versions.TESTED)}"
    )
    yield MachineCheck(
        name="torch",
        is_ok=torch_versions.is_supported(version),
        found=f"{version}, {tested}; supported: {supported}",
        fix="install a supported torch",
    )
    found = "available" if torch.gloo else "not built into this torch"
    yield MachineCheck(name="gloo", is_ok=torch.gloo, found=found, fix="install a torch built with gloo")
    yield _check_gpus(torch.gpus, has_nccl=torch.nccl, is_required=needs_gpus)


def check_trial(results: list[CaseResult] | str) -> MachineCheck:
    """Check that small cases are EQUAL, since a torch release that passes all other checks may fail to trace them.

    If the cases could not be run, `results` is the reason as a string.
    """
    fix = f"install a tested torch: {', '.join(torch_versions.TESTED)}"
    if isinstance(results, str):
        return MachineCheck(name="trial", is_ok=False, found=results, fix=fix)
    failed = [result for result in results if result.verdict != Verdict.EQUAL]
    if failed:
        found = "; ".join(f"{result.case.name} in small: {_failure_text(result)}" for result in failed)
        return MachineCheck(name="trial", is_ok=False, found=found, fix=fix)
    names = " and ".join(result.case.name for result in results)
    seconds = sum(result.seconds.total or 0.0 for result in results)
    found = f"{names} in small are EQUAL, {seconds:.0f} s: traced, 2 ranks forked, 1 step of eager_chunked and graph"
    return MachineCheck(name="trial", is_ok=True, found=found)


def run_trial() -> list[CaseResult] | str:
    """Run two small cases on the CPU. Return their results, or the error as a string.

    Cases that exceed TRIAL_SECONDS are stopped.
    """
    from bitproof.builtin_cases import CASES
    from bitproof.harness.execute.launch import run_cases

    small = []
    for case in map(CASES.__getitem__, TRIAL_CASES):
        # Without dense layers, the only layer has experts.
        model, parallelism = replace(case.model, layers=1, dense_layers=0), replace(case.parallelism, world_size=2)
        small.append(replace(case, model=model, parallelism=parallelism, steps=1))
    # Not on GPUs, which another run may occupy for hours.
    options = RunOptions(device="cpu", timeout=TRIAL_SECONDS, control="never")
    try:
        with tempfile.TemporaryDirectory(prefix="bitproof-doctor-") as folder:
            return list(run_cases(small, options, Path(folder)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_ranks_code(found: str | None) -> MachineCheck:
    """Check that the first and the last rank get the same code for a small step; `found` is the difference, or None.

    This must hold because all ranks use the step that a single rank has traced or precompiled.
    """
    # A constant in the code that depends on the rank, such as the rank's position in a process group, would be wrong on
    # all other ranks.
    text = "a small step is the same on the first rank and the last, whose coordinates all differ"
    fix = "read the coordinate from a buffer that each rank owns"
    return MachineCheck(name="one code", is_ok=found is None, found=found or text, fix=fix)


def trace_as_two_ranks() -> str | None:
    """Return why a small step cannot be precompiled for all ranks; None if it can."""
    from bitproof.builtin_cases import CASES
    from bitproof.harness.case import Parallelism
    from bitproof.harness.commands.precompile import make
    from bitproof.harness.errors import BitproofError

    # On 4 ranks with tp=2 and ep=2, all coordinates of the first and the last rank differ.
    case = CASES["tp_ep_whole"]
    model = replace(case.model, layers=1, dense_layers=0)
    small = replace(case, model=model, parallelism=Parallelism(world_size=4, tp=2, ep=2))
    try:
        with tempfile.TemporaryDirectory(prefix="bitproof-doctor-") as folder:
            make(small, Path(folder), RunOptions(device="cpu", timeout=TRIAL_SECONDS))
    except BitproofError as error:
        return ", ".join(line.strip() for line in str(error).splitlines())
    return None


def _failure_text(result: CaseResult) -> str:
    # A traceback follows the first empty line.
    text = (result.error or "").partition("\n\n")[0]
    return ", ".join([result.verdict.value, *(line.strip() for line in text.splitlines())])


def probe_torch() -> Torch | str:
    """Return facts about the installed torch, or the reason why it cannot be imported."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = run_command(command, PROBE_SECONDS)
        if done.status == 0:
            # The last line only, since an imported package may print lines before it.
            return Torch(**json.loads(done.out.splitlines()[-1]))
        lines = done.err.strip().splitlines()
        return lines[-1] if lines else f"importing it ended with exit status {done.status}"
    except (CommandError, ValueError, IndexError) as error:
        return f"asking it failed: {error}"


def available_gib() -> float | None:
    """Return the memory in GiB that new processes can use, within the container's limit; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    gib = kib / 2**20
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        # `memory.max` is the text "max" without a limit: a ValueError, handled below.
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(gib, (limit - used) / 2**30)
    except (OSError, ValueError):
        return gib


def _check_gpus(gpus: list[str], *, has_nccl: bool, is_required: bool) -> MachineCheck:
    if not gpus:
        found = "none, or none that this torch can use; cases run on the CPU with gloo"
        fix = "install the GPUs' driver and a build of torch for CUDA" if is_required else None
        return MachineCheck(name="GPUs", is_ok=False, found=found, fix=fix, is_required=is_required)
    names = f"{len(gpus)} ({', '.join(dict.fromkeys(gpus))})"
    if not has_nccl:
        found = f"{names}, and this torch has no NCCL: no run would test what joins them"
        return MachineCheck(name="GPUs", is_ok=False, found=found, fix="install a build of torch with NCCL")
    # Ranks that share GPUs use gloo, so such a run does not test NCCL.
    if len(gpus) < NUM_RANKS:
        found = (
            f"{names}, for {NUM_RANKS} ranks: --device cuda takes --world-size {len(gpus)}, or --share-gpus over gloo"
        )
        fix = f"take a machine with {NUM_RANKS} GPUs"
        return MachineCheck(name="GPUs", is_ok=not is_required, found=found, fix=fix, is_required=is_required)
    return MachineCheck(name="GPUs", is_ok=True, found=f"{names}, NCCL", is_required=is_required)
