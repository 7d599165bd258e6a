"""Systems that run in eager, except that torch.compile compiles the attention.

    bitproof.reference.compiled_attention:eager            like the system eager
    bitproof.reference.compiled_attention:eager_chunked    like eager_chunked; the compiled function runs once per chunk

The compiled function computes the heads' outputs from queries, keys and values. Inductor calls SDPA's own kernels for
it, so the bits equal those of eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, make_eager

SETTINGS: dict[str, str | int | bool | Callable[..., Any]] = {
    "compile_threads": 1,  # a pool of compiling processes would outlive the run
    "fx_graph_cache": False,
    "emulate_precision_casts": True,
    "max_autotune": False,
}
"""Inductor's settings: no autotuning, no cache, and casts at the same places as in eager."""


def eager(case: Case, mesh: Mesh) -> Trainer:
    return _make_trainer(case, mesh, chunked=False)


def eager_chunked(case: Case, mesh: Mesh) -> Trainer:
    if case.chunking is None:
        raise CaseError(f"case {case.name} runs eager_chunked but does not say how to chunk", found="chunking=None")
    return _make_trainer(case, mesh, chunked=True)


def _make_trainer(case: Case, mesh: Mesh, *, chunked: bool) -> Trainer:
    trainer = make_eager(case, mesh, mesh.device, chunked, lambda gradients: gradients)
    compile_attention(trainer.model)
    return trainer


def compile_attention(model: nn.Module) -> int:
    """Compile `attend` for all attention layers of a model, which share the result. Return the number of layers.

    The first call compiles it, for static sizes. Raises CaseError if no layer has a function `attend`.
    """
    layers = [module for module in model.modules() if hasattr(module, "attend")]
    if not layers:
        raise CaseError(
            "there is no attention to compile",
            expected="layers that attend by `attend` of reference/layers/attention.py",
            found=type(model).__name__,
        )
    # All layers have the same function, so the first layer's code serves the others.
    compiled = torch.compile(cast(Any, layers[0]).attend, fullgraph=True, dynamic=False, options=SETTINGS)
    for layer in layers:
        cast(Any, layer).attend = compiled
    return len(layers)
