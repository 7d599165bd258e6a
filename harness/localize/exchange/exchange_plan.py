"""Plan the exchanges for a cause: which values of one system replace values of the other, and at which calls.

1. Both systems make the blamed call: its outputs are exchanged between them, on every rank on which it is blamed.
2. Only the candidate makes it, as an extra call: its readers get the values that their matching calls read. In the
   reference, these matching calls get the candidate's value. If a reader is extra too, its own readers are used. The
   reader of a `send` is the receiving rank's `recv_`.
3. Only the reference makes it: as in 2, with the systems' roles changed.
4. It reads a wrong value from before the step: all calls that read this value get the reference's value. So a wrong
   parameter is a single cause, although forward, backward and the optimizer read it.
5. All other calls with the same wrong argument, on any rank, have their outputs exchanged too. Such an exchange only
   takes place if the call reads right inputs, so it cannot hide another defect. For an update, the same wrong optimizer
   setting counts as the same argument (`wrong_setting`).
6. It reads another right value than its match: all inputs misread in the same way are exchanged (`misreads`).

Example for 2, where the candidate has an extra `mul`:

    reference    mm x w -> a                  sum a -> l
    candidate    mm x w -> a    mul a -> B    sum B -> L        B becomes a; in the reference, sum reads B

If the candidate recomputes a value for backward, several of its calls match one call of the reference. If only the
recomputed call is wrong, the reverse exchange is at the readers of the recomputed value, and not for the whole step:

    reference    rsqrt v -> r    mul x r -> y (forward)                       mul g r -> h (backward)
    candidate    rsqrt v -> r    mul x r -> y (forward)    rsqrt V -> R       mul g R -> H (backward)

In all functions, `mine` is the index of a call, or the site of a value, in the candidate's log. `theirs` is the
matching index or site in the reference's log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.misreads import misreads_like
from bitproof.harness.localize.exchange.reader_exchanges import (
    Draft,
    MessageReceives,
    ReaderExchanges,
    Swap,
    checked,
    of_matching,
)
from bitproof.harness.localize.exchange.wrong_arguments import (
    WrongArguments,
    differing_constants,
    family_of,
    is_of_family,
)
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.replay import ValueSite


@dataclass(frozen=True)
class WrongCall:
    """A wrong call, with its exchanges in the candidate and the reverse exchanges in the reference.

    `is_lead` is True for the blamed call itself, on each of its ranks, and False for other calls with the same defect.
    """

    rank: int
    call: Call
    candidate: tuple[Swap, ...]
    reference: tuple[Swap, ...]
    is_lead: bool = True

    @property
    def where(self) -> tuple[int, str]:
        """Return a pair: the call's rank, and the call as text. Calls that differ only in their index are shown
        once.
        """
        return self.rank, str(self.call)


@dataclass
class ExchangePlan:
    """`groups`: the planned exchanges, by wrong call. `problems`: the reasons why other values cannot be exchanged."""

    groups: list[WrongCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


LEADS_NOWHERE = "abandons", "misplaces"
"""Defects of calls whose own output is right or missing: values are exchanged at the calls that should read it."""


def plan_of(
    culprit: Culprit,
    logs: Sequence[CandidateLog],
    differing: Mapping[int, Iterable[Pair]],
    blocked: Collection[ValueSite] = (),
    arguments: WrongArguments | None = None,
    types: Mapping[str, str] = MappingProxyType({}),
) -> ExchangePlan:
    """Return all exchanges of values between the two systems for a cause.

    - `differing`: for each rank, the digests of the records that differ.
    - `blocked`: sites whose values cannot be exchanged, because their dtypes or shapes differ. Their readers are used
      instead.
    - `arguments`: finds further calls with the same wrong argument or optimizer setting.
    - `types`: the dtype and shape of each digest, as far as they are known.
    """
    # `taken` are the calls that were planned, and `own` the candidate's calls at which their exchanges are: for a send,
    # the receiving call. `right` has, by site, the values that these exchanges insert.
    plan, taken, right = ExchangePlan(), set[tuple[int, int | None, int | None]](), dict[ValueSite, str]()
    own, messages = set[tuple[int, int]](), MessageReceives(logs)
    pairs = {rank: list(found) for rank, found in differing.items()}
    leads = _sites(culprit, logs)
    leads += _receivers(leads, logs)
    leads += _in_its_place(leads, logs, pairs) if culprit.how == "misplaces" else []
    for rank, mine, theirs in [*leads, *_same_defect(culprit, logs, arguments or WrongArguments())]:
        if (rank, mine, theirs) in taken or (mine is not None and (rank, mine) in own):
            continue
        is_lead = (rank, mine, theirs) in leads
        taken.add((rank, mine, theirs))
        if mine is not None and theirs is not None and name_of(logs[rank].log[mine]) == "send":
            rank, mine, theirs = messages.receive_of(rank, mine) or (rank, mine, theirs)
        log = logs[rank]
        own |= {(rank, mine)} if mine is not None else set()
        # The blamed call is exchanged in any case. A further call is exchanged only if its inputs are right then.
        readers = ReaderExchanges(log, rank, pairs.get(rank, []), blocked, messages, types)
        draft = checked(readers.of_this_repeat(_drafted(culprit, readers, mine, theirs)))
        # A call that reads the wrong one of several right values never reads its matching call's inputs, so its
        # exchange has no condition.
        if not is_lead and not (culprit.how == "reads" and _reads_right(log, mine)):
            draft = _only_if_right(draft, log, rank, mine, theirs, right)
        elif not draft.candidate:
            plan.problems += draft.problems
        right |= {swap.site: swap.wanted for swap in draft.candidate}
        if draft.candidate:
            call = log.log[mine] if mine is not None else log.reference.log[theirs or 0]
            plan.groups.append(WrongCall(rank, call, tuple(draft.candidate), tuple(draft.reference), is_lead))
    for read in misreads_like(culprit, logs) if plan.groups else ():
        if (read.rank, read.mine) not in own:
            readers = ReaderExchanges(logs[read.rank], read.rank, pairs.get(read.rank, []), blocked, messages, types)
            if (draft := readers.of_misread(read)).candidate:
                call = logs[read.rank].log[read.mine]
                plan.groups.append(
                    WrongCall(read.rank, call, tuple(draft.candidate), tuple(draft.reference), is_lead=False)
                )
    plan.groups = _with_conditions_in_order(plan.groups)
    if not any(group.is_lead for group in plan.groups) and not plan.problems:
        plan.problems.append(f"what {culprit.call} gives is what its matching call gives")
    return plan


def _drafted(culprit: Culprit, readers: ReaderExchanges, mine: int | None, theirs: int | None) -> Draft:
    """Return the exchanges for a call, according to the kind of its defect.

    `mine` is the index of the call in the candidate's log, and `theirs` that of its match in the reference's log.
    """
    # A value from before the step has no producer, so it is exchanged at all calls that read it. If that is impossible,
    # the call's own output is exchanged instead.
    if (
        culprit.how in ("inherits", "unwritten", "outside")
        and mine is not None
        and (draft := readers.of_left(mine)).candidate
    ):
        return draft
    if mine is not None and culprit.how not in LEADS_NOWHERE:
        if theirs is not None and readers.may_take_outputs_of(mine, theirs) and not readers.contradict(mine, theirs):
            return of_matching(readers.log, readers.rank, mine, theirs)
        draft = readers.of_new(mine)
        # Its readers have right values already, so its match is missing: the two systems make the calls at two places.
        return readers.of_missing(theirs) if theirs is not None and not draft.candidate else draft
    return readers.of_missing(theirs) if theirs is not None else Draft(problems=[f"{culprit.call} has no counterpart"])


Sites = list[tuple[int, int | None, int | None]]
"""Triples of a rank, a call's index in the candidate's log, and its matching call's index in the reference's log.

