"""Every node knows its module, direction and line; what autograd adds by itself has no owner."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor, nn

from bitproof.harness.capture import digest
from bitproof.harness.graph.origin import Origin, calls_of, origin_of, user_line
from tests.harness.graph.graphs import Applied, D, Layers, calls, line_of, parameter, trace


def scale(module: Applied, x: Tensor) -> Tensor:
    return x.sin() * module.w


def residual(module: Applied, x: Tensor) -> Tensor:
    return x + x.sin() * module.w


def modules_of(model: nn.Module, *operators: str) -> list[tuple[str | None, str]]:
    return [origin_of(node)[:2] for node in calls(trace(model).module, *operators)]


def test_forward_nodes_take_the_innermost_running_module_and_its_line() -> None:
    joint = trace(Layers(nn.Sequential(Applied(scale, w=parameter(D))), Applied(scale, w=parameter(D))))
    assert [origin_of(node) for node in calls(joint.module, "sin")] == [
        Origin("layers.0.0", "forward", line_of(scale, 1)),
        Origin("layers.1", "forward", line_of(scale, 1)),
    ]


def test_backward_nodes_take_their_forwards_module_in_reverse() -> None:
    model = Layers(Applied(scale, w=parameter(D)), Applied(scale, w=parameter(D)))
    # The derivative of sin is cos. Layer 0's input needs no gradient, so only layer 1 computes it.
    assert modules_of(model, "cos") == [("layers.1", "backward")]
    assert modules_of(model, "sum") == [("layers.1", "backward"), ("layers.0", "backward")]


def test_backward_nodes_name_their_forwards_line() -> None:
    joint = trace(Layers(Applied(scale, w=parameter(D)), Applied(scale, w=parameter(D))))
    (cos,) = calls(joint.module, "cos")
    assert origin_of(cos).source == line_of(scale, 1)


def test_the_loss_belongs_to_the_root_which_is_no_modules_name() -> None:
    assert modules_of(Layers(Applied(scale, w=parameter(D))), "mean") == [("", "forward")]


def test_what_autograd_adds_has_no_owner_and_what_the_model_adds_has_one() -> None:
    model = Layers(Applied(residual, w=parameter(D)), Applied(residual, w=parameter(D)))
    assert modules_of(model, "add") == [("layers.0", "forward"), ("layers.1", "forward"), (None, "backward")]


def test_every_node_but_inputs_and_output_is_stamped() -> None:
    joint = trace(Layers(nn.Linear(D, D), nn.LayerNorm(D)))
    assert all("origin" in n.meta for n in joint.module.graph.nodes if n.op not in ("placeholder", "output"))


def test_forward_nodes_know_the_calls_they_lie_in_and_how_many_calls_of_each_module_went_before() -> None:
    model = Layers(nn.Sequential(Applied(scale, w=parameter(D))))
    model.layers.append(model.layers[0][0])  # one module of two names, called by both
    joint = trace(model)
    first, second = (calls_of(node) for node in calls(joint.module, "sin"))
    assert first == (("layers.0", 0), ("layers.0.0", 0))
    assert second == (("layers.0.0", 1),)
    assert not any(calls_of(n) for n in joint.module.graph.nodes if origin_of(n).direction == "backward")


def test_every_module_of_the_model_is_reported_with_its_calls_those_that_did_not_run_too() -> None:
    model = Layers(nn.Sequential(Applied(scale, w=parameter(D))))
    model.idle = nn.Identity()
    assert trace(model).module_calls == {"layers": 0, "layers.0": 1, "layers.0.0": 1, "idle": 0}


def test_tracing_leaves_no_hook_behind() -> None:
    before = len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks)
    trace(Layers(Applied(scale, w=parameter(D))))
    after = len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks)
    assert before == after


def test_a_line_of_torch_or_of_the_tracer_is_not_the_users() -> None:
    assert user_line(torch.__file__, 1) is None
    assert user_line(trace.__globals__["trace_joint_step"].__code__.co_filename, 1) is None
    assert user_line("<string>", 1) is None
    assert user_line(contextlib.__file__, 81) is None
    assert (
        user_line(f"{Path(contextlib.__file__).parent}/site-packages/trl/trainer.py", 7)
        == "site-packages/trl/trainer.py:7"
    )
    assert user_line("/home/me/torch/harness/graph/model.py", 7) == "harness/graph/model.py:7"


def test_a_line_of_this_package_is_not_the_users() -> None:
    assert user_line(digest.__file__, 1) is None


def test_a_line_of_a_file_named_without_its_folder_keeps_the_files_name() -> None:
    assert user_line("trainer.py", 56) == "trainer.py:56"
    assert user_line("mine/trainer.py", 56) == "mine/trainer.py:56"
    assert user_line("/trainer.py", 56) == "trainer.py:56"


def test_an_origin_reads_as_module_and_direction() -> None:
    assert str(Origin("layers.0", "backward")) == "layers.0 (backward)"
    assert str(Origin(None, "forward")) == str(Origin("", "forward")) == "no module (forward)"
