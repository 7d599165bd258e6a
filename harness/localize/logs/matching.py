"""Match a rank's calls with the reference's: by origin first, then by values, and last by shared inputs.

The origin of a call is its operator, module, direction, chunk, micro-batch and part.

1. Calls of one origin are matched by equal inputs and outputs, then by equal inputs, then by equal outputs, then by the
   calls whose outputs they read: if only one system casts a value, the calls that read the cast value still match.
2. If equally many calls of an origin remain in both systems, these are matched in order.
3. Other calls may have moved, so they are matched by the same outputs, then by the same inputs, in any module.
4. Views that return the same value by different operators are matched, such as `slice` with a half of `split`.
5. Each remaining call is matched with the call of the same operator that shares the most inputs.
6. Last, two remaining calls of the same operator are matched if matching calls read their outputs.

A node that the candidate recomputes takes no part in this: it gets the match of the node that it repeats, also if it
computes something else.

Example, within one module:

    reference    mm x w -> a    mm y w -> b
    candidate    mm y w -> B    mm x w -> a        by inputs, the first call matches the reference's second
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from bitproof.harness.localize.logs.calls import Call, returns_only_inputs
from bitproof.harness.localize.logs.joined_logs import RECEIVES
from bitproof.harness.localize.logs.packing import PACKING, name_of
from bitproof.harness.localize.logs.reference_log import fits, in_any_order, values_of

Key = Callable[[Call], Hashable]

_RECOMPUTED = re.compile(r"_recomputed(_\d+)?")
"""The part of a node's name that marks a recomputed node: see `harness.graph.passes.rematerialize`."""