An index is None if that side lacks the call.
"""


def _sites(culprit: Culprit, logs: Sequence[CandidateLog]) -> Sites:
    """Return the blamed call and its matching call, on each rank on which the call is blamed."""
    log, found = logs[culprit.rank], Sites()
    for rank in culprit.ranks:
        mine, theirs = culprit.candidate, culprit.reference
        # Indices hold for the culprit's rank only. On other ranks, it is the call of the same operator, place and turn.
        if rank != culprit.rank:
            mine = None if mine is None else logs[rank].of_occurrence(log.log[mine], log.occurrence(mine))
            known = logs[rank].reference
            theirs = (
                None
                if theirs is None
                else known.of_occurrence(log.reference.log[theirs], log.reference.occurrence(theirs))
            )
        found.append((rank, mine, theirs))
    return found


def _receivers(sites: Sites, logs: Sequence[CandidateLog]) -> Sites:
    """Return the extra collectives that bring the outputs of extra calls to other ranks, one for each of these ranks.

    For example, a bucket whose parts a rank joins in a wrong order is wrong on all ranks.
    """
    joined, known = JoinedLogs([log.log for log in logs]), {rank for rank, _, _ in sites}
    found = dict[int, int]()
    for rank, mine, theirs in sites:
        if theirs is None and mine is not None and logs[rank].packs(mine):
            for reader, _ in logs[rank].readers(mine):
                if logs[rank].log[reader].collective and logs[rank].matching_call(reader) is None:
                    found |= dict(joined.together((rank, reader)))
    return [(rank, index, None) for rank, index in found.items() if rank not in known]


def _in_its_place(sites: Sites, logs: Sequence[CandidateLog], differing: Mapping[int, Sequence[Pair]]) -> Sites:
    """Return the calls whose outputs were exchanged with those of the misplaced calls `sites`.

    For example, a tensor has the value of another tensor, which has a third one's, and that has the first one's.
    """
    found = Sites()
    for rank, _, theirs in sites:
        # Of records with one value, such as zeros, the first counts.
        known, held = logs[rank].reference, dict(reversed([*differing.get(rank, ())]))
        wanted = first = next(iter(known.log[theirs].outputs), "") if theirs is not None else ""
        # Each record leads to the call that computes its value in the reference, up to the first one again.
        while (value := held.pop(wanted, first)) != first and (theirs := known.producer(value)) is not None:
            found.append((rank, logs[rank].matching_here(theirs), theirs))
            wanted = value
    return found


def _same_defect(culprit: Culprit, logs: Sequence[CandidateLog], arguments: WrongArguments) -> Sites:
    """Return the other calls with the blamed call's defect, on any rank and in any direction.

    - If both systems make the blamed call: the calls with the same wrong argument. If the blamed call reads the wrong
      one of several right values ("reads"), also the calls at the same place that read right values. If it computes
      another output of the same inputs and arguments, as a wrong kernel does, also the calls of its operator that do.
    - If only one system makes the blamed call: other calls that only this system makes, with the same operator and
      arguments, and the backward calls of these.
    """
    wrong, found = arguments.of_culprit(culprit, logs), Sites()
    for rank, log in enumerate(logs):
        if culprit.candidate is not None and culprit.reference is not None:
            blamed = logs[culprit.rank].log[culprit.candidate]
            alike = [
                i for i, call in enumerate(log.log) if call.view <= blamed.view and is_of_family(call, blamed, wrong)
            ]
            pairs = ((i, log.matching_call(i)) for i in alike)
            there = set(log.there(blamed)) if culprit.how == "reads" else set()
            is_kernel = culprit.how == "computes" and not wrong
            found += [
                (rank, i, other)
                for i, other in pairs
                if other is not None
                and (
                    arguments.has(log, i, other, wrong)
                    or (i in there and _reads_right(log, i))
                    or (is_kernel and log.log[i].operator == blamed.operator and _computes_otherwise(log, i, other))
                )
            ]
        elif culprit.candidate is not None:
            blamed = logs[culprit.rank].log[culprit.candidate]
            alike = [i for i, call in enumerate(log.log) if _is_same_or_backward(call, blamed)]
            found += [(rank, i, None) for i in alike if log.matching_call(i) is None]
        elif culprit.reference is not None:
            blamed = logs[culprit.rank].reference.log[culprit.reference]
            alike = [i for i, call in enumerate(log.reference.log) if _is_same_or_backward(call, blamed)]
            found += [(rank, None, i) for i in alike if log.matching_here(i) is None]
    return found


def _computes_otherwise(log: CandidateLog, mine: int, theirs: int) -> bool:
    call, partner = log.log[mine], log.reference.log[theirs]
    is_same = (call.inputs, call.scalars) == (partner.inputs, partner.scalars)
    return is_same and call.outputs != partner.outputs


def _is_same_or_backward(call: Call, blamed: Call) -> bool:
    """Whether a call has the blamed call's operator and numbers, or is its backward."""
    if call.operator == blamed.operator:
        return call.scalars == blamed.scalars
    return call.operator.endswith("_backward") and family_of(call.operator) == family_of(blamed.operator)


