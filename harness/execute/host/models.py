"""Check a case's model before any rank starts: its sizes, and whether the ranks have memory for it."""

from __future__ import annotations

import functools

from bitproof.harness.case import PREPARED, Case, Chunking
from bitproof.harness.errors import MachineError
from bitproof.harness.systems.graph_key import step_part
from bitproof.harness.systems.registry import BUILT_IN

EAGER = tuple(system for system in BUILT_IN if system not in PREPARED)


def expert_sizes(case: Case) -> tuple[int, int] | None:
    """Return the model dim and the hidden dim of the experts of the case's model; None for a model without experts."""
    from bitproof.reference.models import model_config

    config = model_config(case.model)
    return (config.dim, config.moe.hidden_dim) if hasattr(config, "moe") else None


def check_model(case: Case, system: str, num_ranks: int = 1, memory: int | None = None) -> None:
    """Raise an error for a model that the case's ranks cannot run. Only bitproof's eager systems are checked.

    - CaseError: the model cannot be split over the ranks.
    - ChunkError: the model cannot be chunked as the case requires.
    - MachineError: parameters, gradients and optimizer states of `num_ranks` ranks need more than `memory` bytes.
    """
    if system not in EAGER:
        return
    parameters = _bytes_of_parameters(step_part(case), case.chunking)
    needed = num_ranks * parameters * _COPIES
    if memory is not None and needed > memory:
        raise MachineError(
            f"the ranks of case {case.name} find no memory for their state on this machine",
            expected=f"{needed / 2**30:,.1f} GiB for parameters, gradients and moments of {num_ranks} ranks",
            found=f"{memory / 2**30:,.1f} GiB that are free",
            fix="prove the case, which takes no values: `bitproof prove`; or take fewer layers, or more machines",
        )


_COPIES = 4
"""The copies of each parameter in a rank's state: itself, its gradient, and AdamW's two moments, each in float32."""


@functools.lru_cache(maxsize=1)
def _bytes_of_parameters(case: Case, chunking: Chunking | None) -> int:
    import torch

    from bitproof.reference.chunking import check_chunking
    from bitproof.reference.parallel.mesh import Mesh
    from bitproof.reference.step import build_sharded_model

    # Other ranks need not be tried: they would raise the same error.
    model = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"), shares=True)
    if chunking is not None:
        check_chunking(model, chunking, folded=case.model.folded)
    return sum(parameter.nbytes for parameter in model.parameters())
