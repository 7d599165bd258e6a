"""Which inputs of a graph are parameters, and what lies between one and its gather."""

from __future__ import annotations

import torch

from bitproof.harness.graph.analysis.parameters import chain_to_input, parameters_of
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def test_parameters_are_the_inputs_that_have_a_gradient() -> None:
    sketch = Sketch()
    w, v, _ = (sketch.placeholder(name, 4) for name in ("w", "v", "x"))
    loss = sketch.call(aten.sum.default, w)
    module = sketch.finish(loss, w, v)
    assert parameters_of(module.graph) == {w: 0, v: 1}


def test_a_gather_is_followed_back_through_casts_and_padding_and_no_further() -> None:
    sketch = Sketch()
    w = sketch.placeholder("w", 4)
    cast = sketch.call(aten._to_copy.default, w, dtype=torch.bfloat16)
    padded = sketch.call(aten.constant_pad_nd.default, cast, [0, 4])
    assert chain_to_input(sketch.call(c10d.all_gather_into_tensor.default, padded, 2, "fsdp")) == [padded, cast, w]
    computed = sketch.call(aten.sin.default, padded)
    assert chain_to_input(sketch.call(c10d.all_gather_into_tensor.default, computed, 2, "fsdp")) == [computed]
