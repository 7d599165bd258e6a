"""Find the operator call to blame for a difference, or compare every call of an EQUAL case.

The searches run the systems again. If a search fails, the verdict is kept and the failure reported.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import Judgement, Repeat
from bitproof.harness.errors import BitproofError
from bitproof.harness.records import NO_CALL, Comparison, Divergence, Key, Role, Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def cause(judgement: Judgement, run: CaseRun) -> Judgement:
    """Trace a difference between systems, or between two runs of a system, to an operator call.

    If a replay computes other bits than the recording that it repeats, DIFFERENT becomes NONDETERMINISTIC.
    """
    first = judgement.first_divergence
    assert first is not None, "there is a difference to explain"
    run.begin_explaining()
    if judgement.verdict == Verdict.NONDETERMINISTIC:
        # The first divergence is from one of the repeated runs: it decides which two runs are compared.
        return _with_noise(judgement, run, first, next(each for each in run.repeats if each.between == first.between))
    # Missing records make a case UNVERIFIED. A difference between the present ones is still traced, if both sides
    # repeat themselves.
    are_stable = all(repeat.comparison.verdict == Verdict.EQUAL for repeat in run.repeats)
    if judgement.verdict == Verdict.UNVERIFIED and (run.case.bound is not None or not are_stable):
        return judgement
    return _searched(judgement, run, lambda: _with_cause(judgement, run, first))


def every_call(judgement: Judgement, run: CaseRun) -> Judgement:
    """Replay both systems of an EQUAL case, log all their calls, and compare the calls' values."""
    if not run.has_partners:
        return judgement.unverified("--every-call: calls of two layouts have no partners in the reference")
    from bitproof.harness.localize.every_call import EveryCall

    run.begin_explaining()
    run.every_call = found = EveryCall(run.case, run.firsts, run.archives, run.replay)
    return _searched(judgement, run, lambda: found.judge(judgement))


def _searched(judgement: Judgement, run: CaseRun, search: Callable[[], Judgement]) -> Judgement:
    began = time.monotonic()
    try:
        return search()
    except BitproofError as error:
        return judgement.with_error(f"a replay that looks for the cause failed; the verdict stands:\n{error}")
    finally:
        run.seconds.replay = time.monotonic() - began
        # Logs of calls are large, and only this search reads them.
        shutil.rmtree(run.archives, ignore_errors=True)


def _with_cause(judgement: Judgement, run: CaseRun, first: Divergence) -> Judgement:
    from bitproof.harness.localize.search import Search, UnrepeatableError

    search = Search(
        run.firsts,
        run.archives,
        run.case.parallelism.world_size,
        run.replay,
        run.compare_bits,
        is_logged=bool(run.watches) and run.across is None,
        shows_bits=run.shows_bits,
        verifies=run.options.verify and run.shows_bits and run.across is None,
    )
    try:
        found = search.explain(first)
    except UnrepeatableError as error:
        # NONDETERMINISTIC would hide that records are missing.
        if judgement.verdict == Verdict.UNVERIFIED:
            raise
        return _unrepeatable(judgement, run, error.role, error.key)
    run.remarks += search.remarks
    if found.call is None:
        run.remarks.append(NO_CALL)
    return replace(judgement, first_divergence=found)


def _unrepeatable(judgement: Judgement, run: CaseRun, role: Role, key: Key) -> Judgement:
    text = (
        f"a replay of {role} {getattr(run.case, role)} did not reproduce step {key.step}, rank {key.rank}, "
        f"{key.kind} {key.name}: its bits differ from the recorded ones"
    )
    # The replay takes the place of a second run, so the case looks as if `control` had found this difference.
    parted = Comparison(verdict=Verdict.DIFFERENT, first_divergence=Divergence(**key._asdict()))
    repeat = Repeat(role, False, parted)
    first = repeat.divergence()
    assert first is not None, "it has parted"
    judgement = replace(
        judgement.with_error(text),
        verdict=Verdict.NONDETERMINISTIC,
        control=judgement.control | {role: Verdict.NONDETERMINISTIC.value},
        first_divergence=first,
    )
    return _with_noise(judgement, run, first, repeat)


def _with_noise(judgement: Judgement, run: CaseRun, first: Divergence, repeat: Repeat) -> Judgement:
    from bitproof.harness.localize.noise import NoiseSearch

    search = NoiseSearch(
        run.firsts,
        run.archives / "noise",
        run.case.parallelism.world_size,
        run.replay,
        run.compare_bits,
        role=repeat.side,
        stressed=repeat.stressed,
    )

    def explain() -> Judgement:
        explained, reported = search.explain_noise(first)
        run.remarks += search.remarks
        found = replace(judgement, first_divergence=explained)
        return found.with_error(reported) if reported else found

    return _searched(judgement, run, explain)
