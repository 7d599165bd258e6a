"""What a graph's node says of its place."""

from __future__ import annotations

from typing import Any

import pytest
from torch.fx import Graph, Node

from harness.errors import UsageError
from harness.graph.origin import Origin
from harness.graph.writer import CHUNK_KEY
from harness.localize.calls import Place
from harness.localize.node_places import place_of


def node(**meta: Any) -> Node:
    found = Graph().placeholder("x")
    found.meta.update(meta)
    return found


def test_a_node_of_this_packages_graphs_says_it_by_its_origin_and_chunk() -> None:
    found = node(origin=Origin("layers.0", "backward", "model.py:3"), **{CHUNK_KEY: 1})
    assert place_of(found) == (Place("layers.0", "backward", 1), "model.py:3")


def test_a_foreign_node_says_it_by_plain_values_of_which_all_are_optional() -> None:
    assert place_of(node(bitproof={"direction": "update"})) == (Place(None, "update"), None)
    assert place_of(node(bitproof={})) == (Place(None, None), None)


def test_a_node_that_says_nothing_belongs_nowhere_that_is_known() -> None:
    assert place_of(node()) == (Place(None, None), None)


@pytest.mark.parametrize("said", ["backward", {"direction": "back"}, {"chunk": "1"}, {"where": "layers.0"}])
def test_a_node_that_says_it_in_another_form_is_refused_by_name(said: Any) -> None:
    with pytest.raises(UsageError) as error:
        place_of(node(bitproof=said))
    assert str(error.value).startswith("UsageError: node x of a system's graph says where it belongs in a form")
    assert repr(said) in str(error.value)
