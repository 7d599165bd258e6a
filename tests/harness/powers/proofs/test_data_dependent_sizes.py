"""Sizes that depend on data, in graphs whose symbols have other names."""

import pytest

from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.proof_data import Call, Graph, Tensor

ROWS = Tensor("float32", "cpu", (4, 2), (2, 1), 0, 0)
COUNTS = Tensor("int64", "cpu", (), (), 0, 1)


def step(symbol, *, read=1, second=None, size=None):
    """A graph that cuts as many rows as a count in an input says, and multiplies them by a parameter."""
    size = size or ("size", (1, symbol))
    cut = Tensor("float32", "cpu", (size, 2), (2, 1), 0, 9)
    calls = [
        Call("w", "input", (), ROWS),
        Call("n", "input", (), COUNTS),
        Call("m", "input", (), Tensor("int64", "cpu", (), (), 0, 2)),
        Call("item", "aten._local_scalar_dense.default", (("self", ("node", read)),), ("size", (1, symbol))),
        Call("cut", "aten.some_cut.default", (("self", ("node", 0)), ("length", size)), cut),
    ]
    names = {"w": "parameter w", "n": "input n", "m": "input m"}
    calls = [Call(names.get(c.name, c.name), c.op, c.args, c.value) for c in calls]
    return Graph(tuple(calls), (("out", 4),))


def test_a_number_is_named_by_what_it_was_read_from():
    assert prove_graphs(step("u0"), step("u7")).verdict == "PROVED"
    assert prove_graphs(step("u0"), step("u0", read=2)).verdict == "NOT PROVED"


def test_sums_of_numbers_do_not_depend_on_their_symbols_order():
    def two(first, second):
        symbols = sorted([first, second])
        size = ("size", *((1, s) for s in symbols))
        calls = list(step(first, size=size).calls)
        calls.insert(
            4, Call("item 2", "aten._local_scalar_dense.default", (("self", ("node", 2)),), ("size", (1, second)))
        )
        return Graph(tuple(calls), (("out", 5),))

    assert prove_graphs(two("u0", "u1"), two("u1", "u0")).verdict == "PROVED"


def of_unknown(size, *, dtype="float32"):
    """A graph in which a call's result brings a symbol of its own."""
    cut = Tensor(dtype, "cpu", (size, 2), (2, 1), 0, 9)
    calls = list(step("u0").calls)
    calls[4] = Call("cut", "aten.some_cut.default", (("self", ("node", 0)), ("like", ("node", 1))), cut)
    return Graph(tuple(calls), (("out", 4),))


def test_a_size_that_a_result_brings_is_named_by_its_place_in_it():
    assert prove_graphs(of_unknown(("size", (1, "u5"))), of_unknown(("size", (1, "u6")))).verdict == "PROVED"
    doubled = of_unknown(("size", (2, "u5")))
    assert prove_graphs(doubled, doubled).verdict == "REFUSED"


def test_a_size_of_a_symbol_that_nothing_brought_is_refused():
    stray = step("u0", size=("size", (1, "u5")))
    assert prove_graphs(stray, stray).verdict == "REFUSED"


@pytest.mark.parametrize("coefficient", [2, -1])
def test_a_number_that_is_more_than_a_symbol_is_refused(coefficient):
    graph = step("u0")
    calls = list(graph.calls)
    calls[3] = Call("item", calls[3].op, calls[3].args, ("size", (coefficient, "u0")))
    assert prove_graphs(Graph(tuple(calls), graph.outputs), Graph(tuple(calls), graph.outputs)).verdict == "REFUSED"
