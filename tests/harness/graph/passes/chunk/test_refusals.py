"""What must not be chunked: the whole text of each refusal, and the nearest graph that is accepted."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention

from bitproof.harness.errors import ChunkError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.passes.chunk import chunk
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    Sketch,
    assert_as_eager,
    chunked,
    context_of,
    line_of,
    parameter,
    trace,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def refusal(module: GraphModule, sketch: Sketch, dim: str = "batch") -> str:
    with pytest.raises(ChunkError) as error:
        chunk(module, sketch.context("layers.*", dim))
    return str(error.value)


# -- collectives ------------------------------------------------------------------------------------


def reduced_over(group: str, at: str = "layers.0") -> tuple[GraphModule, Sketch]:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, 8)
    y = sketch.call(aten.mul.Tensor, x, 2.0)
    reduced = sketch.call(c10d.all_reduce.default, y, "sum", group, at=at)
    waited = sketch.call(c10d.wait_tensor.default, reduced, at=at)
    return sketch.finish(sketch.call(aten.sum.default, waited, at="")), sketch


def test_a_collective_of_a_group_that_nobody_named_is_refused_in_a_chunk() -> None:
    assert refusal(*reduced_over("SP")) == (
        "ChunkError: cannot run collective `all_reduce` (all_reduce) once a chunk\n"
        "  expected: a collective of one of the groups EP, or a parameter gradient's own reduction\n"
        "  found: group 'SP'\n"
        "  came from: layers.0 (forward)\n"
        "  fix: chunk only modules whose other collectives do not depend on the chunked dim "
        "(sequence parallelism's do)"
    )


def test_an_expert_collective_in_a_chunk_is_accepted() -> None:
    module, sketch = reduced_over("EP")
    chunk(module, sketch.context("layers.*"))


def test_a_tensor_parallel_all_reduce_between_chunked_modules_is_accepted() -> None:
    module, sketch = reduced_over("TP", at="output")
    chunk(module, sketch.context("layers.*"))


# -- shapes -------------------------------------------------------------------------------------------


def test_a_view_of_a_baked_size_is_refused() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, 8)
    baked = sketch.graph.create_node("call_function", aten.view.default, (x, [24, 8]), name="view")
    with sketch.mode:
        baked.meta |= {"val": torch.empty(24, 8), "origin": sketch.call(aten.mul.Tensor, x, 2.0).meta["origin"]}
    loss = sketch.call(aten.sum.default, baked, at="")
    assert refusal(sketch.finish(loss), sketch) == (
        "ChunkError: view `view` has a baked constant instead of the chunked dim\n"
        "  expected: a size computed from x.shape; its input has ['u0', '6', '8']\n"
        "  found: sizes [24, 8]\n"
        "  came from: layers.0 (forward)\n"
        "  fix: write the view with x.shape[...], not with a number"
    )


def flattened(sketch: Sketch, x: Node, at: str | None) -> Node:
    rows = sketch.call(operator.mul, sketch.call(aten.sym_size.int, x, 0, at=at), 6, at=at)
    return sketch.call(aten.view.default, x, [rows, 8], at=at)


def test_flattened_rows_are_refused_at_the_border_into_a_chunked_module() -> None:
    sketch = Sketch()
    rows = flattened(sketch, sketch.placeholder("x", sketch.n, 6, 8), at="")
    y = sketch.call(aten.mul.Tensor, rows, 2.0)
    assert refusal(sketch.finish(sketch.call(aten.sum.default, y, at="")), sketch) == (
        "ChunkError: cannot split live-in `view`: no single dim of it is the chunked dim\n"
        "  expected: exactly one dim of size u0\n"
        "  found: shape ['6*u0', '8']\n"
        "  came from: no module (forward)\n"
        "  fix: keep batch and sequence as dims of their own at the border of a chunked module"
    )


def test_flattened_rows_are_refused_at_the_border_out_of_a_chunked_module() -> None:
    sketch = Sketch()
    rows = flattened(sketch, sketch.placeholder("x", sketch.n, 6, 8), at="layers.0")
    assert refusal(sketch.finish(sketch.call(aten.sum.default, rows, at="")), sketch) == (
        "ChunkError: cannot concatenate live-out `view`: no single dim of it is the chunked dim\n"
        "  expected: exactly one dim of size u0\n"
        "  found: shape ['6*u0', '8']\n"
        "  came from: layers.0 (forward)\n"
        "  fix: keep batch and sequence as dims of their own at the border of a chunked module"
    )


def test_flattened_rows_are_refused_at_the_border_between_two_chunked_modules() -> None:
    sketch = Sketch()
    rows = flattened(sketch, sketch.placeholder("x", sketch.n, 6, 8), at="layers.0")
    y = sketch.call(aten.mul.Tensor, rows, 2.0, at="layers.1")
    text = refusal(sketch.finish(sketch.call(aten.sum.default, y, at="")), sketch)
    assert text.startswith(
        "ChunkError: cannot hand from module to module `view`: no single dim of it is the chunked dim"
    )


def test_rows_flattened_and_unflattened_within_a_module_are_accepted() -> None:
    assert_as_eager(
        Layers(Applied(lambda m, x: (x.view(-1, D) @ m.w).view(x.shape), w=parameter(D, D))), "layers.*", "seq"
    )


# -- live-outs ----------------------------------------------------------------------------------------


class Penalized(Layers):
    """Multiplies the output by what the first layer says of its input as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.layers[0].penalty  # type: ignore[operator]


