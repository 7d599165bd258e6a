"""What a graph's node says of its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from bitproof.harness.errors import UsageError
from bitproof.harness.graph.origin import UNKNOWN, Origin
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.localize.logs.calls import CallSite
from bitproof.harness.localize.logs.node_call_sites import part_of, place_of


def node(**meta: Any) -> Node:
    found = Graph().placeholder("x")
    found.meta.update(meta)
    return found


def test_a_node_of_this_packages_graphs_says_it_by_its_origin_and_chunk() -> None:
    found = node(origin=Origin("layers.0", "backward", "model.py:3"), **{CHUNK_KEY: 1})
    assert place_of(found) == (CallSite("layers.0", "backward", 1), "model.py:3")


def test_a_foreign_node_says_it_by_plain_values_of_which_all_are_optional() -> None:
    assert place_of(node(bitproof={"direction": "update"})) == (CallSite(None, "update"), None)
    assert place_of(node(bitproof={})) == (CallSite(None, None), None)


def test_a_nodes_part_is_its_origins_or_what_a_foreign_graph_says_or_torchs_annotation() -> None:
    assert part_of(node(origin=Origin("layers.0", "backward", part="combine"))) == "combine"
    assert part_of(node(bitproof={"part": "routing"}, custom={"EP": "combine"})) == "routing"
    assert part_of(node(custom={"EP": "combine", "stream": 1})) == "combine"
    assert part_of(node(custom=None)) is part_of(node(bitproof={})) is part_of(node()) is None
    with pytest.raises(UsageError, match=r"source \(text\), part \(text\)"):
        part_of(node(bitproof={"part": 3}))


def test_a_node_that_says_nothing_belongs_nowhere_that_is_known() -> None:
    assert place_of(node()) == (CallSite(None, None), None)


def chain(*origins: tuple[Origin | None, int | None]) -> list[Node]:
    """Calls that each read the one before, with these origins and chunks."""
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for origin, chunk in origins:
        nodes.append(graph.call_function(abs, (nodes[-1],)))
        nodes[-1].meta.update({"origin": origin or UNKNOWN} | ({} if chunk is None else {CHUNK_KEY: chunk}))
    return nodes[1:]


FORWARD, BACKWARD = Origin("layers.0", "forward"), Origin("layers.1", "backward")


def test_a_node_of_a_users_pass_belongs_where_what_it_reads_belongs_though_not_to_its_line() -> None:
    _, first, second, _ = chain((FORWARD._replace(source="model.py:3"), 1), (None, None), (None, None), (BACKWARD, 0))
    assert place_of(first) == place_of(second) == (CallSite("layers.0", "forward", 1), None)


def test_a_node_that_writes_a_buffer_belongs_where_that_is_written_and_not_where_what_it_adds_was_made() -> None:
    graph = Graph()
    buffer, x = graph.placeholder("buffer"), graph.placeholder("x")
    counts = graph.call_function(torch.ops.aten.neg.default, (x,))
    counts.meta["origin"] = FORWARD._replace(module="layers.0.router")
    once = graph.call_function(torch.ops.aten.add_.Tensor, (buffer, counts))
    once.meta["origin"] = FORWARD
    twice, read = (graph.call_function(op, (buffer, counts)) for op in (once.target, torch.ops.aten.add.Tensor))
    twice.meta["origin"] = read.meta["origin"] = UNKNOWN
    assert place_of(twice) == (CallSite("layers.0", "forward"), None)
    assert place_of(read) == (CallSite("layers.0.router", "forward"), None)


def test_where_nothing_that_is_read_shows_it_belongs_where_its_first_reader_does() -> None:
    made, _ = chain((None, None), (BACKWARD, 0))
    assert place_of(made) == (CallSite("layers.1", "backward", 0), None)


def test_what_reads_of_forward_and_of_backward_belongs_to_backward_and_of_two_chunks_to_none() -> None:
    first, second = chain((FORWARD, 0), (BACKWARD, 1))
    both = first.graph.call_function(max, (first, second))
    both.meta["origin"] = UNKNOWN
    assert place_of(both) == (CallSite("layers.1", "backward", None), None)


def test_where_no_neighbour_shows_nothing_is_known() -> None:
    assert place_of(chain((None, None))[0]) == (CallSite(None, None, None), None)


@pytest.mark.parametrize("said", ["backward", {"direction": "back"}, {"chunk": "1"}, {"where": "layers.0"}])
def test_a_node_that_says_it_in_another_form_is_refused_by_name(said: Any) -> None:
    with pytest.raises(UsageError) as error:
        place_of(node(bitproof=said))
    assert str(error.value).startswith("UsageError: node x of a system's graph states its place in an unknown form")
    assert repr(said) in str(error.value)
