"""Which of all files is taken: that of the fewest calls, cut at values that both sides have."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.powers.shrink.standalone.reading import Scene
from bitproof.harness.powers.shrink.standalone.shortening import shortest
from tests.harness.powers.shrink.standalone.test_standalone import body, graph_of, right, scene, wrong

VALUES = {"index": torch.ones(3, 3), "exp": torch.zeros(3, 3)}


def probed() -> Scene:
    """Two sides of which both have `exp`, bit for bit."""

    def saw(name: str) -> list[Any]:
        x: Tensor = VALUES[name]
        content = base64.b64encode(zlib.compress(x.numpy().tobytes(), 9)).decode()
        return [name, "float32", list(x.shape), list(x.stride()), content]

    stage = scene(graph_of(right), graph_of(wrong))
    values = {name: saw(name) for name in VALUES}
    stage.seen = [{"values": {"reference": values, "candidate": values}, "differing": ["grad layers.0.w"]}]
    return stage


def test_a_file_begins_at_the_last_value_that_both_sides_have() -> None:
    text, num_calls = shortest(probed(), ["grad layers.0.w"], True)
    assert num_calls == {"reference": 1, "candidate": 2}
    assert body(text, "reference")[0] == "mul = torch.ops.aten.mul.Tensor(x0, 2)"


def test_a_file_that_may_not_be_cut_begins_at_the_steps_own_inputs() -> None:
    _, num_calls = shortest(probed(), ["grad layers.0.w"], False)
    assert num_calls == {"reference": 3, "candidate": 4}


def test_of_several_outputs_the_one_that_needs_the_fewest_calls_is_shown() -> None:
    text, num_calls = shortest(probed(), ["grad layers.0.w", "loss"], True)
    assert num_calls == {"reference": 1, "candidate": 1}
    assert "return {'loss': sum_1}" in body(text, "candidate")
