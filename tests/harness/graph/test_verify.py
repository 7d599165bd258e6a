"""What must hold of a graph between passes, and the graphs of which it does not."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from harness.errors import PassError
from harness.graph.verify import verify
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten


@pytest.fixture
def module() -> GraphModule:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    return sketch.finish(sketch.call(aten.neg.default, sketch.call(aten.sin.default, x)))


def test_a_graph_in_order_with_values_and_origins_passes(module: GraphModule) -> None:
    verify(module)


def test_a_node_read_before_it_is_written_is_refused(module: GraphModule) -> None:
    _, sin, neg, _ = module.graph.nodes
    neg.append(sin)
    with pytest.raises(PassError) as error:
        verify(module)
    lines = str(error.value).splitlines()
    assert lines[:2] == ["PassError: the graph is malformed", "  expected: topological order"]
    assert lines[2].startswith("  found: Argument 'sin' of Node 'neg' was used before it has been defined!")


@pytest.mark.parametrize(("missing", "left"), [("val", "origin"), ("origin", "val")])
def test_a_call_without_value_or_origin_is_refused_by_name(module: GraphModule, missing: str, left: str) -> None:
    sin = list(module.graph.nodes)[1]
    del sin.meta[missing]
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        "PassError: node `sin` (aten.sin.default) lacks metadata\n"
        "  expected: 'val' and 'origin' in node.meta\n"
        f"  found: {left}"
    )


def test_a_call_without_any_metadata_is_refused(module: GraphModule) -> None:
    list(module.graph.nodes)[1].meta.clear()
    with pytest.raises(PassError, match=r"found: nothing$"):
        verify(module)
