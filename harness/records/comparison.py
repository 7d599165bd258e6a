"""The outcome of comparing two recordings."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitproof.harness.case import Kind
from bitproof.harness.records.divergence import Divergence
from bitproof.harness.records.result import Differing, Verdict, zero_counts


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of comparing two recordings. `reason` says why the verdict is UNVERIFIED, else None.

    `differing_kinds` are the kinds that differ at the first differing step, on any rank. `layout_mismatches` has a
    sentence for each pair of records whose dtype, shape or placements differ; `is_sharded_otherwise`: some placements
    differ. `differing` and `differing_left_out` are as in CaseResult. `vacuous` lists tensors whose agreement is no
    evidence, such as zeros. `unshared` lists state that only one of the systems has. `remarks` are sentences about
    vacuous tensors, about the code that torch.compile compiled, and about state without a record.
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
