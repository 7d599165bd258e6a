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
6. It reads the wrong one of several right values: all inputs misread in the same way are exchanged (`misreads`).

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
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.misreads import Misread, misreads_like
from bitproof.harness.localize.exchange.wrong_setting import wrong_settings
from bitproof.harness.localize.logs.calls import OPAQUE, Call, producer_of
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE, ReferenceLog
from bitproof.harness.localize.logs.replay import ValueSite, value_at

MAX_NEW_CALLS = 12
"""The maximum number of new calls in a row between a blamed call and a reader with a matching call."""


class Swap(NamedTuple):
    """An exchange: a value of a system is replaced by a value of the other.

    - `site`, `found`: the site and the digest of the replaced value.
    - `value`, `wanted`: the site and the digest of the inserted value, in the other system.
    - `reads`: exchange only if the call's inputs have these digests when it runs; None for any inputs.
    """

    site: ValueSite
    value: ValueSite
    operator: str
    found: str
    wanted: str
    reads: tuple[str, ...] | None = None
    in_place: bool = False


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


@dataclass
class _Draft:
    """The exchanges for a call, while they are collected."""

    candidate: list[Swap] = field(default_factory=list)
    reference: list[Swap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, other: _Draft) -> None:
        """Add the exchanges of another call."""
        self.candidate += other.candidate
        self.reference += other.reference
        self.problems += other.problems


Wrong = frozenset[tuple[str, str]]
"""The arguments in which a call differs from its matching call, the candidate's first: numbers, words and constants."""

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
    - `blocked`: sites whose values cannot be exchanged, because their dtypes or shapes differ. The outputs of their
      readers are exchanged instead.
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
        draft = _checked(readers.of_this_repeat(_drafted(culprit, readers, mine, theirs)))
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
            readers = ReaderExchanges(logs[read.rank], read.rank, pairs.get(read.rank, []), blocked, messages)
            if (draft := readers.of_misread(read)).candidate:
                call = logs[read.rank].log[read.mine]
                plan.groups.append(
                    WrongCall(read.rank, call, tuple(draft.candidate), tuple(draft.reference), is_lead=False)
                )
    plan.groups = _with_conditions_in_order(plan.groups)
    if not any(group.is_lead for group in plan.groups) and not plan.problems:
        plan.problems.append(f"what {culprit.call} gives is what its matching call gives")
    return plan


def _drafted(culprit: Culprit, readers: ReaderExchanges, mine: int | None, theirs: int | None) -> _Draft:
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
            return _of_matching(readers.log, readers.rank, mine, theirs)
        draft = readers.of_new(mine)
        # Its readers have right values already, so its match is missing: the two systems make the calls at two places.
        return readers.of_missing(theirs) if theirs is not None and not draft.candidate else draft
    return readers.of_missing(theirs) if theirs is not None else _Draft(problems=[f"{culprit.call} has no counterpart"])


class MessageReceives:
    """Finds the calls that receive the candidate's messages."""

    def __init__(self, logs: Sequence[CandidateLog]) -> None:
        self._logs = logs

    @cached_property
    def _joined(self) -> JoinedLogs:
        return JoinedLogs([log.log for log in self._logs])

    def receive_of(self, rank: int, send: int) -> tuple[int, int, int] | None:
        """Return the call that receives the message of a send, as (rank, index in the candidate's log, in the
        reference's); None if there is none, or the reference makes no such call.

        `send` is the index of the sending call in the candidate's log of `rank`.
        """
        for peer, index in self._joined.together((rank, send)):
            if peer != rank and (theirs := self._logs[peer].matching_call(index)) is not None:
                return peer, index, theirs
        return None

    def log_of(self, rank: int) -> CandidateLog:
        """Return a rank's log."""
        return self._logs[rank]


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

    For example, a bucket whose parts one rank joins in a wrong order is wrong on all ranks.
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


