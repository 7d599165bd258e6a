"""Compare every operator call of an EQUAL case (--every-call), to find wrong values that no record shows.

1. Both systems run once more, with every call logged. Their records must equal those of the first runs.
2. Each output of the candidate must be a value that the reference had in the same step on the same rank. Calls that
   only join or divide such values are exempt (`unmatched_calls`).
3. If some output is no such value, both systems run again. If its call's output varies between two runs of a system,
   the case is UNVERIFIED. Otherwise it is DIFFERENT, and the first such call is blamed.

For example, only this finds a wrong value that is rounded to bfloat16 before it reaches a record. In the case's counts,
a call is a record of kind `activation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitproof.harness.case import Case, Kind
from bitproof.harness.compare.verdict import Judgement
from bitproof.harness.errors import RankError, RecordingError
from bitproof.harness.localize.culprit import HOW
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.joined_logs import CallId, JoinedLogs
from bitproof.harness.localize.logs.replay import Replay, archive_of, read_log, read_records, read_steps
from bitproof.harness.localize.unmatched_calls import describe_packing, find_unmatched, listed, summed_up
from bitproof.harness.records import (
    MAX_DIFFERING,
    ROLES,
    BlamedCall,
    Divergence,
    Key,
    Recording,
    Role,
    Verdict,
    group_keys,
)

ACTIVATION: Kind = "activation"
ANOTHER_VALUE = "has an output that is nowhere in the reference"

RunReplay = Callable[[Role, int, Path, Replay], str | None]
"""Runs the replay of a system that has this number, and writes its archives into a folder."""


def why_not(case: Case) -> str | None:
    """Return the reason why a case's calls cannot be compared; None if they can."""
    if case.pipeline.compiles:
        return f"backend {case.pipeline.backend} compiles calls together, so they have no partners in the reference"
    return None


def describe_uncompared(case: Case, uncompared: int, calls: int) -> str:
    """Return a remark on an EQUAL case with a user's pass: how many calls of the graph no comparison covers."""
    reason = why_not(case)
    look = f"they cannot be: {reason}" if reason else "--every-call compares them"
    return (
        f"--extra-pass: no comparison covers the values of {uncompared:,} of the {calls:,} calls in the "
        f"candidate's graph, and a wrong one may be rounded away before a record; {look}"
    )


@dataclass
class Found:
    """The result of comparing all calls.

    - `steps`, `calls`: the numbers of compared steps and calls, over all ranks.
    - `fewest`: the number of calls of the step that has the fewest.
    - `unmatched`: the candidate's calls with a value that the reference never had, as (step, rank, index, call). The
      call to blame is the first.
    - `packing`, `num_packing`: graph nodes that the reference does not have, but that only join or view values that it
      has; and the number of calls of such nodes.
    """

    steps: int = 0
    calls: int = 0
    fewest: int = 0
    unmatched: list[tuple[int, int, int, Call]] = field(default_factory=list)
    packing: set[str] = field(default_factory=set)
    num_packing: int = 0


