"""What is read of a graph and of the values seen in it: the calls that an output needs, and inputs with their bytes."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from bitproof.harness.powers.shrink.standalone.reading import Side, content_of, input_of
from tests.harness.powers.shrink.standalone.test_standalone import TOKENS, graph_of, right, scene


@pytest.fixture
def side() -> Side:
    return scene(graph_of(right), graph_of(right)).sides["reference"]


def test_outputs_are_the_loss_gradients_and_buffers(side: Side) -> None:
    assert list(side.outputs) == ["loss", "grad layers.0.w", "buffer count"]
    assert [name for name in side.placeholders.values()] == ["layers.0.w", "count", "tokens"]


def test_a_walk_goes_back_to_placeholders_and_stops_at_what_is_known(side: Side) -> None:
    gradient = side.outputs["grad layers.0.w"]
    calls, inputs = side.walk([gradient], lambda node: False)
    assert [node.name for node in calls] == ["index", "exp", "mul"]
    assert [side.placeholders[node] for node in inputs] == ["layers.0.w", "tokens"]
    calls, inputs = side.walk([gradient], lambda node: node.name == "exp")
    assert ([node.name for node in calls], [node.name for node in inputs]) == (["mul"], ["exp"])


def test_a_buffer_is_followed_through_what_writes_into_it(side: Side) -> None:
    calls, inputs = side.walk([side.outputs["buffer count"]], lambda node: True)
    assert [node.name for node in calls] == ["add_"]
    assert [side.placeholders[node] for node in inputs] == ["count", "tokens"]


def seen(x: Tensor, shape: list[int] | None = None, stride: list[int] | None = None) -> dict[str, Any]:
    """What one rank saw: the value of every `exp`."""
    content = base64.b64encode(zlib.compress(x.numpy().tobytes(), 9)).decode()
    value = ["digest", "float32", shape or list(x.shape), stride or list(x.stride()), content]
    return {"values": {"reference": {"exp": value}, "candidate": {}}, "differing": []}


@pytest.mark.parametrize(
    ("values", "contents"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], ([1.0, 2.0],)),
        ([[1.0, 2.0], [1.0, 3.0]], ([1.0, 2.0], [1.0, 3.0])),
    ],
)
def test_few_numbers_are_readable_and_stand_once_where_all_ranks_have_them(
    values: list[list[float]], contents: tuple[Any, ...]
) -> None:
    stage = scene(graph_of(right), graph_of(right), world_size=2)
    stage.seen = [seen(torch.tensor(x)) for x in values]
    [node] = [node for node in stage.sides["reference"].graph.module.graph.nodes if node.name == "exp"]
    found = input_of(stage, "reference", node, 3)
    assert (found.name, found.dtype, found.shape, found.contents) == ("x3", "float32", (2,), contents)


def test_what_numbers_cannot_say_or_what_overlaps_itself_is_not_written_as_numbers() -> None:
    stage = scene(graph_of(right), graph_of(right))
    [node] = [node for node in stage.sides["reference"].graph.module.graph.nodes if node.name == "exp"]
    stage.seen = [seen(torch.tensor([math.nan]))]
    found = content_of(stage, "reference", node)
    assert found is not None and isinstance(found.contents[0], str)
    stage.seen = [seen(torch.ones(2), shape=[2], stride=[0])]
    assert content_of(stage, "reference", node) is None


def test_tokens_are_those_of_the_case_and_parameters_are_drawn(side: Side) -> None:
    stage = scene(graph_of(right), graph_of(right))
    nodes = {name: node for node, name in stage.sides["reference"].placeholders.items()}
    assert input_of(stage, "reference", nodes["tokens"], 0).contents == (TOKENS.tolist(),)
    drawn = input_of(stage, "reference", nodes["layers.0.w"], 1)
    assert (drawn.name, drawn.shape, drawn.contents) == ("layers_0_w_1", (4, 3), ())