def is_of_family(call: Call, blamed: Call, wrong: Wrong) -> bool:
    """Whether a call may have the blamed call's wrong argument: their operators are of the same family, or they belong
    to the same module.

    For example, dropout with another `p` passes it to `bernoulli_` and to `div_`. If the wrong argument is an optimizer
    setting, the two calls must be of the same optimizer instead.
    """
    if of_setting(wrong):
        return call.place.direction == blamed.place.direction and call.part == blamed.part
    is_one_module = bool(wrong) and call.place.module is not None and call.place.module == blamed.place.module
    return is_one_module or family_of(call.operator) == family_of(blamed.operator)


def _only_if_right(
    draft: _Draft, log: CandidateLog, rank: int, mine: int | None, theirs: int | None, right: Mapping[ValueSite, str]
) -> _Draft:
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
    return (
        _Draft(known, [swap._replace(found="") for swap in draft.reference]) if len(known) == len(swaps) else _Draft()
    )


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
        own = _constants(log, mine, theirs)
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


def family_of(operator: str) -> str:
    """Return the common name of an operator and its backward: `gelu` for `gelu_backward`, `mul` for `mul_.Scalar`."""
    # Longer endings come first: removing `_backward` alone would leave `_dense`.
    name = operator.partition(".")[0].strip("_")
    for ending in ("_backward_data", "_dense_backward", "_backward", "_forward"):
        name = name.removesuffix(ending)
    return name.removeprefix("foreach_").removeprefix("native_")


@dataclass(frozen=True)
class WrongArguments:
    """Finds the arguments in which calls differ from their matching calls.

    `settings` are the optimizer settings that differ at the step `step`.
    """

    settings: Sequence[DifferingSetting] = ()
    step: int = 0

    def of_culprit(self, culprit: Culprit, logs: Sequence[CandidateLog]) -> Wrong:
        """Return the wrong arguments of the blamed call.

        For a call that only one system makes, these are only the wrong settings of its optimizer.
        """
        log = logs[culprit.rank]
        if culprit.candidate is None or culprit.reference is None:
            call = log.log[culprit.candidate] if culprit.candidate is not None else None
            partner = log.reference.log[culprit.reference] if culprit.reference is not None else None
            return self._settings_of(call, partner)
        return self.of(log, culprit.candidate, culprit.reference)

    def of(self, log: CandidateLog, mine: int, theirs: int) -> Wrong:
        """Return the arguments in which call `mine` differs from its match `theirs`."""
        call, partner = log.log[mine], log.reference.log[theirs]
        # A setting explains the numbers, and is the same defect in calls with other numbers.
        if found := self._settings_of(call, partner):
            return found
        known = dict(partner.scalars)
        unlike = {(value, known[name]) for name, value in call.scalars if known.get(name, value) != value}
        for position in _constants(log, mine, theirs):
            unlike.add((call.inputs[position], partner.inputs[position]))
        return frozenset(unlike)

    def has(self, log: CandidateLog, mine: int, theirs: int, wrong: Wrong) -> bool:
        """Whether call `mine` differs from its match `theirs` in exactly the arguments `wrong`.

        If there are optimizer settings among `wrong`, it suffices that the calls differ in one of these settings.
        """
        own = self.of(log, mine, theirs) if wrong else frozenset()
        return bool(own) and (own == wrong or bool(of_setting(own) & of_setting(wrong)))

    def _settings_of(self, call: Call | None, partner: Call | None) -> Wrong:
        found = wrong_settings(call, partner, self.settings, self.step)
        return frozenset((_SETTING + each.name + " " + each.found, each.expected) for each in found)


_SETTING = "setting "


def of_setting(wrong: Wrong) -> Wrong:
    """Return the wrong arguments among `wrong` that are optimizer settings."""
    return frozenset(pair for pair in wrong if pair[0].startswith(_SETTING))


def _constants(log: CandidateLog, mine: int, theirs: int) -> list[int]:
    """Return the positions of inputs in which `mine` and `theirs` differ, and that no call of either system computed.

    For example, tracing turns a number in the code into a constant tensor.
    """
    sides = [side.log[at].inputs for side, at in ((log, mine), (log.reference, theirs))]
    given = log.log[mine].producers, log.reference.log[theirs].producers
    count = min(map(len, (*sides, *given)))
    return [
        position
        for position in range(count)
        if sides[0][position] != sides[1][position] and given[0][position] is None and given[1][position] is None
    ]