def _reads_right(log: CandidateLog, mine: int | None) -> bool:
    """Whether a call reads only right values: the reference has all its inputs, and no wrong call produced them.

    False if `mine` is None.
    """
    return mine is not None and log.reads_right_values(mine) and not any(map(log.differs, log.producers(mine)))


def _only_if_right(
    draft: Draft, log: CandidateLog, rank: int, mine: int | None, theirs: int | None, right: Mapping[ValueSite, str]
) -> Draft:
    """Return the exchanges in `draft`, each with a condition added. They are for `mine`, another call with the same
    defect.

    They are made only if this call reads its right inputs when it runs. The returned draft is empty if the right inputs
    are not known.
    """
    # With this condition, no exchange hides a defect before the call. Three forms: a missing call, which is exchanged
    # at its readers; an extra call with right inputs; and a call whose right inputs are those of its matching call, or
    # follow from the exchanges before it.
    if mine is None:
        given = log.reference.log[theirs or 0].inputs
        swaps = [_expecting(swap, log, given) for swap in draft.candidate]
    elif theirs is None and _reads_right(log, mine):  # as the lead: it may reach its readers through other new calls
        swaps = [swap._replace(found="") for swap in draft.candidate]
    else:
        reads = _right_inputs(log, rank, mine, theirs, right)
        swaps = [
            # Only exchanges of the call's own outputs can be made to depend on its inputs.
            s._replace(reads=reads, found="") if s.site[1:] == (mine, s.site.position, False) else None
            for s in draft.candidate
        ]
        swaps = swaps if reads is not None else []
    # All of the call's exchanges or none: a part of them would leave the call neither right nor wrong.
    known = [swap for swap in swaps if swap is not None]
    return Draft(known, [swap._replace(found="") for swap in draft.reference]) if len(known) == len(swaps) else Draft()


