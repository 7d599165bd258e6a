"""What a call gives is held against what its graph says of it."""

from dataclasses import replace

import pytest

from bitproof.harness.powers.proofs.prover.evaluate import run_graph
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.graphs.memory_layouts import Layouts
from tests.harness.powers.proofs.toy_graphs import GROUPS, as_data, aten, randn, trace

W, X = randn(4, 6), randn(4, 6)
MODULE = trace(lambda w, x: (w * x).t() + aten.view.default(w, [6, 4]), (W, X))
GRAPH = as_data(MODULE, (W, X))


def watch(graph):
    run_graph(MODULE, [[W, X]] * 2, GROUPS.partitions(), watch=Layouts(graph))


def described(name, **changes):
    """The graph with another layout of one call."""
    return replace(
        GRAPH,
        calls=tuple(
            replace(call, value=replace(call.value, **changes)) if call.name == name else call for call in GRAPH.calls
        ),
    )


def test_what_lies_as_its_graph_says_passes():
    watch(GRAPH)


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("mul", {"strides": (1, 4)}, r"strides \(6, 1\), not \(1, 4\)"),
        ("mul", {"dtype": "float64"}, "dtype float32, not float64"),
        ("mul", {"shape": (6, 4)}, r"shape \(4, 6\), not \(6, 4\)"),
        ("mul", {"offset": 3}, "offset 0, not 3"),
        ("mul", {"storage": 0}, "memory of its own, where its fake shares some"),
        ("view", {"storage": 99}, "memory that it shares, where its fake has some of its own"),
    ],
)
def test_what_lies_otherwise_is_refused_naming_the_node(name, changes, what):
    with pytest.raises(RefusedError, match=f"{what} \\(`{name}`, aten.{name}"):
        watch(described(name, **changes))
