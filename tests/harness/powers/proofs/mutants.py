"""Graphs with one random change, exact or not: what a prover must not call equal unless all bits are.

Each mutation takes a copy of a graph, a random number generator and a call, and returns whether it changed anything.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.torch_compat import LazyGraphModule
from tests.harness.powers.proofs.toy_graphs import aten, c10d

Mutation = Callable[[GraphModule, random.Random, Node], bool]

REAL = {torch.float32, torch.bfloat16, torch.float64}


def mutate(
    module: GraphModule, chance: random.Random, mutations: Mapping[str, Mutation] | None = None
) -> tuple[str, GraphModule]:
    """A copy of a graph with one change, and its kind."""
    known = MUTATIONS if mutations is None else mutations
    while True:
        name = chance.choice(sorted(known))
        mutant = copied(module)
        calls = [node for node in mutant.graph.nodes if node.op == "call_function"]
        if known[name](mutant, chance, chance.choice(calls)):
            return name, mutant


def copied(module: GraphModule) -> GraphModule:
    """The same calls, without code: mutants are interpreted, and most attempts change nothing."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return LazyGraphModule(module, graph)


def _value(node: Any) -> Tensor | None:
    """What a call gives, where it is a tensor whose sizes do not depend on data."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    is_plain = isinstance(value, Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return value if is_plain else None


def _is_real(node: Any, dims: int = 1) -> bool:
    value = _value(node)
    return value is not None and value.dtype in REAL and value.dim() >= dims and value.numel() > 1


def _read(node: Node, chance: random.Random, dims: int = 1) -> Node | None:
    """A real tensor that a call reads, whose elements it is not merely waiting for."""
    if node.target is c10d.wait_tensor.default or node.target is operator.getitem:
        return None
    known = [x for x in node.all_input_nodes if _is_real(x, dims) and not _is_launch(x)]
    return chance.choice(known) if known else None


def _is_launch(node: Node) -> bool:
    return "_c10d_functional" in str(node.target) and node.target is not c10d.wait_tensor.default


def _insert(module: GraphModule, node: Node, read: Node, *steps: tuple[Any, tuple[Any, ...]]) -> bool:
    """Let a call read what `steps` make of what it read."""
    with module.graph.inserting_before(node):
        made = read
        for target, args in steps:
            made = module.graph.call_function(target, (made, *args))
    node.replace_input_with(read, made)
    return True


def swap_operands(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if len(node.args) < 2 or not all(isinstance(x, Node) for x in node.args[:2]):
        return False
    one, two = node.args[:2]
    if one is two or _value(one) is None or _value(two) is None or _value(one).shape != _value(two).shape:
        return False
    node.args = (two, one, *node.args[2:])
    return True


def read_another(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _read(node, chance)
    if read is None:
        return False
    earlier = []
    for other in module.graph.nodes:
        if other is node:
            break
        if other is not read and _is_real(other) and not _is_launch(other):
            earlier.append(other)
    alike = [x for x in earlier if (_value(x).shape, _value(x).dtype) == (_value(read).shape, _value(read).dtype)]
    if not alike:
        return False
    node.replace_input_with(read, chance.choice(alike))
    return True


def lay_out_in_columns(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _read(node, chance, dims=2)
    contiguous = {"memory_format": torch.contiguous_format}
    if read is None or "view" in str(node.target):
        return False
    with module.graph.inserting_before(node):
        columns = module.graph.call_function(aten.transpose.int, (read, 0, 1))
        copied = module.graph.call_function(aten.clone.default, (columns,), contiguous)
        back = module.graph.call_function(aten.transpose.int, (copied, 0, 1))
    node.replace_input_with(read, back)
    return True


def copy_first(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _read(node, chance)
    return read is not None and _insert(module, node, read, (aten.clone.default, ()))


def reshape_and_back(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _read(node, chance)
    if read is None:
        return False
    return _insert(
        module, node, read, (aten.reshape.default, ([-1],)), (aten.reshape.default, (list(_value(read).shape),))
    )


def cast_and_back(module: GraphModule, chance: random.Random, node: Node) -> bool:
    read = _read(node, chance)
    if read is None:
        return False
    with module.graph.inserting_before(node):
        other = chance.choice([torch.float16, torch.bfloat16, torch.float64])
        cast = module.graph.call_function(aten._to_copy.default, (read,), {"dtype": other})
        back = module.graph.call_function(aten._to_copy.default, (cast,), {"dtype": _value(read).dtype})
    node.replace_input_with(read, back)
    return True


def cut_and_join(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """Halves of an operand, joined again: in their order, or in the other."""
    read = _read(node, chance)
    if read is None or _value(read).shape[0] < 2:
        return False
    half = _value(read).shape[0] // 2
    with module.graph.inserting_before(node):
        parts = [
            module.graph.call_function(aten.slice.Tensor, (read, 0, begin, end))
            for begin, end in ((0, half), (half, _value(read).shape[0]))
        ]
        joined = module.graph.call_function(aten.cat.default, (parts[:: chance.choice([1, 1, -1])],))
    node.replace_input_with(read, joined)
    return True


def run_in_halves(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """An operator on both halves of its rows: exact for some, and never to be proved for others."""
    pointwise = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.silu.default, aten.exp.default)
    value = _value(node)
    if node.target not in (*pointwise, aten.mm.default) or value is None or value.dim() < 1 or value.shape[0] < 2:
        return False
    split = [x for x in node.args if isinstance(x, Node)]
    split = split[:1] if node.target is aten.mm.default else split
    if any(_value(x).shape[:1] != value.shape[:1] or _value(x).dim() != value.dim() for x in split):
        return False
    half = value.shape[0] // 2
    with module.graph.inserting_after(node):
        anchor = module.graph.call_function(aten.clone.default, (node,))
    with module.graph.inserting_before(anchor):
        parts = []
        for begin, end in ((0, half), (half, value.shape[0])):
            args = [
                module.graph.call_function(aten.slice.Tensor, (x, 0, begin, end)) if x in split else x
                for x in node.args
            ]
            parts.append(module.graph.call_function(node.target, tuple(args), node.kwargs))
        joined = module.graph.call_function(aten.cat.default, (parts,))
    node.replace_all_uses_with(joined, delete_user_cb=lambda user: user is not anchor)
    module.graph.erase_node(anchor)
    return True


def regroup(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """(a + b) + c as a + (b + c)."""
    if node.target is not aten.add.Tensor or not isinstance(node.args[0], Node):
        return False
    inner = node.args[0]
    if inner.target is not aten.add.Tensor or _value(inner).shape != _value(node).shape:
        return False
    with module.graph.inserting_before(node):
        right = module.graph.call_function(aten.add.Tensor, (inner.args[1], node.args[1]))
    node.args = (inner.args[0], right)
    return True


def change_a_number(module: GraphModule, chance: random.Random, node: Node) -> bool:
    places = [place for place, x in enumerate(node.args) if type(x) is float]
    if not places:
        return False
    place = chance.choice(places)
    node.args = (*node.args[:place], node.args[place] * 1.001, *node.args[place + 1 :])
    return True


def scale_an_operand(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if node.target is not aten.add.Tensor or not isinstance(node.args[1], Node):
        return False
    node.kwargs = {"alpha": chance.choice([2, 1])}
    return True


def move_a_slice(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.args[2] == 0:
        return False
    read, dim, start, end = node.args
    node.args = (read, dim, start - 1, min(end, _value(read).shape[dim]) - 1)
    return True


def write_in_place(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """Something is negated in memory, where others may read it later or not."""
    read = _read(node, chance)
    if read is None or 0 in _value(read).stride():
        return False
    with module.graph.inserting_after(node) if chance.random() < 0.5 else module.graph.inserting_before(node):
        module.graph.call_function(aten.neg_.default, (read,))
    return True


def copy_back(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """What a call leaves in memory is computed beside it, with a factor or without, and copied there."""
    plain = {aten.add_.Tensor: aten.add.Tensor, aten.mul_.Tensor: aten.mul.Tensor}.get(node.target)
    if plain is None:
        return False
    factor = {"alpha": 3} if plain is aten.add.Tensor and chance.random() < 0.3 else {}
    with module.graph.inserting_before(node):
        made = module.graph.call_function(plain, node.args, factor)
        copied = module.graph.call_function(aten.copy_.default, (node.args[0], made))
    node.replace_all_uses_with(copied)
    module.graph.erase_node(node)
    return True


def swap_outputs(module: GraphModule, chance: random.Random, node: Node) -> bool:
    output = module.graph.output_node()
    values = list(output.args[0])
    one, two = chance.sample(range(len(values)), 2)
    values[one], values[two] = values[two], values[one]
    output.args = (values,)
    return True


def change_a_group(module: GraphModule, chance: random.Random, node: Node) -> bool:
    if not _is_launch(node):
        return False
    node.args = (*node.args[:-1], chance.choice(["renamed", "reversed"]))
    return True


def repeat(module: GraphModule, chance: random.Random, node: Node) -> bool:
    """A reader gets a call of its own."""
    if _is_launch(node) or node.target in (c10d.wait_tensor.default, operator.getitem):
        return False
    users = list(node.users)
    if not users or str(node.target).split(".")[1].endswith("_"):
        return False
    with module.graph.inserting_after(node):
        again = module.graph.call_function(node.target, node.args, node.kwargs)
    again.meta.update(node.meta)
    chance.choice(users).replace_input_with(node, again)
    return True


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        swap_operands,
        read_another,
        lay_out_in_columns,
        copy_first,
        reshape_and_back,
        cast_and_back,
        cut_and_join,
        run_in_halves,
        regroup,
        change_a_number,
        scale_an_operand,
        move_a_slice,
        write_in_place,
        copy_back,
        swap_outputs,
        change_a_group,
        repeat,
    )
}


# -- steps to mutate ----------------------------------------------------------------------------------
# Three small ones, for what a mutant costs grows with its calls. Together they have what real steps have: gathers,
# reductions, a buffer, halves, casts, gradients that add.


def _gathered(w: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(w.bfloat16(), 2, "pairs")).float()  # (8, 6)


def chunks(w: Tensor, v: Tensor, counts: Tensor, x: Tensor) -> list[Tensor]:
    """A forward in halves, which a buffer counts."""
    weight = _gathered(w)
    halves = []
    for part in torch.split(x, [4, 4]):
        norm = part * (part.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        hidden = torch.nn.functional.silu(norm @ weight.t())  # (4, 8)
        counts.add_(hidden.sum(0) * 0.5)
        halves.append(hidden @ v)
    joined = torch.cat(halves) + x
    return [(joined * joined).sum(), joined.view(4, 12) + v.reshape(4, 12)]


def gradients(w: Tensor, v: Tensor, counts: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of halves, each reduced, and added."""
    grads = [(h.t() @ h).reshape(-1)[:24].view(4, 6) for h in (x[:4] + v[:4], x[4:] * v[4:])]
    reduced = [c10d.wait_tensor(c10d.reduce_scatter_tensor(g.clone(), "sum", 2, "pairs")) for g in grads]
    counts.mul_((x * v).sum(1))
    return [(reduced[0] + reduced[1]) + w[:2] * v[:2], reduced[0] * 2.0 + w[2:]]


def products(w: Tensor, v: Tensor, counts: Tensor, x: Tensor) -> list[Tensor]:
    """Elementwise operators, slices and products of what was gathered."""
    weight = _gathered(w)
    joined = torch.cat([x[:4] * weight[:4], x[4:] * weight[4:]])
    product = joined.exp()[:, :4] - (joined[:, 2:] + v[:, :4]) * 1.5
    counts.add_((joined - v).float().sum(1))
    return [product.t() @ v, (joined + v).bfloat16().float().t() @ weight]


STEPS = (chunks, gradients, products)


def inputs(seed: int, ranks: int = 4) -> list[list[Tensor]]:
    """Each rank's tensors, of magnitudes far enough apart for roundings to show."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))

    return [[normal(4, 6), normal(8, 6), normal(8), normal(8, 6)] for _ in range(ranks)]
