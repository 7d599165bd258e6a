"""What a node's work is, what a line gives for it, and how lines are fitted and kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph.passes.overlap.costs import (
    CPU_GLOO,
    Cost,
    CostLine,
    CostModel,
    NodeWork,
    Sizes,
    fit,
    node_costs,
    work_of,
)
from bitproof.harness.step.storages import Storages
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def line(fixed: float, per_unit: float = 0.0) -> CostLine:
    return CostLine(fixed, per_unit, points=1, r2=1.0, median_relative_error=0.0)


def work(sketch: Sketch, target: Any, *args: Any, **kwargs: Any) -> NodeWork:
    node = sketch.call(target, *args, **kwargs)
    is_view = Storages(sketch.graph.nodes).is_view(node)
    return work_of(node, is_view, lambda x: x.meta["val"])


def test_products_of_matrices_count_two_operations_an_element_and_term() -> None:
    sketch = Sketch()
    a, b = sketch.placeholder("a", 3, 5), sketch.placeholder("b", 5, 7)
    bias = sketch.placeholder("bias", 7)
    batches = sketch.placeholder("c", 2, 3, 5), sketch.placeholder("d", 2, 5, 7)
    assert work(sketch, aten.mm.default, a, b) == ("matmul", 2 * 3 * 5 * 7)
    assert work(sketch, aten.addmm.default, bias, a, b) == ("matmul", 2 * 3 * 5 * 7)
    assert work(sketch, aten.bmm.default, *batches) == ("matmul", 2 * 2 * 3 * 5 * 7)


def test_a_product_of_scaled_matrices_is_a_product_too() -> None:
    sketch = Sketch()
    a = sketch.placeholder("a", 16, 32, dtype=torch.float8_e4m3fn)
    b = sketch.placeholder("b", 64, 32, dtype=torch.float8_e4m3fn)
    scale = sketch.placeholder("scale")
    product = work(sketch, aten._scaled_mm.default, a, sketch.call(aten.t.default, b), scale, scale)
    assert product == ("matmul", 2 * 16 * 32 * 64)


def test_a_grouped_product_multiplies_each_row_by_one_experts_matrix() -> None:
    sketch = Sketch()
    kinds = {"dtype": torch.bfloat16}
    rows, weights = sketch.placeholder("rows", 16, 8, **kinds), sketch.placeholder("weights", 2, 8, 24, **kinds)
    columns = sketch.placeholder("columns", 8, 16, **kinds)
    stacked = sketch.placeholder("stacked", 2, 24, 8, **kinds)
    ends = sketch.placeholder("ends", 2, dtype=torch.int32)
    assert work(sketch, aten._grouped_mm.default, rows, weights, ends) == ("matmul", 2 * 16 * 8 * 24)
    assert work(sketch, aten._grouped_mm.default, columns, rows, ends) == ("matmul", 2 * 8 * 16 * 8)
    assert work(sketch, aten._grouped_mm.default, stacked, columns, ends) == ("matmul", 2 * 24 * 8 * 16)


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    sketch = Sketch()
    q, k, v = (sketch.placeholder(name, 2, 4, 6, 16) for name in "qkv")
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert work(sketch, forward, q, k, v, 0.0, True) == ("attention", 2 * 2 * (2 * 4 * 6 * 6 * 16))
    out, logsumexp = sketch.placeholder("out", 2, 4, 6, 16), sketch.placeholder("logsumexp", 2, 4, 6)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert work(sketch, backward, out, q, k, v, out, logsumexp, 0.0, True) == (
        "attention",
        5 * 2 * (2 * 4 * 6 * 6 * 16),
    )


def test_views_sizes_and_parts_move_nothing() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4, 6)
    assert work(sketch, aten.t.default, x) == ("view", 0)
    assert work(sketch, aten.slice.Tensor, x, 0, 0, 2) == ("view", 0)
    assert work(sketch, aten.sym_size.int, x, 0) == ("view", 0)


def test_everything_else_counts_bytes_read_and_written() -> None:
    sketch = Sketch()
    x, y = sketch.placeholder("x", 4, 6), sketch.placeholder("y", 4, 6, dtype=torch.bfloat16)
    assert work(sketch, aten.add.Tensor, x, y) == ("memory", 24 * (4 + 2 + 4))
    assert work(sketch, aten.add_.Tensor, x, y) == ("memory", 24 * (4 + 2 + 4))
    assert work(sketch, aten.topk.default, x, 1) == ("memory", 24 * 4 + 4 * (4 + 8))
    assert work(sketch, aten._local_scalar_dense.default, sketch.placeholder("n", dtype=torch.int64)) == (
        "host_sync",
        0,
    )


def test_a_collective_counts_the_bytes_that_one_rank_sends() -> None:
    sketch = Sketch()
    x, y = sketch.placeholder("x", 4, 6), sketch.placeholder("y", 4, 6)
    assert work(sketch, c10d.all_to_all_single.default, x, [2, 2], [2, 2], "ep") == ("all_to_all_single/2", 96)
    assert work(sketch, c10d.all_gather_into_tensor.default, x, 8, "fsdp") == ("all_gather_into_tensor/8", 96)
    assert work(sketch, c10d.reduce_scatter_tensor.default, x, "sum", 4, "fsdp") == ("reduce_scatter_tensor/4", 96)
    assert work(sketch, c10d.all_gather_into_tensor_coalesced.default, [x, y], 8, "fsdp") == (
        "all_gather_into_tensor/8",
        192,
    )
    assert work(sketch, c10d.all_reduce.default, x, "sum", "fsdp") == ("all_reduce/0", 96)


def dispatched(sketch: Sketch) -> tuple[Node, Node]:
    """Twelve rows go out to two ranks; how many arrive depends on data."""
    counts, rows = sketch.placeholder("counts", 2, dtype=torch.int64), sketch.placeholder("rows", 12, 8)
    parts = [sketch.call(aten.select.int, counts, 0, i) for i in (0, 1)]
    received = [sketch.call(aten._local_scalar_dense.default, part) for part in parts]
    return sketch.call(c10d.all_to_all_single.default, rows, received, [6, 6], "ep"), received[0]


def test_as_many_rows_are_expected_as_are_sent() -> None:
    sketch = Sketch()
    launch, first = dispatched(sketch)
    wait = sketch.call(c10d.wait_tensor.default, launch)
    doubled = sketch.call(aten.cat.default, [wait, wait])
    sizes = Sizes()
    sizes.expect_balance(launch)
    assert sizes.number(launch.meta["val"].shape[0]) == 12
    assert sizes.number(first.meta["val"]) == 6
    assert sizes.number(doubled.meta["val"].shape[0]) == 24
    assert sizes.number(7) == 7


def test_rows_that_were_received_are_sent_back_as_many() -> None:
    sketch = Sketch()
    launch, first = dispatched(sketch)
    wait = sketch.call(c10d.wait_tensor.default, launch)
    model = CostModel({}, {"memory": line(0, 1), "view": line(0), "host_sync": line(5)})
    collective = {"all_to_all_single/2": line(1, 10), "launch all_to_all_single/2": line(2)}
    model = CostModel({}, {**model.lines, **collective})
    second = sketch.call(c10d.all_to_all_single.default, wait, [6, 6], [first, first], "ep")
    copy = sketch.call(aten.neg.default, wait)
    costs = node_costs(sketch.graph, model)
    assert costs[launch] == costs[second] == Cost(2, 1 + 10 * 12 * 8 * 4)
    assert costs[first] == Cost(5, 0)
    assert costs[wait] == Cost(0, 0)
    assert costs[copy] == Cost(2 * 12 * 8 * 4, 0)


def test_a_size_that_nothing_shows_counts_as_zero() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    found = sketch.call(aten.nonzero.default, x)
    assert Sizes().number(found.meta["val"].shape[0]) == 0


def test_without_a_model_only_collectives_take_time() -> None:
    sketch = Sketch()
    launch, first = dispatched(sketch)
    costs = node_costs(sketch.graph, None)
    assert {node: cost for node, cost in costs.items() if cost != Cost(0, 0)} == {launch: Cost(0, 1)}
    assert len(costs) == len(sketch.graph.nodes) and costs[first] == Cost(0, 0)


def test_a_group_size_that_was_not_measured_takes_the_nearest_one() -> None:
    lines = {f"all_to_all_single/{size}": line(size) for size in (2, 8)}
    model = CostModel({}, lines)
    found = {size: model.seconds(NodeWork(f"all_to_all_single/{size}", 0)) for size in (1, 2, 3, 5, 8, 64)}
    assert found == {1: 2, 2: 2, 3: 2, 5: 8, 8: 8, 64: 8}
    assert model.seconds(NodeWork("all_to_all_single/0", 0)) == 8  # a collective that does not tell its size


def test_a_collective_that_names_only_its_group_has_the_size_that_the_table_of_groups_says() -> None:
    sketch = Sketch()
    node = sketch.call(c10d.all_reduce.default, sketch.placeholder("x", 4), "sum", "tp")
    lines = {f"{kind}all_reduce/{size}": line(size) for size in (2, 8) for kind in ("", "launch ")}
    model = CostModel({}, lines)
    assert node_costs(sketch.graph, model, {"tp": 2, "ep": 8})[node] == Cost(2, 2)
    assert node_costs(sketch.graph, model)[node] == Cost(8, 8), "unknown: the largest"


def test_a_collective_that_was_not_measured_is_refused() -> None:
    model = CostModel({}, {"memory": line(1), "all_to_all_single/2": line(1)})
    with pytest.raises(PassError) as error:
        model.seconds(NodeWork("all_reduce/0", 8))
    assert str(error.value) == (
        "PassError: the cost model has no line for all_reduce\n"
        "  expected: one of all_to_all_single/2, memory\n"
        "  found: all_reduce\n"
        "  fix: fit a model on a graph that calls it: python tests/benchmarks/fit_costs.py --help"
    )


def test_a_fit_recovers_the_lines_that_made_the_points() -> None:
    truth = {"matmul": (5e-6, 2e-11), "memory": (3e-6, 1e-10), "all_to_all_single/8": (4e-3, 7e-9)}
    points = [
        (NodeWork(kind, x), fixed + per_unit * x)
        for kind, (fixed, per_unit) in truth.items()
        for x in (0, 10, 1e4, 1e7)
    ]
    model = fit(points, {"device": "made up"})
    assert list(model.lines) == sorted(truth) and model.description == {"device": "made up"}
    for kind, (fixed, per_unit) in truth.items():
        assert model.lines[kind].fixed == pytest.approx(fixed, rel=1e-6)
        assert model.lines[kind].per_unit == pytest.approx(per_unit, rel=1e-6)
        assert (model.lines[kind].points, model.lines[kind].r2) == (4, pytest.approx(1))
        assert model.lines[kind].median_relative_error == pytest.approx(0, abs=1e-6)


def test_predictions_of_noisy_points_add_up_to_what_was_measured() -> None:
    choose = random.Random(0)
    amounts = [choose.uniform(0, 1e6) for _ in range(2000)]
    points = [(NodeWork("memory", x), (1e-5 + 1e-10 * x) * choose.uniform(0.5, 1.5)) for x in amounts]
    model = fit(points, {})
    found = model.lines["memory"]
    assert found.fixed == pytest.approx(1e-5, rel=0.05) and found.per_unit == pytest.approx(1e-10, rel=0.05)
    predicted, measured = sum(model.seconds(work) for work, _ in points), sum(seconds for _, seconds in points)
    assert predicted == pytest.approx(measured, rel=1e-3)
    assert 0.1 < found.median_relative_error < 0.4 and 0.2 < found.r2 < 0.9


@pytest.mark.parametrize(
    ("points", "fixed", "per_unit"),
    [
        ([(1, 3.0), (1, 5.0)], 4.0, 0.0),  # one amount alone: no slope to tell
        ([(0, 4.0), (1, 2.0)], 3.0, 0.0),  # falls: flat
        ([(1, 0.5), (2, 3.0), (3, 6.0)], 0.0, pytest.approx(9.5 / 6, rel=0.02)),  # starts below zero: from the origin
    ],
)
def test_no_line_is_negative(points: list[tuple[float, float]], fixed: float, per_unit: Any) -> None:
    found = fit([(NodeWork("memory", x), y) for x, y in points], {}).lines["memory"]
    assert (found.fixed, found.per_unit) == (pytest.approx(fixed), per_unit)


def test_a_model_reads_back_as_it_was_saved(tmp_path: Path) -> None:
    model = CostModel({"device": "cpu"}, {"memory": line(1e-6, 1e-10)})
    model.save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == model


MODEL = (
    '{"schema": 1, "description": %s, "lines": {"%s": '
    '{"fixed": %s, "per_unit": 1, "points": 1, "r2": 1, "median_relative_error": 0}}}'
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"schema": 2, "description": {}, "lines": {}}', "ValueError: schema 2"),
        ('{"schema": 1, "description": {}}', "KeyError: 'lines'"),
        ('{"schema": 1, "description": {}, "lines": {"memory": {"fixed": 1}}}', "TypeError"),
        (MODEL % ("[]", "memory", "1"), "TypeError: a description that is no object"),
        (MODEL % ("{}", "memory", '"1"'), "TypeError: the line 'memory', which holds more than numbers"),
        (MODEL % ("{}", "memory", "1" + "0" * 400), "OverflowError"),
        (MODEL % ("{}", "all_to_all_single/x", "1"), "ValueError: the kind 'all_to_all_single/x'"),
        ("[" * 100_000, "RecursionError"),
        ("negative", "ValueError: a line that is not finite and positive"),
    ],
)
def test_a_damaged_model_is_refused(tmp_path: Path, text: str | None, found: str) -> None:
    path = tmp_path / "costs.json"
    if text == "negative":
        CostModel({}, {"memory": line(-1.0)}).save(path)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(PassError) as error:
        CostModel.load(path)
    head, expected, last = str(error.value).splitlines()
    assert head == f"PassError: cannot read the cost model {path}"
    assert expected == "  expected: a file of schema 1 written by tests/benchmarks/fit_costs.py"
    assert last.startswith(f"  found: {found}")


def test_the_model_that_comes_along_knows_its_machine_and_every_kind() -> None:
    model = CostModel.load(CPU_GLOO)
    assert {"device": "cpu", "backend": "gloo", "ranks": 8}.items() <= model.description.items()
    assert {"cpu", "cpu_count", "torch"} <= model.description.keys()
    kinds = {"view", "matmul", "attention", "host_sync", "memory"}
    names = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    collectives = {f"{name}/{size}" for name in names for size in (2, 4, 8)} | {"all_reduce/2", "all_reduce/4"}
    assert kinds | collectives | {f"launch {kind}" for kind in collectives} <= model.lines.keys()
    assert all(line.points > 10 for line in model.lines.values())


def test_the_model_that_comes_along_is_installed_with_the_package() -> None:
    settings = (Path(__file__).parents[5] / "pyproject.toml").read_text()
    assert 'package-data."bitproof.harness.graph.passes.overlap" = ["*.json"]' in settings
    assert json.loads(CPU_GLOO.read_text())["schema"] == 1