class Matching:
    """The matching calls of a rank's log in the candidate and in the reference.

    - `theirs`: for each call of the candidate, the index of its match or None; `mine` is the inverse.
    - `repeated`: the reference's calls that several calls of the candidate match, such as recomputed calls.
    """

    def __init__(self, candidate: Sequence[Call], reference: Sequence[Call]) -> None:
        self.calls = candidate, reference
        self.theirs: list[int | None] = [None] * len(candidate)
        self.mine: list[int | None] = [None] * len(reference)
        self._first = _first_of_recomputed(candidate)
        # Receives come first, as messages match by their order and never by values. The keys go from the strictest to
        # the loosest: each step matches only calls that the steps before it have left.
        self._receives()
        for keys in (_origin, lambda c: (c.operator, c.place[:2])):
            self._match_groups(keys)
        # The other calls, in any module: a pass may have moved them.
        for value in (_result, _inputs):
            self._match(value)
        self._views()
        self._nearest(range(len(candidate)), range(len(reference)))
        self._by_readers()
        self._repeats()
        self.repeated = {index for index, count in Counter(self.theirs).items() if index is not None and count > 1}

    def _match_groups(self, origin: Key) -> None:
        """Group the unmatched calls of both systems by origin, and match the calls within each group."""
        groups: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for side, calls in enumerate(self.calls):
            # Only the strictest key keeps steps apart (see `_steps`): what it leaves may match across steps.
            steps = _steps(calls) if origin is _origin else [0] * len(calls)
            for index, call in enumerate(calls):
                if self._is_left(side, index):
                    groups[origin(call), steps[index]][side].append(index)
        for own, due in groups.values():
            if own and due:
                for key in (_computation, _question, _result):
                    self._match(key, own, due)
                self._match_by_sources(own, due)
                # A call that returns its input unchanged is no wrong version of one that computes.
                for is_copy in (False, True):
                    self._match_in_order(
                        [i for i in own if self.theirs[i] is None and self._copies(0, i) == is_copy],
                        [i for i in due if self.mine[i] is None and self._copies(1, i) == is_copy],
                    )

    def _match_by_sources(self, own: Sequence[int], due: Sequence[int]) -> None:
        """Match calls of the candidate, `own`, with calls of the reference, `due`, that read outputs of matching calls
        and have equal numbers.

        A call without a match between them counts as no call if it reads a single tensor, such as a cast.
        """
        waiting: dict[Hashable, list[int]] = defaultdict(list)
        for index in due:
            if self.mine[index] is None and (sources := self._sources(1, index)) is not None:
                waiting[sources].append(index)
        for index in own:
            if self.theirs[index] is None and (sources := self._sources(0, index)) is not None:
                # Several calls with the same sources, such as two views of a tensor, are left for the next steps.
                there = waiting.get(sources, [])
                if (
                    len(there) == 1
                    and self._are_alike(index, there[0])
                    and _may_match(self.calls[1][there[0]], self.calls[0][index])
                ):
                    self._pair(index, there.pop())

    def _sources(self, side: int, index: int) -> tuple[Hashable, ...] | None:
        """Return the numbers of a call and, for each input, the index in the reference of the matched call before it,
        or the digest of a value from before the step.

        None if an input comes from other calls, or if all are from before the step.
        """
        call, found = self.calls[side][index], list[Hashable]()
        for value, producer in zip(call.inputs, call.producers, strict=False):
            source, at = producer, index
            while source is not None and (self.theirs, self.mine)[side][source] is None:
                at, reads = source, self.calls[side][source]
                if reads.operator == call.operator or len(reads.inputs) != 1:
                    return None
                source = reads.producers[0] if reads.producers else None
            if source is None:
                found.append(value if at == index else self.calls[side][at].inputs[0])
            else:
                found.append(self.theirs[source] if side == 0 else source)
        return (call.scalars, *found) if any(isinstance(each, int) for each in found) else None

    def _match_in_order(self, own: Sequence[int], due: Sequence[int]) -> None:
        """Match the calls `own` with the calls `due` in order, if they are equally many.

        If not, two calls match only if their numbers are equal and the same operators produced their inputs.
        """
        # Unequal numbers: calls are missing or extra, so the longest common runs of alike calls are matched.
        pairs = [*zip(own, due, strict=False)] if len(own) == len(due) else []
        if own and due and not pairs:
            sides = [[self._circumstances(side, i) for i in indices] for side, indices in enumerate((own, due))]
            blocks = SequenceMatcher(a=sides[0], b=sides[1], autojunk=False).get_matching_blocks()
            pairs = [(own[a + i], due[b + i]) for a, b, size in blocks for i in range(size)]
        for mine, theirs in pairs:
            if self._are_alike(mine, theirs):
                self._pair(mine, theirs)

    def _are_alike(self, mine: int, theirs: int) -> bool:
        """Whether two calls both work on a bucket, or both do not, and join equally many values."""
        return self._is_packed(0, mine) == self._is_packed(1, theirs) and self._joins(0, mine) == self._joins(1, theirs)

    def _joins(self, side: int, index: int) -> int | None:
        """Return the number of values that a call joins; None for a call that computes. The bucket of ten parameters is
        no wrong version of a sequence's two chunks.
        """
        call = self.calls[side][index]
        return len(call.inputs) if name_of(call) in PACKING and not call.view else None

    def _copies(self, side: int, index: int) -> bool:
        call = self.calls[side][index]
        return returns_only_inputs(call) and not call.collective

    def _circumstances(self, side: int, index: int) -> Hashable:
        calls = self.calls[side]
        before = tuple(calls[i].operator for i in calls[index].producers if i is not None)
        is_known = (calls[index].scalars or before) and not calls[index].collective
        # Side and index are equal for no other call, so a call without circumstances matches none.
        return (calls[index].scalars, before) if is_known else (side, index)

    def _match(self, key: Key, own: Sequence[int] | None = None, due: Sequence[int] | None = None) -> None:
        """Match unmatched calls in order, if the function `key` returns the same for them, and directions and chunks
        agree.

        `own` and `due` are the candidate's and the reference's calls to match; None for all.
        """
        calls, known = self.calls
        # Of equal calls, first those that read outputs of matching calls; the others match in order.
        for by_producers in (True, False):
            waiting: dict[Hashable, list[int]] = defaultdict(list)
            for index in range(len(known)) if due is None else due:
                if self.mine[index] is None and known[index].outputs and name_of(known[index]) not in RECEIVES:
                    producers = known[index].producers if by_producers else ()
                    waiting[key(known[index]), producers].append(index)
            for index in range(len(calls)) if own is None else own:
                if not self._is_left(0, index):
                    continue
                made = calls[index].producers if by_producers else ()
                producers = tuple(by if by is None else self.theirs[by] for by in made)
                there = waiting.get((key(calls[index]), producers), [])
                other = next((i for i in there if _may_match(known[i], calls[index])), None)
                if other is not None:
                    there.remove(other)
                    self._pair(index, other)

    def _is_packed(self, side: int, index: int) -> bool:
        """Whether a call is a collective of values that were joined or copied into a bucket.

        Such a call matches no collective of a single value. `side` is 0 for the candidate, and 1 for the reference.
        """
        calls = self.calls[side]
        makers = (calls[i] for i in calls[index].producers if i is not None)
        return calls[index].collective and any(
            name_of(call) in PACKING | {"copy_"} and not call.view for call in makers
        )

    def _nearest(self, own: Iterable[int], due: Iterable[int]) -> None:
        """Match each remaining call with the remaining call of the same operator that shares the most inputs with it.

        A call that shares no input with any stays unmatched.
        """
        calls, known = self.calls
        waiting: dict[str, list[int]] = defaultdict(list)
        for index in due:
            if self.mine[index] is None:
                waiting[known[index].operator].append(index)
        for index in own:
            call = calls[index]
            if not self._is_left(0, index):
                continue
            there = [i for i in waiting[call.operator] if _may_match(known[i], call)]
            shared = {i: len(set(known[i].inputs) & set(call.inputs)) for i in there}
            # Of equally good calls, `max` takes the first, so that they match in order.
            best = max(there, key=lambda i: shared[i], default=None)
            if best is not None and shared[best]:
                waiting[call.operator].remove(best)
                self._pair(index, best)

    def _by_readers(self) -> None:
        """Match remaining calls of the same operator if matching calls read their outputs.

        For example, this matches a call that reads a wrong input and thus shares no value with its match. The two
        readers must read equally many remaining calls of the operator, which match in the order in which they are read.
        """
        calls, known = self.calls
        # Readers before their producers, so that a chain of such calls is matched back to its first.
        for mine in reversed(range(len(calls))):
            if (theirs := self.theirs[mine]) is None:
                continue
            due = self._left_before(1, theirs)
            for operator, own in self._left_before(0, mine).items():
                pairs = zip(own, due[operator], strict=True) if len(own) == len(due[operator]) else ()
                for first, second in pairs:
                    if _may_match(known[second], calls[first]):
                        self._pair(first, second)

    def _left_before(self, side: int, index: int) -> dict[str, list[int]]:
        """Return the unmatched producers of a call's inputs, by operator, in the order in which the call reads them."""
        found = defaultdict[str, list[int]](list)
        for producer in dict.fromkeys(self.calls[side][index].producers):
            if producer is not None and self._is_left(side, producer):
                found[self.calls[side][producer].operator].append(producer)
        return found

    def _is_left(self, side: int, index: int) -> bool:
        """Whether a call has no match yet and may get one of its own. `side` is 0 for the candidate."""
        return (self.theirs, self.mine)[side][index] is None and (side == 1 or index not in self._first)

    def _pair(self, mine: int, theirs: int) -> None:
        self.theirs[mine], self.mine[theirs] = theirs, mine

    def _receives(self) -> None:
        """Match receives in order: messages between two ranks arrive in the order in which they are sent.

        Those of micro-batches are counted apart from others: PyTorch's stages first exchange the shapes of their
        activations, where the candidate's know them.
        """
        sides = [defaultdict[Hashable, list[int]](list), defaultdict[Hashable, list[int]](list)]
        for side, calls in zip(sides, self.calls, strict=True):
            for index, call in enumerate(calls):
                if name_of(call) in RECEIVES:
                    kind = call.micro_batch is None, call.place.direction == "update"
                    side[call.operator, call.peers, *kind].append(index)
        for key, own in sides[0].items():
            if len(own) == len(due := sides[1][key]):
                for mine, theirs in zip(own, due, strict=True):
                    self._pair(mine, theirs)

    def _views(self) -> None:
        """Match views that return the same value by different operators, such as a `slice` for half of a `split`."""
        calls, known = self.calls
        # Reversed, so that the first view with a value stays. Several views of the candidate may match the same view.
        shown = {value: i for i, call in reversed([*enumerate(known)]) if call.view for value in call.outputs}
        for index, call in enumerate(calls):
            if (
                self._is_left(0, index)
                and call.view
                and call.outputs
                and (other := shown.get(call.outputs[0])) is not None
            ):
                self.theirs[index] = other
                if self.mine[other] is None:
                    self.mine[other] = index

    def _repeats(self) -> None:
        """Match calls that repeat another call: recomputed ones, and those with the same operator, inputs and numbers.

        Such a call gets the match of the call that it repeats. For example, the reference gathers a parameter for each
        chunk, and the candidate once, so both gathers of the reference match that of the candidate.
        """
        for again, first in self._first.items():
            self.theirs[again] = self.theirs[first]
        for side, done in enumerate((self.theirs, self.mine)):
            asked: dict[Hashable, list[int]] = defaultdict(list)
            for index, call in enumerate(self.calls[1 - side]):
                asked[_inputs(call), call.scalars].append(index)
            for index, call in enumerate(self.calls[side]):
                if done[index] is not None or not call.inputs:
                    continue
                there = asked.get((_inputs(call), call.scalars), [])
                done[index] = next((i for i in there if _may_match(self.calls[1 - side][i], call)), None)
        self._same_there()

    def _same_there(self) -> None:
        """Give several calls of the reference that compute the same, such as gathers for each chunk, one match, also if
        that is wrong.
        """
        calls, known = self.calls[0], dict[Hashable, int]()
        for index, call in enumerate(self.calls[1]):
            if (mine := self.mine[index]) is not None:
                known.setdefault((_computation(call), call.scalars), mine)
        for index, call in enumerate(self.calls[1]):
            match = known.get((_computation(call), call.scalars))
            if self.mine[index] is None and call.inputs and match is not None and _may_match(call, calls[match]):
                self.mine[index] = match