def remember(module: Applied, x: Tensor) -> Tensor:
    module.penalty = x.square().mean()
    return x * module.w


def test_a_live_out_without_the_chunked_dim_that_is_read_whole_too_is_refused() -> None:
    with pytest.raises(ChunkError) as error:
        chunked(trace(Penalized(Applied(remember, w=parameter(D)))), "layers.*")
    assert str(error.value) == (
        "ChunkError: live-out `mean` exists once per chunk but is also read whole, and does not carry the chunked dim\n"
        "  expected: a tensor with the chunked dim (concatenated) or a parameter gradient (added)\n"
        "  found: shape [], read by mul_1, mul_4\n"
        f"  came from: layers.0 (forward), {line_of(remember, 1)}, pass chunk\n"
        "  fix: keep its readers inside the chunked module, or choose a larger module"
    )


def test_a_value_without_the_chunked_dim_that_its_own_module_alone_reads_is_accepted() -> None:
    def count(module: Applied, x: Tensor) -> Tensor:
        module.seen.add_(x.detach().square().mean())
        return x * module.w

    assert_as_eager(Layers(Applied(count, w=parameter(D), seen=torch.zeros(()))), "layers.*")


# -- in-place writes ----------------------------------------------------------------------------------


class WritingBetween(Layers):
    """Doubles the first layer's output in place before the second reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](double(self.layers[0](x)))


def double(x: Tensor) -> Tensor:
    return x.mul_(2.0)


def scaling() -> Applied:
    return Applied(lambda m, x: (x * m.w).sin(), w=parameter(D))


def test_writing_in_place_from_outside_to_what_a_chunked_module_computed_is_refused() -> None:
    model = WritingBetween(Applied(lambda m, x: x @ m.w, w=parameter(D, D)), scaling())
    with pytest.raises(ChunkError) as error:
        chunked(trace(model), "layers.*")
    assert str(error.value) == (
        "ChunkError: cannot write in place to `_unsafe_view` in `mul_`: its elements also exist split or joined\n"
        "  expected: in-place writes to buffers without the chunked dim, or to values of the same module\n"
        "  found: shape ['u0', '6', '8']\n"
        f"  came from: no module (forward), {line_of(double, 1)}, pass chunk\n"
        "  fix: write the update out of place"
    )


def test_writing_in_place_to_a_chunked_modules_input_is_refused() -> None:
    class Cloning(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    with pytest.raises(ChunkError, match=r"cannot write in place to `clone` in `mul_`"):
        chunked(trace(Cloning(Applied(lambda m, x: x.mul_(2.0) @ m.w, w=parameter(D, D)))), "layers.*")


def test_writing_in_place_from_outside_to_what_was_split_before_is_refused() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, 8)
    y = sketch.call(aten.mul.Tensor, x, 3.0, at="")
    z = sketch.call(aten.sin.default, y)
    written = sketch.call(aten.view.default, y, [sketch.call(aten.sym_size.int, y, 0, at=""), 48], at="")
    double = sketch.call(aten.mul_.Tensor, written, 2.0, at="")
    loss = sketch.call(
        aten.add.Tensor, sketch.call(aten.sum.default, z, at=""), sketch.call(aten.sum.default, double, at=""), at=""
    )
    assert refusal(sketch.finish(loss), sketch).startswith("ChunkError: cannot write in place to `view` in `mul_`")


def test_writing_in_place_to_what_the_same_chunk_computed_is_accepted() -> None:
    assert_as_eager(Layers(Applied(lambda m, x: (x @ m.w).mul_(2.0), w=parameter(D, D))), "layers.*")


def test_writing_in_place_outside_before_a_chunked_module_reads_is_accepted() -> None:
    class Doubling(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone().mul_(2.0))

    assert_as_eager(Doubling(scaling()), "layers.*")


# -- attention ----------------------------------------------------------------------------------------


def attend(module: Applied, x: Tensor) -> Tensor:
    q = (x @ module.w).unsqueeze(1)
    return scaled_dot_product_attention(q, q, q).squeeze(1)


def test_a_sequence_chunk_through_attention_is_refused() -> None:
    with pytest.raises(ChunkError) as error:
        chunked(trace(Layers(Applied(attend, w=parameter(D, D))), dim=1), "layers.*", "seq")
    found = "_scaled_dot_product_flash_attention_for_cpu"
    assert str(error.value) == (
        f"ChunkError: cannot chunk attention `{found}` along the sequence: every position reads earlier ones\n"
        "  expected: modules that treat each token alone, such as layers.*.moe\n"
        f"  found: {found}\n"
        f"  came from: layers.0 (forward), {line_of(attend, 2)}, pass chunk\n"
        "  fix: chunk along batch, or choose modules='layers.*.moe'"
    )


def test_a_batch_chunk_through_attention_is_accepted() -> None:
    assert_as_eager(Layers(Applied(attend, w=parameter(D, D))), "layers.*")


# -- modules that do not run ------------------------------------------------------------------------


def test_a_module_that_matches_but_is_never_called_is_refused_by_name() -> None:
    joint = trace(Layers(squaring(), squaring()))
    assert chunked(joint, "layers.*")
    with pytest.raises(ChunkError) as error:
        chunk(joint.module, context_of(joint, "layers"))
    assert str(error.value) == (
        "ChunkError: layers cannot be chunked: the pattern 'layers' matches, but no call runs\n"
        "  expected: a pattern of modules that the step calls: layers.*\n"
        "  found: no call of layers\n"
        "  fix: correct `modules` in the case's Chunking"
    )


def test_one_of_many_matching_modules_that_is_never_called_is_refused() -> None:
    model = Layers(squaring(), nn.Identity())
    model.forward = lambda x: model.layers[0](x)  # type: ignore[method-assign]
    joint = trace(model)
    with pytest.raises(ChunkError, match=r"^ChunkError: layers\.1 cannot be chunked: the pattern 'layers\.\*' matches"):
        chunk(joint.module, context_of(joint, "layers.*"))


def test_a_call_that_computes_nothing_of_the_chunked_dim_is_refused() -> None:
    model = Layers(squaring(), nn.Identity())
    joint = trace(model)
    with pytest.raises(ChunkError) as error:
        chunk(joint.module, context_of(joint, "layers.*"))
    assert str(error.value) == (
        "ChunkError: layers.1 cannot be chunked: not every call of it is left in the graph and depends on the "
        "chunked dim\n"
        "  expected: 1 calls in chunks, as many as were traced\n"
        "  found: 0\n"
        "  fix: choose modules whose every call computes with the chunked activation"
    )


def test_one_call_of_two_that_does_not_depend_on_the_chunked_dim_is_refused() -> None:
    doubling = Applied(lambda module, x: x + x)
    model = Layers(doubling, Applied(lambda module, x: x * doubling(module.w), w=parameter(D)))
    joint = trace(model)
    with pytest.raises(ChunkError, match=r"layers\.0 cannot be chunked: not every call") as error:
        chunk(joint.module, replace_only(context_of(joint, "layers.*"), "layers.0"))
    assert (error.value.expected, error.value.found) == ("2 calls in chunks, as many as were traced", "1")


def test_a_chosen_module_that_runs_within_another_is_refused() -> None:
    inner = squaring()
    model = Layers(Applied(lambda module, x: inner(x) + x), inner)
    joint = trace(model)
    with pytest.raises(ChunkError) as error:
        chunk(joint.module, context_of(joint, "layers.*"))
    lines = str(error.value).splitlines()
    assert lines[0] == "ChunkError: cannot chunk layers.1: it runs within layers.0, which is chunked too"
    assert "within layers.1 within layers.0" in lines[2]


def squaring() -> Applied:
    return Applied(lambda module, x: x * x * module.w, w=parameter(D))


def replace_only(context: PassContext, name: str) -> PassContext:
    assert context.chunking is not None
    return replace(context, chunking=replace(context.chunking, only=(name,)))
