"""The first divergence of two systems: the record, how its tensor differs and the call to blame."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bitproof.harness.case import Kind
from bitproof.harness.ulps import Count, Histogram
from bitproof.harness.validate import GROWING


class Sample(NamedTuple):
    """A differing element: its index, and the bits on both sides, such as `0x3f800000`."""

    at: list[Count]
    reference: str
    candidate: str


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """How a tensor differs between two systems; None for unknown facts.

    A type is dtype and shape, such as `bfloat16[10, 100]`. `reference_bits` and `candidate_bits` are the bits of the
    first differing element; `samples` are the first few differing elements. `histogram` counts the tensor's elements by
    their distance in ULPs; it is None for a dtype without ULPs.
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
    """A call on the path from the blamed call to the shown record, and the number of calls left out before it.

    `elements_differing`, `elements` and `max_ulp` describe its output, if the other side has a matching call.
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
    """A further cause of a difference, found in a run in which the first cause's values were exchanged.

    `call` is a sentence about the blamed call; `operator`, `module`, `direction` and `rank` are its parts. `accounts`
    is the number of tensors that became equal when this call's values were exchanged as well.
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
    """The result of running the step again with the reference's value in place of the blamed call's output.

    `tensors` is the number of records of the step on all ranks. `differing` of these records differed before, and
    `remaining` still differ with all exchanges. `accounts` is the number of records that became equal when the output
    of this call alone was exchanged. `reverse`: whether the reference, with the candidate's value there, computes the
    candidate's step; None if that did not run. `calls` are further calls of the same cause; `calls_left_out` counts
    those that are not listed. `causes` are independent causes. `reason` names the missing evidence. `runs` is the
    number of runs with exchanged values.

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
        """The strongest status that these numbers support. Without a difference there is no cause to verify."""
        if differing and not remaining and reverse:
            return "verified"
        return "in part" if remaining < differing else "not verified"


@dataclass(frozen=True, kw_only=True)
class BlamedCall:
    """The operator call to blame for a difference: the first with equal inputs and different outputs.

    `how` says what is wrong with it. It ran on `rank`, the lowest of the `ranks` on which it differs; `source` is
    its source line; `output` says how its output differs, if known. `micro_batch` counts from 1, if a step has
    several. `part` is the part of an update that runs the call: an optimizer's class, "clipping", "loss scaling";
    in a mixture of experts "dispatch", "compute" or "combine". `chain` leads from the call to the shown record;
    each of its calls reads an output of the previous one. `expected` and `found` state the defect in a few words
    each: `eps=1e-05` and `eps=0.001`, or `mul.Tensor of layers.0 (forward)` and `no such call`. `verification` says
    what an exchange of the call's values showed, None without one.
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
    """The first divergence of two systems: the first differing record, how its tensor differs, and the call to blame.

    `pass_` is the first pass that changes bits, if a search found it. `between` is None for a reference and a
    candidate. If a system diverges from itself, `between` names the system, such as "reference against itself"; the two
    sides are then the system's first and second run. `holds` is the only other record of the reference, such as "grad
    b", that equals the candidate's tensor bit for bit: two tensors were exchanged, or one was stored twice.
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