@dataclass
class EveryCall:
    """Compares all calls of a case. Replays write their archives into `folder`."""

    case: Case
    recordings: Mapping[Role, Recording]
    folder: Path
    run_replay: RunReplay
    found: Found = field(default_factory=Found)

    def judge(self, judgement: Judgement) -> Judgement:
        """Compare the calls of an EQUAL case, and return its new judgement. A failed replay makes it UNVERIFIED."""
        if reason := why_not(self.case):
            return _unverified(judgement, reason)
        try:
            return self._judge(judgement)
        except (RankError, RecordingError) as error:
            return _unverified(judgement, f"a replay failed:\n{error}")

    def _judge(self, judgement: Judgement) -> Judgement:
        for role in ROLES:
            if (key := self._replay(role, 1)) is not None:
                where = f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"
                # Then the logged calls are not those of the recorded run, and comparing them would
                # say nothing about it.
                return _unverified(judgement, f"a replay of the {role} did not reproduce its recording, at {where}")
        self.found = found = self._look()
        # A report's counts must be multiples of the steps (see `consistency`), but steps may have different numbers of
        # calls. So the smallest is taken: the report must not claim more comparisons than were made.
        total = found.fewest * found.steps
        counts = judgement.compared | {ACTIVATION: judgement.compared.get(ACTIVATION, 0) + total}
        steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
        looked = f"{found.calls:,} calls of {steps}{describe_packing(found.num_packing)}"
        if not found.unmatched:
            text = f"--every-call: each of {looked} returned values that the reference had too"
            differ = judgement.mismatched | {ACTIVATION: judgement.mismatched.get(ACTIVATION, 0)}
            return replace(judgement, compared=counts, mismatched=differ, remarks=(*judgement.remarks, text))
        # Only now, as two more replays are needed: a call that varies from run to run may lack a match by chance.
        if varying := self._varying():
            return _unverified(judgement, varying)
        unmatched = summed_up([(rank, call) for _, rank, _, call in found.unmatched])
        text = (
            f"--every-call: {len(found.unmatched)} of {looked} returned values that the reference never had: "
            f"{listed(unmatched)}"
        )
        # The counted differences must not exceed the counted calls.
        number = min(len(found.unmatched), total)
        keys = [_key(*site) for site in found.unmatched[:number]]
        return replace(
            judgement,
            verdict=Verdict.DIFFERENT,
            compared=counts,
            mismatched=judgement.mismatched | {ACTIVATION: number},
            differing_kinds=(ACTIVATION,),
            first_divergence=self._divergence(*found.unmatched[0]),
            differing=group_keys(keys[:MAX_DIFFERING]),
            differing_left_out=len(keys[MAX_DIFFERING:]),
            remarks=(*judgement.remarks, text),
        )

    def _replay(self, role: Role, number: int) -> Key | None:
        """Run a system's first or second replay (`number` is 1 or 2), with every call logged.

        Returns the first record, rank by rank, in which the replay differs from the recording; None if there is none.
        """
        last = self.case.steps - 1
        self.run_replay(role, number, self._folder(role, number), Replay(step=last, log=True, every_step=True))
        for rank in self._ranks:
            again = read_records(self._archive(role, number, rank))
            for key, row in self.recordings[role].records_of(rank).items():
                if key not in again or again[key].digest != row.digest:
                    return key
        return None

    def _look(self) -> Found:
        found, by_step = Found(), dict.fromkeys(range(self.case.steps), 0)
        for rank in self._ranks:
            # Calls are compared within a rank and a step: an equal value on another rank or in another
            # step is no match.
            pairs = zip(self._steps("reference", 1, rank), self._steps("candidate", 1, rank), strict=True)
            for (step, known), (_, calls) in pairs:
                look = find_unmatched(known, calls)
                by_step[step] += len(calls)
                found.unmatched += [(step, rank, index, calls[index]) for index in look.unmatched]
                found.packing.update(str(calls[index].node) for index in look.packing)
                found.num_packing += len(look.packing)
        found.unmatched.sort(key=lambda site: site[:3])
        if found.unmatched:
            step = found.unmatched[0][0]
            first = self._first(step, [(rank, index) for at, rank, index, _ in found.unmatched if at == step])
            # Move the first call to the front. The sort is stable, so all others keep their order.
            found.unmatched.sort(key=lambda site: (site[0], (site[1], site[2]) != first))
        found.steps, found.calls, found.fewest = len(by_step), sum(by_step.values()), min(by_step.values())
        return found

    def _first(self, step: int, unmatched: list[CallId]) -> CallId:
        """Return the rank and index of the earliest unmatched call of a step: no other unmatched call leads to it."""
        # It need not have the lowest index, since indices of different ranks cannot be compared. The search needs the
        # logs of all steps: a step may read values of earlier steps.
        logs, begins = [], []
        for rank in self._ranks:
            archive = self._archive("candidate", 1, rank)
            # The index of the step's first call in the rank's whole log.
            begins.append(sum(count for at, count in read_steps(archive) if at < step))
            logs.append(read_log(archive))
        rank, index = JoinedLogs(logs).first_of([(rank, begins[rank] + index) for rank, index in unmatched])
        return rank, index - begins[rank]

    def _varying(self) -> str:
        """Return a sentence about the first call whose output varies between a system's two replays; "" if there is
        none.
        """
        for role in ROLES:
            self._replay(role, 2)
            for rank in self._ranks:
                first, again = (read_log(self._archive(role, number, rank)) for number in (1, 2))
                # The logs cannot be compared call by call.
                if len(first) != len(again):
                    return f"two replays of the {role} make {len(first)} and {len(again)} calls on rank {rank}"
                for call, other in zip(first, again, strict=True):
                    if call.outputs != other.outputs:
                        return f"two replays of the {role} differ in {call}, on rank {rank}"
        return ""

    def _divergence(self, step: int, rank: int, index: int, call: Call) -> Divergence:
        """Return the first divergence of a case. The first unmatched call, `call`, is also the call to blame."""
        known = next(calls for number, calls in self._steps("reference", 1, rank) if number == step)
        # The same operator with equal inputs exists in the reference, so this call is a wrong computation.
        is_made = any((each.operator, each.inputs) == (call.operator, call.inputs) for each in known)
        how = HOW["computes"] if is_made else ANOTHER_VALUE
        # If the reference has no such call at all, the call is extra, whether its inputs are known or not.
        kind = call.operator, call.place.direction
        if all((each.operator, each.place.direction) != kind for each in known):
            how = HOW["adds"]
        ranks = [peer for at, peer, place, _ in self.found.unmatched if (at, place) == (step, index)]
        blamed = BlamedCall(
            operator=call.operator,
            how=how,
            module=call.place.module,
            direction=call.place.direction,
            chunk=call.place.chunk,
            node=call.node,
            source=call.source,
            rank=rank,
            ranks=", ".join(map(str, sorted(ranks))),
        )
        return Divergence(**_key(step, rank, index, call)._asdict(), call=blamed)

    def _steps(self, role: Role, number: int, rank: int) -> Iterator[tuple[int, Sequence[Call]]]:
        """Yield a pair for each step of a replay: its number, and the rank's calls in it."""
        archive = self._archive(role, number, rank)
        calls, begin = read_log(archive), 0
        for step, count in read_steps(archive):
            yield step, calls[begin : begin + count]
            begin += count

    @property
    def _ranks(self) -> range:
        return range(self.case.parallelism.world_size)

    def _folder(self, role: Role, number: int) -> Path:
        return self.folder / f"{role}.every-call{number}"

    def _archive(self, role: Role, number: int, rank: int) -> Path:
        return archive_of(self._folder(role, number), rank)


def _key(step: int, rank: int, index: int, call: Call) -> Key:
    """Return a key for a call, as if it were a recorded activation. The name has the call and its index in the step."""
    return Key(step, ACTIVATION, f"{call}, call {index}", rank)


def _unverified(judgement: Judgement, reason: str) -> Judgement:
    return replace(judgement.with_error(f"--every-call: {reason}"), verdict=Verdict.UNVERIFIED)
