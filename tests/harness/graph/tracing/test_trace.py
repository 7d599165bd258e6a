"""One traced step: what becomes an input and an output, and which steps are refused, by line."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import Mod

from bitproof.harness.errors import TraceError
from bitproof.harness.graph.tracing.trace import Guard, trace_joint_step
from tests.harness.graph.graphs import (
    CPU,
    SEED,
    Applied,
    B,
    D,
    Layers,
    S,
    assert_as_eager,
    batch,
    chunked,
    differing,
    line_of,
    listing,
    mean_square,
    parameter,
    run_eager,
    run_graph,
    trace,
)


def scale(module: Applied, x: Tensor) -> Tensor:
    return x * module.w


def test_a_step_is_traced_with_parameters_buffers_and_inputs_as_graph_inputs_in_that_order() -> None:
    model = Layers(Applied(scale, w=parameter(D), counter=torch.zeros(3)))
    joint = trace(model)
    shapes = [tuple(map(str, n.meta["val"].shape)) for n in joint.module.graph.nodes if n.op == "placeholder"]
    assert joint.parameter_names == ["layers.0.w"]
    assert joint.buffer_names == ["layers.0.counter"]
    assert joint.num_inputs == 1
    assert shapes == [("8",), ("3",), ("u0", "6", "8")]
    assert (str(joint.chunk_symbol.symbol), joint.chunk_symbol.hint) == ("u0", B)
    assert listing(joint.module)[0] == "mul = mul(arg1_1, arg0_1)"


def test_the_traced_step_has_the_bits_of_the_eager_step() -> None:
    model = Layers(nn.Linear(D, D), nn.LayerNorm(D))
    assert_as_eager(model, None)


def test_a_gradient_of_other_bits_would_be_seen() -> None:
    model = Layers(nn.Linear(D, D))
    step = run_eager(model, batch())
    flipped = dict(step) | {"grad layers.0.bias": -step["grad layers.0.bias"]}
    assert differing(step, flipped) == ["grad layers.0.bias"]


def test_the_model_may_live_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Layers(nn.Linear(D, D))
    x = torch.empty(B, S, D, device="meta")
    joint = trace_joint_step(model, mean_square(model), [x], chunk_dim=0, gradient_seed=1.0, device=CPU)
    assert {n.meta["val"].device.type for n in joint.module.graph.nodes if n.op == "placeholder"} == {"cpu"}


def test_a_layer_norm_may_flatten_the_open_dim() -> None:
    trace(Layers(Applied(lambda m, x: (x.view(-1, D) * m.w).view(x.shape), w=parameter(D))))


def test_a_view_of_a_constant_number_of_rows_is_refused_naming_the_line() -> None:
    def flatten(module: Applied, x: Tensor) -> Tensor:
        return x.view(24, D) * module.w

    with pytest.raises(TraceError) as error:
        trace(Layers(Applied(flatten, w=parameter(D))))
    assert str(error.value) == (
        "TraceError: the training step fixes the size of dim 0 of its inputs, which must be left open\n"
        "  expected: sizes computed from x.shape, so that dim 0 may have any size\n"
        "  found: a number that fits only u0 = 4\n"
        f"  came from: {line_of(flatten, 1)}\n"
        "  fix: write the size as x.shape[...] or -1, not as a number"
    )


def test_adding_a_constant_of_the_whole_batch_is_refused_naming_the_line() -> None:
    def add_ones(module: Applied, x: Tensor) -> Tensor:
        return (x + torch.ones(B, S, D)) * module.w

    with pytest.raises(TraceError, match=r"which must be left open[^$]*came from: " + line_of(add_ones, 1)):
        trace(Layers(Applied(add_ones, w=parameter(D))))


def test_a_constant_that_broadcasts_over_the_batch_is_accepted() -> None:
    trace(Layers(Applied(lambda m, x: (x + torch.ones(1, S, D)) * m.w, w=parameter(D))))


def test_a_branch_on_the_open_size_is_refused_naming_the_line() -> None:
    def branch(module: Applied, x: Tensor) -> Tensor:
        return x * module.w if x.shape[0] > 3 else x

    with pytest.raises(TraceError) as error:
        trace(Layers(Applied(branch, w=parameter(D))))
    assert str(error.value) == (
        "TraceError: cannot trace the training step with dim 0 of its inputs left open\n"
        "  expected: code that does not branch on, or bake in, the size of that dim\n"
        "  found: GuardOnDataDependentSymNode: Could not guard on data-dependent expression u0 > 3 "
        "(unhinted: u0 > 3).  (Size-like symbols: u0)\n"
        f"  came from: {line_of(branch, 1)}\n"
        "  fix: write the size as x.shape[...], never as int(...) or in an `if`"
    )


def test_a_refusal_on_a_torch_that_was_never_tested_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(TraceError) as error:
        trace(Layers(Applied(lambda m, x: x * m.w if x.shape[0] > 3 else x, w=parameter(D))))
    assert str(error.value).startswith(
        "TraceError: torch 2.14.0+cpu is not among the tested versions (2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0); "
        "on it: cannot trace the training step with dim 0 of its inputs left open\n"
    )
    assert "fix: install a tested version, or, if it is not to blame: write the size as x.shape[...]" in str(
        error.value
    )


def test_a_branch_on_another_size_is_accepted() -> None:
    trace(Layers(Applied(lambda m, x: x * m.w if x.shape[1] > 3 else x, w=parameter(D))))


def test_a_condition_on_the_open_size_is_kept_as_a_guard_with_its_line() -> None:
    def check(module: Applied, x: Tensor) -> Tensor:
        torch._check(x.shape[0] % 2 == 0)
        return x * module.w

    joint = trace(Layers(Applied(check, w=parameter(D))))
    symbol = joint.chunk_symbol.symbol
    assert joint.guards == [
        Guard(sympy.Le(2, symbol), None),
        Guard(sympy.Le(symbol, 4), None),
        Guard(sympy.Eq(Mod(symbol, 2), 0), line_of(check, 1)),
    ]


def test_a_buffer_that_gets_another_tensor_instead_of_a_write_is_refused() -> None:
    def counted(module: Applied, x: Tensor) -> Tensor:
        module.counter = module.counter + 1
        return x * module.w * module.counter

    with pytest.raises(TraceError, match=r"replaces the tensor of buffer layers\.0\.counter\n"):
        trace(Layers(Applied(counted, w=parameter(D), counter=torch.zeros(()))))


def test_an_odd_number_of_sequences_is_refused() -> None:
    with pytest.raises(TraceError) as error:
        trace(Layers(Applied(scale, w=parameter(D))), torch.randn(3, S, D))
    assert str(error.value) == (
        "TraceError: the inputs cannot be chunked along dim 0\n"
        "  expected: one even size, common to all inputs\n"
        "  found: (3, 6, 8)\n"
        "  fix: choose an even number of sequences (batch) or sequence length (seq) in the case"
    )


@pytest.mark.parametrize("extent", [1, 3])
def test_an_odd_number_of_sequences_that_stay_whole_is_traced(extent: int) -> None:
    model = Layers(Applied(scale, w=parameter(D), counter=torch.zeros(3)))
    x = torch.randn(extent, S, D)
    options: Any = {"chunk_dim": 0, "gradient_seed": SEED, "device": CPU, "is_cut": False}
    joint = trace_joint_step(model, mean_square(model), [x], **options)
    assert differing(run_graph(chunked(joint, None), joint, model, x), run_eager(model, x)) == []


def test_inputs_of_differing_sizes_are_refused() -> None:
    inputs = [torch.randn(4, S), torch.randn(2, S)]
    with pytest.raises(TraceError) as error:
        trace_joint_step(nn.Identity(), lambda a, b: a.sum(), inputs, chunk_dim=0, gradient_seed=1.0, device=CPU)
    assert str(error.value) == (
        "TraceError: the inputs cannot be chunked along dim 0\n"
        "  expected: one even size, common to all inputs\n"
        "  found: (4, 6), (2, 6)\n"
        "  fix: choose an even number of sequences (batch) or sequence length (seq) in the case"
    )


def test_the_inputs_sizes_along_another_dim_may_differ() -> None:
    model = Layers(Applied(scale, w=parameter(D)))
    joint = trace_joint_step(
        model,
        lambda x, y: model(x).sum() + y.sum(),
        [torch.randn(4, S, D), torch.randn(4, 2)],
        chunk_dim=0,
        gradient_seed=1.0,
        device=CPU,
    )
    symbols = {str(n.meta["val"].shape[0]) for n in list(joint.module.graph.nodes)[1:3]}
    assert symbols == {"u0"}, "one symbol for both"


def test_a_loss_without_parameters_is_refused() -> None:
    with pytest.raises(TraceError, match="does not require grad"):
        trace(Layers(Applied(lambda m, x: x.sin(), w=parameter(D))))


def test_a_tied_parameter_is_one_graph_input() -> None:
    w = parameter(D)
    joint = trace(Layers(Applied(scale, w=w), Applied(scale, w=w)))
    assert joint.parameter_names == ["layers.0.w"]
