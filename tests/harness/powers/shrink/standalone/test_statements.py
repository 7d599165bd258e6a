"""A graph's calls as lines of Python, and what cannot be one."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph

from bitproof.harness.powers.shrink.standalone.reading import NoFileError
from bitproof.harness.powers.shrink.standalone.statements import function_text

aten = torch.ops.aten


def text_of(target: Any, *args: Any, probing: bool = False, **kwargs: Any) -> list[str]:
    """A function of one call on one input, a line each."""
    graph = Graph()
    x = graph.placeholder("x")
    call = graph.create_node("call_function", target, (x, *args), kwargs, name="y")
    return function_text("candidate", [call], {x: "x0", call: "y"}, {"loss": call}, probing).splitlines()


def test_a_function_has_a_line_a_call_below_its_module() -> None:
    assert text_of(aten.sum.default, dtype=torch.float32) == [
        "def candidate(INPUTS):",
        "    # no module (forward)",
        "    y = torch.ops.aten.sum.default(x0, dtype=torch.float32)",
        "    return {'loss': y}",
    ]


def test_a_file_that_probes_looks_at_each_value() -> None:
    assert text_of(aten.neg.default, probing=True)[3] == "    see('y', y)"


@pytest.mark.parametrize(
    ("target", "args", "line"),
    [
        (operator.getitem, (1,), "y = x0[1]"),
        (operator.add, (2,), "y = operator.add(x0, 2)"),
        (aten.view.default, ([2, -1],), "y = torch.ops.aten.view.default(x0, [2, -1])"),
        (aten.add.Tensor, (float("inf"),), "y = torch.ops.aten.add.Tensor(x0, float('inf'))"),
        (aten.to.device, (torch.device("cpu"), None), "y = torch.ops.aten.to.device(x0, torch.device('cpu'), None)"),
        (operator.getitem, ((slice(0, 2), None),), "y = x0[(slice(0, 2, None), None, )]"),
    ],
)
def test_arguments_are_written_so_that_they_come_back(target: Any, args: tuple[Any, ...], line: str) -> None:
    assert text_of(target, *args)[2].strip() == line


def test_an_argument_that_is_no_literal_is_refused_by_its_type() -> None:
    with pytest.raises(NoFileError) as refusal:
        text_of(aten.add.Tensor, {1})
    assert refusal.value.what == "a graph has an argument of type set, which cannot be written down"
