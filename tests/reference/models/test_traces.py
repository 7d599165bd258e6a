"""The whole training step of every family traces with a batch or sequence dim of unknown size, bookkeeping included."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.case import Model
from bitproof.harness.torch_compat import FakeTensorMode, open_dim, symbolic_graph
from bitproof.reference.loss import cross_entropy
from bitproof.reference.models import FAMILIES, build_model

SHORT = {family: Model(family=family, layers=1) for family in FAMILIES} | {
    "deepseek_v3": Model(layers=1, dense_layers=0)
}
"""A layer with all that a family's layers have: a dense one of DeepSeek-V3's has the feed-forward of shared experts."""


@functools.cache
def trace_step(model: Model, dim: int) -> GraphModule:
    """Trace loss and gradients in bfloat16; `dim` of the three inputs is one unbacked symbol."""
    with torch.device("meta"):
        module = build_model(model)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)

    def static(value: Tensor, dtype: torch.dtype) -> Tensor:
        real = torch.empty(value.shape, dtype=dtype, requires_grad=value.requires_grad)
        return mode.from_tensor(real, static_shapes=True)

    def unbacked(name: str) -> Tensor:
        real_BS = torch.zeros(4, 32, dtype=torch.int64)
        size = real_BS.shape[dim]
        return open_dim(mode, real_BS, dim, (size // 2, size), name, shared="chunked")

    def step(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
        tokens_BS, labels_BS, positions_BS = inputs
        logits_BSV = torch.func.functional_call(module, {**parameters, **buffers}, (tokens_BS, positions_BS))
        loss = cross_entropy(logits_BSV, labels_BS)
        return [loss, *torch.autograd.grad(loss, list(parameters.values()))]

    with shape_env.ignore_fresh_unbacked_symbols():
        parameters = {name: static(value, torch.bfloat16) for name, value in module.named_parameters()}
        buffers = {name: static(value, value.dtype) for name, value in module.named_buffers()}
        inputs = [unbacked(name) for name in ("tokens", "labels", "positions")]
    # The mode is on meanwhile: attention's math kernel makes its causal mask out of nothing.
    with torch.autograd.set_multithreading_enabled(False):
        return symbolic_graph(step, mode)(parameters, buffers, *inputs)


def symbols_of(graph_module: GraphModule) -> set[str]:
    """The symbols in the shapes of all values of a graph."""
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    shapes: list[Any] = [value.shape for value in values if isinstance(value, Tensor)]
    return {
        str(symbol)
        for shape in shapes
        for size in shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["batch", "sequence"])
def test_the_tiny_step_traces_with_one_unbacked_dim_and_no_other_symbol(family: str, dim: int) -> None:
    traced = trace_step(SHORT[family], dim)
    assert len(symbols_of(traced)) == 1


@pytest.mark.parametrize(("family", "num_mixtures"), [("deepseek_v3", 1), ("qwen3_moe", 1), ("llama3", 0)])
def test_the_trace_keeps_the_write_to_every_token_counter(family: str, num_mixtures: int) -> None:
    traced = trace_step(SHORT[family], 1)
    writes = [node for node in traced.graph.nodes if node.target is torch.ops.aten.add_.Tensor]
    assert len(writes) == num_mixtures


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "sequence"])
def test_attention_of_unequal_head_dims_traces_too(dim: int) -> None:
    assert len(symbols_of(trace_step(Model(flavor="debugmodel", layers=1, dense_layers=1), dim))) == 1
