"""The call to blame, and how a report words it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.records import BlamedCall, ChainLink, TensorDifference

How = Literal[
    "computes",
    "compiles",
    "reads",
    "inherits",
    "unwritten",
    "outside",
    "draws",
    "exchanges",
    "adds",
    "lacks",
    "abandons",
    "misplaces",
]

HOW: dict[How, str] = {
    "computes": "has the same inputs and a different output",
    "compiles": "runs kernels of Inductor, whose calls are not logged; its inputs are right, its output is not",
    "reads": "reads different inputs, each correct by itself",
    "inherits": "reads a stale value: nothing in this step computed it (left from an earlier step, or written outside "
    "torch, e.g. by NumPy)",
    "unwritten": "reads uninitialized memory, which no call has written",
    "outside": "reads memory of this step that something else than an operator call wrote, such as NumPy",
    "draws": "has no tensor input, and a different output",
    "exchanges": "reads the same inputs in another order",
    "adds": "is an extra call that the reference does not have",
    "lacks": "is missing from the candidate",
    "abandons": "is launched, and never waited for",
    "misplaces": "computes the value that the tensor should have, but the tensor has another right value",
}
"""Each defect as the predicate of a sentence: "mm of layers.3.w1 (forward) on rank 0 is missing from the candidate"."""

HOW_ITSELF: dict[How, str] = HOW | {
    "reads": "reads different inputs, though no earlier call has a different output",
    "compiles": "runs kernels of Inductor, whose calls are not logged; it has the same inputs and a different output",
    "adds": "is missing from another run of the system",
    "lacks": "is missing from another run of the system",
}
"""The sentences if reference and candidate are two runs of the same system."""


class Link(NamedTuple):
    """A call in the chain of calls from the blamed call to a record.

    The chain omits `left_out` calls just before it. `reference` and `candidate` are the call's indices in the logs of
    the two systems; None if the system does not make the call.
    """

    call: Call
    rank: int
    left_out: int
    reference: int | None = None
    candidate: int | None = None


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The call to blame.

    - `how`: its defect, a key of `HOW`.
    - `ranks`: all ranks on which the call has this defect.
    - `candidate`, `reference`: the index of the call in the candidate's log, and that of its match in the reference's
      log. None if missing or unknown.
    - `arguments`: the differing arguments, such as "eps=1e-05 where the reference has 1e-06".
    - `reading`: the source of an input that the matching call does not read.
    - `instead_of`: for a call that only the candidate makes, the operator of the reference's call that it replaces.
    - `at`: the rank to whose logs the two indices refer, None for the lowest of `ranks`.
    - `explains`: the record to which the call leads: its rank and its two digests.
    - `chain`: the calls that lead to that record.
    """

    how: How
    call: Call
    ranks: tuple[int, ...]
    candidate: int | None
    reference: int | None
    arguments: str = ""
    reading: str = ""
    instead_of: str = ""
    at: int | None = None
    explains: tuple[int, str, str] | None = field(default=None, compare=False)
    chain: tuple[Link, ...] = field(default=(), compare=False)

    @property
    def index(self) -> int:
        """Return the call's index in the candidate's log, or in the reference's log if the candidate lacks the call."""
        index = self.reference if self.candidate is None else self.candidate
        assert index is not None, "a culprit is a call of some log"
        return index

    @property
    def rank(self) -> int:
        """Return the rank to whose logs `candidate` and `reference` refer.

        This is the lowest of `ranks`. If the call leads to the record only on a higher rank, it is that rank.
        """
        return self.ranks[0] if self.at is None else self.at


def call_of(
    culprit: Culprit, wording: Mapping[How, str] = HOW, changed: Sequence[TensorDifference | None] = ()
) -> BlamedCall:
    """Return the blamed call in the form that reports store.

    - `wording`: the text of each defect.
    - `changed`: for each call in the chain, the difference in its output or None. The blamed call's is first.
    """
    call, arguments, reading = culprit.call, culprit.arguments, culprit.reading
    # The texts speak of the reference. With another wording, both sides are runs of the same system.
    if wording is not HOW:
        as_runs = "where the reference has", "where its other run had"
        arguments, reading = arguments.replace(*as_runs), reading.replace(*as_runs)
    return BlamedCall(
        operator=call.operator,
        how=wording[culprit.how]
        + (f": {reading}" if reading else "")
        + (f", with {arguments}" if arguments else "")
        + (f", in place of {culprit.instead_of}" if culprit.instead_of else ""),
        module=call.place.module,
        direction=call.place.direction,
        chunk=call.place.chunk,
        node=call.node,
        source=call.source,
        rank=culprit.rank,
        ranks=", ".join(map(str, culprit.ranks)),
        micro_batch=call.micro_batch,
        part=call.part,
        output=changed[0] if changed else None,
        # The chain may be longer than `changed`, which is empty if no bits were fetched.
        chain=[_chain_link(link, found) for link, found in zip_longest(culprit.chain, changed) if link] or None,
    )


def _chain_link(link: Link, changed: TensorDifference | None) -> ChainLink:
    call, found = link.call, changed or TensorDifference()
    return ChainLink(
        operator=call.operator,
        module=call.place.module,
        direction=call.place.direction,
        chunk=call.place.chunk,
        micro_batch=call.micro_batch,
        part=call.part,
        rank=link.rank,
        source=call.source,
        left_out=link.left_out,
        elements_differing=found.elements_differing,
        elements=found.elements,
        max_ulp=found.max_ulp,
    )