def _of_matching(log: CandidateLog, rank: int, mine: int, theirs: int) -> _Draft:
    """Return exchanges for call `mine` and its match `theirs`: those of all outputs in which they differ."""
    call, partner, plan = log.log[mine], log.reference.log[theirs], _Draft()
    for position, (found, wanted) in enumerate(zip(call.outputs, partner.outputs, strict=True)):
        if found != wanted:
            here, there = ValueSite(rank, mine, position), ValueSite(rank, theirs, position)
            plan.candidate.append(Swap(here, there, call.operator, found, wanted))
            plan.reference.append(Swap(there, here, partner.operator, wanted, found))
    return _checked(plan)


def _checked(plan: _Draft) -> _Draft:
    """Return `plan`, unless it exchanges a value that cannot be digested, such as a sparse tensor.

    If it does, return a draft without exchanges that has this as its problem.
    """
    has_none = [swap for swap in (*plan.candidate, *plan.reference) if OPAQUE in (swap.found, swap.wanted)]
    if has_none:
        text = f"{has_none[0].operator} gives a tensor without bytes of its own, such as a sparse one"
        return _Draft(problems=[text])
    return plan


def _in_order(plan: _Draft) -> _Draft:
    """Return the exchanges in the order in which they are made. Only the first of each system replaces a known value.

    The others may be after it, and then have another value to replace, or share memory with it.
    """
    for swaps in (plan.candidate, plan.reference):
        swaps.sort(key=lambda swap: (swap.site.call, not swap.site.is_input, swap.site.position))
        once = {swap.site: swap for swap in swaps}.values()
        swaps[:] = [swap if number == 0 else swap._replace(found="") for number, swap in enumerate(once)]
    return plan


