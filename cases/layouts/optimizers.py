"""Cases whose two systems implement the same optimizer differently, and must take the same step.

AdamW has three implementations, and Muon has four: on whole matrices, layer by layer, sharded, and sharded with split
layers.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.layouts.two_layouts import ddp_fsdp
from bitproof.harness.case import Parallelism

FAMILY = "optimizers"
_LOOP = "bitproof.builtin_cases.examples.optimizer_loop"

adamw_foreach = replace(
    ddp_fsdp,
    name="adamw_foreach",
    family=FAMILY,
    reference=f"{_LOOP}:adamw",
    candidate=f"{_LOOP}:adamw_foreach",
    reference_parallelism=None,
)
adamw_fused = replace(
    adamw_foreach, name="adamw_fused", candidate=f"{_LOOP}:adamw_fused", expected="CLOSE", close_within=1e-5
)
muon_by_layer = replace(
    adamw_foreach,
    name="muon_by_layer",
    reference=f"{_LOOP}:muon",
    candidate=f"{_LOOP}:muon_by_layer",
    parallelism=Parallelism(world_size=4, ep=1),
)
muon_fsdp = replace(
    ddp_fsdp, name="muon_fsdp", family=FAMILY, reference=f"{_LOOP}:muon", candidate=f"{_LOOP}:muon_fsdp"
)
muon_fsdp_tp = replace(
    muon_fsdp,
    name="muon_fsdp_tp",
    candidate=f"{_LOOP}:muon_fsdp_tp",
    parallelism=Parallelism(world_size=4, ep=1, tp=2),
    reference_parallelism=Parallelism(world_size=4, ep=1),
    expected="CLOSE",
)

CASES = (adamw_foreach, adamw_fused, muon_by_layer, muon_fsdp, muon_fsdp_tp)
