"""Changes that keep every bit, and the nearest that do not: what a prover should call equal, and must not.

Each is a mutation as in `mutants.py`. Those of KEEPS change no layout either: what they insert lies as what was read,
and no write goes through it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bitproof.harness.graph import operators
from tests.harness.powers.proofs.mutants import Mutation, _insert, _is_real, _read, _value
from tests.harness.powers.proofs.toy_graphs import aten

WIDER = {torch.float32: [torch.float64], torch.bfloat16: [torch.float32, torch.float64]}


def _kept(node: Node, chance: random.Random) -> Node | None:
    """A real tensor that a call reads, in rows, which the call neither writes nor shows."""
    read = _read(node, chance)
    if read is None or operators.written_arguments(node):
        return None
    value = _value(read)
    results = node.meta.get("val")
    memory = {x.untyped_storage()._cdata for x in (results if isinstance(results, list | tuple) else [results])}
    is_shown = value.untyped_storage()._cdata in memory
    return read if value.is_contiguous() and not value.storage_offset() and not is_shown else None


def _inserting(*steps: tuple[Any, tuple[Any, ...]]) -> Mutation:
    def mutation(module: GraphModule, chance: random.Random, node: Node) -> bool:
        read = _kept(node, chance)
        return read is not None and _insert(module, node, read, *steps)

    return mutation


def widen_and_narrow(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _kept(node, chance)
    if read is None or _value(read).dtype not in WIDER:
        return False
    with module.graph.inserting_before(node):
        wide = chance.choice(WIDER[_value(read).dtype])
        cast = module.graph.call_function(aten._to_copy.default, (read,), {"dtype": wide})
        back = module.graph.call_function(aten._to_copy.default, (cast,), {"dtype": _value(read).dtype})
    node.replace_input_with(read, back)
    return True


def choose_the_same(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _kept(node, chance)
    if read is None:
        return False
    with module.graph.inserting_before(node):
        condition = module.graph.call_function(aten.gt.Scalar, (read, 0))
        chosen = module.graph.call_function(aten.where.self, (condition, read, read))
    node.replace_input_with(read, chosen)
    return True


def _instead(module: GraphModule, node: Node, make: Callable[[], Node]) -> bool:
    with module.graph.inserting_before(node):
        made = make()
    node.replace_all_uses_with(made)
    module.graph.erase_node(node)
    return True


def _is_plain_binary(node: Node, target: Any) -> bool:
    is_binary = node.target is target and len(node.args) == 2 and not node.kwargs and all(map(_is_real, node.args))
    return is_binary and _value(node.args[0]).dtype == _value(node.args[1]).dtype == _value(node).dtype


def difference_as_sum(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """a - b as a + -b, a + b as a - -b: operands in rows, so that the result lies as before."""
    found = next((x for x in (aten.add.Tensor, aten.sub.Tensor) if _is_plain_binary(node, x)), None)
    if found is None or not all(_value(x).is_contiguous() for x in node.args):
        return False
    other = aten.sub.Tensor if found is aten.add.Tensor else aten.add.Tensor
    call = module.graph.call_function
    return _instead(module, node, lambda: call(other, (node.args[0], call(aten.neg.default, (node.args[1],)))))


def double_as_sum(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """x * 2 as x + x, and x + x as x * 2."""
    call = module.graph.call_function
    if node.target is aten.mul.Tensor and not isinstance(node.args[1], Node) and node.args[1] == 2 and _is_real(node):
        return _instead(module, node, lambda: call(aten.add.Tensor, (node.args[0], node.args[0])))
    if _is_plain_binary(node, aten.add.Tensor) and node.args[0] is node.args[1]:
        return _instead(module, node, lambda: call(aten.mul.Tensor, (node.args[0], 2.0)))
    return False


def pad_and_cut(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _kept(node, chance)
    if read is None or _value(read).numel() == 0:
        return False
    last = _value(read).dim() - 1
    size = _value(read).shape[last]
    before, after = chance.choice([0, 1, 3]), chance.choice([0, 2])
    copy = (aten.clone.default, ())  # in rows again
    pad = (aten.constant_pad_nd.default, ([before, after], chance.choice([0.0, 1.5])))
    return _insert(module, node, read, pad, (aten.slice.Tensor, (last, before, before + size)), copy) and _contiguous(
        module, node
    )


def _contiguous(module: GraphModule, node: Node) -> bool:
    for read in node.all_input_nodes:
        if read.target is aten.clone.default and "val" not in read.meta:
            read.kwargs = {"memory_format": torch.contiguous_format}
    return True


def plus_zero(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _kept(node, chance)
    return read is not None and _insert(module, node, read, (aten.add.Tensor, (chance.choice([0.0, 0]),)))


def reverse_otherwise(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _read(node, chance, dims=2)
    return read is not None and _insert(module, node, read, (aten.flip.default, ([0],)), (aten.flip.default, ([1],)))


def negate_a_difference(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """a - b as -(b - a), which is +0.0 where the other is -0.0, or the other way round."""
    if not _is_plain_binary(node, aten.sub.Tensor):
        return False
    call = module.graph.call_function
    return _instead(module, node, lambda: call(aten.neg.default, (call(aten.sub.Tensor, node.args[::-1]),)))


def move_earlier(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """A call moves before the one that stands before it, which may have written what it reads, or drawn."""
    before = node.prev
    if before.op != "call_function" or before in node.all_input_nodes:
        return False
    before.prepend(node)
    return True


def drop_a_write(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if not operators.written_arguments(node) or not isinstance(node.args[0], Node):
        return False
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    return True


def write_to_a_copy(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if not operators.written_arguments(node) or not isinstance(node.args[0], Node):
        return False
    with module.graph.inserting_before(node):
        copied = module.graph.call_function(aten.clone.default, (node.args[0],))
    node.args = (copied, *node.args[1:])
    return True


def share_for_copy(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if node.target is not aten.clone.default:
        return False
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    return True


KEEPS: dict[str, Mutation] = {
    "times_one": _inserting((aten.mul.Tensor, (1.0,))),
    "over_one": _inserting((aten.div.Tensor, (1,))),
    "minus_zero": _inserting((aten.sub.Tensor, (0.0,))),
    "negate_twice": _inserting((aten.neg.default, ()), (aten.neg.default, ())),
    "times_minus_one_twice": _inserting((aten.mul.Tensor, (-1.0,)), (aten.mul.Scalar, (-1,))),
    "reverse_twice": _inserting((aten.flip.default, ([0],)), (aten.flip.default, ([0],))),
    "transpose_twice": _inserting((aten.transpose.int, (0, -1)), (aten.transpose.int, (0, -1))),
    "flatten_and_back": _inserting((aten.clone.default, ()), (aten.alias.default, ())),
    **{x.__name__: x for x in (widen_and_narrow, choose_the_same, difference_as_sum, double_as_sum, pad_and_cut)},
}

BREAKS: dict[str, Mutation] = {
    x.__name__: x
    for x in (
        *(plus_zero, reverse_otherwise, negate_a_difference, move_earlier, drop_a_write, write_to_a_copy),
        share_for_copy,
    )
}
