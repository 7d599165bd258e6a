"""Bytes of values whose sizes are open: the chunk symbol, and rows that depend on routing."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from bitproof.harness.graph.analysis.tensor_bytes import TensorBytes
from bitproof.harness.graph.symbols import free_symbols
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from tests.harness.graph.graphs import B, Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def sized(sketch: Sketch, *nodes: Node) -> list[int | None]:
    tensor_bytes = TensorBytes(sketch.graph, sketch.symbol)
    return [tensor_bytes.of(node.meta["val"]) for node in nodes]


def counts(sketch: Sketch, number: int) -> list[Node]:
    """Integers that depend on data."""
    found = []
    with sketch.mode.shape_env.ignore_fresh_unbacked_symbols():
        for _ in range(number):
            count = sketch.placeholder("count", dtype=torch.int64)
            found.append(sketch.call(aten._local_scalar_dense.default, count))
    return found


def test_the_chunk_symbol_counts_as_the_cases_number() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, dtype=torch.bfloat16)
    assert sized(sketch, x, sketch.call(aten.t.default, x)) == [B * 6 * 2] * 2


def test_bytes_reach_from_the_first_to_the_last_element() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4, 6)
    strided = sketch.call(aten.as_strided.default, x, [2, 3], [12, 2])
    empty = sketch.call(aten.slice.Tensor, x, 0, 2, 2)
    expanded = sketch.call(aten.expand.default, sketch.call(aten.sum.default, x), [5, 7])
    assert sized(sketch, x, strided, empty, expanded) == [96, (12 + 4 + 1) * 4, 0, 4]


def test_an_all_to_all_sends_and_receives_equal_shares_of_the_rows_that_go_in() -> None:
    sketch = Sketch()
    rows = sketch.placeholder("rows", sketch.n * 3, 2)
    received, sent = counts(sketch, 2), counts(sketch, 2)
    there = sketch.call(c10d.all_to_all_single.default, rows, received, sent, "EP")
    back = sketch.call(c10d.all_to_all_single.default, there, sent, received, "EP")
    one = sketch.call(aten.slice.Tensor, there, 0, 0, received[0])
    assert sized(sketch, rows, there, back) == [B * 3 * 2 * 4] * 3
    assert sized(sketch, one) == [B * 3 * 2 * 4 // 2]


def test_a_split_gives_each_part_an_equal_share() -> None:
    sketch = Sketch()
    parts = sketch.call(aten.split_with_sizes.default, sketch.placeholder("x", 2, sketch.n * 3), counts(sketch, 2), 1)
    first, second = (sketch.call(operator.getitem, parts, i) for i in (0, 1))
    copies = [sketch.call(aten.clone.default, x, memory_format=torch.contiguous_format) for x in (first, second)]
    assert sized(sketch, *copies) == [2 * B * 3 * 4 // 2] * 2


def test_a_size_that_nothing_explains_has_no_number() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    with sketch.mode.shape_env.ignore_fresh_unbacked_symbols():
        rows = sketch.call(aten.nonzero.default, x)
    assert sized(sketch, x, rows) == [16, None]


def test_what_many_ranks_deliver_is_as_much_as_was_sent() -> None:
    sketch = Sketch()
    sketch.mode = step_fake_mode(shape_env=sketch.mode.shape_env)
    rows, parts = sketch.placeholder("rows", 12, 2), counts(sketch, 4)
    received = sketch.call(c10d.all_to_all_single.default, rows, parts, [3, 3, 3, 3], "ep")
    assert len(free_symbols(received.meta["val"])) == 2
    assert TensorBytes(sketch.graph, sketch.symbol).of(received.meta["val"]) == 12 * 2 * 4
