"""Where two systems part: the record, how its tensor differs, the call to blame and what stands around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from bitproof.harness.case import Kind
from bitproof.harness.ulps import Count, Histogram
from bitproof.harness.validate import GROWING


class Sample(NamedTuple):
    """An element that differs: where it is, and the bits of both sides, such as `0x3f800000`."""

    at: list[Count]
    reference: str
    candidate: str


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """How one tensor differs between two systems; None marks what is not known.

    A type is dtype and shape, `bfloat16[10, 100]`. The bits are those of the first differing element, and `samples`
    are the first of them all; `histogram` counts the tensor's elements, and dtypes without ULPs have none.
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
class Neighbour:
    """A call near the blamed one, or that one itself, and whether both sides agree in its outputs."""

    __pydantic_config__ = GROWING

    operator: str | None = None
    module: str | None = None
    direction: str | None = None
    chunk: int | None = None
    source: str | None = None
    agrees: bool | None = None
    is_culprit: bool = False


@dataclass(frozen=True, kw_only=True)
class ChainLink:
    """One call on the way from the call to blame to the record that is shown, and how many are left out before it.

    `elements_differing`, `elements` and `max_ulp` are of its output, where the other side has a call of its turn there.
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
class ModuleCalls:
    """A module's calls of one direction on the blamed call's rank, in the step that is shown, and how many differ.

    `turn` counts from 1, in the order in which modules and directions first differ; None where all calls agree.
    """

    __pydantic_config__ = GROWING

    module: str | None = None
    direction: str | None = None
    calls: Count
    differing: Count
    turn: Count | None = None


@dataclass(frozen=True, kw_only=True)
class BlamedCall:
    """The operator call to blame for a difference: the first whose inputs agree and whose output does not.

    `how` says what is wrong with it. It ran on `rank`, the lowest of the `ranks` on which it differs, and is written
    at the line `source`; `output` says how its output differs, where that is known. `neighbours` are the calls around
    it, in execution order. `micro_batch` counts from 1, where a step has several; `part` is what of an update runs: an
    optimizer's class, "clipping", "loss scaling"; of a mixture of experts it is "dispatch", "compute" or "combine".
    `chain` leads from it to the record that is shown, each of its calls by what the one before gave. `modules` says
    where in the model calls differ.
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
    neighbours: list[Neighbour] | None = None
    chain: list[ChainLink] | None = None
    modules: list[ModuleCalls] | None = None


@dataclass(kw_only=True)
class Divergence:
    """Where two systems first part: the first differing record, how its tensor differs, and the call to blame.

    `pass_` is the pass that first changes bits, where somebody looked for it. `between` is None for a reference and a
    candidate. Where one system parts from itself it says which, such as "reference against itself"; what is told of
    the two sides is then about its first and its second run. `holds` is the one other record of the reference, such as
    "grad b", that the candidate's tensor is, bit for bit: two were exchanged, or one stored twice.
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
