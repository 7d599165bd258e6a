"""Programs: calls over slots, in which nothing is overwritten."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.errors import PassError
from bitproof.harness.graph.observation import observed
from bitproof.harness.powers.sensitivity.lockstep import after, run_step
from bitproof.harness.powers.sensitivity.program import BUFFER, PARAM, Slot, filled, slots_in
from bitproof.harness.powers.sensitivity.spread import follow
from tests.harness.powers.sensitivity.toy import (
    COUNTED,
    THREE,
    VALUES,
    aten,
    by_name,
    counted,
    pair,
    product,
    program_of,
)


def test_what_computes_nothing_is_no_call_that_counts():
    program = program_of(product)
    assert [call.operator for call in program.calls if call.counts] == [
        "mul", "slice", "neg", "mul", "slice", "add", "all_reduce",
    ]  # fmt: skip
    assert [call.operator for call in program.calls if not call.counts] == ["wait_tensor"]


def test_a_written_buffer_gets_a_slot_for_each_write_and_readers_read_the_one_of_their_time():
    program = program_of(counted, COUNTED, THREE)
    held = {(PARAM, "w"): torch.tensor([1.0]), (BUFFER, "counts"): torch.tensor([10.0])}
    [values] = run_step(program, [held])
    assert [values[slot].item() for slot in program.compared.values()] == [20.0, 22.0, 24.0]
    assert after(program, values)[BUFFER, "counts"].item() == 12.0
    assert held[BUFFER, "counts"].item() == 10.0, "what a step starts from stays"


def test_a_view_of_written_memory_may_be_read_before_the_write_and_not_after_it():
    def viewed(late):
        def build(graph, w, counts):
            view = graph.call_function(aten.view.default, (counts, [1]))
            early = graph.call_function(aten.mul.Tensor, (view, 2.0))
            graph.call_function(aten.add_.Tensor, (counts, w))
            return [graph.call_function(aten.mul.Tensor, (view, 3.0)) if late else early]

        return program_of(build, COUNTED)

    held = [{(PARAM, "w"): torch.tensor([1.0]), (BUFFER, "counts"): torch.tensor([10.0])}]
    program = viewed(late=False)
    assert run_step(program, held)[0][program.compared["loss", "loss"]].item() == 20.0
    with pytest.raises(PassError, match="an earlier view reads later"):
        run_step(viewed(late=True), held)


def test_an_observed_activation_is_compared_where_it_is_shown_and_is_no_call_that_counts():
    def build(graph, w, x):
        y = graph.call_function(aten.mul.Tensor, (x, w))
        z = graph.call_function(aten.neg.default, (y,))
        graph.call_function(observed, ("a@forward", [y], None, None))
        graph.call_function(observed, ("b@forward", [y, z], 0, None))
        graph.call_function(observed, ("c@forward.chunk1", [z], 0, 1))
        return [graph.call_function(aten.mul.Tensor, (z, 0.0))]

    program = program_of(build)
    values = run_step(program, VALUES)[0]
    found = {name: values[slot].tolist() for (kind, name), slot in program.compared.items() if kind == "activation"}
    y = [0.5, 3.0, 7.5, 14.0]
    assert found == {"a@forward": y, "b@forward": [*y, *(-x for x in y)], "c@forward.chunk1": [-7.5, -14.0]}
    assert [call.operator for call in program.calls if call.counts] == ["mul", "neg", "mul"]
    wrong = {(by_name(program, "neg").result, 0): values[by_name(program, "neg").result] + 1}
    assert follow(program, run_step(program, VALUES), wrong).shown == "activation", "the loss is zero, whatever it is"
    unseen = program_of(lambda graph, w, x: [graph.call_function(aten.mul.Tensor, (x, 0.0))])
    assert unseen.compared.keys() == {("loss", "loss")}


def test_a_collective_of_an_unknown_group_is_refused():
    def build(graph, w, x):
        return [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "some"))]

    with pytest.raises(PassError, match="unknown process group"):
        program_of(build)


def test_of_several_results_the_ones_that_are_read_are_targets():
    program = program_of(pair)
    assert program.targets(by_name(program, "sort")) == [by_name(program, "getitem").result]
    program = program_of(product)
    assert program.targets(by_name(program, "mul")) == [by_name(program, "mul").result]


def test_slots_are_found_and_filled_wherever_they_stand():
    nested = (Slot(1), [Slot(2), 3], "text")
    assert list(slots_in(nested)) == [1, 2]
    assert filled(nested, lambda slot: slot * 10) == (10, [20, 3], "text")
    assert VALUES[0].keys() == program_of(product).inputs.keys()