def _first_of_recomputed(calls: Sequence[Call]) -> dict[int, int]:
    """Return, for each call of a recomputed node, the last call before it of the node that it repeats, in the same
    micro-batch.
    """
    latest, found = dict[Hashable, int](), dict[int, int]()
    for index, call in enumerate(calls):
        if call.node is not None:
            name = _RECOMPUTED.sub("", call.node)
            if name != call.node and (name, call.micro_batch) in latest:
                found[index] = latest[name, call.micro_batch]
            latest[call.node, call.micro_batch] = index
    return found


def _steps(calls: Sequence[Call]) -> list[int]:
    """Return, for each call, the number of complete steps before it. A step begins at the first forward after an
    update, unless that is of the same or a later micro-batch than the forward before.

    So a call without a match in its step cannot match a call of the next step, such as a counter's next increase.
    """
    # A stage sends a gradient after a backward, as an update does, and goes on to the next micro-batch.
    found, step, is_updating, latest = list[int](), 0, False, 0
    for call in calls:
        if call.place.direction is not None:
            is_forward = call.place.direction == "forward"
            step += is_updating and is_forward and not 0 < latest <= (call.micro_batch or 0)
            is_updating = call.place.direction == "update"
            latest = (call.micro_batch or 0) if is_forward else latest
        found.append(step)
    return found


def _may_match(first: Call, second: Call) -> bool:
    """Whether two calls agree in direction and chunk; two random calls also in module and micro-batch."""
    # Different random calls may read the same state, so equal inputs are weaker evidence for them.
    if not fits(first.place, second.place):
        return False
    pairs = (first.place.module, second.place.module), (first.micro_batch, second.micro_batch)
    return not first.draws or all(None in pair or pair[0] == pair[1] for pair in pairs)


def _origin(call: Call) -> Hashable:
    return call.operator, call.place, call.micro_batch, call.part


def _computation(call: Call) -> Hashable:
    return call.operator, call.inputs, call.outputs


def _question(call: Call) -> Hashable:
    return call.operator, call.inputs, call.scalars


def _inputs(call: Call) -> Hashable:
    return call.operator, in_any_order(call)


def _result(call: Call) -> Hashable:
    return call.operator, values_of(call)
