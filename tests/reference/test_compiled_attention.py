"""Attention compiled by torch.compile within the eager step: which layers it reaches, its bits, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bitproof.builtin_cases import CASES
from bitproof.builtin_cases.chunking import unchunked
from bitproof.harness.errors import CaseError
from bitproof.reference import compiled_attention
from bitproof.reference.compiled_attention import compile_attention
from bitproof.reference.layers.attention import attend
from bitproof.reference.models import build_model
from bitproof.reference.parallel.mesh import Mesh
from tests.small import small

CASE = CASES["blocks_batch_eager_regional"]


@pytest.mark.parametrize("family", ["deepseek_v3", "llama3"])
def test_every_layer_of_a_model_attends_by_one_compiled_function(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fake(function: Any, **settings: Any) -> Any:
        given.update(settings, function=function)
        return "compiled"

    monkeypatch.setattr(torch, "compile", fake)
    with torch.device("meta"):
        model: Any = build_model(replace(CASE.model, family=family, layers=2, dense_layers=None))
    assert compile_attention(model) == 2
    assert [layer.attention.attend for layer in model.layers] == ["compiled"] * 2
    assert given["function"] is attend
    assert given["fullgraph"] and not given["options"]["fx_graph_cache"] and given["options"]["compile_threads"] == 1


def test_a_model_without_attention_is_refused_and_does_not_run_uncompiled() -> None:
    with pytest.raises(CaseError) as error:
        compile_attention(nn.Linear(2, 2))
    assert str(error.value) == (
        "CaseError: there is no attention to compile\n"
        "  expected: layers that attend by `attend` of reference/layers/attention.py\n"
        "  found: Linear"
    )


def test_a_case_without_chunks_has_no_chunked_step() -> None:
    with pytest.raises(CaseError, match="unchunked runs eager_chunked but does not say how to chunk"):
        compiled_attention.eager_chunked(unchunked, Mesh(0, unchunked.parallelism))


@pytest.mark.slow
@pytest.mark.ranks
def test_compiled_attention_has_the_bits_of_eager_forward_and_backward() -> None:
    model: Any = build_model(small(CASE).model)
    compile_attention(model)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 32, 4, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    found = []
    for function in (attend, model.layers[0].attention.attend):
        y = function(q, k, v, scale=0.25, attention_masks=None)
        found.append([y, *torch.autograd.grad(y.float().square().mean(), (q, k, v))])
    assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True))
