"""`bitproof doctor --gpu`: what a machine's GPUs must do, tried one thing after the other, as a table of pass and fail.

First what a step relies on, in `gpu_checks/`; then that a rank that is killed or hangs is named; then the
three main cases on all GPUs. What needs several GPUs and NCCL is not tried without them, and on a machine without GPUs
nothing is: every such line says so, and NOT RUN is no pass.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bitproof.harness.case import Case
from bitproof.harness.commands.doctor import MAIN_CASES, Torch, probe_torch
from bitproof.harness.gpu_checks.first_hour import FirstHour, Outcome, earlier
from bitproof.harness.gpu_checks.found import CheckResult
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.machine.gpus import gpu_topology
from bitproof.harness.options import RunOptions
from bitproof.harness.processes import framing
from bitproof.harness.processes.started import Started
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED
from bitproof.harness.runtime.sources import own_digest

_CHECKS_SECONDS = 1800
_CASE_SECONDS = 600.0
_HANG_SECONDS = 60.0
ALONE = ("digests", "attention", "grouped products", "offload", "digest bandwidth")
TOGETHER = ("sums in rank order", "native sums", "all-to-all")
NAMES = (*ALONE, *TOGETHER)
"""What `harness.gpu_checks.checks` has, on one device and on all ranks; importing it would load torch."""
KILLED, HUNG = "a killed rank", "a hung rank"


@dataclass(frozen=True, kw_only=True)
class CheckLine:
    """One check and its result."""

    name: str
    outcome: Outcome
    found: str

    def __str__(self) -> str:
        return f"{self.outcome:<7}  {self.name:<18}  {self.found}"


def examine_gpus(report_dir: Path, torch: Torch | str | None = None) -> Iterator[CheckLine]:
    """Every check, as soon as it is known, on all GPUs that torch can use.

    What is found is kept in two files of `report_dir`, and a call that was cut short is gone on with
    (`first_hour.py`). Where there is no GPU nothing is kept.
    """
    torch = probe_torch() if torch is None else torch
    if why := why_not(torch):
        yield from _not_run((*NAMES, KILLED, HUNG, *MAIN_CASES), why)
        return
    assert not isinstance(torch, str), "it has GPUs"
    hour = FirstHour(about=about(torch))
    kept = {each.name: each for each in earlier(report_dir, hour.about)}
    began = time.monotonic()
    for line in _lines(report_dir, torch, kept=tuple(kept)):
        seconds, began = time.monotonic() - began, time.monotonic()
        if line.name in kept:
            seconds, line = kept[line.name].seconds, replace(line, found=kept[line.name].found)
        hour = hour.plus(line.name, line.outcome, line.found, seconds)
        hour.write(report_dir)
        yield line
    replace(hour, is_over=True).write(report_dir)


def about(torch: Torch) -> dict[str, str]:
    """The machine and the code that checks are of."""
    return {
        "torch": torch.version,
        "GPUs": ", ".join(torch.gpus),
        "how they are joined": " / ".join(gpu_topology() or ["nvidia-smi does not say"]),
        "NCCL": "yes" if torch.nccl else "no",
        "code": own_digest(),
    }


def _lines(report_dir: Path, torch: Torch, kept: tuple[str, ...]) -> Iterator[CheckLine]:
    """Each check; what is kept of an earlier call passed, and is not tried."""
    yield from (CheckLine(name=name, outcome="pass", found="") for name in kept)
    why, ranks = why_not_together(torch), len(torch.gpus)
    left = [name for name in ((*ALONE,) if why else NAMES) if name not in kept]
    if left:
        yield from run_checks("cuda", 1 if why else ranks, left)
    if why:
        yield from _not_run((*TOGETHER, KILLED, HUNG, *MAIN_CASES), why)
    else:
        yield from run_cases_on(ranks, report_dir, kept)


def _not_run(names: Iterable[str], why: str) -> Iterator[CheckLine]:
    for name in names:
        yield CheckLine(name=name, outcome="NOT RUN", found=why)


def why_not(torch: Torch | str) -> str | None:
    """Why nothing can be tried on this machine, in words; None when something can."""
    if isinstance(torch, str):
        return torch
    return None if torch.gpus else "no GPU that this torch can use"


def why_not_together(torch: Torch) -> str | None:
    """Why checks of several ranks cannot run here, in words; None when they can."""
    if not torch.nccl:
        return "this torch has no NCCL"
    return None if len(torch.gpus) > 1 else "one GPU: there is nothing that NCCL could join"


def status_of(lines: list[CheckLine]) -> int:
    """The exit status: 1 where something failed, else 3 where something was not run, or nothing was, else 0."""
    outcomes = {line.outcome for line in lines}
    return UNEXPECTED if "FAIL" in outcomes else SUCCESS if outcomes == {"pass"} else UNJUDGED


def run_checks(device: str, ranks: int, names: Iterable[str]) -> Iterator[CheckLine]:
    """These checks of `gpu_checks/`, in a process that ends with them. One without a result has failed."""
    left = dict.fromkeys(names)
    arguments = ["--device", device, "--ranks", str(ranks), *(f"--name={name}" for name in left)]
    with tempfile.TemporaryDirectory(prefix="bitproof-doctor-") as folder:
        log = Path(folder, "gpu_checks.log")
        process = Started("bitproof.harness.gpu_checks.run", arguments, log=log, environment=ENVIRONMENT)
        try:
            while (line := process.inlet.wait(_CHECKS_SECONDS)) is not None:
                found: CheckResult = framing.read(line, CheckResult)
                left.pop(found.name, None)
                yield CheckLine(name=found.name, outcome="pass" if found.is_ok else "FAIL", found=found.found)
        finally:
            process.kill()
        last = (log.read_text(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
    for name in left:
        yield CheckLine(name=name, outcome="FAIL", found=f"the process that checks ended before: {last}")


def run_cases_on(ranks: int, report_dir: Path, kept: Iterable[str] = ()) -> Iterator[CheckLine]:
    """A rank that is killed, one that hangs, then the main cases, each on that many GPUs, but for those kept."""
    from bitproof.builtin_cases import CASES

    main = [replace(CASES[name], parallelism=replace(CASES[name].parallelism, world_size=ranks)) for name in MAIN_CASES]
    short = replace(main[0], steps=2)
    if KILLED not in kept:
        yield try_case(short, KILLED, f"kill-rank:rank={ranks - 1},step=1", _CASE_SECONDS, report_dir, tell_killed)
    if HUNG not in kept:
        yield try_case(short, HUNG, f"hang-rank:rank={ranks - 1},step=1", _HANG_SECONDS, report_dir, tell_hung)
    for case in main:
        if case.name not in kept:
            yield try_case(case, case.name, None, _CASE_SECONDS, report_dir, tell_main)


Tell = Callable[[CaseResult, int], tuple[bool, str]]


def try_case(
    case: Case,
    name: str,
    inject: str | None,
    timeout: float,
    report_dir: Path,
    tell: Tell,
    device: Literal["cuda", "cpu"] = "cuda",
) -> CheckLine:
    """Run a case, with controls where nothing is injected; any error is a failure. On "cpu" it says nothing of GPUs."""
    from bitproof.harness.execute.launch import run_cases

    options = RunOptions(device=device, timeout=timeout, inject=inject, control="never" if inject else "always")
    folder = report_dir / f"doctor-gpu-{name.replace(' ', '-')}-{time.strftime('%Y%m%dT%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        [result] = run_cases([case], options, folder)
    except Exception as error:
        return CheckLine(name=name, outcome="FAIL", found=f"{type(error).__name__}: {error}".partition("\n")[0])
    is_ok, found = tell(result, case.parallelism.world_size - 1)
    with contextlib.suppress(OSError):
        folder.rmdir()  # where nothing was left
    return CheckLine(name=name, outcome="pass" if is_ok else "FAIL", found=f"{found}, logs in {folder}")


def tell_killed(result: CaseResult, rank: int) -> tuple[bool, str]:
    """The rank that was killed is the one that is named, and the signal."""
    return _names(result, f"rank {rank}", "SIGKILL")


def tell_hung(result: CaseResult, rank: int) -> tuple[bool, str]:
    """Ranks are named as late, at their step, and what each did last shows that this one holds up the others."""
    text = result.error or ""
    named = re.search(r"^  found: (?:.*; )?ranks? ([\d, ]+) at step 1[;,]", text, re.MULTILINE)
    late = set(map(int, named[1].split(", "))) if named else set()
    last = {int(number): did or "" for number, did in _LAST_OF_RANK.findall(text)}
    is_seen = rank in late and all(_holds_up(last.get(rank, ""), last.get(other)) for other in late - {rank})
    is_ok = result.verdict == Verdict.ERROR and "the case ran longer than" in text and len(late) > 1 and is_seen
    expected = "" if is_ok else f", where rank {rank} should be seen to hold up others at step 1"
    return is_ok, f"{result.verdict.value}: {' '.join(text.split())[:200] or 'no error'}{expected}"


_LAST_OF_RANK = re.compile(r"^rank (\d+)(?:, [^\n]*)?:(?:\n  ([^\n]*))?$", re.MULTILINE)
"""A rank's number, and the line below it: what it did with collectives last, or where its Python was."""
_COLLECTIVE = re.compile(r"(\d+) of group (\w+)")


