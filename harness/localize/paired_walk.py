"""Walk back from a differing record through the logs of both systems at once, to the calls that cause the difference.

Calls of the two systems match if they have the same operator and place (see `matching`). The walk goes from a pair of
matching calls to the producers of each input that differs, as long as these match:

    reference    mm x w -> a    silu a -> b    sum b -> l
    candidate    mm x w -> a    silu a -> B    sum B -> L

Here the walk starts at L, goes to `sum`, and then to `silu`. It ends there, as the inputs of `silu` are equal.

A walk ends at a cause:

1. Equal inputs and a different output: the call computes a wrong value ("computes").
2. The candidate's producer is an extra call, one without a match: the walk goes on to the producers of its wrong
   inputs. If it has no wrong inputs, the extra call is the cause ("adds").
3. The reference's producer has no match, and the candidate lacks its output: this call, or one before it, is missing
   ("lacks").
4. Both producers are right, but do not match: the call reads the wrong one of several right values ("reads"). Variants:
   no call of the step computed that value ("inherits"), the inputs have another order ("exchanges"), or a record has
   another tensor's value ("misplaces").

Two special cases:

- A call that only joins right values is a cause only if the walk finds no wrong call before it. If it fills a bucket,
  the bucket's collective is the cause.
- A collective is compared on all of its ranks. The walk goes on to the rank that passes a different value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import How
from bitproof.harness.localize.logs.calls import Call, is_abandoned, returns_only_inputs
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import CONSTANTS, PACKING, keeps_order, name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE, ReferenceLog

LAST = 3
"""The weight of a possible cause that is tried after all others."""


class PossibleCause(NamedTuple):
    """A possible cause: the indices of a call in the candidate's log and of its matching call in the reference's log.

    An index is None if that system has no matching call. `how` is the defect.
    """

    rank: int
    candidate: int | None
    reference: int | None
    how: How


class Walk:
    """A walk back from differing records through the logs of both systems.

    - `found`: the possible causes, each with a weight; 0 is the likeliest.
    - `replaced`: (rank, index) of a call that only the candidate makes -> the reference's call that it replaces.
    - `readers`: (rank, index) of a call -> the call that reads it, from which the walk reached it.

    In all methods, `mine` is the index of a call in the candidate's log, and `due` of a call in the reference's log.
    """

    def __init__(self, logs: Sequence[CandidateLog], joined: JoinedLogs, known: JoinedLogs) -> None:
        self.logs, self.joined, self.known = logs, joined, known
        self.found: dict[PossibleCause, int] = {}
        self.replaced = dict[tuple[int, int], int]()
        self.readers = dict[tuple[int, int], int]()
        # `_done` has the results of searches by key. `_is_misplaced`: the record has a value that the reference has
        # elsewhere. `_depth` is above 0 within calls whose inputs are exchanged: see `_parallel`.
        self._done = dict[object, bool]()
        self._is_misplaced = False
        self._depth = 0

    def from_record(self, rank: int, pair: Pair) -> None:
        """Walk back from a record of a rank. `pair` has its digests in the reference and in the candidate."""
        # The walk is as deep as the longest path of calls, and Python's own limit is for programs that never end.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + 20 * sum(len(log.log) + len(log.reference.log) for log in self.logs))
        try:
            self._from_record(rank, pair)
        finally:
            sys.setrecursionlimit(limit)

    def _from_record(self, rank: int, pair: Pair) -> None:
        # `mine` made the candidate's value, `due` the reference's; `made` is the candidate's call that matches `due`.
        (wanted, held), log = pair, self.logs[rank]
        self._is_misplaced = held in log.reference.values
        mine, due = log.producer(wanted, held), log.reference.producer(wanted)
        made = None if due is None else log.matching_here(due)
        if due is not None and made is not None and mine != made and not log.differs(made):
            # The value is here, too: perhaps a copy of it is missing.
            due = next((i for i in log.reference.all_with(wanted) if log.matching_here(i) is None), due)
        if mine is not None:
            self._explain_value(rank, mine, due, None)
        elif due is not None and log.matching_here(due) is None:
            self._missing(rank, due)
        elif due is not None and made is not None and is_abandoned(log.log[made]):
            self._add(rank, made, due, "abandons")

    def _add(self, rank: int, mine: int | None, due: int | None, how: How, weight: int = 1) -> bool:
        # Weights order the causes: 0 is the likeliest, 1 is usual, 2 is an extra call behind other calls,
        # 3 the least likely.
        if mine is not None and how in ("reads", "inherits") and keeps_order(self.logs[rank].log[mine]):
            # Such a view computes nothing, so its reader has the wrong input.
            reader = self.readers.get((rank, mine))
            if reader is not None and (match := self.logs[rank].matching_call(reader)) is not None:
                mine, due = reader, match
        if mine is not None and how != "abandons":
            call = self.logs[rank].log[mine]
            # The least likely causes: a call without inputs, and an extra call that computes nothing.
            if not call.inputs or (how == "adds" and (name_of(call) in CONSTANTS or self.logs[rank].packs(mine))):
                weight = 3
        return self._add_cause(PossibleCause(rank, mine, due, how), weight)

    def _add_cause(self, parting: PossibleCause, weight: int) -> bool:
        self.found[parting] = min(weight, self.found.get(parting, weight))
        return True

    def _result_so_far(self, key: object) -> bool | None:
        """Return the result of the search for `key`; None if it is asked for the first time. So each search runs only
        once.
        """
        known = self._done.get(key)
        # False while the search is in progress, so that a cycle of calls ends it.
        self._done.setdefault(key, False)
        return known

    def _explain_value(self, rank: int, mine: int, due: int | None, reader: tuple[int, int] | None) -> bool:
        """Find out why the candidate has the output of call `mine` where the reference has the output of call `due`.

        `reader` is the pair of matching calls that read these outputs; None if a record has them. Returns whether a
        cause is found.
        """
        log = self.logs[rank]
        if reader is not None:
            self.readers.setdefault((rank, mine), reader[0])
        # `other` is the reference's call that matches `mine`, and `here` the candidate's call that matches `due`. If
        # both are None, each system made the value by a call of its own.
        other = log.matching_call(mine)
        here = None if due is None else log.matching_here(due)
        if self._depth and due is not None:
            # Only a difference between matching calls can have exchanged the values.
            if due not in (other, None) and here != mine:
                return self._parallel(rank, mine, due)
            # The producers match, so this is an ordinary search again; the depth is restored for the other inputs.
            depth, self._depth = self._depth, 0
            found = other is not None and self._call(rank, mine)
            self._depth = depth
            return found
        # From here on, the order decides which of several possible causes is found: an extra producer first, then
        # matching producers, then a wrong call on either side, a missing call, and last a reader of right values.
        if other is None:
            # An extra copy changes nothing, so the question is about its input. A copy in place overwrites a value.
            source = mine if name_of(log.log[mine]).endswith("_") else _behind_copies(log, mine)
            if source != mine and log.matching_call(source) is not None:
                return self._explain_value(rank, source, due, reader)
            return self._behind_extra(rank, mine, due, here, reader)
        if due is None:
            if (reader is None or log.differs(mine)) and self._call(rank, mine):
                return True
            return reader is not None and self._reads(rank, reader)
        # The producers match, or read and compute the same: fields 1 to 3 are operator, inputs and outputs.
        if due == other or here == mine or log.reference.log[other][1:4] == log.reference.log[due][1:4]:
            if self._call(rank, mine):
                return True
            # A view by another operator, as a `slice` for half of a `split`, takes another part of the same value.
            if not log.log[mine].view or log.log[mine].operator == log.reference.log[due].operator:
                return False
            # The right part is here as well, so the view is right, and its reader takes the wrong one of two.
            if reader is not None and log.has(log.reference.log[due].outputs):
                return self._reads(rank, reader)
            self._replaces(rank, mine, due)
            return self._add_cause(PossibleCause(rank, mine, None, "adds"), 0)
        if log.differs(mine) and self._call(rank, mine):
            return True
        if here is None and log.lacks(due) and not _is_for_its_reader(log.reference.log[due]):
            return self._missing(rank, due)
        if here is not None and log.differs(here) and self._call(rank, here):
            return True
        if self._parallel(rank, mine, due):
            return True
        if reader is not None:
            return self._reads(rank, reader)
        # A record lacks the value even if the candidate has it elsewhere, such as a sum before zeros are added to it.
        return self._missing(rank, due) if here is None else self._add(rank, here, due, "misplaces")

    def _reads(self, rank: int, reader: tuple[int, int]) -> bool:
        """Add a cause: the call that reads a wrong value. Returns True.

        The defect is "inherits" if no call of the step computed the value, and "reads" if an earlier call did.
        """
        log, (mine, due) = self.logs[rank], reader
        # An input that no call of the step computed, and that the reference never has, is left from before the step.
        is_left = any(
            log.producer_of_input(mine, position) is None and value not in log.reference.values
            for position, value in enumerate(log.log[mine].inputs)
        )
        return self._add(rank, mine, due, "inherits" if is_left else "reads")

    def _parallel(self, rank: int, mine: int, due: int) -> bool:
        """Search for the cause if two of the reference's values were exchanged somewhere before the calls `mine` and
        `due`.

        The candidate has the output of `mine` where the reference has that of `due`. Returns whether a cause is found.
        """
        # Go back through calls of the same operators, although they do not match.
        log = self.logs[rank]
        mine, due = _behind_copies(log, mine), _behind_copies(log.reference, due)
        if log.log[mine].operator != log.reference.log[due].operator:
            return False
        if (known := self._result_so_far(("parallel", rank, mine, due))) is not None:
            return known
        self._depth += 1
        pairs = [(a, b) for a, b, _ in self._differing_inputs(rank, mine, due) if a is not None and b is not None]
        found = [self._explain_value(rank, a, b, None) for a, b in pairs]
        self._depth -= 1
        self._done["parallel", rank, mine, due] = any(found)
        return any(found)

    def _call(self, rank: int, mine: int) -> bool:
        """Search for a cause among the calls before call `mine`. If there is none and `mine` is wrong, it is the cause.

        For a collective, all its ranks are searched. Returns whether a cause is found.
        """
        log, due = self.logs[rank], self.logs[rank].matching_call(mine)
        if due is None:
            return self._extra(rank, mine)
        if (known := self._result_so_far((rank, mine))) is not None:
            return known
        call, other = log.log[mine], log.reference.log[due]
        found = False
        # A wrong value may come from any rank. All ranks are searched, as several may pass wrong values.
        if call.collective:
            theirs = dict(self.known.together((rank, due)))
            for peer, index in self.joined.together((rank, mine)):
                if peer != rank and peer in theirs:
                    if self._is_another_message(peer, index, theirs[peer]):
                        return self._reads(rank, (mine, due))
                    found |= self._inputs(peer, index, theirs[peer])
        found |= self._inputs(rank, mine, due)
        if not found and is_abandoned(call):
            found = self._add(rank, mine, due, "abandons")
        elif not found and log.differs(mine):
            # In any order: exchanged inputs that matter are found by `_inputs`.
            is_same = sorted(call.inputs) == sorted(other.inputs)
            is_given = is_same and call.scalars != other.scalars and self._read_out(rank, mine, due)
            # The number may be wrong by itself, so the call is tried as well, after what Python may have read.
            weight = LAST if is_given else 0
            found = self._add(rank, mine, due, "computes", weight) if is_same else self._reads(rank, (mine, due))
        self._done[rank, mine] = found
        return found

    def _read_out(self, rank: int, mine: int, due: int) -> bool:
        """Search for the cause of a wrong number among earlier wrong draws that Python may have read.

        For example, `tolist()` reads indices out of a draw without a call, and `mine` takes the row at one of them.
        A fraction counts only if `item()` read it, since an index is the usual number to draw. Returns whether a cause
        is found.
        """
        log, found = self.logs[rank], False
        known = dict(log.reference.log[due].scalars)
        numbers = [value for name, value in log.log[mine].scalars if known.get(name) != value]
        if not all(number.isdigit() or f"number {number}" in log.values for number in numbers):
            return False
        for index in log.read_by_python:
            if index < mine and log.differs(index):
                found |= self._call(rank, index)
        return found

    def _is_another_message(self, rank: int, mine: int, due: int) -> bool:
        """Whether the send `mine` is right, but not the send `due` that should reach this receiver: it took another's.

        A send is right if its match has the same inputs, and comes before and after the same sends to this receiver.
        """
        log, call = self.logs[rank], self.logs[rank].log[mine]
        other = log.matching_call(mine)
        if name_of(call) != "send" or other in (None, due) or call.inputs != log.reference.log[other].inputs:
            return False
        sends = [i for i, each in enumerate(log.log) if (each.operator, each.peers) == (call.operator, call.peers)]
        matches = [(i, there) for i in sends if (there := log.matching_call(i)) is not None]
        return all((i < mine) == (there < other) for i, there in matches if i != mine)

    def _inputs(self, rank: int, mine: int, due: int) -> bool:
        """Search for a cause among the producers of the inputs in which the matching calls `mine` and `due` differ.

        Returns whether a cause is found.
        """
        log = self.logs[rank]
        call, other = log.log[mine], log.reference.log[due]
        found = False
        # The same inputs in another order: search for the exchange before the call, and blame the call
        # if none is found.
        is_exchange = sorted(call.inputs) == sorted(other.inputs)
        self._depth += is_exchange
        for producer, theirs, value in self._differing_inputs(rank, mine, due):
            if producer is not None:
                found |= self._explain_value(rank, producer, theirs, None if is_exchange else (mine, due))
                continue
            # No call of the candidate made this input. Either the call that should have made it was not waited for, or
            # it is missing, or the value is from before the step.
            here = None if theirs is None else log.matching_here(theirs)
            if here is not None and is_abandoned(log.log[here]):
                found |= self._add(rank, here, theirs, "abandons")
            elif (
                here is None
                and theirs is not None
                and not self._is_before(rank, theirs, mine)
                and not _is_for_its_reader(log.reference.log[theirs])
            ):
                found |= self._missing(rank, theirs)
            elif not is_exchange:
                found |= self._add(rank, mine, due, "reads" if value in log.reference.values else "inherits")
        self._depth -= is_exchange
        for producer in log.producers(mine):
            if is_abandoned(log.log[producer]):
                found |= self._add(rank, producer, log.matching_call(producer), "abandons", 0)
        # Entries beyond the inputs are writers of an input's parts, and a call that read out a number.
        for number in log.input_producers(mine)[len(call.inputs) :]:
            found |= number is not None and log.differs(number) and self._call(rank, number)
        if found or call.inputs == other.inputs or (is_exchange and name_of(call) in COMMUTATIVE):
            return found
        return self._add(rank, mine, due, "exchanges") if is_exchange else self._reads(rank, (mine, due))

    def _differing_inputs(self, rank: int, mine: int, due: int) -> Iterator[tuple[int | None, int | None, str]]:
        """Yield a triple for each input in which two calls differ: the candidate's producer, the reference's producer,
        and the candidate's digest, or the reference's if the candidate lacks the input.

        `mine` is the candidate's call, and `due` the reference's. A producer is a call of the step, or None.
        """
        log = self.logs[rank]
        given, wanted = log.reference.input_producers(due), log.reference.log[due].inputs
        for at, there in log.differing_inputs(mine, due):
            if at is not None:
                theirs = given[there] if there is not None else None
                yield log.producer_of_input(mine, at), theirs, log.log[mine].inputs[at]
            elif there is not None:
                yield None, given[there], wanted[there]

    def _behind_extra(
        self, rank: int, mine: int, due: int | None, here: int | None, reader: tuple[int, int] | None
    ) -> bool:
        """Search for the cause if the output of call `mine`, which only the candidate makes, is read instead of that of
        `due`.

        - `here`: the candidate's call that matches `due`, or None.
        - `reader`: the pair of matching calls that read the outputs; None if a record has them.

        Returns whether a cause is found.
        """
        # `is_right`: the extra call's outputs are right values. `is_between`: it reads the value that the reference
        # reads in its place, and no other call rightly reads its output, so it was inserted there, and is a cause
        # itself.
        log, call = self.logs[rank], self.logs[rank].log[mine]
        computes = not log.packs(mine)
        is_right = log.reference.values.issuperset(call.outputs)
        is_between = computes and due is not None and bool(set(log.reference.log[due].outputs) & set(call.inputs))
        is_between &= not (is_right and _is_rightly_read(log, mine))
        # `is_read_wrong`: both values are here and right, and the reader takes the wrong one. Constants and random
        # numbers do not count: an equal value elsewhere is chance.
        # Without `due`, the reference reads a value from before the step.
        is_evidence = is_right and bool(call.inputs) and name_of(call) not in CONSTANTS and not call.draws
        is_read_wrong = is_evidence and reader is not None and (due is None or self._is_before(rank, due, reader[0]))
        if due is not None and here is None:
            self._replaces(rank, mine, due)
        reads_wrong = computes and is_read_wrong and not is_between
        if reader is not None and (
            reads_wrong or (computes and not is_right and self._is_for_others(rank, mine, due, reader))
        ):
            return self._reads(rank, reader)
        # A record has this right value, and the candidate computes the one that it should have as well.
        is_elsewhere = computes and is_evidence and not is_between and reader is None
        if is_elsewhere and here is not None and not log.differs(here):
            return self._add(rank, here, due, "misplaces")
        if self._extra(rank, mine, weight=1):
            return True
        if here is not None and log.differs(here) and self._call(rank, here):
            return True
        if is_read_wrong and not is_between and reader is not None:
            return self._reads(rank, reader)
        # Nothing before the call is wrong. So it packs right values wrongly, or a call that should read it is missing,
        # or its reader reads the wrong value, or else it is the cause itself.
        if not is_between and (packed := self._packer(rank, mine)) is not None:
            return self._add(*packed, None, "adds")
        if not is_between and due is not None and here is None and is_right and log.lacks(due):
            return self._missing(rank, due)
        return self._add(rank, mine, None, "adds")

    def _replaces(self, rank: int, mine: int, due: int) -> None:
        """Note that the extra call `mine` stands in place of the reference's call `due`.

        A graph makes a view once for several modules. It then stands for the reference's first one.
        """
        self.replaced[rank, mine] = min(due, self.replaced.get((rank, mine), due))

    def _is_for_others(self, rank: int, mine: int, due: int | None, reader: tuple[int, int]) -> bool:
        """Whether the output of the extra call `mine` is right, and only the call `reader` should read another value.

        It is right if another call computes a right value of it, or if the candidate computes it of right values with
        which what `reader` should read has nothing in common.
        """
        log, call = self.logs[rank], self.logs[rank].log[mine]
        if name_of(call) in CONSTANTS or call.draws:
            return False
        own = log.read_behind(mine)
        if not own or not log.reference.values.issuperset(own):
            return False
        if due is not None and not self._is_before(rank, due, reader[0]):
            return False
        # The reference computes that value more often: the extra call stands for one of these calls.
        right = log.reference.log[due].outputs if due is not None else ()
        if any(_times_computed(log, value) < _times_computed(log.reference, value) for value in right):
            return False
        # A collective may give a wrong value to other ranks only.
        # A call with a match may give the right output of a wrong input: the backward of a loss needs the shape alone.
        others = [index for index, _ in log.readers(mine) if log.matching_call(index) is None]
        others = [index for index in others if not (log.log[index].collective or log.packs(index))]
        if not all(map(log.differs, others)):
            return True
        known = log.reference.log
        pairs = zip(log.log[reader[0]].inputs, known[reader[1]].inputs, strict=False)
        is_ordered = name_of(log.log[reader[0]]) not in COMMUTATIVE
        wanted = {right for value, right in pairs if value in call.outputs or not is_ordered}
        if due is not None:
            wanted |= {*known[due].outputs, *known[due].inputs, *log.read_behind_there(due)}
        return own.isdisjoint(wanted)

    def _is_before(self, rank: int, due: int, reader: int) -> bool:
        """Whether the candidate computes an output of the reference's call `due` before its own call `reader` runs.

        Also true if the candidate has such an output from before the step.
        """
        log = self.logs[rank]
        # If the value is here although no call made it (`made` is empty), it is an input from before the step.
        made = [index for value in log.reference.log[due].outputs for index in log.all_with(value)]
        return not log.lacks(due) and (not made or min(made) < reader)

    def _extra(self, rank: int, mine: int, weight: int = 2) -> bool:
        """Search for the cause of the extra call `mine`, which the candidate makes and the reference does not.

        The search begins among the producers of its wrong inputs. If none is a cause, the call itself is a cause if it
        is wrong, and gets `weight` in `found`. Returns whether a cause is found.
        """
        if (known := self._result_so_far((rank, mine))) is not None:
            return known
        log, call, found = self.logs[rank], self.logs[rank].log[mine], False
        for peer, index in self.joined.together((rank, mine)):
            side = self.logs[peer]
            # Behind the inputs' producers are those of parts of a bucket.
            for value, producer in zip_longest(side.log[index].inputs, side.input_producers(index)):
                # The readers are calls with a match, so an extra producer has the reader of its own reader.
                if producer is not None and peer == rank:
                    self.readers.setdefault((rank, producer), self.readers.get((rank, mine), mine))
                is_right = value in side.reference.values
                if producer is None or (is_right and not side.log[producer].inputs):
                    continue
                if side.matching_call(producer) is not None:
                    found |= side.differs(producer) and self._call(peer, producer)
                elif not is_right:
                    found |= self._extra(peer, producer)
        if not found and is_abandoned(call):
            found = self._add(rank, mine, None, "abandons")
        elif not found and self._is_misplaced and self._overwrites(rank, mine):
            found = self._add(rank, mine, None, "adds", 0)
        elif not found and log.differs(mine) and not log.packs(mine) and not self._is_bucket(rank, mine):
            found = self._add(rank, mine, None, "adds", weight)
        self._done[rank, mine] = found
        return found

    def _overwrites(self, rank: int, mine: int) -> bool:
        """Whether call `mine` copies a value of the reference over another value of the reference."""
        log, call = self.logs[rank], self.logs[rank].log[mine]
        return name_of(call) == "copy_" and len(set(call.inputs)) > 1 and log.reads_right_values(mine)

    def _is_bucket(self, rank: int, mine: int) -> bool:
        """Whether call `mine` is a collective of values that another call joined, such as a bucket."""
        log = self.logs[rank]
        return log.log[mine].collective and any(log.packs(producer) for producer in log.producers(mine))

    def _packer(self, rank: int, mine: int) -> tuple[int, int] | None:
        """Return the rank and index of the call to blame if calls that only the candidate makes, up to `mine`, join
        values.

        - If one of these calls is a collective of the joined values: a call that joins them in a wrong order or, if
          there is none, that collective, but None if it is `mine` itself.
        - Otherwise the first call that joins values. None if no call does.
        """
        # Only extra calls are followed. For a misplaced value collectives are passed, since the packing is wrong then.
        log, pending, seen, packs = self.logs[rank], [mine], set[int](), list[int]()
        while pending:
            if (index := pending.pop()) in seen or log.matching_call(index) is not None:
                continue
            seen.add(index)
            call = log.log[index]
            if call.collective and not self._is_misplaced:
                return self._wrong_pack(rank, index) or ((rank, index) if index != mine else None)
            if name_of(call) in PACKING and len(set(call.inputs)) > 1:
                packs.append(index)
            if log.packs(index) or call.collective or self._is_misplaced:
                pending += log.producers(index)
        return (rank, min(packs)) if packs else None

    def _wrong_pack(self, rank: int, collective: int) -> tuple[int, int] | None:
        """Return the call, on any rank of a bucket's collective, that joins the bucket's parts in a wrong order; else
        None.
        """
        # Its own rank first: if all ranks are wrong, each of their records leads to its own call.
        for peer, index in sorted(self.joined.together((rank, collective)), key=lambda site: site[0] != rank):
            log = self.logs[peer]
            for pack in log.producers(index):
                if not all(self._is_in_order(log, pack, taken) for taken, _ in log.readers(index)):
                    return peer, pack
        return None

    def _is_in_order(self, log: CandidateLog, pack: int, taken: int) -> bool:
        """Whether the call `pack` joins the parts of a bucket in the order in which the call `taken` takes them out.

        The reference reduces each part by itself: the results, in the order in which the candidate joins the parts, are
        what the readers of `taken` should read. True if that is not known.
        """
        known, outputs, due = log.reference.log, log.log[taken].outputs, dict[int, str]()
        for reader, position in log.readers(taken):
            value, other = log.log[reader].inputs[position], log.matching_call(reader)
            if other is not None and value in outputs and position < len(known[other].inputs):
                due[outputs.index(value)] = known[other].inputs[position]
        reduced = {call.inputs: call.outputs for call in known if call.collective}
        for at in range(len(log.log[pack].inputs) if due else 0):
            whole, number = self._whole(log, pack, at)
            result, right = reduced.get((whole,)), due.get(at % len(outputs))
            # A reduce-scatter's bucket has the first rank's part of each tensor, then the second's.
            if result and ((right and right not in result) or number not in (None, at // len(outputs))):
                return False
        return True

    @staticmethod
    def _whole(log: CandidateLog, reader: int, position: int) -> tuple[str, int | None]:
        """Return the value that a call reads or, for a view that only the candidate makes, the value that it is a part
        of, and the number of the part; None if the value is no view.
        """
        value, number, producer = log.log[reader].inputs[position], None, log.producer_of_input(reader, position)
        while producer is not None and _shows_a_part(log.log[producer]) and log.matching_call(producer) is None:
            number = log.log[producer].outputs.index(value) if value in log.log[producer].outputs else None
            value, producer = log.log[producer].inputs[0], log.producer_of_input(producer, 0)
        return value, number

    def _is_elsewhere(self, rank: int, due: int) -> bool:
        """Whether only other ranks of the candidate run the module of the reference's call `due`, as in a pipeline."""
        module = self.logs[rank].reference.log[due].place.module
        own = any(call.place.module == module for call in self.logs[rank].log)
        return bool(module) and not own and any(log.matching_here(due) is not None for log in self.logs)

    def _missing(self, rank: int, due: int, is_named: bool = True) -> bool:
        """Search for a cause among the calls before the missing call `due`, which only the reference makes.

        If no call before it is the cause, the missing call itself is the cause, unless `is_named` is False. Returns
        whether a cause is found.
        """
        if (known := self._result_so_far(("missing", rank, due, is_named))) is not None:
            return known
        # `found`: a missing call before this one is a cause. `is_wrong`: a wrong call of the candidate before it is.
        log, found, is_wrong = self.logs[rank], False, False
        for value, producer in zip(log.reference.log[due].inputs, log.reference.input_producers(due), strict=False):
            if producer is None:
                continue
            if (here := log.matching_here(producer)) is not None:
                is_wrong |= log.differs(here) and self._call(rank, here)
            elif value not in log.values and not self._is_elsewhere(rank, producer):
                found |= self._missing(rank, producer, not _is_for_its_reader(log.reference.log[producer]))
        # Calls that prepare a missing collective, such as a division before a sum, are missing because of it.
        if not is_wrong and is_named and (not found or log.reference.log[due].collective):
            found = self._add(rank, None, due, "lacks", 0 if found else 1)
        found |= is_wrong
        self._done["missing", rank, due, is_named] = found
        return found