class ReaderExchanges:
    """Plans exchanges at the calls that read the output of a wrong call, in both logs of a rank.

    - `pairs`: the two digests of each differing record of the rank.
    - `types`: the dtype and shape of each digest, as far as they are known.
    - `passed`: calls whose outputs cannot be exchanged. Their readers are used instead.
    """

    def __init__(
        self,
        log: CandidateLog,
        rank: int,
        pairs: Sequence[Pair],
        blocked: Collection[ValueSite],
        messages: MessageReceives,
        types: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log, self.rank, self.pairs, self.messages, self.types = log, rank, pairs, messages, types
        self.blocked = {site.call for site in blocked if site.rank == rank and not site.is_input}
        self.blocked_inputs = {site for site in blocked if site.is_input}
        self.passed = set[int]()
        self._planned: dict[tuple[str, int], int] = {}

    def _is_planned(self, side: str, index: int, depth: int) -> bool:
        """Whether a call was already planned, at this depth or a smaller one. Also notes that it is planned now.

        `depth` is the number of calls passed between the blamed call and this call.
        """
        known = self._planned.get((side, index), MAX_NEW_CALLS + 1)
        self._planned[side, index] = min(known, depth)
        return known <= depth

    def is_blocked(self, index: int) -> bool:
        """Whether a call's outputs cannot be exchanged with those of the matching call in the other system's log.

        True if an earlier exchange of them failed, because their dtypes or shapes differ.
        """
        return index in self.blocked

    def may_take_outputs_of(self, mine: int, theirs: int) -> bool:
        """Whether the outputs of `mine` can be exchanged with those of its match `theirs`: number, dtypes and shapes
        are equal.

        For example, a `send` has no output, though a `broadcast` may match it.
        """
        is_alike = len(self.log.log[mine].outputs) == len(self.log.reference.log[theirs].outputs)
        return is_alike and not self.is_blocked(mine)

    def contradict(self, mine: int, theirs: int) -> bool:
        """Whether the match of two calls with different inputs or arguments is wrong by all readers: none of their
        matches reads an output of `theirs` there.
        """
        call, partner = self.log.log[mine], self.log.reference.log[theirs]
        if sorted(call.inputs) == sorted(partner.inputs) and call.scalars == partner.scalars:
            return False
        readers = [(self.log.matching_call(reader), at) for reader, at in self.log.readers(mine)]
        due = [self.log.reference.log[other].inputs[at : at + 1] for other, at in readers if other is not None]
        return bool(due) and all(set(partner.outputs).isdisjoint(wanted) for wanted in due)

    def of_new(self, index: int, depth: int = 0) -> _Draft:
        """Return the exchanges for a call that only the candidate makes."""
        call, plan = self.log.log[index], _Draft()
        if self._is_planned("candidate", index, depth):
            return plan
        if name_of(call) == "send":
            received = self.messages.receive_of(self.rank, index)
            return _of_matching(self.messages.log_of(received[0]), *received) if received is not None else plan
        if self.is_blocked(index):
            return self._of_readers(index, depth)
        # Three collections, all by output: -1, -2, ... stand for aliases, and None for memory that several calls
        # wrote. `at_readers` has the exchanges at single readers, and `read_right` the outputs that some reader
        # needs unchanged. `due` has, for each output, the values that the matches of its readers read in its
        # place, with their sites.
        due: dict[int | None, dict[str, ValueSite]] = defaultdict(dict)
        at_readers, read_right = list[tuple[int | None, Swap]](), set[int | None]()
        for reader, position in self.log.readers(index):
            other = self.log.matching_call(reader)
            if other is None:
                continue
            inputs = self.log.reference.log[other].inputs
            if len(inputs) != len(self.log.log[reader].inputs):
                plan.problems.append(f"{self.log.log[reader]} takes another number of tensors than its matching call")
                continue
            at = _position_there(self.log.log[reader], self.log.reference.log[other], position)
            value, wanted = self.log.log[reader].inputs[position], inputs[at]
            output = _output_with(call, value)
            if value == wanted:
                read_right.add(output)
                continue
            due[output][wanted] = _source(self.log.reference, self.rank, other, at)
            pair = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, at, True)
            # An alias, or memory that several calls wrote, is overwritten in place: its later readers need
            # the right value too.
            is_written = output is not None and output >= 0
            at_readers.append((output, self._at_reader(*pair, in_place=not is_written)))
            plan.reference += self._at_readers_there(*pair, in_place=name_of(call).endswith("_"))
        # A record that shows an output of this call counts as a reader of it.
        # The reference's value is that of the first call with the record's digest.
        for wanted, held in self.pairs:
            made = next(iter(self.log.reference.all_with(wanted)), None)
            output = _output_with(call, held)
            if output is not None and made is not None:
                position = self.log.reference.log[made].outputs.index(wanted)
                due[output][wanted] = ValueSite(self.rank, made, position)
                site = ValueSite(self.rank, index, output)
                known = self.log.reference.log[made]
                swap = Swap(ValueSite(self.rank, made, position), site, known.operator, wanted, held)
                plan.reference.insert(0, swap)  # the record shows this memory as well
                plan.reference[1:] = [later._replace(found="") for later in plan.reference[1:]]
        # If all readers of an output need the same value, the output itself is exchanged; else each reader's own input.
        for output, values in due.items():
            # In the log, views of one part have one producer, so each reader is exchanged by itself.
            if output is None or len(values) > 1 or (output in read_right and call.view):
                plan.candidate += [swap for read, swap in at_readers if read == output]
                continue
            if output in read_right:  # another reader rightly reads this value: the reader of the wrong one is wrong
                plan.problems.append(f"{call} has the right output for another reader")
                continue
            [(wanted, source)] = values.items()
            site = ValueSite(self.rank, index, output)
            plan.candidate.append(Swap(site, source, call.operator, str(value_at(call, site)), wanted))
        # Only new calls read it: go on to their outputs.
        if not plan.candidate and not read_right and depth < MAX_NEW_CALLS:
            plan.add(self._of_readers(index, depth))
        if not plan.candidate and not plan.problems and not depth:
            plan.problems.append(f"no call that the reference has reads what {call} gives")
        return _checked(plan)

    def of_left(self, index: int) -> _Draft:
        """Return the exchanges for a call that reads a value that no call of the step computed.

        The call may read it directly or through views.
        """
        # First the wrong values, each with the right value of the matching call; then all calls that read them.
        wrong, pending, seen = dict[str, str](), [index], set[int]()
        while pending:
            call, given = self.log.log[number := pending.pop()], self.log.input_producers(number)
            seen.add(number)
            other = self.log.matching_call(number)
            due = self.log.reference.log[other].inputs if other is not None else ()
            for value, producer, wanted in zip(call.inputs, given, due, strict=False):
                if producer is None and value != wanted:
                    wrong[value] = wanted
                elif producer is not None and producer not in seen and self.log.log[producer].view:
                    pending.append(producer)
        plan = _Draft()
        for reader, call in enumerate(self.log.log) if wrong else ():
            left = [position for position, value in enumerate(call.inputs) if value in wrong]
            left = [position for position in left if _is_left(self.log, reader, position)]
            other = self.log.matching_call(reader) if left else None
            if other is None:
                continue
            if call.draws:
                return _Draft()  # a generator's state is no tensor that the call is given
            due = self.log.reference.log[other].inputs
            for position in left:
                if due[position : position + 1] == (wrong[call.inputs[position]],):
                    pair = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, position, True)
                    plan.candidate.append(self._at_reader(*pair))
                    plan.reference += self._at_readers_there(*pair)
        return _checked(plan)

    def of_misread(self, read: Misread) -> _Draft:
        """Return the exchanges for a single input that a call misreads."""
        mine = ValueSite(self.rank, read.mine, read.position, True)
        theirs = ValueSite(self.rank, read.theirs, read.there, True)
        if mine in self.blocked_inputs:
            return _Draft()
        return _checked(_Draft([self._at_reader(mine, theirs)], self._at_readers_there(mine, theirs)))

    def _of_readers(self, index: int, depth: int) -> _Draft:
        """Return the exchanges for all calls that read an output of call `index`, which cannot be exchanged itself.

        A reader's input is exchanged if the reference's value fits there, otherwise the reader's output. If neither
        fits, its own readers are used: without a cast, all calls up to the next cast have values of another dtype.
        """
        plan, pending, seen = _Draft(), [index], set[int]()
        while pending:
            if (current := pending.pop(0)) in seen:
                continue
            seen.add(current)
            self.passed.add(current)
            plan.add(self._of_shown(current))
            for reader, position in self.log.readers(current):
                if (draft := self._of_fitting_input(reader, position)) is not None:
                    plan.add(draft)
                elif not self._reads_right_beside(reader):
                    plan.problems.append(f"{self.log.log[reader]} also reads another value that is wrong")
                elif self.is_blocked(reader):
                    pending.append(reader)
                else:
                    plan.add(self._of_reader(reader, depth))
            for reader in self.log.readers_of_parts(current):
                if self._reads_right_beside(reader):
                    plan.add(self._of_reader(reader, depth))
        if not plan.candidate and not plan.problems:
            plan.problems.append(f"no call that the reference has reads what {self.log.log[index]} gives")
        return _in_order(plan)

    def _of_reader(self, reader: int, depth: int) -> _Draft:
        """Return the exchanges for the outputs of a call, or for its readers."""
        other = self.log.matching_call(reader)
        if other is not None and self.may_take_outputs_of(reader, other):
            return _of_matching(self.log, self.rank, reader, other)
        return self.of_new(reader, depth + 1) if depth < MAX_NEW_CALLS else _Draft()

    def _of_shown(self, index: int) -> _Draft:
        """Return the exchanges for records that have an output of call `index`, if the reference's values fit there."""
        plan, call, reference = _Draft(), self.log.log[index], self.log.reference
        for wanted, held in self.pairs:
            made = next(iter(reference.all_with(wanted)), None)
            if held in call.outputs and made is not None and self._is_of_one_type(held, wanted):
                here = ValueSite(self.rank, index, call.outputs.index(held))
                there = ValueSite(self.rank, made, reference.log[made].outputs.index(wanted))
                plan.candidate.append(Swap(here, there, call.operator, held, wanted))
                plan.reference.append(Swap(there, here, reference.log[made].operator, wanted, held))
        return plan

    def _of_fitting_input(self, reader: int, position: int) -> _Draft | None:
        """Return the exchange of a call's input, without exchanges if it is right; None if no value fits there."""
        if (other := self.log.matching_call(reader)) is None:
            return None
        call, partner = self.log.log[reader], self.log.reference.log[other]
        if len(call.inputs) != len(partner.inputs):
            return None
        at = _position_there(call, partner, position)
        if (value := call.inputs[position]) == (wanted := partner.inputs[at]):
            return _Draft()
        here, there = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, at, True)
        if here in self.blocked_inputs or not self._is_of_one_type(value, wanted):
            return None
        return _Draft([self._at_reader(here, there)], self._at_readers_there(here, there))

    def _is_of_one_type(self, first: str, second: str) -> bool:
        """Whether two values are known to have one dtype and shape."""
        return self.types.get(first) is not None and self.types.get(first) == self.types.get(second)

    def _reads_right_beside(self, reader: int) -> bool:
        """Whether all inputs of a call are right, apart from those that calls with blocked outputs or new calls give.

        With a wrong other input, an exchange of the output would hide a second defect. An input is right if the
        matching call reads it; for a new call, if the reference has it. An input of another dtype than the matching
        call's cannot be compared. But if the call's output is of another dtype, too, its arguments must be equal.
        """
        call, other = self.log.log[reader], self.log.matching_call(reader)
        partner = self.log.reference.log[other] if other is not None else None
        if partner is not None and self.is_blocked(reader) and call.scalars != partner.scalars:
            return False
        right = self.log.reference.values if partner is None else partner.inputs
        return all(
            value in right
            or producer in self.passed
            or self._is_of_new(producer)
            or self._is_of_other_type(reader, position)
            for position, (value, producer) in enumerate(
                zip(call.inputs, self.log.input_producers(reader), strict=False)
            )
        )

    def _is_of_other_type(self, reader: int, position: int) -> bool:
        """Whether an input is known to have another dtype or shape than the matching call's."""
        if ValueSite(self.rank, reader, position, True) in self.blocked_inputs:
            return True
        other = self.log.matching_call(reader)
        wanted = self.log.reference.log[other].inputs[position : position + 1] if other is not None else ()
        types = {self.types.get(value) for value in (self.log.log[reader].inputs[position], *wanted)}
        return None not in types and len(types) > 1

    def _is_of_new(self, index: int | None) -> bool:
        """Whether a value is computed of right values alone, by new calls and by calls that read what these give.
        `index` is the call that gives it.

        For example, a product row by row: new calls take the rows, and one product of a row may match the reference's
        product of the whole.
        """
        if index is None:
            return False
        log, pending, seen = self.log, [index], set[int]()
        while pending:
            if (current := pending.pop()) in seen:
                continue
            seen.add(current)
            other = log.matching_call(current)
            if other is not None and current != index and not log.differs(current):
                continue
            # A matching call is no new one, unless each input in which it differs is of a new call.
            differing = log.differing_inputs(current, other) if other is not None else ()
            makers = [log.input_producers(current)[at] if at is not None else None for at, _ in differing]
            if other is not None and not (
                makers and all(x is not None and log.matching_call(x) is None for x in makers)
            ):
                return False
            for value, producer in zip(log.log[current].inputs, log.input_producers(current), strict=False):
                if producer is not None:
                    pending.append(producer)
                elif value not in log.reference.values:
                    return False
        return True

    def of_missing(self, index: int, depth: int = 0) -> _Draft:
        """Return the exchanges for a call that only the reference makes."""
        reference, plan = self.log.reference, _Draft()
        if self._is_planned("reference", index, depth):
            return plan
        call = reference.log[index]
        in_place = name_of(call).endswith("_")
        for reader, position in reference.readers(index):
            mine = self.log.matching_here(reader)
            # The reader is missing too: search its own readers, if the candidate lacks its value as well.
            if mine is None:
                if depth < MAX_NEW_CALLS and self.log.lacks(reader):
                    plan.add(self.of_missing(reader, depth + 1))
                continue
            is_alike = len(self.log.log[mine].inputs) == len(reference.log[reader].inputs)
            at = _position_there(reference.log[reader], self.log.log[mine], position) if is_alike else position
            here, there = ValueSite(self.rank, mine, at, True), ValueSite(self.rank, reader, position, True)
            # The reader's input cannot be exchanged, so its output is.
            if not is_alike or here in self.blocked_inputs:
                if self.may_take_outputs_of(mine, reader):
                    plan.add(self._of_join(mine, reader))
                elif not is_alike or self._reads_right_beside(mine):
                    plan.add(self._of_readers(mine, depth))
                else:
                    plan.problems.append(f"{self.log.log[mine]} also reads another value that is wrong")
            elif self.log.log[mine].inputs[at] != reference.log[reader].inputs[position]:
                # A record that has the value read here shows this memory, so the memory itself gets the other value,
                # unless another call rightly reads what is there.
                shown = (reference.log[reader].inputs[position], self.log.log[mine].inputs[at]) in self.pairs
                shown &= not self._is_rightly_read(mine, at)
                plan.candidate.append(self._at_reader(here, there, in_place or shown))
                plan.reference += self._at_readers_there(here, there, in_place or shown)
        plan.add(self._of_records(index))
        if not plan.candidate and not plan.problems and not depth:
            plan.problems.append(f"no call of the candidate stands for one that reads what {call} gives")
        return _checked(_in_order(plan))

    def _is_rightly_read(self, reader: int, position: int) -> bool:
        """Whether another call than `reader` reads the value of this input, and so does its match."""
        producer, value = self.log.input_producers(reader)[position], self.log.log[reader].inputs[position]
        for other, at in self.log.readers(producer) if producer is not None else ():
            theirs = self.log.matching_call(other)
            due = self.log.reference.log[theirs].inputs if theirs is not None else ()
            if other != reader and self.log.log[other].inputs[at] == value and due[at : at + 1] == (value,):
                return True
        return False

    def _of_records(self, index: int) -> _Draft:
        """Return the exchanges for records that have the output of a missing call.

        Example: `all_reduce` is missing. In the candidate, the output of the call that computed the local gradient is
        replaced by the reduced gradient. There is no exchange if another reader needs the local gradient.
        """
        call, plan = self.log.reference.log[index], _Draft()
        for wanted, held in self.pairs:
            made = self.log.producer(wanted, held)
            if wanted not in call.outputs or made is None or held not in self.log.log[made].outputs:
                continue
            # The record's own call has a match with the wanted value: the missing call's output only equals it, as
            # zeros do.
            if (other := self.log.matching_call(made)) is not None and wanted in self.log.reference.log[other].outputs:
                continue
            readers = [(self.log.matching_call(reader), position) for reader, position in self.log.readers(made)]
            due = [self.log.reference.log[other].inputs[at : at + 1] for other, at in readers if other is not None]
            # Another reader needs the value unchanged; or it is wrong already, and an earlier call is to blame.
            if (held,) in due or held not in self.log.reference.values:
                continue
            here = ValueSite(self.rank, made, self.log.log[made].outputs.index(held))
            there = ValueSite(self.rank, index, call.outputs.index(wanted))
            plan.candidate.append(Swap(here, there, self.log.log[made].operator, held, wanted))
            plan.reference.append(Swap(there, here, call.operator, wanted, held))
        return plan

    def _of_join(self, mine: int, theirs: int) -> _Draft:
        """Return exchanges of the outputs of `mine`, if it lacks an input of its match `theirs`, or reads it in another
        dtype.
        """
        call = self.log.log[mine]
        if set(call.inputs) <= self.log.reference.values:
            return _of_matching(self.log, self.rank, mine, theirs)
        return _Draft(problems=[f"{call} also reads another value that is wrong"])

    def of_this_repeat(self, draft: _Draft) -> _Draft:
        """Return `draft` with reverse exchanges for a recomputed value's readers alone.

        In the reference, one call stands for all calls that compute the value, so its own output stays right. Exchanges
        on other ranks, where a message is received, stay. Returns `draft` without recomputed values, and if a record
        shows the value, as a record has no reader.
        """
        shown = {held for _, held in self.pairs}
        own = [swap for swap in draft.candidate if swap.site.rank == self.rank]
        elsewhere = [swap for swap in draft.reference if swap.site.rank != self.rank]
        repeats = (self.log.is_repeated(swap.site.call) for swap in draft.reference if swap not in elsewhere)
        if not any(repeats) or any(swap.found in shown for swap in own):
            return draft
        found, seen, pending = list[Swap](), set[tuple[int, int]](), list[tuple[int, int]]()
        for site in (swap.site for swap in own):
            pending += [(site.call, site.position)] if site.is_input else self.log.readers(site.call)
        while pending:
            reader, position = pending.pop()
            if (reader, position) in seen:
                continue
            seen.add((reader, position))
            other = self.log.matching_call(reader)
            if other is None or self.log.is_repeated(other):
                pending += self.log.readers(reader)
                continue
            call, partner = self.log.log[reader], self.log.reference.log[other]
            if len(call.inputs) != len(partner.inputs):
                return draft
            at = _position_there(call, partner, position)
            if call.inputs[position] != partner.inputs[at]:
                pair = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, at, True)
                found += self._at_readers_there(*pair)
        found.sort(key=lambda swap: swap.site)
        return _Draft(draft.candidate, [*found, *elsewhere], draft.problems) if found else draft

    def _at_reader(self, mine: ValueSite, theirs: ValueSite, in_place: bool = False) -> Swap:
        """Return the exchange that makes the call at the site `mine` in the candidate read the reference's value at
        `theirs`.
        """
        call, partner = self.log.log[mine.call], self.log.reference.log[theirs.call]
        value = _source(self.log.reference, self.rank, theirs.call, theirs.position)
        found, wanted = call.inputs[mine.position], partner.inputs[theirs.position]
        return Swap(mine, value, call.operator, found, wanted, in_place=in_place)

    def _at_readers_there(self, mine: ValueSite, theirs: ValueSite, in_place: bool = False) -> list[Swap]:
        """Return the reverse exchanges: the call at the site `theirs` in the reference, and all other calls that the
        candidate's call at `mine` matches, read the candidate's value.
        """
        call, partner = self.log.log[mine.call], self.log.reference.log[theirs.call]
        value = _source(self.log, self.rank, mine.call, mine.position)
        found, wanted = partner.inputs[theirs.position], call.inputs[mine.position]
        again = {theirs.call, *self.log.all_matching_there(mine.call)}
        return [
            Swap(theirs._replace(call=each), value, partner.operator, found, wanted, in_place=in_place)
            for each in sorted(again)
            if self.log.reference.log[each].inputs == partner.inputs
        ]


