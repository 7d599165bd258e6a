"""Bytes of live tensors: against a count by hand, and against what the interpreter of a real step holds."""

from __future__ import annotations

import operator

import pytest
import torch

from bitproof.harness.graph.passes.measure_memory import LiveMemory, live_memory, measure_memory
from tests.harness.graph.graphs import Layers, Sketch, listing, trace
from tests.harness.graph.memory_graphs import aten, context_with, rewritten, two_blocks, with_policy
from tests.harness.graph.passes.chunk.test_chunk import Block
from tests.harness.graph.passes.test_rematerialize import three_blocks

KIB = 1024


def measured(sketch: Sketch, *outputs: torch.fx.Node) -> LiveMemory:
    return live_memory(sketch.finish(*outputs).graph, sketch.symbol)


def kib(sketch: Sketch, amount: int, name: str = "x") -> torch.fx.Node:
    """A graph input of so many KiB."""
    return sketch.placeholder(name, amount, KIB // 4)


def test_inputs_do_not_count_and_a_value_dies_with_its_last_reader() -> None:
    sketch = Sketch()
    a = sketch.call(aten.neg.default, kib(sketch, 4))
    b = sketch.call(aten.neg.default, a)
    c = sketch.call(aten.neg.default, b)
    assert measured(sketch, c) == LiveMemory(8 * KIB, "neg_1", 0, 0, 0)


def test_a_value_that_is_read_again_stays() -> None:
    sketch = Sketch()
    a = sketch.call(aten.neg.default, kib(sketch, 4))
    c = sketch.call(aten.neg.default, sketch.call(aten.neg.default, a))
    assert measured(sketch, sketch.call(aten.add.Tensor, a, c)).peak == 12 * KIB


def test_a_view_keeps_its_base_and_takes_nothing_itself() -> None:
    sketch = Sketch()
    base = sketch.call(aten.neg.default, kib(sketch, 4))
    part = sketch.call(operator.getitem, sketch.call(aten.split.Tensor, base, 1), 0)
    view = sketch.call(aten._unsafe_view.default, part, [KIB // 4])
    sketch.call(aten.ones.default, [8 * KIB // 4])
    assert measured(sketch, sketch.call(aten.neg.default, view)) == LiveMemory(12 * KIB, "ones", 0, 0, 0)


def test_each_result_of_a_call_is_a_storage_of_its_own() -> None:
    sketch = Sketch()
    sort = sketch.call(aten.sort.default, kib(sketch, 4))
    indices = sketch.call(operator.getitem, sort, 1)  # int64: twice the bytes of the values, which die here
    sketch.call(aten.ones.default, [3 * KIB // 4])
    assert measured(sketch, indices) == LiveMemory(12 * KIB, "sort", 0, 0, 0)


def test_a_wait_shares_the_storage_of_its_launch() -> None:
    c10d = torch.ops._c10d_functional
    sketch = Sketch()
    launch = sketch.call(c10d.all_gather_into_tensor.default, kib(sketch, 4), 2, "fsdp")
    assert measured(sketch, sketch.call(c10d.wait_tensor.default, launch)).peak == 8 * KIB


def test_an_in_place_write_takes_nothing() -> None:
    sketch = Sketch()
    assert measured(sketch, sketch.call(aten.add_.Tensor, kib(sketch, 4), 1)).peak == 0


def test_what_has_no_size_is_counted_apart() -> None:
    sketch = Sketch()
    with sketch.mode.shape_env.ignore_fresh_unbacked_symbols():
        rows = sketch.call(aten.nonzero.default, kib(sketch, 4))
    assert measured(sketch, rows) == LiveMemory(0, "", 0, 0, 1)


def test_two_blocks_by_hand_under_each_policy() -> None:
    value = 4 * 4 * 4
    found = {}
    for policy in ("none", "selective", "full", "offload"):
        blocks = two_blocks()
        if policy != "none":
            rewritten(blocks.module, context_with(blocks.sketch, policy))
        memory = live_memory(blocks.module.graph, blocks.sketch.symbol)
        found[policy] = [round((memory.at_backward - 4) / value), memory.host_peak // value]
    # in0, mm0, sin0, in1, mm1, sin1, in2; without sin0, sin1; without mm0, mm1; without in0, mm0, which are away
    assert found == {"none": [7, 0], "selective": [5, 0], "full": [3, 0], "offload": [3, 2]}


def test_the_pass_leaves_the_graph_alone_and_reports() -> None:
    blocks = two_blocks()
    context = blocks.sketch.context()
    before = listing(blocks.module)
    assert measure_memory(blocks.module, context) is blocks.module and listing(blocks.module) == before
    assert context.facts == {
        "peak_mib": 0.0,
        "peak_node": "ones_like",
        "at_backward_mib": 0.0,
        "host_peak_mib": 0.0,
        "num_unsized": 0,
    }


@pytest.mark.parametrize("modules", [None, pytest.param("layers.*", marks=pytest.mark.slow), "layers.*.moe"])
def test_each_policy_holds_less_than_the_one_before(modules: str | None) -> None:
    held = []
    for policy in ("none", "selective", "full"):
        _, _, joint, module, reports = three_blocks(policy, modules, "batch")
        held.append(live_memory(module.graph, joint.chunk_symbol).at_backward)
        assert reports[-1].name == "measure_memory" and reports[-1].facts["num_unsized"] == 0
    assert held == sorted(held, reverse=True) and len(set(held)) == 3


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_count_agrees_with_the_storages_that_a_real_step_holds(policy: str) -> None:
    joint = trace(Layers(*(Block().attention for _ in range(3))))
    module, _ = with_policy(joint, policy)
    expected = live_memory(module.graph, joint.chunk_symbol)
    assert expected.peak > 0 and _held_by_interpreter(module) == expected.peak


def _held_by_interpreter(module: torch.fx.GraphModule) -> int:
    """The most bytes in storages that values of a running graph hold, its inputs left out."""
    peak = 0

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            nonlocal peak
            value = super().run_node(n)
            storages: dict[int, int] = {}
            for found in (*self.env.values(), value):
                for x in found if isinstance(found, (tuple, list)) else (found,):
                    if isinstance(x, torch.Tensor):
                        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            peak = max(peak, sum(size for address, size in storages.items() if address not in inputs))
            return value

    inputs = set()
    arguments = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            arguments.append(torch.ones(tuple(value.shape), dtype=value.dtype))
            inputs.add(arguments[-1].untyped_storage().data_ptr())
    with torch.no_grad():
        Watch(module).run(*arguments)
    return peak
