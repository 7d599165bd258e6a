import operator

import torch
from torch.fx import Graph, GraphModule

from bitproof.harness.graph.backend.device_constants import forget_device_index

RANK_3 = torch.device("cuda", 3)


def graph_naming(device):
    """relu(x) + zeros on `device`, which is named among arguments, within a list and in a nested graph."""
    graph = Graph()
    x = graph.placeholder("x")
    zeros = graph.call_function(torch.zeros, ([2],), {"device": device})
    graph.output([graph.call_function(operator.add, (x, zeros)), device])
    return GraphModule({}, graph)


def with_nested(module, nested):
    module.add_module("nested", nested)
    return module


def code_of(index):
    module = with_nested(graph_naming(torch.device("cuda", index)), graph_naming(torch.device("cuda", index)))
    assert forget_device_index(module, torch.device("cuda", index)) == 4
    return module.code, module.nested.code


def test_the_code_is_one_for_all_ranks_nested_graphs_included():
    assert len({code_of(index) for index in range(8)}) == 1
    assert "device = device(type='cuda'))" in code_of(3)[0]


def test_another_device_than_the_ranks_own_stays_named():
    module = graph_naming(torch.device("cuda", 2))
    before = module.code
    assert forget_device_index(module, RANK_3) == 0
    assert module.code == before


def test_a_graph_without_device_constants_comes_back_untouched():
    module = graph_naming(torch.device("cpu"))
    before = module.code
    assert forget_device_index(module, RANK_3) == 0
    assert forget_device_index(module, torch.device("cpu")) == 0
    assert module.code == before


def test_a_device_without_an_index_has_none_to_forget():
    module = graph_naming(torch.device("cuda"))
    assert forget_device_index(module, torch.device("cuda")) == 0
