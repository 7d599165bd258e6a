"""Find the call that makes a system differ from itself, by running the system again.

1. Two replays log every call of all steps up to that of the recorded difference.
2. The replays are compared with each other. Noise differs in each run, so they may first differ at another step.
3. The search begins there, and goes back through earlier steps too. A value without a record, such as an optimizer's
   hidden state, may carry noise from step to step.
4. Two more replays measure how much the blamed call's outputs differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitproof.harness.compare.order import computation_order
from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import HOW_ITSELF, Culprit, call_of
from bitproof.harness.localize.logs.calls import Call, is_abandoned
from bitproof.harness.localize.logs.replay import (
    Replay,
    ValueSite,
    archive_of,
    name_of_value,
    read_log,
    read_records,
    read_steps,
    step_of,
)
from bitproof.harness.localize.search import Logs, Search
from bitproof.harness.records import ROLES, Divergence, Key, Record, Role, TensorDifference


@dataclass
class NoiseSearch(Search):
    """A search for the call that makes a system differ from itself in two runs.

    - `role`: the role of the system in its case. Within the search, "reference" and "candidate" are the two runs.
    - `stressed`: whether the second run has random sleeps, and other values in uninitialized memory.
    """

    role: Role
    stressed: bool

    def explain_noise(self, first: Divergence) -> tuple[Divergence, str | None]:
        """Return a pair: the divergence `first` with the call to blame filled in, and a remark for the report or None.

        Raises the errors of a replay, such as RankError.
        """
        key = Key(first.step, first.kind, first.name, first.rank)
        for side in ROLES:
            self._replay(side, 1, Replay(step=key.step, log=True, every_step=True, record=key))
        differing_records = self._differing_records()
        # The noise may not show in two runs. A collective without a wait is still visible in a log, and explains why:
        # a replay waits for each collective at once, so that the race cannot happen there.
        if not differing_records:
            text = f"the difference of the {self.role} from itself did not recur in two replays"
            culprit = self._abandoned(key)
            if culprit is None:
                return first, text
            return replace(first, call=call_of(culprit)), f"{text}, which wait for every collective at once"
        found = min(differing_records, key=computation_order(differing_records))
        # The replays kept the bits of this record only, and at the last step.
        if key in differing_records and key.step == found.step:
            with self._bits_may_fail("the first differing tensor", first.rank):
                first = self._with_bits(first)
        # Later steps only repeat the difference, and would add roots of their own.
        ranks = range(self.num_ranks)
        logs: Logs = {side: [self._log_until(side, rank, found.step) for rank in ranks] for side in ROLES}
        differing: dict[int, list[tuple[str, str]]] = {}
        for other, (left, right) in differing_records.items():
            if other.step == found.step:
                differing.setdefault(other.rank, []).append((left.digest, right.digest))
        pair = differing_records[found][0].digest, differing_records[found][1].digest
        culprit = find_culprit(logs["reference"], logs["candidate"], differing, (found.rank, pair))
        if culprit is None:
            return first, _remark(key, found, None)
        # A missing call has an index in the reference's log only.
        log_of: Role = "reference" if culprit.candidate is None else "candidate"
        step, begin = step_of(archive_of(self._archives(log_of, 1), culprit.rank), culprit.index)
        # The cause is known without these bits, so a failure to fetch them is only a remark.
        output = None
        with self._bits_may_fail(f"the output of {culprit.call}", culprit.rank):
            output = self._bits_of_noise(culprit, logs, step, begin)
        call = replace(call_of(culprit, HOW_ITSELF), output=output)
        return replace(first, call=call), _remark(key, found, step)

    def _abandoned(self, key: Key) -> Culprit | None:
        """Return the first collective that was never waited for, in the step and on the rank of `key`; else None."""
        archive = archive_of(self._archives("candidate", 1), key.rank)
        calls, begin = read_log(archive), 0
        for step, count in read_steps(archive):
            for index in range(begin, begin + count) if step == key.step else ():
                call = calls[index]
                if is_abandoned(call):
                    return Culprit(how="abandons", call=call, ranks=(key.rank,), candidate=index, reference=None)
            begin += count
        return None

    def _replay(self, side: Role, number: int, replay: Replay) -> str | None:
        # 3 to 6: a search between two systems may have had 1 and 2.
        turn = 2 * number + 1 + ROLES.index(side)
        replay = replace(replay, stressed=self.stressed and side == "candidate")
        return self.run_replay(self.role, turn, self._archives(side, number), replay)

    def _differing_records(self) -> dict[Key, tuple[Record, Record]]:
        """Return key -> (first replay's record, second replay's record), for each record that differs between the
        replays.
        """
        found: dict[Key, tuple[Record, Record]] = {}
        for rank in range(self.num_ranks):
            first, second = (read_records(archive_of(self._archives(side, 1), rank)) for side in ROLES)
            found |= {key: (first[key], second[key]) for key in first if key in second and first[key] != second[key]}
        return found

    def _log_until(self, side: Role, rank: int, last: int) -> list[Call]:
        """Return a rank's calls in one of the first two replays, up to the end of the step `last`.

        `side` names the replay: "reference" for the first, "candidate" for the second.
        """
        archive = archive_of(self._archives(side, 1), rank)
        return read_log(archive)[: sum(count for step, count in read_steps(archive) if step <= last)]

    def _bits_of_noise(self, culprit: Culprit, logs: Logs, step: int, begin: int) -> TensorDifference | None:
        """Return the difference in the blamed call's output between two more replays of its step.

        None if it does not recur. The call must have equal inputs in all replays. `begin` is the index of the step's
        first call.
        """
        rank, index = culprit.rank, culprit.candidate
        if index is None or index >= len(logs["reference"][rank]):
            return None
        # The same index in both logs: without noise in the control flow, the two runs make the same calls.
        position = _first_difference(logs["reference"][rank][index], logs["candidate"][rank][index])
        if position is None:
            return None
        for side in ROLES:
            self._replay(side, 2, Replay(step=step, log=True, values=(ValueSite(rank, index - begin, position),)))
        # These logs have a single step, so the index counts from the step's first call. The noise must appear in the
        # same output again: otherwise the fetched bits show something else than the blamed difference.
        again = [read_log(archive_of(self._archives(side, 2), rank))[index - begin :] for side in ROLES]
        if not all(again) or _first_difference(again[0][0], again[1][0]) != position:
            return None
        bits, _ = self._bits(2, rank, name_of_value(0))
        return bits


def _remark(recorded: Key, replayed: Key, blamed_step: int | None) -> str | None:
    """Return a sentence for the report: where two replays first differ, and the step of the call to blame.

    `recorded` and `replayed` are the records at which the recordings and the replays first differ. None if these are
    the same, and the call is not in another step.
    """
    if recorded == replayed and blamed_step in (None, recorded.step):
        return None
    place = f"step {replayed.step}, rank {replayed.rank}, {replayed.kind} {replayed.name}"
    blamed = "" if blamed_step is None else f"; the call to blame is in step {blamed_step}"
    return f"noise is new at each run: two replays first differ at {place}{blamed}"


def _first_difference(first: Call, second: Call) -> int | None:
    """Return the position of the first output in which two calls of the same place, operator and inputs differ.

    None if no output differs, or if the calls differ in operator, place or inputs.
    """
    if (first.place, first.operator, first.inputs) != (second.place, second.operator, second.inputs):
        return None
    pairs = zip(first.outputs, second.outputs, strict=False)
    return next((position for position, (left, right) in enumerate(pairs) if left != right), None)
