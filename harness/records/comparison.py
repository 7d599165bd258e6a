"""The outcome of comparing two recordings."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitproof.harness.case import Kind
from bitproof.harness.records.divergence import Divergence
from bitproof.harness.records.result import Differing, Verdict, zero_counts


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of comparing two recordings.

    - `reason`: why the verdict is UNVERIFIED, else None.
    - `differing_kinds`: the kinds that differ at the first differing step, on any rank.
    - `layout_mismatches`: a sentence for each pair of records whose dtype, shape or placements differ.
    - `is_sharded_otherwise`: whether some pair's placements differ.
    - `differing`, `differing_left_out`: as in CaseResult.
    - `vacuous`: sentences about agreement that is no evidence, such as the agreement of zeros.
    - `unshared`: sentences about state that only one of the systems has.
    - `remarks`: sentences about single tensors whose agreement is no evidence, about code that torch.compile compiled,
      and about state without a record.
    """

    verdict: Verdict
    compared: dict[str, int] = field(default_factory=zero_counts)
    mismatched: dict[str, int] = field(default_factory=zero_counts)
    differing_kinds: tuple[Kind, ...] = ()
    first_divergence: Divergence | None = None
    layout_mismatches: tuple[str, ...] = ()
    is_sharded_otherwise: bool = False
    reason: str | None = None
    differing: Differing = field(default_factory=dict)
    differing_left_out: int = 0
    vacuous: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