def _expecting(swap: Swap, log: CandidateLog, given: Sequence[str]) -> Swap | None:
    """Return `swap` with an added condition: it is made only if the call at `swap.site` reads its right inputs.

    `swap` is an exchange for a missing call, which has the inputs `given`. Returns None if the right inputs are not
    known. The right inputs are:

    - If the exchange replaces an input: the inputs of the matching call in the reference, but with `given[0]` where
      that call reads the missing call's output.
    - If the exchange replaces an output: the inputs of the matching call or, without a matching call, the call's own
      inputs. The reference's log must have all these values.
    """
    other = log.matching_call(swap.site.call)
    if not swap.site.is_input:
        reads = log.log[swap.site.call].inputs if other is None else log.reference.log[other].inputs
        return swap._replace(reads=reads, found="") if log.reference.values.issuperset(reads) else None
    if other is None or not given or not swap.site.is_input:
        return None
    # Without the missing call, the reader gets that call's input in place of its output.
    inputs = list(log.reference.log[other].inputs)
    inputs[swap.site.position] = given[0]
    return swap._replace(reads=tuple(inputs), found="")


def _with_conditions_in_order(groups: Sequence[WrongCall]) -> list[WrongCall]:
    """Return the wrong calls, with corrected conditions (`reads`) if several inputs of a call are exchanged.

    The inputs are exchanged one by one. For example, if `stack a b` reads two losses that were wrongly not divided, `b`
    is still undivided when `a` is exchanged, and the condition must expect that.
    """
    # The inputs of a call are exchanged one by one, in order of position. When an input is exchanged, the later inputs
    # still have their wrong values, and its condition must expect them. `expected` has these, by call and position.
    expected: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for swap in (swap for group in groups for swap in group.candidate if swap.site.is_input):
        if swap.reads:
            expected[swap.site[:2]][swap.site.position] = swap.reads[swap.site.position]

    def later(swap: Swap) -> Swap:
        others = expected[swap.site[:2]] if swap.site.is_input and swap.reads else {}
        reads = [others.get(i, x) if i > swap.site.position else x for i, x in enumerate(swap.reads or ())]
        return swap._replace(reads=tuple(reads)) if others else swap

    return [replace(group, candidate=tuple(map(later, group.candidate))) for group in groups]


def _right_inputs(
    log: CandidateLog, rank: int, mine: int, theirs: int | None, right: Mapping[ValueSite, str]
) -> tuple[str, ...] | None:
    """Return the digests that call `mine` would read if no earlier call were wrong; None if they are not known.

    `right` has, by site, the digests that planned exchanges insert.
    """
    call = log.log[mine]
    if theirs is not None:
        # The matching call's inputs, but constants of the code stay the candidate's: they are
        # the wrong argument itself.
        known = log.reference.log[theirs].inputs
        own = differing_constants(log, mine, theirs)
        if len(known) != len(call.inputs):
            return None
        return tuple(call.inputs[i] if i in own else value for i, value in enumerate(known))
    # A call without a match, such as another extra call: each input is the output that an exchange puts there, or else
    # that of its producer's matching call.
    exchanged = {(site.call, site.position): value for site, value in right.items() if site.rank == rank}
    found = list[str]()
    # A value from before the step stays as it is.
    for value, producer in zip(call.inputs, log.input_producers(mine), strict=False):
        if producer is None:
            found.append(value)
            continue
        if value not in log.log[producer].outputs:
            return None
        position, other = log.log[producer].outputs.index(value), log.matching_call(producer)
        outputs = log.reference.log[other].outputs if other is not None else ()
        if (producer, position) in exchanged:
            found.append(exchanged[producer, position])
        elif position < len(outputs):
            found.append(outputs[position])
        else:
            return None
    return tuple(found)
