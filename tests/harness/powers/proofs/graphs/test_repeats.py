"""A graph as data is the same whether repeated calls run on fake values or not."""

import pytest
import torch

from bitproof.harness.powers.proofs.prover.graphs.repeats import Repeats
from tests.harness.powers.proofs.toy_graphs import as_data, randn, trace

W, X = randn(4, 4), randn(4, 4)


def layers(w, x):
    """Each layer is the one before once more: views, copies, several results, writes in place."""
    for _ in range(3):
        y = x.t() @ w[:2].reshape(4, 2)
        low, high = torch.split(torch.nn.functional.silu(y), [1, 3])
        values, places = torch.sort(high.t(), dim=1)
        x = torch.cat([low, values.t().contiguous()]).repeat(1, 2) + places.sum()
        x.add_(w.t())
    return [x]


def with_sizes(w, x):
    for _ in range(3):
        rows = x[:, 0].nonzero()
        x = x + w * rows.sum() + rows.float().sum()
    return [x]


def squeezed(w, x):
    """The same call of what was, and of what a call in place has made another shape."""
    y = x.view(1, 4, 4).clone()
    one = y.sum(0)
    torch.ops.aten.squeeze_.dims(y, [0])
    return [one, y.sum(0), (w.view(1, 4, 4) + 1).sum(0)]


def of_one_memory(w, x):
    """Three calls of operands that lie alike: in two memories, in one, in two again."""
    y = torch.stack([w, x])
    return [torch.ops.aten.view(y[0], [16]), torch.ops.aten.view(y[1], [16]), torch.ops.aten.view((w * x)[0], [4])]


@pytest.mark.parametrize("step", [layers, with_sizes, squeezed, of_one_memory])
def test_a_graph_is_the_same_where_every_call_runs(step, monkeypatch):
    module = trace(step, (W, X))
    found, again = [], Repeats.again
    monkeypatch.setattr(Repeats, "again", lambda self, *args: found.append(again(self, *args)) or found[-1])
    short = as_data(module, (W, X))
    assert any(x is not None for x in found) == (step is not of_one_memory)
    monkeypatch.setattr(Repeats, "again", lambda *_: None)
    assert as_data(module, (W, X)) == short


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 1.0),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.t() + 1, lambda x: x + 1),
        (lambda x: x[1:] + 1, lambda x: x[:3] + 1),
        (lambda x: x + x.t(), lambda x: x + x.clone().t()),
        (lambda x: x.bfloat16() + 1, lambda x: x + 1),
    ],
)
def test_a_call_with_another_argument_or_layout_repeats_none(one, other, monkeypatch):
    module = trace(lambda w, x: [one(x), other(x)], (W, X))
    last = [node for node in module.graph.nodes if node.op == "call_function"][-1]
    found, again = {}, Repeats.again
    monkeypatch.setattr(
        Repeats, "again", lambda self, node, values: found.setdefault(node.name, again(self, node, values))
    )
    as_data(module, (W, X))
    assert found[last.name] is None
    module = trace(lambda w, x: [one(x), one(x)], (W, X))
    last = [node for node in module.graph.nodes if node.op == "call_function"][-1]
    found.clear()
    as_data(module, (W, X))
    assert found[last.name] is not None
