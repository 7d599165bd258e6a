"""The first divergence of two systems: the record, how its tensor differs, and the call to blame."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bitproof.harness.case import Kind
from bitproof.harness.ulps import Count, Histogram
from bitproof.harness.validate import GROWING


class Sample(NamedTuple):
    """An element that differs: its index in the tensor, and its bits in both systems, such as `0x3f800000`."""

    at: list[Count]
    reference: str
    candidate: str


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """How a tensor differs between two systems. A field is None if the fact is unknown.

    - `reference_type`, `candidate_type`: dtype and shape, such as `bfloat16[10, 100]`.
    - `reference_bits`, `candidate_bits`: the bits of the first differing element.
    - `samples`: the first few differing elements.
    - `histogram`: the number of elements by distance in ULPs; None for a dtype without ULPs.
    """

    elements_differing: int | None = None
    elements: int | None = None
    max_ulp: int | None = None
    reference_bits: str | None = None
    candidate_bits: str | None = None
    reference_type: str | None = None
    candidate_type: str | None = None
    histogram: Histogram | None = None
    samples: list[Sample] | None = None


@dataclass(frozen=True, kw_only=True)
class ChainLink:
    """A call on the path from the blamed call to the differing record.

    - `left_out`: the number of calls just before this call that the path omits.
    - `elements_differing`, `elements`, `max_ulp`: how the call's output differs. None if the other system has no
      matching call.
    """

    __pydantic_config__ = GROWING

    operator: str
    module: str | None = None
    direction: str | None = None
    chunk: int | None = None
    rank: int
    micro_batch: int | None = None
    part: str | None = None
    source: str | None = None
    left_out: int = 0
    elements_differing: Count | None = None
    elements: Count | None = None
    max_ulp: Count | None = None


@dataclass(frozen=True, kw_only=True)
class OtherCause:
    """A further cause of a difference. It was found in a run in which the blamed call's output was replaced by the
    reference's value.

    - `call`: a sentence about the call to blame for it; `operator`, `module`, `direction` and `rank` are its parts.
    - `accounts`: the number of tensors that became equal when this call's values were replaced as well.
    """

    __pydantic_config__ = GROWING

    call: str
    accounts: Count
    operator: str | None = None
    module: str | None = None
    direction: str | None = None
    rank: int | None = None


VerificationStatus = Literal["not verified", "in part", "verified"]
"""How far a cause is verified, the weakest status first."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of running the step again after replacing the blamed call's output by the reference's value.

    - `tensors`: the number of records of the step on all ranks.
    - `differing`: the number of these records that differed before any value was replaced.
    - `remaining`: the number of these records that still differ when the values of all causes are replaced.
    - `accounts`: the number of these records that became equal by replacing the values of this cause alone.
    - `reverse`: whether the reference computes the candidate's step if it gets the candidate's values; None if not
      tried.
    - `calls`, `calls_left_out`: further calls of the same cause, and the number of calls that are not listed.
    - `causes`: independent causes.
    - `reason`: the missing evidence.
    - `runs`: the number of runs with replaced values.

    Example: differing=40, remaining=0, reverse=True is `verified`; remaining=5 is `in part`.
    """

    __pydantic_config__ = GROWING

    status: VerificationStatus
    tensors: Count
    differing: Count
    remaining: Count
    accounts: Count = 0
    reverse: bool | None = None
    reason: str | None = None
    calls: list[str] = field(default_factory=list)
    calls_left_out: Count = 0
    causes: list[OtherCause] = field(default_factory=list)
    runs: Count = 0

    @staticmethod
    def strongest(differing: int, remaining: int, reverse: bool | None) -> VerificationStatus:
        """Return the strongest status that these numbers support.

        It is "verified" if some records differed before, none differs now, and `reverse` is True; "in part" if fewer
        records differ than before; otherwise "not verified".
        """
        # `reverse` may be None: without the reverse run, the exchange alone is no proof.
        if differing and not remaining and reverse:
            return "verified"
        return "in part" if remaining < differing else "not verified"


@dataclass(frozen=True, kw_only=True)
class BlamedCall:
    """The operator call to blame for a difference, such as the first with equal inputs and different outputs.

    - `how`: the defect in words.
    - `ranks`, `rank`: all ranks on which the call is wrong, and the rank that is shown.
    - `source`: the call's source line, None if unknown.
    - `output`: how the call's output differs, None if unknown.
    - `micro_batch`: the number of the micro-batch, from 1, if a step has several.
    - `part`: in an update, the optimizer's class, "clipping" or "loss scaling". In a mixture of experts, "dispatch",
      "compute" or "combine".
    - `chain`: the calls from this call to the differing record. Each reads an output of the previous call.
    - `expected`, `found`: the defect as two short texts, such as `eps=1e-05` and `eps=0.001`.
    - `verification`: the result of running again with the other system's values; None if that was not done.
    """

    operator: str
    how: str | None = None
    module: str | None = None
    direction: str | None = None
    chunk: int | None = None
    node: str | None = None
    source: str | None = None
    rank: int | None = None
    ranks: str | None = None
    micro_batch: int | None = None
    part: str | None = None
    output: TensorDifference | None = None
    chain: list[ChainLink] | None = None
    expected: str | None = None
    found: str | None = None
    verification: Verification | None = None


NO_CALL = (
    "no operator call explains the first difference: each call before it gave what the reference's gave, so its tensor "
    "was changed by something that is no operator call, or by one that no recorder sees"
)
"""The report's remark if a search found no call to blame."""


@dataclass(kw_only=True)
class Divergence:
    """The record that differs first between two systems, how its tensor differs, and the call to blame.

    - `pass_`: the first pass that changes bits, if a search found it.
    - `between`: a text such as "reference against itself" if a system differs from itself, otherwise None. If it is
      set, "reference" and "candidate" in the other fields are this system's first and second run.
    - `holds`: the name of another record of the reference, such as "grad b", if it is the only record that has the
      candidate's bits. Perhaps two tensors were exchanged.
    """

    step: int
    rank: int
    kind: Kind
    name: str
    tensor: TensorDifference = field(default_factory=TensorDifference)
    call: BlamedCall | None = None
    pass_: str | None = None
    between: str | None = None
    holds: str | None = None
