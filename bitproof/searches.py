"""Call the other commands from Python: find a cause, a pass, a smaller case or a proof, or measure sensitivity.

- Each function takes a case, or two systems, like `bitproof.run`.
- Its keywords are the options of the command with the same name.
- It writes the command's run folder and returns a typed result.
- It prints nothing, and does not load torch into this process.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from bitproof.keywords import LocalizeSettings, ProveSettings, SensitivitySettings, ShrinkSettings
from bitproof.runs import Asked, Run, System, asked, run_asked

if TYPE_CHECKING:
    from bitproof.harness.case import Case
    from bitproof.harness.options import OnEvent
    from bitproof.harness.powers.proofs.prover.pairs import PairProof
    from bitproof.harness.powers.proofs.records import ProofOutcome
    from bitproof.harness.powers.sensitivity.records import Sensitivity
    from bitproof.harness.powers.shrink.records import Bisection, Shrunk


def localize(
    case: Case | str | None = None,
    *,
    reference: System | None = None,
    candidate: System | None = None,
    report_dir: str | Path = "reports",
    on_event: OnEvent | None = None,
    **settings: Unpack[LocalizeSettings],
) -> Run:
    """Run a case, regardless of its expected verdict, and find the cause of its first difference.

    The result's `first_divergence` has both. Raises UsageError, before anything runs, if arguments or the case are
    wrong.
    """
    from bitproof.harness.commands.localize import LOCALIZE_FILE, any_difference
    from bitproof.harness.report.story import render

    call = asked("localize", LocalizeSettings, case, reference, candidate, settings)
    call = replace(call, case=any_difference(call.case))
    notify = on_event or (lambda event: None)
    return run_asked(call, report_dir, notify, lambda result: {LOCALIZE_FILE: render(result)})


def bisect(
    case: Case | str,
    *,
    report_dir: str | Path = "reports",
    reference: System | None = None,
    candidate: System | None = None,
    **settings: Unpack[LocalizeSettings],
) -> Bisection:
    """Find the pass that first changes a case's bits.

    The pass is in `blamed` of the result; if there is no answer, `problem` has the reason. Raises UsageError if
    arguments or the case are wrong, before anything runs.
    """
    from bitproof.harness.execute.transport import refuse_torchrun
    from bitproof.harness.powers.shrink.bisect_command import checked_options, search

    refuse_torchrun("bisect", "is called once from Python, and starts its own ranks")
    call = asked("bisect", LocalizeSettings, case, reference, candidate, settings)
    options = checked_options(call.case, call.options)
    with _quiet_call(call, report_dir) as (folder, words):
        return search(call.case, options, folder, words)[1]


def shrink(
    case: Case | str,
    *,
    tries: int = 200,
    timeout: float = 1800.0,
    report_dir: str | Path = "reports",
    reference: System | None = None,
    candidate: System | None = None,
    **settings: Unpack[ShrinkSettings],
) -> Shrunk:
    """Make a failing case as small as possible while it still fails in the same way.

    The search ends after `tries` runs or `timeout` seconds. Raises UsageError if arguments or the case are wrong,
    before anything runs.
    """
    from bitproof.harness.powers.shrink.shrink_case import Budget
    from bitproof.harness.powers.shrink.shrink_command import shrink_and_report
    from bitproof.harness.settings import to_argv

    call = asked("shrink", ShrinkSettings, case, reference, candidate, settings)
    with _quiet_call(call, report_dir) as (folder, _):
        # Without the extra passes: shrinking may remove some, and names the remaining ones itself.
        kept = to_argv(replace(call.options, extra_passes=()))
        return shrink_and_report(call.case, call.options, Budget(tries, timeout), folder, kept)


@overload
def prove(
    case: Case | str,
    *,
    report_dir: str | Path = "reports",
    timeout: float = 600.0,
    **settings: Unpack[ProveSettings],
) -> ProofOutcome: ...


@overload
def prove(case: Any, other: Any, /, *inputs: Any, dynamic_shapes: Any = None) -> PairProof: ...


def prove(
    case: Any,
    *others: Any,
    dynamic_shapes: Any = None,
    report_dir: str | Path = "reports",
    timeout: float = 600.0,
    **settings: Unpack[ProveSettings],
) -> ProofOutcome | PairProof:
    """Prove, without running a rank, that a case's systems compute equal bits for every input.

    - `prove(case)` runs in a separate process, within `timeout` seconds. Its log goes to a run folder in `report_dir`.
    - `prove(f, g, *inputs)` proves two functions, modules, graphs or exported programs equal instead.

    The result has the outcome in `verdict`. Raises UsageError if arguments or the case are wrong, and TypeError for a
    keyword that belongs to the other form.
    """
    if dynamic_shapes is not None and not others:
        raise TypeError("prove(case) takes no dynamic_shapes: those are of prove(f, g, *inputs)")
    if others:
        from bitproof.harness.powers.proofs.prover.programs.subjects import prove_equal

        if settings:
            raise TypeError(f"prove(f, g, *inputs) takes no {', '.join(settings)}: those are a case's")
        return prove_equal(case, *others, dynamic_shapes=dynamic_shapes)
    from bitproof.harness.powers.proofs.check import prove_cases
    from bitproof.harness.report.write import prepare_run_dir

    call = asked("prove", ProveSettings, case, None, None, settings)
    [(_, found)] = prove_cases([call.case], replace(call.options, timeout=timeout), prepare_run_dir(Path(report_dir)))
    return found


def sensitivity(
    case: Case | str,
    *,
    sample: int | None = None,
    limit: float = 600.0,
    report_dir: str | Path = "reports",
    **settings: Unpack[SensitivitySettings],
) -> Sensitivity | None:
    """Change each operator call of a step by 1 ULP, one at a time, and count the changes that the case notices.

    - `sample`: the number of calls to try, drawn by the case's seed; None tries all.
    - `limit`: seconds after which no further call is tried; 0 means no limit.

    Returns None if the case does not get its expected verdict: then nothing is measured. Raises UsageError if arguments
    or the case are wrong, before anything runs.
    """
    from bitproof.harness.powers.sensitivity.check import SensitivityCheck, SensitivityOptions
    from bitproof.harness.powers.sensitivity.records import Effort
    from bitproof.harness.powers.sensitivity.report import measured

    check = SensitivityCheck(SensitivityOptions(Effort(sample=sample, seconds=limit or None)))
    call = asked("sensitivity", SensitivitySettings, case, None, None, settings)
    # Before the options below are replaced: the check refuses what the caller asked for.
    check.refuse(call.options)
    # The measurement replays calls on the CPU; second runs would only add time.
    call = replace(call, options=replace(call.options, device="cpu", control="never", active=(check,)))
    return measured(run_asked(call, report_dir, lambda event: None).result)


@contextmanager
def _quiet_call(call: Asked, report_dir: str | Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Context for a call of a command: yields the report folder, and the options that repeat the call.

    In the block, standard output and errors are suppressed.
    """
    folder = Path(report_dir)
    files, words = call.replay(folder)
    # A case that is in no file yet is written into the report folder, so that a command can repeat the call.
    for name, text in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield folder, words
