"""Gathers and reductions that run once a step: which calls they are, the bits of a step, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bitproof.harness.case import Schedule
from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged.placed_calls import Once
from tests.harness.graph.graphs import Applied, D, Layers, parameter
from tests.harness.graph.staged.stages import bits, parts_of, run
from tests.harness.graph.staged.test_staged_step import run_whole

aten = torch.ops.aten
BOTH = Once(gathers=True, reductions=True)


def narrow(module: Applied, x: Tensor) -> Tensor:
    """Compute in bfloat16, by a cast of the parameter as sharded ones have: its gradient is cast back."""
    return x + (x.bfloat16() @ module.matrix.to(torch.bfloat16)).float()


def narrow_layer() -> Applied:
    return Applied(narrow, matrix=parameter(D, D))


def targets(part: Any) -> list[Any]:
    return [node.target for node in part.module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("once", [Once(), Once(gathers=True), Once(reductions=True), BOTH])
@pytest.mark.parametrize("count", [1, 4])
def test_a_step_has_the_bits_of_the_whole_graph_on_one_rank_whatever_runs_once(once: Once, count: int) -> None:
    model = Layers(*(narrow_layer() for _ in range(4)))
    joint, parts = parts_of(model, 2, once=once)
    schedule = Schedule(micro_batches=count, order="gpipe")
    assert bits(run(joint, parts, model, schedule, 2)) == bits(run_whole(joint, model, count))


def test_casts_of_parameters_and_of_gradients_run_once_a_step_and_each_stage_has_its_own() -> None:
    joint, parts = parts_of(Layers(narrow_layer(), narrow_layer()), 2, once=BOTH)
    assert parts.once_parts.keys() == {(stage, kind) for stage in (0, 1) for kind in ("gathers", "reductions")}
    for stage in (0, 1):
        # Backward of the second stage also reads the cast's transpose.
        assert targets(parts.once_parts[stage, "gathers"]) == [aten._to_copy.default, *[aten.t.default] * stage]
        assert targets(parts.once_parts[stage, "reductions"]) == [aten._to_copy.default]
        assert parts.once_parts[stage, "reductions"].inputs[0] in parts.summed
    runs: list[Any] = []
    run(joint, parts, Layers(narrow_layer(), narrow_layer()), Schedule(), 2, lambda step: _listen(step, runs))
    assert [runs.count(part.module) for part in parts.once_parts.values()] == [1] * 4
    assert [runs.count(part.module) for part in parts.by_place.values()] == [4] * 4


def _listen(step: Any, runs: list[Any]) -> None:
    own = step._run
    step._run = lambda module: runs.append(module) or own(module)


def test_without_the_settings_nothing_runs_once() -> None:
    _, parts = parts_of(Layers(narrow_layer(), narrow_layer()), 2)
    assert not parts.once_parts and not parts.summed


def counted(module: Applied, x: Tensor) -> Tensor:
    """Scale the parameter by a buffer that each micro-batch changes: not to be computed once."""
    weight = module.matrix.to(torch.bfloat16) * module.seen.clone()
    module.seen.add_(1)
    return x + (x @ weight.float())


def test_what_reads_a_buffer_besides_parameters_runs_for_each_micro_batch() -> None:
    model = Layers(*(Applied(counted, matrix=parameter(D, D), seen=torch.ones(1)) for _ in range(2)))
    joint, parts = parts_of(model, 2, once=BOTH)
    assert targets(parts.once_parts[0, "gathers"]) == [aten._to_copy.default]
    assert aten.mul.Tensor in targets(parts.by_place[0, "forward"])
    assert bits(run(joint, parts, model, Schedule(), 2)) == bits(run_whole(joint, model, 4))


def narrowed_twice(module: Applied, x: Tensor) -> Tensor:
    """The gradient is narrowed on its way to the parameter: a sum of narrowed values, not a narrowed sum."""
    return x + x @ module.matrix.to(torch.float64).to(torch.bfloat16).float()


def test_a_gradient_that_is_narrowed_is_narrowed_for_each_micro_batch() -> None:
    model = Layers(*(Applied(narrowed_twice, matrix=parameter(D, D)) for _ in range(2)))
    joint, parts = parts_of(model, 2, once=Once(reductions=True))
    # From float64 to float32, the parameter's dtype: the last cast narrows, so nothing is taken out.
    assert not parts.once_parts
    assert bits(run(joint, parts, model, Schedule(), 2)) == bits(run_whole(joint, model, 4))


def read_twice(module: Applied, x: Tensor) -> Tensor:
    return narrow(module, narrow(module, x))


def test_a_parameter_that_is_read_twice_is_refused_by_its_gradient() -> None:
    model = Layers(Applied(read_twice, matrix=parameter(D, D)), narrow_layer())
    parts_of(model, 2, once=Once(gathers=True))
    with pytest.raises(PassError) as error:
        parts_of(model, 2, once=BOTH)
    assert str(error.value).startswith("PassError: the reduction of the gradient `")
    assert "expected: gradients that one use of a parameter computes" in str(error.value)
    assert "fix: set schedule.reductions_once to False" in str(error.value)
