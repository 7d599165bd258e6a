"""Cases with fewer layers: everything that a case has, at a part of the time that tracing and running it take."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.case import Case
from bitproof.reference.models import model_config


def small(case: Case, layers: int = 1) -> Case:
    """A case of so many layers, at least one a stage, of which the last, where the family has experts, has experts."""
    layers = max(layers, case.stages)
    has_dense_layers = hasattr(model_config(case.model), "num_dense_layers")
    dense_layers = layers - 1 if has_dense_layers else None
    return replace(case, model=replace(case.model, layers=layers, dense_layers=dense_layers))