def _holds_up(hung: str, other: str | None) -> bool:
    """Whether a rank whose last action was `hung` may block another whose last action was `other`.

    A rank that hangs in its own code is not in a collective. On CUDA the other ranks' hosts need not be, either; then
    numbers decide: all ranks of a group count its collectives alike.
    """
    if other is None or other == hung or hung.startswith(("launches ", "waits for ")):
        return False
    first, second = _COLLECTIVE.search(hung), _COLLECTIVE.search(other)
    if first and second and first[2] == second[2]:
        return int(first[1]) < int(second[1])
    return True


def _names(result: CaseResult, *wanted: str) -> tuple[bool, str]:
    text = " ".join((result.error or "no error").split())
    is_ok = result.verdict == Verdict.ERROR and all(part in text for part in wanted)
    expected = "" if is_ok else f", where {' and '.join(wanted)} should be named"
    return is_ok, f"{result.verdict.value}: {text[:200]}{expected}"


def tell_main(result: CaseResult, rank: int) -> tuple[bool, str]:
    """EQUAL over NCCL, with controls that agree."""
    compared, mismatched = sum(result.compared.values()), sum(result.mismatched.values())
    controls = set(result.control.values())
    is_ok = result.verdict == Verdict.EQUAL and result.backend == "nccl" and controls == {"EQUAL"}
    where = f"{result.world_size} ranks, {result.device}, {result.collectives or result.backend}"
    return is_ok, f"{result.verdict.value} on {where}: {mismatched} of {compared} records differ"
