"""`bitproof doctor --gpu`: checks a machine's GPUs, and prints a table of pass and fail.

1. Check operations that a training step needs.
2. Kill a rank, then let a rank hang. The error must name this rank.
3. Run cases on all GPUs.

Checks that this machine cannot run are shown as NOT RUN, which does not count as a pass.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from bitproof.harness.capture.environment import environment_variables
from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.machine.gpus import driver_version, gpu_topology, read_nccl_conf
from bitproof.harness.options import Control, RunOptions
from bitproof.harness.powers.doctor.check_result import CheckResult
from bitproof.harness.powers.doctor.command import MAIN_CASES, NUM_RANKS, Torch, probe_torch
from bitproof.harness.powers.doctor.plan import GPU_CHECKS, HUNG, KILLED, names_of
from bitproof.harness.powers.doctor.saved_results import Outcome, SavedResults, earlier
from bitproof.harness.processes import framing
from bitproof.harness.processes.started import Started
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED
from bitproof.harness.runtime.disk_cache import default_folder
from bitproof.harness.runtime.sources import own_digest

_CHECKS_SECONDS = 1800
_CASE_SECONDS = 600.0
_HANG_SECONDS = 60.0  # this case always runs until its time is up
ALONE, TOGETHER = names_of("alone"), names_of("together")
NAMES = (*ALONE, *TOGETHER)
"""The names of the checks in `run.py`. They come from the plan, because importing `run.py` would load torch."""
CASES_TRIED = names_of("case")
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class CheckLine:
    """A line of the table: a check and its result."""

    name: str
    outcome: Outcome
    found: str

    def __str__(self) -> str:
        return f"{self.outcome:<7}  {self.name:<29}  {self.found}"


def examine_gpus(
    report_dir: Path, torch: Torch | str | None = None, *, share_gpus: bool = False
) -> Iterator[CheckLine]:
    """Check all GPUs that torch can use, yield each result, and save the results in `report_dir`.

    Checks that passed in an interrupted call are not repeated. `share_gpus`: whether 8 ranks may share fewer GPUs.
    """
    torch = probe_torch() if torch is None else torch
    if why := why_not(torch):
        yield from _not_run(GPU_CHECKS, why)
        return
    assert not isinstance(torch, str), "it has GPUs"
    # With enough GPUs each rank gets its own, whatever was asked.
    share_gpus = share_gpus and len(torch.gpus) < NUM_RANKS
    hour, cache = SavedResults(about=about(torch, share_gpus=share_gpus)), default_folder()
    kept = {each.name: each for each in earlier(cache, hour.about)}
    began = time.monotonic()
    for line in _check_lines(report_dir, torch, kept=tuple(kept), share_gpus=share_gpus):
        seconds, began = time.monotonic() - began, time.monotonic()
        if line.name in kept:
            # A kept check did not run again: its time and findings are those of the interrupted call.
            seconds, line = kept[line.name].seconds, replace(line, found=kept[line.name].found)
        # Saved after each check: the next check may hang the machine.
        hour = hour.plus(line.name, line.outcome, line.found, seconds)
        hour.write(report_dir)
        hour.keep(cache)
        yield line
    replace(hour, is_over=True).write(report_dir)
    replace(hour, is_over=True).keep(cache)


def about(torch: Torch, *, share_gpus: bool = False) -> dict[str, str]:
    """Return all facts about machine, libraries, settings and code that can change the results, by name."""
    libraries = sorted(
        f"{name} {found.version}" for found in distributions() if (name := found.name or "").startswith(_LIBRARIES)
    )
    # NCCL reads its settings from files and from variables.
    settings = [*read_nccl_conf(os.environ, Path("/etc"), Path.home())]
    settings += [f"{name}={value}" for name, value in environment_variables().items()]
    return {
        "machine": platform.node(),
        "torch": torch.version,
        "GPUs": ", ".join(torch.gpus) + (f", shared by {NUM_RANKS} ranks" if share_gpus else ""),
        "how they are joined": " / ".join(gpu_topology() or ["nvidia-smi does not say"]),
        "driver": driver_version(Path("/proc/driver/nvidia/version")) or "unknown",
        "NCCL": "yes" if torch.nccl else "no",
        "libraries": ", ".join(libraries) or "none of their own",
        "settings": ", ".join(settings) or "none",
        "code": own_digest(),
    }


# Packages with parts of CUDA, such as nvidia-nccl-cu12, and Triton.
_LIBRARIES = ("nvidia-", "triton", "pytorch-triton")


def _check_lines(report_dir: Path, torch: Torch, kept: tuple[str, ...], *, share_gpus: bool) -> Iterator[CheckLine]:
    # The kept checks come first. `examine_gpus` adds their findings.
    yield from (CheckLine(name=name, outcome="pass", found="") for name in kept)
    why, ranks = why_not_together(torch, share_gpus=share_gpus), NUM_RANKS if share_gpus else len(torch.gpus)
    left = [name for name in ((*ALONE,) if why else NAMES) if name not in kept]
    if left:
        yield from run_checks("cuda", ranks, left, shared_gpus=len(torch.gpus) if share_gpus else None)
    if why:
        yield from _not_run((*TOGETHER, *names_of("rank", "case")), why)
    else:
        yield from run_cases_on(ranks, report_dir, kept, share_gpus=share_gpus)


def _not_run(names: Iterable[str], why: str) -> Iterator[CheckLine]:
    for name in names:
        yield CheckLine(name=name, outcome="NOT RUN", found=why)


def why_not(torch: Torch | str) -> str | None:
    """Return why nothing can be checked on this machine; None if something can."""
    if isinstance(torch, str):
        return torch
    return None if torch.gpus else "no GPU that this torch can use"


def why_not_together(torch: Torch, *, share_gpus: bool = False) -> str | None:
    """Return why checks of several ranks cannot run here; None if they can."""
    if not torch.nccl:
        return "this torch has no NCCL"
    if share_gpus or len(torch.gpus) > 1:
        return None
    return "one GPU: there is nothing that NCCL could join; --share-gpus has ranks share it"


def status_of(lines: list[CheckLine]) -> int:
    """Return the exit status: 1 if a check failed, 3 if a check was not run or there are no checks, otherwise 0."""
    outcomes = {line.outcome for line in lines}
    return UNEXPECTED if "FAIL" in outcomes else SUCCESS if outcomes == {"pass"} else UNJUDGED


def run_checks(device: str, ranks: int, names: Iterable[str], *, shared_gpus: int | None = None) -> Iterator[CheckLine]:
    """Run the named checks in a separate process, and yield a line with the result of each.

    If the process ends early, the lines of checks without a result state that they failed.
    """
    left = dict.fromkeys(names)
    arguments = ["--device", device, "--ranks", str(ranks), *(f"--name={name}" for name in left)]
    arguments += [] if shared_gpus is None else ["--shared-gpus", str(shared_gpus)]
    with tempfile.TemporaryDirectory(prefix="bitproof-doctor-") as folder:
        log = Path(folder, "gpu_checks.log")
        process = Started("bitproof.harness.powers.doctor.run", arguments, log=log, environment=ENVIRONMENT)
        try:
            # None: the process has ended, or its next answer took too long.
            while (line := process.inlet.wait(_CHECKS_SECONDS)) is not None:
                found: CheckResult = framing.read(line, CheckResult)
                left.pop(found.name, None)
                yield CheckLine(name=found.name, outcome="pass" if found.is_ok else "FAIL", found=found.found)
        finally:
            process.kill()
        # The last line of a traceback is the error.
        last = (log.read_text(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
    # The process has ended: what it has not answered has failed.
    for name in left:
        yield CheckLine(name=name, outcome="FAIL", found=f"the process that checks ended before: {last}")


def run_cases_on(
    ranks: int, report_dir: Path, kept: Iterable[str] = (), device: Device = "cuda", *, share_gpus: bool = False
) -> Iterator[CheckLine]:
    """Run a case with a killed rank, a case with a hanging rank, then the other planned cases. Yields a line for each.

    `kept` has the names of checks to skip, because they passed in an interrupted call. Ranks that share GPUs use gloo.
    """
    from bitproof.builtin_cases import CASES

    last, kept = ranks - 1, {*kept}
    fail = {
        KILLED: (f"kill-rank:rank={last},step=1", _CASE_SECONDS, judge_killed),
        HUNG: (f"hang-rank:rank={last},step=1", _HANG_SECONDS, judge_hung),
    }
    for name in names_of("rank", "case"):
        if name in kept:
            continue
        # Two steps are enough for the faults, which apply in the second (step=1).
        case = CASES[name] if name not in fail else replace(CASES[MAIN_CASES[0]], steps=2)
        # Not NCCL on shared GPUs: its kernels would wait for each other on the same GPU, about 5 s per step.
        judge_equal: JudgeResult = functools.partial(judge_equal_run, backend="gloo") if share_gpus else judge_equal_run
        inject, timeout, judge = fail.get(name, (None, _CASE_SECONDS, judge_equal))
        try:
            case = on_ranks(case, ranks, is_for_all=name in fail or name in MAIN_CASES)
        except CaseError as error:
            why = " ".join(str(error).split())
            yield CheckLine(name=name, outcome="NOT RUN", found=f"no run on {ranks} GPUs: {why}")
            continue
        yield try_case(case, name, inject, timeout, report_dir, judge, device, share_gpus=share_gpus)


def on_ranks(case: Case, ranks: int, *, is_for_all: bool) -> Case:
    """Return the case with `ranks` ranks. Unless `is_for_all`, a case that has fewer ranks keeps its number of ranks.

    Raises CaseError if the case cannot run on this number of ranks.
    """
    count = ranks if is_for_all else min(ranks, case.parallelism.world_size)
    return replace(case, parallelism=replace(case.parallelism, world_size=count))


JudgeResult = Callable[[CaseResult, int], tuple[bool, str]]


def try_case(
    case: Case,
    name: str,
    inject: str | None,
    timeout: float,
    report_dir: Path,
    judge: JudgeResult,
    device: Device = "cuda",
    *,
    share_gpus: bool = False,
) -> CheckLine:
    """Run a case, and return its line of the table. `judge` returns a pair: whether the case passed, and a text.

    Each system runs twice, unless a fault is injected with `inject`. The device "cpu" is for tests of this function.
    """
    from bitproof.harness.execute.launch import run_cases

    # A fault that kills or hangs a rank leaves nothing to repeat.
    control: Control = "never" if inject else "always"
    options = RunOptions(device=device, timeout=timeout, inject=inject, control=control, share_gpus=share_gpus)
    folder = report_dir / f"doctor-gpu-{name.replace(' ', '-')}-{time.strftime('%Y%m%dT%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        [result] = run_cases([case], options, folder)
    except Exception as error:
        return CheckLine(name=name, outcome="FAIL", found=f"{type(error).__name__}: {error}".partition("\n")[0])
    is_ok, found = judge(result, case.parallelism.world_size - 1)
    if result.device != device:
        # A case that fell back to another device shows nothing about this one.
        is_ok, found = False, f"{found}, which is not {device}"
    with contextlib.suppress(OSError):
        folder.rmdir()  # if it is empty
    return CheckLine(name=name, outcome="pass" if is_ok else "FAIL", found=f"{found}, logs in {folder}")


def judge_killed(result: CaseResult, rank: int) -> tuple[bool, str]:
    return _error_names(result, f"rank {rank}", "SIGKILL")


def judge_hung(result: CaseResult, rank: int) -> tuple[bool, str]:
    """Return a pair: whether the report of a time-out shows that `rank` blocks the others, and the finding in words.

    The report must list `rank` and another rank as late at step 1, and show that `rank` is behind.
    """
    text = result.error or ""
    # The report of a time-out: the late ranks in its line `found`, then a line for each rank's last action.
    named = re.search(r"^  found: (?:.*; )?ranks? ([\d, ]+) at step 1[;,]", text, re.MULTILINE)
    late = set(map(int, named[1].split(", "))) if named else set()
    last = {int(number): did or "" for number, did in _LAST_OF_RANK.findall(text)}
    is_seen = rank in late and all(_holds_up(last.get(rank, ""), last.get(other)) for other in late - {rank})
    is_ok = result.verdict == Verdict.ERROR and "the case ran longer than" in text and len(late) > 1 and is_seen
    expected = "" if is_ok else f", where rank {rank} should be seen to hold up others at step 1"
    return is_ok, f"{result.verdict.value}: {' '.join(text.split())[:200] or 'no error'}{expected}"


_LAST_OF_RANK = re.compile(r"^rank (\d+)(?:, [^\n]*)?:(?:\n  ([^\n]*))?$", re.MULTILINE)
"""The number of a rank, and the line below it: its last collective, or its position in Python."""
_COLLECTIVE = re.compile(r"(\d+) of group (\w+)")


def _holds_up(hung: str, other: str | None) -> bool:
    """Return whether a hanging rank may block another rank, judged by the last action of each: `hung` and `other`."""
    # The rank that causes a hang hangs in its own code, not in a collective.
    if other is None or other == hung or hung.startswith(("launches ", "waits for ")):
        return False
    first, second = _COLLECTIVE.search(hung), _COLLECTIVE.search(other)
    # Of two collectives of a group, the earlier one is the cause. On CUDA this counts, too: the host of a waiting
    # rank may have run past the collective.
    if first and second and first[2] == second[2]:
        return int(first[1]) < int(second[1])
    return True


def _error_names(result: CaseResult, *wanted: str) -> tuple[bool, str]:
    text = " ".join((result.error or "no error").split())
    is_ok = result.verdict == Verdict.ERROR and all(part in text for part in wanted)
    expected = "" if is_ok else f", where {' and '.join(wanted)} should be named"
    return is_ok, f"{result.verdict.value}: {text[:200]}{expected}"


def judge_equal_run(result: CaseResult, rank: int, backend: str = "nccl") -> tuple[bool, str]:
    """Return a pair: whether a case ran on GPUs as expected, and a text about its result.

    It must have the expected verdict, use this `backend`, and repeat its bits in a second run. `rank` is not used.
    """
    compared, mismatched = sum(result.compared.values()), sum(result.mismatched.values())
    # On a CPU, as in tests, any backend will do.
    controls, is_joined = set(result.control.values()), result.device == "cpu" or result.backend == backend
    is_ok = result.verdict == Verdict(result.case.expected) and is_joined and controls == {"EQUAL"}
    where = f"{result.world_size} ranks, {result.device}, {result.collectives or result.backend}"
    error = f", {(result.error or '').partition(chr(10))[0]}" if result.error else ""
    return is_ok, f"{result.verdict.value} on {where}: {mismatched} of {compared} records differ{error}"
