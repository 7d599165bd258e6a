import pytest
import torch
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import bitproof
from bitproof import PassError
from tests.harness.powers.proofs.toy_graphs import aten, randn

X, Y = randn(3, 4), randn(3, 4) * 2


def graph():
    return make_fx(lambda x, y: (x + y) * x, tracing_mode="fake")(X, Y).graph


def exchange(graph):
    for node in graph.nodes:
        if node.target is aten.add.Tensor:
            node.args = node.args[::-1]


def subtract(graph):
    for node in graph.nodes:
        if node.target is aten.add.Tensor:
            node.target = aten.sub.Tensor


def scale(graph):
    for node in graph.nodes:
        if node.target is aten.add.Tensor:
            node.kwargs = {"alpha": 2}


def insert(graph):
    [added] = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with graph.inserting_after(added):
        made = graph.call_function(aten.exp.default, (added,))
    added.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def test_a_pass_that_keeps_every_bit_leaves_its_graph():
    kept = bitproof.keeps_bits(exchange)
    given = graph()
    [before] = given.find_nodes(op="call_function", target=aten.add.Tensor)
    exchanged = [*before.args][::-1]
    kept(given)
    [proof] = kept.proofs
    assert (proof.name, proof.proof.verdict, proof.changed) == ("exchange", "PROVED", True)
    [added] = given.find_nodes(op="call_function", target=aten.add.Tensor)
    assert [*added.args] == exchanged


def test_a_pass_that_does_not_is_refused_with_the_node_and_what_was_seen():
    with pytest.raises(PassError) as refused:
        bitproof.keeps_bits(subtract)(graph())
    text = str(refused.value)
    assert "pass subtract is not proved to keep every bit" in text
    assert "only the candidate computes aten.sub.Tensor `add`" in text
    assert "seen to differ: 12 of 12 elements" in text


def test_a_changed_argument_is_shown():
    with pytest.raises(PassError, match=r"with alpha 2\.0 ") as refused:
        bitproof.keeps_bits(scale)(graph())
    assert "with alpha left out" in str(refused.value)


def test_an_inserted_call_has_its_place():
    with pytest.raises(PassError, match=r"aten.exp `exp[_a-z]*` \[3, 4\] of `add`, read by `mul`"):
        bitproof.keeps_bits(insert)(graph())


def test_a_graph_whose_inputs_nobody_knows_is_refused_and_proved_with_some():
    module = symbolic_trace(lambda x: (x + 1).exp())
    with pytest.raises(PassError, match="give keeps_bits the graph's inputs"):
        bitproof.keeps_bits(lambda module: None)(module)
    bitproof.keeps_bits(lambda module: None, inputs=[X])(module)


def test_a_pass_that_exchanges_a_tensor_of_the_graph_is_seen():
    module = make_fx(lambda x: x * torch.tensor([0.5, 2.0, 3.0, 4.0]), tracing_mode="fake")(X)
    [name] = {node.target for node in module.graph.find_nodes(op="get_attr")}

    def exchanged(module):
        setattr(module, name, getattr(module, name).clone().mul_(2))

    with pytest.raises(PassError, match="NOT PROVED"):
        bitproof.keeps_bits(exchanged)(module)


def test_a_hook_of_inductors_is_known_to_its_cache_by_its_source_alone():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    one, other = bitproof.keeps_bits(exchange), bitproof.keeps_bits(subtract)
    assert isinstance(one, CustomGraphPass)
    assert one.uuid() == bitproof.keeps_bits(exchange).uuid() != other.uuid()
    captured = 3
    assert bitproof.keeps_bits(lambda graph: captured).uuid() is None


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_inductors_own_passes_are_watched_by_name():
    def step(x, y):
        return (x * y).sin() + y

    with bitproof.keeps_bits() as kept, torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(step)(X, Y)
    assert {proof.proof.verdict for proof in kept.proofs} == {"PROVED"}
    assert "remove_noop_ops" in {proof.name for proof in kept.proofs}


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.get_submodule("0").weight.data.mul_(2),
        lambda module: setattr(module.get_submodule("0"), "weight", torch.nn.Parameter(torch.ones(4, 4))),
    ],
)
def test_a_pass_that_changes_what_a_parameter_holds_is_refused(change):
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4)))

    def a_pass(graph):
        change(graph)
        return graph

    assert bitproof.keeps_bits(lambda graph: graph, inputs=[torch.ones(2, 4)])(module) is module
    with pytest.raises(PassError, match="the pass changes the values of parameter"):
        bitproof.keeps_bits(a_pass, inputs=[torch.ones(2, 4)])(module)
