"""Small graphs under the knife: what is found, what is changed, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from bitproof.builtin_cases import CASES
from bitproof.harness.disturb.entry import Entry, Site
from bitproof.harness.disturb.faults import kernels
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.disturb.graph_editor import GraphEditor, NoPlaceError
from bitproof.harness.disturb.mutate import mutate
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.observation import insert_observers, observed, observed_by
from bitproof.harness.graph.origin import META_KEY, Origin

aten = torch.ops.aten
CASE = CASES["moe_seq"]


def small() -> GraphModule:
    """silu of each half of x, joined, and added to x."""
    graph = Graph()
    x = graph.placeholder("x")
    halves = []
    for chunk in (0, 1):
        half = graph.call_function(aten.slice.Tensor, (x, 0, 2 * chunk, 2 * chunk + 2))
        node = graph.create_node("call_function", aten.silu.default, (half,), name=f"silu_chunk{chunk}")
        halves.append(node)
        for made in (half, node):
            made.meta |= {META_KEY: Origin("layers.0.moe", "forward"), "chunk": chunk, "val": torch.empty(2, 3)}
    joined = graph.call_function(aten.cat.default, (halves, 0))
    total = graph.call_function(aten.add.Tensor, (joined, x))
    for made in (joined, total):
        made.meta |= {META_KEY: Origin("layers.0", "forward"), "val": torch.empty(4, 3)}
    graph.output([total])
    return GraphModule(torch.nn.Module(), graph)


def editor(module: GraphModule) -> GraphEditor:
    return GraphEditor(module.graph, CASE)


X = torch.arange(12.0).view(4, 3) - 5


def test_chunk_1_is_found_where_no_chunk_is_asked_for():
    g = editor(small())
    assert g.find("silu").name == "silu_chunk1"
    assert g.find("silu", chunk=0).name == "silu_chunk0"
    assert g.find("add", r"layers\.\d") is g.graph.output_node().args[0][0]


def test_what_is_not_there_is_reported():
    with pytest.raises(NoPlaceError) as error:
        editor(small()).find("mm", r".*experts", direction="backward")
    assert str(error.value) == (
        "NoPlaceError: there is nothing to strike in case moe_seq\n"
        "  expected: a graph with a call of mm in backward, in a module .*experts"
    )


def test_a_twin_is_the_other_chunks_call_and_stands_before():
    g = editor(small())
    assert g.twin(g.find("silu", chunk=1)).name == "silu_chunk0"
    with pytest.raises(NoPlaceError, match="has no twin in the other chunk before it"):
        g.twin(g.find("silu", chunk=0))


def test_halves_and_joins_are_known():
    g = editor(small())
    assert [node.name for node in g.halves(1)] == ["slice_tensor_1"]
    assert [node.name for node in g.joins()] == ["cat_default"]
    assert g.joins("backward") == []


def test_after_lets_all_readers_read_the_new_call():
    module = small()
    g = editor(module)
    g.after(g.find("silu"), "aten.neg.default")
    module.recompile()
    assert torch.equal(module(X)[0], torch.cat([torch.nn.functional.silu(X[:2]), -torch.nn.functional.silu(X[2:])]) + X)


def test_before_lets_one_reader_read_the_new_call():
    module = small()
    g = editor(module)
    node = g.find("add")
    g.before(node, node.args[1], g.kernel("rolled_blocks"), 2)
    module.recompile()
    assert torch.equal(module(X)[0], torch.nn.functional.silu(X) + X.roll(2, 0))


def test_instead_takes_a_calls_place_and_bypass_leaves_it_out():
    module = small()
    g = editor(module)
    g.bypass(g.find("add"), g.joins()[0])
    g.instead(g.find("silu"), "aten.relu.default", g.find("silu").args[0])
    module.recompile()
    assert torch.equal(module(X)[0], torch.cat([torch.nn.functional.silu(X[:2]), torch.relu(X[2:])]))


def test_a_site_is_where_a_node_belongs():
    g = editor(small())
    here = Site("layers.0.moe", "forward", 1, "silu")
    assert set(g.sites(g.find("silu"), "relu")) == {here, here._replace(operator="relu")}


def test_what_an_edit_puts_in_may_also_lie_where_what_it_reads_does():
    g = editor(small())
    here, before = Site("layers.0", "forward", None, "add"), Site("layers.0", "forward", None, "sub")
    assert set(g.sites(g.find("add"), "sub")) == {here, before}
    known = g.sites(g.joins()[0], "stack")
    assert {Site("layers.0.moe", "forward", chunk, name) for chunk in (0, 1) for name in ("cat", "stack")} < set(known)


def forget_the_sum(g: GraphEditor) -> list[Site]:
    node = g.find("add")
    sites = g.sites(node)
    g.bypass(node, node.args[0])
    return sites


def test_a_struck_graph_is_a_copy_that_shows_where():
    module = small()
    before = module(X)[0]
    found = mutate(Entry(name="forgotten", says="", source="", edit=forget_the_sum), module, CASE)
    assert found.sites == [Site("layers.0", "forward", None, "add")]
    assert torch.equal(found.module(X)[0], torch.nn.functional.silu(X))
    assert torch.equal(module(X)[0], before)


def test_an_edit_that_finds_nothing_is_a_fault_that_never_fired():
    row = Entry(name="lost", says="", source="", edit=lambda g: g.sites(g.find("topk")))
    with pytest.raises(UsageError, match="fault lost never fired: there is nothing to strike in case moe_seq"):
        mutate(row, small(), CASE)


def test_an_edit_that_changes_nothing_never_fired():
    with pytest.raises(UsageError) as error:
        mutate(Entry(name="idle", says="", source="", edit=lambda g: []), small(), CASE)
    assert str(error.value) == (
        "UsageError: fault idle never fired: in the graph of case moe_seq it would change nothing\n"
        "  fix: choose another case: see `bitproof faults --list`"
    )


def test_a_mistake_in_an_edit_is_no_detected_fault():
    def misspelled(g):
        raise NameError("name 'through' is not defined")

    with pytest.raises(UsageError, match="fault broken is broken: its edit raised NameError: name 'through'"):
        mutate(Entry(name="broken", says="", source="", edit=misspelled), small(), CASE)


@pytest.mark.parametrize(("scale", "fires"), [(0.25, False), (0.3, True), (None, False)])
def test_a_softmaxs_scale_is_only_lost_where_it_is_another_than_the_operators_own(scale, fires):
    graph = Graph()
    x = graph.placeholder("x")
    kwargs = {} if scale is None else {"scale": scale}
    query = graph.call_function(aten.neg.default, (x,))
    query.meta |= {META_KEY: Origin("layers.0.attention", "forward"), "val": torch.empty(1, 1, 2, 16)}
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    attention = graph.call_function(operator, (query, query, query, 0.0, True), kwargs)
    attention.meta |= {META_KEY: Origin("layers.0.attention", "forward")}
    graph.output([attention])
    module = GraphModule(torch.nn.Module(), graph)
    if not fires:
        with pytest.raises(UsageError, match="never fired"):
            mutate(CATALOGUE["other-softmax-scale"], module, CASE)
        return
    struck = mutate(CATALOGUE["other-softmax-scale"], module, CASE).module
    [node] = struck.graph.find_nodes(op="call_function", target=operator)
    assert node.kwargs == {"scale": 0.25}


def test_another_epsilon_is_another_whatever_the_models_own_is():
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.add.Tensor, (x, 1e-5))
    total.meta |= {META_KEY: Origin("layers.0.attention_norm", "forward")}
    graph.output([total])
    struck = mutate(CATALOGUE["other-epsilon"], GraphModule(torch.nn.Module(), graph), CASE).module
    [node] = struck.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert node.args[1] == pytest.approx(1e-4)


def test_one_ulp_is_one_bit_of_the_largest_element():
    nudged = kernels.nudged(torch.tensor([1.0, -8.0]))
    assert nudged.tolist() == [1.0, -8.00000095367431640625]
    narrow = kernels.nudged(torch.tensor([2.0, 1.0], dtype=torch.bfloat16))
    assert narrow.tolist() == [2.015625, 1.0]


def test_a_truncated_cast_rounds_towards_zero():
    x = torch.tensor([1.00390625 + 2**-9, -1.00390625 - 2**-9])
    assert kernels.truncated(x).tolist() == [1.0, -1.0]
    assert x.bfloat16().tolist() == [1.0078125, -1.0078125]


def test_tf32_keeps_ten_bits():
    assert kernels.in_tf32(torch.tensor([1 + 2**-10, 1 + 2**-12])).tolist() == [1 + 2**-10, 1.0]


def test_the_step_before_is_kept_by_key(monkeypatch):
    monkeypatch.setattr(kernels.NOW, "memory", {})
    for step, value, reported in ((0, 1.0, 1.0), (1, 2.0, 1.0), (2, 3.0, 2.0)):
        monkeypatch.setattr(kernels.NOW, "step", step)
        assert kernels.of_step_before(torch.tensor(value), "a").item() == reported


def test_what_looks_at_a_node_is_no_reader_and_looks_at_what_stands_in_its_place():
    module = small()
    insert_observers(
        module.graph, [("a@forward", [node], None, None) for node in module.graph.nodes if "silu" in node.name]
    )
    module.graph.lint()

    def edit(g):
        assert all(node.target is not observed for node in g.calls)
        node = g.find("silu", chunk=1)
        assert [user.name for user in node.users] == ["cat_default"]
        g.after(node, "aten.neg.default")
        other = g.find("silu", chunk=0)
        g.instead(other, "aten.relu.default", other.args[0])
        return []

    struck = mutate(Entry(name="negated", says="", source="", edit=edit), module, CASE).module
    looking = struck.graph.find_nodes(op="call_function", target=observed)
    assert [node.args[1][0].name for node in looking] == ["relu_default", "neg_default"]
    seen = []
    with observed_by(lambda kind, name, value: seen.append(value)):
        struck(X)
    assert torch.equal(seen[0], X[:2].relu()) and torch.equal(seen[1], -torch.nn.functional.silu(X[2:]))
    lost = mutate(Entry(name="lost", says="", source="", edit=lose_a_half), module, CASE).module
    assert len(lost.graph.find_nodes(op="call_function", target=observed)) == 1


def lose_a_half(g):
    """Without a method of the editor, who then knows of no stand-in."""
    node = g.find("silu", chunk=1)
    node.replace_all_uses_with(g.find("silu", chunk=0))
    g.graph.erase_node(node)
    return []
