"""Find the call to blame for a differing record: the first wrong call on a path of values that leads to the record.

A call is right if the reference has a call of the same operator, direction and chunk with the same outputs. A call of
an operator that the reference does not use in this direction is right if the reference has its output values at all.
Values pass from call to call through memory, collectives, a generator's state, and numbers read out of tensors. This
orders the calls of all ranks partially: each rank has its own order, and the launches of a collective come before
everything computed from its result. A root is a wrong call on a path to the record that has no wrong input:

    reference    mm x w -> a    silu a -> b    sum b -> l
    candidate    mm x w -> a    silu a -> B    sum B -> L    The record L differs; silu is the root.

1. Find the roots: walk back from the record over wrong calls, at a collective to all of its ranks. The answer is the
   first root in the order. Roots with the same inputs and a different output come first, then roots that are the only
   cause of a wrong input of a call that the reference makes, too. Among roots without an order, the one behind fewer
   collectives comes first, then the root on the lower rank.
2. Packing (`cat`, copying into a bucket) comes last: its values are nowhere in the reference, without being wrong.
   Each part of a bucket is judged separately, unless the bucket lost a value that all ranks had, or packs the values
   of a pack of the reference in another order.
3. A root with the inputs of its partner, the reference's call that it should equal, is wrong itself.
4. A root with another right value as input is blamed for reading it, unless an earlier call exchanged that value: a
   collective to which a rank passed the value of another occurrence, a new constant, or a missing call whose output
   the partner reads. A send is blamed for another message, not its receive. A sum over ranks before the root that is
   missing, or that no call reads, takes precedence over all of these (`lost_sums`).
5. If there is no root, a right value is in the wrong tensor, or is missing. The answer is the call that put right
   values in another order; the collective of the bucket from which the other value came; the copy that overwrote the
   right value there; the reference's call whose inputs are here and whose output is not; or a missing copy.
6. A new call is reported at the place of the reference's call that it replaces, or before which it was inserted.

docs/explanation/causes.md derives each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from bitproof.harness.localize.argument_differences import (
    argument_differences,
    input_differences,
    list_differences,
    strange_output,
)
from bitproof.harness.localize.chain import Pair, with_chain
from bitproof.harness.localize.collective_inputs import fed_otherwise, fed_wrong, is_packed_otherwise, out_of_turn
from bitproof.harness.localize.culprit import Culprit, How
from bitproof.harness.localize.logs.calls import KERNELS, Call, gives_what_it_reads, is_abandoned
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.idle_broadcasts import without_idle_broadcasts
from bitproof.harness.localize.logs.joined_logs import RECEIVES, JoinedLogs, Site
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.localize.lost_sums import or_lost_sum
from bitproof.harness.localize.missing_values import (
    blocks_elsewhere,
    first_lost,
    first_missing,
    launched,
    misplaced_by,
    packed_otherwise,
)
from bitproof.harness.localize.new_calls import constant_of, put_before, put_between, replaced_by
from bitproof.harness.localize.partial_sums import regrouped
from bitproof.harness.localize.roots import needed, roots_of

Differing = Mapping[int, Iterable[Pair]]
"""For each rank, the digests of each tensor that differs."""


def find_culprit(
    reference: Sequence[Sequence[Call] | ReferenceLog],
    candidate: Sequence[Sequence[Call]],
    differing: Differing,
    first: tuple[int, Pair] | None = None,
) -> Culprit | None:
    """The call to blame in a step. `reference` and `candidate` have a log for each rank, of the same ranks.

    The culprit explains the record `first` (its rank and digests) or, if no call leads to that, the next record of
    `differing` to which a call leads. None if no call explains a difference, for example if NumPy wrote the differing
    values. A reference that is compared with many candidates can be indexed beforehand (`ReferenceLog`).
    """
    return culprit_in(ready_logs(reference, candidate), differing, first)


def ready_logs(
    reference: Sequence[Sequence[Call] | ReferenceLog], candidate: Sequence[Sequence[Call]]
) -> list[CandidateLog]:
    """The candidate's log of each rank, with every call judged by the reference's log. Searches may share it."""
    plain = [log for log in reference if not isinstance(log, ReferenceLog)]
    reference = without_idle_broadcasts(plain) if len(plain) == len(reference) else reference
    # An indexed reference may come from a baseline, and is used as it is.
    candidate = without_idle_broadcasts(candidate)
    known = [log if isinstance(log, ReferenceLog) else ReferenceLog(log) for log in reference]
    return [CandidateLog(calls, ready) for calls, ready in zip(candidate, known, strict=True)]


def culprit_in(
    logs: Sequence[CandidateLog], differing: Differing, first: tuple[int, Pair] | None = None
) -> Culprit | None:
    """The call to blame, as `find_culprit` finds it, in logs that are ready."""
    try:
        return _culprit_in(logs, differing, first)
    finally:
        for log in logs:
            log.trusts_parts = True


def _culprit_in(logs: Sequence[CandidateLog], differing: Differing, first: tuple[int, Pair] | None) -> Culprit | None:
    blame = _Blame(
        logs, JoinedLogs([log.log for log in logs]), {rank: list(pairs) for rank, pairs in differing.items()}
    )
    records = [(rank, pair) for rank, pairs in blame.differing.items() for pair in pairs]
    ordered = records if first is None else [first, *(record for record in records if record != first)]
    for rank, pair in ordered:
        # The search for the record before may have withdrawn the trust in parts of buckets (rule 2).
        for log in logs:
            log.trusts_parts = True
        if (culprit := blame.explain({rank: [pair]})) is not None:
            culprit = or_lost_sum(culprit, logs[culprit.rank], blame.known)
            return with_chain(culprit, rank, pair, logs, blame.joined, blame.known)
    return None


@dataclass
class _Blame:
    """A search. `differing` has every differing tensor by rank; `record` has the tensor that is being explained."""

    logs: Sequence[CandidateLog]
    joined: JoinedLogs
    differing: Mapping[int, Sequence[Pair]]
    record: Differing = field(default_factory=dict)

    def explain(self, record: Differing) -> Culprit | None:
        """The call to blame for a record, by rules 1 to 6."""
        self.record = record
        picked = self._root(record)
        exchanged = self._exchanged(record, picked)
        # Calls after an exchange agree with the reference or exchange in turn, so the first exchange is the cause.
        if exchanged and (picked is None or picked.same == "exchanges"):
            picked = self._first_of(exchanged, exchanged)
        if picked is None:  # rule 5
            misplaced = misplaced_by(record, self.logs, self.joined)
            if misplaced is not None and (misplaced.rank, misplaced.index) in self._history(record):
                return misplaced
            missing = self._first_missing({rank: [wanted for wanted, _ in pairs] for rank, pairs in record.items()})
            return missing or self._lost_copy(record)
        # The root only reads another right value: perhaps a collective before it exchanged two occurrences (rule 4).
        if picked.reads and picked.partner is not None:
            came = out_of_turn(picked.site, picked.partner, self.logs, self.joined, self.known)
            picked = picked if came is None else _Picked(*came, None, picked.roots)
        picked = self._sent(picked)
        # An update of a gradient in the wrong tensor looks wrong, but the gradient was misplaced before it.
        is_of_update = self.logs[picked.site[0]].log[picked.site[1]].place.direction == "update"
        if picked.same != "computes" and is_of_update and (misplaced := misplaced_by(record, self.logs, self.joined)):
            return misplaced
        return self._said_of(picked)

    def _sent(self, picked: _Picked) -> _Picked:
        """The send of another message, if `picked` is the receive that brings it; else `picked` itself."""
        (rank, index), partner = picked.site, picked.partner
        log = self.logs[rank]
        if name_of(log.log[index]) not in RECEIVES or partner is None:
            return picked
        there = log.counterpart(index, log.reference)
        known = dict(self.known.together((rank, partner if there is None else there)))
        for peer, send in self.joined.together((rank, index)):
            if peer != rank and peer in known:
                given, due = self.logs[peer].log[send], self.known.logs[peer][known[peer]]
                if given.inputs != due.inputs:
                    return _Picked((peer, send), known[peer], None, picked.roots)
        return picked

    def _root(self, record: Differing) -> _Picked | None:
        """Rules 1 and 2: the root to blame. If it lies behind a bucket that lost a value, search inside the bucket."""
        picked = self._pick(record)
        if picked is None or (picked.reads and self._loses(picked, record)):
            # Without this trust, the parts of a bucket are wrong if the bucket is, so the walk goes on into the bucket.
            for each in self.logs:
                each.trusts_parts = False
            picked = self._pick(record)
        return picked

    def _said_of(self, picked: _Picked) -> Culprit:
        """Rules 3, 4 and 6: the defect of a root, or the earlier call that exchanged its input."""
        (first_rank, index), partner, same, roots = picked
        log = self.logs[first_rank]
        call = log.log[index]
        # A new constant that the root reads takes its place as the culprit.
        if picked.reads and (constant := log.new_constant(index, partner)) is not None:
            roots = {(rank, constant) for rank, each in roots if each == index}
            index, call, partner, same = constant, log.log[constant], None, None
        turn = log.turn(index)
        # The same defect usually occurs on many ranks: list the roots at this call's occurrence on each.
        ranks = tuple(sorted({first_rank} | {r for r, i in roots | self.roots if self.logs[r].is_turn(i, call, turn)}))
        at = first_rank if first_rank != ranks[0] else None
        if call.operator.startswith(KERNELS):
            told = strange_output(log, call)
            return Culprit(how="compiles", call=call, ranks=ranks, candidate=index, reference=None, reading=told, at=at)
        if same is None and (whole := regrouped(log, call)) is not None:
            call = call._replace(place=whole.place)
            return Culprit(how="regroups", call=call, ranks=ranks, candidate=index, reference=None, at=at)
        if partner is not None and same is None:
            missing = self._missing_for(picked)
            is_constant = missing is not None and missing.how == "lacks" and not missing.call.inputs
            if missing is not None and not (is_constant and log.how_it_reads(index) == "inherits"):
                # A constant that became a tensor of the module's is missing only for its reader.
                return missing
        how: How = same or (log.how_it_reads(index) if partner is not None else "adds")
        if how in ("reads", "inherits") and partner is not None:
            how = log.how_it_came(index, log.reference.log[partner].inputs) or how
        if how == "computes" and not call.inputs:
            how = "draws"
        if is_abandoned(call):
            how = "abandons"
        arguments = argument_differences(call, log.reference.log[partner]) if partner is not None else ""
        other = replaced_by(log, call) if how == "adds" else None
        if how == "adds" and (due := other or put_before(log, index)) is not None:  # rule 6
            call = call._replace(place=due.place)
        return Culprit(
            how=how,
            call=call,
            ranks=ranks,
            candidate=index,
            reference=partner,
            arguments=arguments,
            reading=input_differences(log, index, partner) if partner is not None and how == "reads" else "",
            instead_of=other.operator if other is not None else "",
            at=at,
        )

    @cached_property
    def known(self) -> JoinedLogs:
        """The reference's logs."""
        return JoinedLogs([log.reference.log for log in self.logs])

    @cached_property
    def roots(self) -> set[Site]:
        """The roots of all differing records."""
        return roots_of(self.differing, self.logs, self.joined, self.known).found

    def _pick(self, differing: Differing) -> _Picked | None:
        """The first root of the highest class that has any; None without roots. The classes, by certainty:

        1. Same inputs, different output.
        2. Roots that are the only cause of a wrong input of a call that the reference makes, too (`needed`), or else
           all roots that compute. Any other root may lead to right values in another way.
        3. Packing that the reference does there too.
        4. Other packing, and calls without tensor inputs such as `arange`, whose length a pack may decide.
        """
        walk, logs = roots_of(differing, self.logs, self.joined, self.known), self.logs
        roots = walk.found
        if not roots:
            return None
        proven = {site for site in roots if self._is_proven(site)}
        packing = {(rank, index) for rank, index in roots if logs[rank].is_packing(index)}
        computing = {(rank, index) for rank, index in roots - packing if logs[rank].log[index].inputs}
        due = {
            (rank, index) for rank, index in packing if not logs[rank].is_new(index) and not logs[rank].is_extra(index)
        }
        surely = needed(computing, walk, logs) or computing
        return self._first_of(proven or surely or due or roots, roots)

    def _first_of(self, sites: set[Site], roots: set[Site]) -> _Picked:
        """The earliest of these sites, on the lowest rank if they are unordered, with its partner."""
        rank, index = min(sites, key=self.joined.when)
        log = self.logs[rank]
        partner, same = log.reference.partner(log.log[index], log.turn(index))
        if same is None and (first := log.repeated_by(index)) is not None:
            partner, _ = log.reference.partner(log.log[first], log.turn(first))
        # The reference has no call for this one: it has fewer calls of the operator.
        if same is None and log.is_extra(index):
            partner = log.stands_for(index)
        return _Picked((rank, index), partner, same, roots)

    def _loses(self, picked: _Picked, differing: Differing) -> bool:
        """Whether a bucket was packed wrong: then the root found behind it is no answer, and the search goes on inside.

        A bucket was packed wrong if the first missing value is the result of a collective of the reference, and all of
        the collective's ranks have its inputs here. Or the value is the result of a pack of the reference, and a call
        here packs the same values in another order. A collective that is launched here and never waited for does not
        count, since its result is missing for that reason.
        """
        (picked_rank, picked_index), logs = picked.site, self.logs
        # A call that a pass added is wrong itself; no bucket lost a value.
        if logs[picked_rank].is_extra(picked_index):
            return False
        for rank, pairs in differing.items():
            index = first_missing(logs[rank], (wanted for wanted, _ in pairs), elsewhere=self._elsewhere[rank])
            if index is None:
                continue
            if is_packed_otherwise(logs[rank], index):
                return True
            if not logs[rank].reference.log[index].collective or launched(logs[rank], index) is not None:
                continue
            sites = self.known.together((rank, index))
            is_its_own = (picked_rank, picked.partner) in sites and logs[picked_rank].reads_right_values(picked_index)
            if not is_its_own and all(logs[r].has(self.known.logs[r][i].inputs) for r, i in sites):
                return True
        return False

    def _exchanged(self, record: Differing, root: _Picked | None) -> set[Site]:
        """Calls that lead to the `root`, or else to the record, and read the reference's values in another order.

        For example, `cat b a` for `cat a b`. All later calls agree with the reference, but for other tensors.
        """
        history = self._history(record) if root is None else self._before({root.site})
        return {(rank, index) for rank, index in history if self.logs[rank].exchanges(index)}

    def _history(self, record: Differing) -> set[Site]:
        """Every call from which a path of values leads to a record's value."""
        starts = [(rank, self.logs[rank].giver(*pair)) for rank, pairs in record.items() for pair in pairs]
        return self._before({(rank, index) for rank, index in starts if index is not None})

    def _before(self, sites: set[Site]) -> set[Site]:
        """These calls, and every call from which a path of values leads to any of them."""
        return self.joined.before(sites, lambda site: self.logs[site[0]].givers(site[1]))

    def _is_proven(self, site: Site) -> bool:
        """Whether a call's inputs equal the reference's and its output does not.

        A collective's inputs must be equal on all ranks.
        """
        rank, index = site
        if not self.logs[rank].is_proven(index):
            return False
        return len(self.joined.together(site)) == 1 or fed_wrong(site, self.logs, self.joined, self.known) == set()

    def _missing_for(self, picked: _Picked) -> Culprit | None:
        """Rule 4: the missing call whose output the root's partner reads."""
        rank, index = picked.site
        read = self.logs[rank].reference.log[picked.partner].inputs if picked.partner is not None else ()
        return self._first_missing({rank: read}, index)

    @cached_property
    def _elsewhere(self) -> list[frozenset[str]]:
        return blocks_elsewhere(self.logs)

    def _first_missing(self, wanted: Mapping[int, Iterable[str]], before: int | None = None) -> Culprit | None:
        """Rules 4 and 5: the call to blame because a rank lacks a value. `wanted` has the values of a single rank.

        With `before`, the value must be there before this call. None if nothing is missing, or if the missing value is
        computed here from wrong inputs, which have another cause.
        """
        [(rank, values)] = wanted.items()
        log = self.logs[rank]
        index = first_missing(log, values, before, self._elsewhere[rank])
        if index is None:
            return None
        call = log.reference.log[index]
        others = [] if before is not None else [r for r in self.differing if r != rank and self._lacks(r, call)]
        ranks = tuple(sorted([rank, *others]))
        at = rank if rank != ranks[0] else None
        if (launch := launched(log, index)) is not None:
            return Culprit(how="abandons", call=log.log[launch], ranks=ranks, candidate=launch, reference=index, at=at)
        made = log.reference.counterpart(index, log)
        # The call is not missing: it read another value.
        if made is not None and (rank, made) in self._history(self.record):
            if (between := put_between(log, index, made)) is not None:
                new = log.log[between]
                return Culprit(how="adds", call=new, ranks=ranks, candidate=between, reference=None, at=at)
            mine = log.log[made]
            if log.shows_left(made):
                # It reads a value from an earlier step.
                return None
            if before is not None and made != before and (rank, before) in self._before({(rank, made)}):
                # It depends on the wrong call itself.
                return None
            if mine.inputs and (mine.inputs, mine.outputs) == (call.inputs, call.outputs):
                # It is right: the missing value is that of another tensor over its storage.
                return None
            if not mine.view and log.reads_right_values(made):
                packed = log.wrongly_packed(made)
                due = None if packed is None else log.stands_for(packed)
                return self._made_otherwise(
                    made if packed is None else packed, index if due is None else due, ranks, at
                )
        if (there := self._put_there((rank, index))) is not None:
            on, new_call = there[0], self.logs[there[0]].log[there[1]]
            ranks, at = (ranks, at) if on == rank else ((on,), None)
            return Culprit(how="adds", call=new_call, ranks=ranks, candidate=there[1], reference=None, at=at)
        packed_here = packed_otherwise(log, index)
        if packed_here is not None and (rank, packed_here[0]) in self._history(self.record):
            return self._made_otherwise(*packed_here, ranks, at)
        index = first_lost(log, index)
        call = log.reference.log[index]
        lists = list_differences(log, call)
        return Culprit(how="lacks", call=call, ranks=ranks, candidate=None, reference=index, arguments=lists, at=at)

    def _lost_copy(self, record: Differing) -> Culprit | None:
        """Rule 5: the missing copy of a value that the candidate has in other memory; None if no copy is missing.

        For example, if an update is not copied to a target network, the network's record shows an older value.
        """
        for rank, pairs in record.items():
            log = self.logs[rank]
            for wanted, _ in pairs:
                due, made = ([i for i, c in enumerate(side.log) if _copies(c, wanted)] for side in (log.reference, log))
                if len(due) > len(made):
                    index = due[len(made)]
                    call = log.reference.log[index]
                    return Culprit(how="lacks", call=call, ranks=(rank,), candidate=None, reference=index)
        return None

    def _put_there(self, missing: Site) -> Site | None:
        """The new call, in the record's history, that reads the input of a missing call of the reference.

        It makes a constant from that input, or its output goes into the collective that corresponds to the missing
        call. None if there is no such call.
        """
        found = list[Site]()
        for rank, index in self.known.together(missing):
            log, call = self.logs[rank], self.known.logs[rank][index]
            kind = call.operator, call.peers
            alike = [i for i, mine in enumerate(log.log) if call.peers and (mine.operator, mine.peers) == kind]
            new = [constant_of(log, index), *(put_between(log, index, mine) for mine in alike)]
            found += [(rank, number) for number in new if number is not None]
        there = self._history(self.record).intersection(found) if found else set()
        return min(there, key=self.joined.when, default=None)

    def _made_otherwise(self, made: int, due: int, ranks: tuple[int, ...], at: int | None) -> Culprit:
        """The culprit for a call `made` that differs from the reference's call `due` in its inputs or numbers."""
        rank = ranks[0] if at is None else at
        fed = fed_otherwise((rank, made), (rank, due), self.joined, self.known)
        # Another rank passed the other value to the collective.
        if fed and (rank, made) not in fed:
            theirs = dict(self.known.together((rank, due)))
            rank, made = min(fed, key=self.joined.when)
            due, ranks = theirs[rank], tuple(sorted(peer for peer, _ in fed))
            at = rank if rank != ranks[0] else None
        log = self.logs[rank]
        call, partner = log.log[made], log.reference.log[due]
        is_same = bool(call.inputs) and call.inputs == partner.inputs
        return Culprit(
            how="computes" if is_same else log.how_it_reads(made),
            call=call,
            ranks=ranks,
            candidate=made,
            reference=due,
            arguments=argument_differences(call, partner),
            at=at,
        )

    def _lacks(self, rank: int, call: Call) -> bool:
        """Whether the first value that a rank lacks is the output of a call of the operator and the place of `call`."""
        log = self.logs[rank]
        index = first_missing(log, (wanted for wanted, _ in self.differing[rank]), elsewhere=self._elsewhere[rank])
        mine = None if index is None else log.reference.log[index]
        return mine is not None and (mine.operator, mine.place) == (call.operator, call.place)


def _copies(call: Call, value: str) -> bool:
    """Whether a call copies a value into other memory."""
    return value in call.outputs and not call.view and not call.collective and gives_what_it_reads(call)


class _Picked(NamedTuple):
    """The root to blame, the index of its partner, and all roots.

    `same` is the root's defect if it has its partner's inputs, perhaps in another order; else None.
    """

    site: Site
    partner: int | None
    same: Literal["computes", "exchanges"] | None
    roots: set[Site]

    @property
    def reads(self) -> bool:
        """Whether the root has a partner with other inputs."""
        return self.partner is not None and self.same is None