def _output_with(call: Call, value: str) -> int | None:
    """Return the position of the call's output whose digest is `value`.

    If an alias of an output has this digest instead, returns -1 for the call's first alias, -2 for the second, and so
    on. None if no output or alias has it, for example if several calls each wrote a part of the memory.
    """
    if value in call.outputs:
        return call.outputs.index(value)
    return -1 - call.aliases.index(value) if value in call.aliases else None


def _position_there(call: Call, partner: Call, position: int) -> int:
    """Return the position in which the matching call reads the input that `call` reads at `position`.

    It differs from `position` only for operators such as `mul`, whose two inputs may be in the other order. Both calls
    have equally many inputs.
    """
    if len(call.inputs) == 2 and name_of(call) in COMMUTATIVE:
        (mine, beside), (same, turned) = (
            (inputs[position], inputs[1 - position]) for inputs in (call.inputs, partner.inputs)
        )
        return 1 - position if mine != same and (mine == turned or beside == same) else position
    return position


def _is_left(log: CandidateLog, index: int, position: int) -> bool:
    """Whether an input, or the tensor that it is a view of, existed before the step."""
    maker = producer_of(log.log, log.input_producers, index, position)
    return maker is None or (log.log[maker].view and not log.producers(maker))


def _source(log: CandidateLog | ReferenceLog, rank: int, index: int, position: int) -> ValueSite:
    """Return the site of an input's value: the output of the call that computes it, or else this input itself."""
    call, producer = (
        log.log[index],
        log.input_producers(index)[position] if position < len(log.input_producers(index)) else None,
    )
    value = call.inputs[position]
    if producer is not None and value in log.log[producer].outputs:
        return ValueSite(rank, producer, log.log[producer].outputs.index(value))
    return ValueSite(rank, index, position, is_input=True)
