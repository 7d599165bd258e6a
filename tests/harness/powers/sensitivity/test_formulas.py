"""Neighbouring formulas are the same numbers, but for rounding."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.powers.sensitivity.formulas import computed, names_of
from bitproof.harness.powers.sensitivity.lockstep import run_step
from bitproof.harness.powers.sensitivity.program import INPUT, PARAM
from tests.harness.powers.sensitivity.toy import aten, program_of

ONES = torch.linspace(0.1, 3.0, 24)
GROUPED = torch.linspace(-1, 1, 64).view(4, 16).to(torch.bfloat16)


def values(program, first, second):
    held = [{(PARAM, "w"): second, (INPUT, "x"): first} for _ in range(2)]
    return run_step(program, held)


CALLS = {
    "rsqrt": (aten.rsqrt.default, lambda w, x: (x,), ONES, ONES),
    "sigmoid": (aten.sigmoid.default, lambda w, x: (x,), ONES, ONES),
    "silu": (aten.silu.default, lambda w, x: (x,), ONES, ONES),
    "silu_backward": (aten.silu_backward.default, lambda w, x: (w, x), ONES, ONES),
    "sigmoid_backward": (aten.sigmoid_backward.default, lambda w, x: (w, x), ONES, ONES / 4),
    "exp": (aten.exp.default, lambda w, x: (x,), ONES, ONES),
    "div": (aten.div.Tensor, lambda w, x: (x, w), ONES, ONES + 1),
    "sum": (aten.sum.dim_IntList, lambda w, x: (x, [0]), ONES.view(6, 4), ONES),
    "mean": (aten.mean.dim, lambda w, x: (x, [-1], True), ONES.view(6, 4), ONES),
    "mm": (aten.mm.default, lambda w, x: (x, w), ONES.view(4, 6), ONES.view(6, 4)),
    "bmm": (aten.bmm.default, lambda w, x: (x, w), ONES.view(2, 2, 6), ONES.view(2, 6, 2)),
    "_softmax": (aten._softmax.default, lambda w, x: (x, -1, False), ONES.view(4, 6), ONES),
    "_log_softmax": (aten._log_softmax.default, lambda w, x: (x, -1, False), ONES.view(4, 6), ONES),
    "embedding_dense_backward": (
        aten.embedding_dense_backward.default,
        lambda w, x: (w, x, 3, -1, False),
        torch.tensor([0, 1, 0, 2]),
        ONES.view(4, 6),
    ),
    "_to_copy": (aten._to_copy.default, lambda w, x: (x,), ONES, ONES),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_neighbour_is_the_same_but_for_rounding(name):
    function, arguments, first, second = CALLS[name]
    options = {"dtype": torch.bfloat16} if name == "_to_copy" else {}
    program = program_of(lambda graph, w, x: [graph.call_function(function, arguments(w, x), options)])
    ranks = values(program, first, second)
    [call] = program.calls
    names = names_of(program, call)
    assert names
    for formula in names:
        found = computed(program, call, formula, [own.__getitem__ for own in ranks])
        assert set(found) == {(call.result, 0), (call.result, 1)}
        usual = ranks[0][call.result]
        torch.testing.assert_close(found[call.result, 0], usual)
        assert found[call.result, 0].stride() == usual.stride()


def test_attention_by_steps_keeps_what_lies_ahead_out():
    q = torch.linspace(-1, 1, 2 * 4 * 8).view(1, 2, 4, 8)
    call = aten._scaled_dot_product_flash_attention_for_cpu.default
    program = program_of(lambda graph, w, x: [graph.call_function(call, (x, x, w, 0.0, True))])
    ranks = values(program, q, q * 2)
    found = computed(program, program.calls[0], "by steps in float32", [own.__getitem__ for own in ranks])
    for mine, usual in zip(found[program.calls[0].result, 0], ranks[0][program.calls[0].result], strict=True):
        torch.testing.assert_close(mine, usual)


def test_a_product_in_a_sum_is_rounded_once_and_a_sum_of_a_sum_added_the_other_way():
    def contracted(graph, w, x):
        y = graph.call_function(aten.mul.Tensor, (x, w))
        z = graph.call_function(aten.add.Tensor, (y, x))
        return [graph.call_function(aten.add.Tensor, (z, w))]

    program = program_of(contracted)
    ranks = values(program, ONES, ONES.flip(0))
    gets = [own.__getitem__ for own in ranks]
    first, second = [call for call in program.calls if call.operator == "add"]
    assert names_of(program, first) == ["product 0 not rounded (FMA)"]
    assert names_of(program, second) == ["a + (b + c)"]
    fused = computed(program, first, "product 0 not rounded (FMA)", gets)[first.result, 0]
    exact = (ONES.double() * ONES.flip(0).double() + ONES.double()).float()
    assert torch.equal(fused, exact) and not torch.equal(fused, ranks[0][first.result])
    other = computed(program, second, "a + (b + c)", gets)[second.result, 0]
    torch.testing.assert_close(other, ranks[0][second.result])


def test_ranks_are_added_from_the_last():
    def summed(graph, w, x):
        return [graph.call_function(torch.ops._c10d_functional.reduce_scatter_tensor.default, (x, "sum", 2, "all"))]

    program = program_of(summed)
    ranks = run_step(program, [{(PARAM, "w"): ONES, (INPUT, "x"): ONES * n} for n in (1, 3)])
    [call] = program.calls
    found = computed(program, call, "from the last rank", [own.__getitem__ for own in ranks])
    assert torch.equal(found[call.result, 1], ranks[1][call.result]), "two summands have no order"