def _is_rightly_read(log: CandidateLog, index: int) -> bool:
    """Whether another call reads an output of call `index`, and its matching call reads the same value there."""
    pairs = ((log.log[reader], log.matching_call(reader), position) for reader, position in log.readers(index))
    return any(
        other is not None and log.reference.log[other].inputs[position : position + 1] == (call.inputs[position],)
        for call, other, position in pairs
    )


def _times_computed(log: CandidateLog | ReferenceLog, value: str) -> int:
    """Return the number of calls that compute a value, without those that return an input unchanged."""
    return sum(not returns_only_inputs(log.log[index]) for index in log.all_with(value))


def _is_for_its_reader(call: Call) -> bool:
    """Whether a call only prepares the input of its reader: it joins values, is a constant, or views a whole value."""
    return keeps_order(call) or not call.inputs or (name_of(call) in PACKING | CONSTANTS and not call.view)


def _shows_a_part(call: Call) -> bool:
    return call.view and bool(call.inputs)


def _behind_copies(log: CandidateLog | ReferenceLog, index: int) -> int:
    """Return the call that computed the output of call `index`, before calls that return an input unchanged, such as
    `clone`.
    """
    while returns_only_inputs(call := log.log[index]):
        producer = log.input_producers(index)[call.inputs.index(call.outputs[0])]
        if producer is None:
            break
        index = producer
    return index


def ordered(walk: Walk) -> list[PossibleCause]:
    """Return the causes that a walk found, ordered by likelihood, then by the time of the call.

    - Calls that compute a wrong value, with equal inputs but a different output, are among the first.
    - Calls without inputs come last, and so do calls of the candidate alone that compute nothing, such as a `cat`.
    """

    # The order of calls is only known within a system's logs, so missing calls are placed by the reference's.
    def when(parting: PossibleCause) -> tuple[int, int, int, int]:
        if parting.candidate is None:
            return (walk.found[parting], *walk.known.when((parting.rank, parting.reference or 0)))
        return (walk.found[parting], *walk.joined.when((parting.rank, parting.candidate)))

    return sorted(walk.found, key=when)
