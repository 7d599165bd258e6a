"""What is known of a case's model without ranks: its sizes, and whether any rank could hold its part of it."""

from __future__ import annotations

import functools

from bitproof.harness.case import PREPARED, Case
from bitproof.harness.systems.graph_key import step_part
from bitproof.harness.systems.registry import BUILT_IN

EAGER = tuple(system for system in BUILT_IN if system not in PREPARED)


def model_sizes(case: Case) -> dict[str, int]:
    """The sizes of the case's model, by the names of `harness.case.SIZES`."""
    from bitproof.reference.models import model_config
    from bitproof.reference.models.sizes import sizes_of

    return sizes_of(model_config(case.model))


def expert_sizes(case: Case) -> tuple[int, int] | None:
    """The model dim and the hidden dim of the experts of the case's model; None where it has none."""
    from bitproof.reference.models import model_config

    config = model_config(case.model)
    return (config.dim, config.moe.hidden_dim) if hasattr(config, "moe") else None


def check_model(case: Case, system: str) -> None:
    """Refuse a model that the case's ranks cannot share, before any of them starts; tracing refuses it by itself.

    Of a system of the user's nothing is known. Raises CaseError.
    """
    if system in EAGER:
        _build(step_part(case))


@functools.lru_cache(maxsize=1)
def _build(case: Case) -> None:
    """Build the first rank's part of a model, without values: what is wrong with it is so on every rank."""
    import torch

    from bitproof.reference.parallel.mesh import Mesh
    from bitproof.reference.step import build_sharded_model

    build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"))
