"""Sizes: who carries the symbol, along which dim, and which number it stands for."""

from __future__ import annotations

import operator

import pytest
import torch

from bitproof.harness.errors import ChunkError
from bitproof.harness.graph.symbols import carries, chunk_dim, is_scalar_of, number, number_of, require_chunk_dim
from tests.harness.graph.graphs import Sketch


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def test_a_dim_whose_size_is_the_symbol_is_the_chunk_dim(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 6, sketch.n, 8)
    assert chunk_dim(x.meta["val"], sketch.symbol.symbol) == 1


def test_a_dim_of_a_multiple_of_the_symbol_carries_it_but_is_no_chunk_dim(sketch: Sketch) -> None:
    x = sketch.placeholder("x", sketch.n * 6, 8)
    assert carries(x.meta["val"], sketch.symbol.symbol)
    assert chunk_dim(x.meta["val"], sketch.symbol.symbol) is None


def test_a_value_with_two_chunked_dims_has_no_chunk_dim(sketch: Sketch) -> None:
    x = sketch.placeholder("x", sketch.n, sketch.n)
    assert chunk_dim(x.meta["val"], sketch.symbol.symbol) is None


def test_a_symbol_in_strides_alone_is_not_carried(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 4, sketch.n, 8)
    assert not carries(x.meta["val"][:, 0], sketch.symbol.symbol)


def test_requiring_a_chunk_dim_where_there_is_none_names_the_node(sketch: Sketch) -> None:
    x = sketch.placeholder("x", sketch.n, 6, 8)
    rows = sketch.call(operator.mul, sketch.call(torch.ops.aten.sym_size.int, x, 0), 6)
    flat = sketch.call(torch.ops.aten.view.default, x, [rows, 8])
    with pytest.raises(ChunkError) as error:
        require_chunk_dim(flat, flat.meta["val"], sketch.symbol.symbol, "split live-in")
    assert str(error.value) == (
        "ChunkError: cannot split live-in `view`: no single dim of it is the chunked dim\n"
        "  expected: exactly one dim of size u0\n"
        "  found: shape ['6*u0', '8']\n"
        "  came from: layers.0 (forward)\n"
        "  fix: keep batch and sequence as dims of their own at the border of a chunked module"
    )


def test_a_scalar_of_another_symbol_too_is_not_a_number(sketch: Sketch) -> None:
    with sketch.mode.shape_env.ignore_fresh_unbacked_symbols():  # type: ignore[union-attr]
        other = sketch.mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
    assert is_scalar_of(sketch.n * 2, sketch.symbol.symbol)
    assert not is_scalar_of(sketch.n * other, sketch.symbol.symbol)
    assert not is_scalar_of(4, sketch.symbol.symbol)


def test_integers_and_conditions_become_numbers(sketch: Sketch) -> None:
    assert number(sketch.n * 6 + 1, sketch.symbol.symbol, 2) == 13
    assert number(sketch.n // 2 == 1, sketch.symbol.symbol, 2) is True


def test_floats_are_rounded_as_python_rounds_them(sketch: Sketch) -> None:
    factors = 0.7, 0.3
    x = sketch.placeholder("x", sketch.n, 8)
    node = sketch.call(torch.ops.aten.sym_size.int, x, 0)
    expected = 6.0
    for factor in factors:
        node = sketch.call(operator.mul, node, factor)
        expected = expected * factor
    assert number_of(node, sketch.symbol.symbol, 6) == expected
    assert number(node.meta["val"], sketch.symbol.symbol, 6) != expected, "sympy multiplies the factors first"
