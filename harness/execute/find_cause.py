"""Replay a judged case: find the call to blame, or compare the calls of an EQUAL case.

The verdict selects a search in `harness/localize`. If the search fails, that is reported, and the verdict stays.
Searches are imported when they are needed, since most cases are EQUAL and need none.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.case import Case
from bitproof.harness.compare.verdict import Judgement, Repeat
from bitproof.harness.errors import BitproofError
from bitproof.harness.options import Role, RunOptions
from bitproof.harness.records import NO_CALL, Comparison, Divergence, Key, Recording, Verdict

if TYPE_CHECKING:
    from bitproof.harness.localize.every_call import EveryCall
    from bitproof.harness.localize.search import CompareBits, RunReplay, Search


class Explainer:
    """Explains the judgement of a case; `recordings` are those of its first runs.

    Replays write into the folder `archives`, which is removed after the search. `seconds` is the duration of the
    replays, None if there were none; `remarks` are lines for the report. `every_call` is the comparison of all calls,
    None if there was none. `is_logged`, `shows_bits` and `verifies` are settings of the search.
    """

    def __init__(
        self,
        case: Case,
        recordings: dict[Role, Recording],
        archives: Path,
        run_replay: RunReplay,
        compare_bits: CompareBits,
        *,
        is_logged: bool = False,
        shows_bits: bool = True,
        verifies: bool = True,
    ) -> None:
        self.seconds: float | None = None
        self.remarks: list[str] = []
        self.every_call: EveryCall | None = None
        self._case = case
        self._recordings = recordings
        self._archives = archives
        self._run_replay = run_replay
        self._compare_bits = compare_bits
        self._is_logged = is_logged
        self._shows_bits = shows_bits
        self._verifies = verifies and shows_bits

    def explained(self, judgement: Judgement, repeats: Iterable[Repeat], options: RunOptions) -> Judgement:
        """Add the results of replays to the judgement. `repeats` compare each side's second run with its first run.

        A difference, or the difference of a system from itself, is traced to a call. This is also tried if recordings
        are incomplete: the records that differ are enough. The calls of an EQUAL case are compared if `options` request
        it.
        """
        first, repeats = judgement.first_divergence, list(repeats)
        if judgement.verdict == Verdict.UNVERIFIED and first is not None and self._case.bound is None:
            # Missing records make a case UNVERIFIED. A difference between the present ones is still traced, if both
            # sides repeat themselves.
            are_stable = all(repeat.comparison.verdict == Verdict.EQUAL for repeat in repeats)
            return self._told(judgement, lambda: self._with_cause(judgement, first)) if are_stable else judgement
        if judgement.verdict == Verdict.DIFFERENT and first is not None:
            return self._told(judgement, lambda: self._with_cause(judgement, first))
        if judgement.verdict == Verdict.NONDETERMINISTIC and first is not None:
            return self._with_noise(judgement, first, next(x for x in repeats if x.between == first.between))
        if judgement.verdict == Verdict.EQUAL and options.every_call:
            return self._told(judgement, lambda: self._looked_at(judgement))
        return judgement

    def _told(self, judgement: Judgement, explain: Callable[[], Judgement]) -> Judgement:
        """The judgement that `explain` returns. If a replay fails, the unchanged judgement with an error."""
        began = time.monotonic()
        try:
            return explain()
        except BitproofError as error:
            return judgement.with_error(f"a replay that looks for the cause failed; the verdict stands:\n{error}")
        finally:
            self.seconds = time.monotonic() - began
            shutil.rmtree(self._archives, ignore_errors=True)

    def _with_cause(self, judgement: Judgement, first: Divergence) -> Judgement:
        """Replay both systems to find the call to blame."""
        from bitproof.harness.localize.search import UnrepeatableError

        search = self._search(self._recordings)
        try:
            found = search.explain(first)
        except UnrepeatableError as error:
            if judgement.verdict == Verdict.UNVERIFIED:
                raise
            return self._unrepeatable(judgement, error.role, error.key)
        self.remarks += search.remarks
        if found.call is None:
            self.remarks.append(NO_CALL)
        return replace(judgement, first_divergence=found)

    def _unrepeatable(self, judgement: Judgement, role: Role, key: Key) -> Judgement:
        """The judgement of a case in which a replay differs from its recording.

        It is NONDETERMINISTIC, as if the side's second run had differed.
        """
        text = (
            f"a replay of {role} {getattr(self._case, role)} did not reproduce step {key.step}, rank {key.rank}, "
            f"{key.kind} {key.name}: its bits differ from the recorded ones"
        )
        # The replay counts as a second run of this side that differed, at the record that the replay could not repeat.
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
        return self._with_noise(judgement, first, repeat)

    def _with_noise(self, judgement: Judgement, first: Divergence, repeat: Repeat) -> Judgement:
        """Replay a system twice to find the call that makes it differ from itself."""
        from bitproof.harness.localize.noise import NoiseSearch

        search = NoiseSearch(
            self._recordings,
            self._archives / "noise",
            self._case.parallelism.world_size,
            self._run_replay,
            self._compare_bits,
            role=repeat.side,
            stressed=repeat.stressed,
        )

        def explain() -> Judgement:
            explained, told = search.explain_noise(first)
            self.remarks += search.remarks
            found = replace(judgement, first_divergence=explained)
            return found.with_error(told) if told else found

        return self._told(judgement, explain)

    def _looked_at(self, judgement: Judgement) -> Judgement:
        """The judgement of an EQUAL case after a comparison of its calls, which replays of both systems log."""
        from bitproof.harness.localize.every_call import EveryCall

        self.every_call = EveryCall(self._case, self._recordings, self._archives, self._run_replay)
        return self.every_call.judge(judgement)

    def _search(self, recordings: dict[Role, Recording]) -> Search:
        from bitproof.harness.localize.search import Search

        return Search(
            recordings,
            self._archives,
            self._case.parallelism.world_size,
            self._run_replay,
            self._compare_bits,
            is_logged=self._is_logged,
            shows_bits=self._shows_bits,
            verifies=self._verifies,
        )
