"""Cases that run the same training loop in two layouts of ranks, and show which differences a layout may cause.

Whole tensors are compared, joined from the ranks' parts. For example, a gradient sharded over 2 ranks is compared with
the same gradient on a single rank.

- EQUAL: both layouts compute the same sums.
- CLOSE: the sums have other orders. The bounds are measured by running the reference with its sums in other orders.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.case import Case, Parallelism

FAMILY = "two_layouts"
_LOOP = "bitproof.builtin_cases.examples.mesh_loop"
_EIGHT, _FOUR, _TWO, _ONE = (Parallelism(world_size=ranks, ep=1) for ranks in (8, 4, 2, 1))

ddp_fsdp = Case(
    name="ddp_fsdp",
    family=FAMILY,
    reference=f"{_LOOP}:ddp",
    candidate=f"{_LOOP}:fsdp",
    steps=3,
    parallelism=_TWO,
    reference_parallelism=_TWO,
)
ddp_fsdp_eight = replace(
    ddp_fsdp, name="ddp_fsdp_eight", parallelism=_EIGHT, reference_parallelism=_EIGHT, expected="CLOSE"
)
fsdp_tp = replace(
    ddp_fsdp_eight,
    name="fsdp_tp",
    reference=f"{_LOOP}:fsdp",
    candidate=f"{_LOOP}:fsdp_tp",
    parallelism=Parallelism(world_size=8, ep=1, tp=2),
)
fsdp_hsdp = replace(ddp_fsdp_eight, name="fsdp_hsdp", reference=f"{_LOOP}:fsdp", candidate=f"{_LOOP}:hsdp")
one_eight = replace(ddp_fsdp_eight, name="one_eight", candidate=f"{_LOOP}:ddp", reference_parallelism=_ONE)
ep2_ep4 = replace(
    ddp_fsdp_eight,
    name="ep2_ep4",
    reference=f"{_LOOP}:ep",
    candidate=f"{_LOOP}:ep",
    parallelism=Parallelism(world_size=8, ep=4),
    reference_parallelism=Parallelism(world_size=8, ep=2),
)
# Modules' outputs are compared, too, so that a defect that shows in the loss is located in a module.
_SEEN = ("embedding", "blocks.*", "output")
fsdp_observed = replace(ddp_fsdp, name="fsdp_observed", observe=_SEEN)
hsdp_observed = replace(fsdp_hsdp, name="hsdp_observed", parallelism=_FOUR, reference_parallelism=_FOUR, observe=_SEEN)
tp_observed = replace(
    fsdp_tp,
    name="tp_observed",
    parallelism=Parallelism(world_size=4, ep=1, tp=2),
    reference_parallelism=_TWO,
    observe=_SEEN,
)
ep_observed = replace(
    ep2_ep4,
    name="ep_observed",
    parallelism=Parallelism(world_size=2, ep=2),
    reference_parallelism=_TWO,
    observe=_SEEN,
)

_WIDE = (ddp_fsdp, ddp_fsdp_eight, fsdp_tp, fsdp_hsdp, one_eight, ep2_ep4)
CASES = (*_WIDE, fsdp_observed, hsdp_observed, tp_observed, ep_observed)
