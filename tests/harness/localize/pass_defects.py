"""Defects inside the passes that come with bitproof, and a host whose pipeline has one of them.

    python -P bitproof/harness/runtime/start.py tests.harness.localize.pass_defects DEFECT ...

is a main, as bitproof.harness.execute.host.main is.

Each is what a pass may well get wrong: nothing is marked, nothing fails, and verification has no objection.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from bitproof.harness.graph.operators import operator_name
from bitproof.harness.graph.origin import origin_of

aten = torch.ops.aten


class PassDefect(NamedTuple):
    """What a pass does wrong after it did everything right, and the region in which it does, for the chunk pass."""

    edit: Callable[[GraphModule], None]
    of: str
    region: str | None = None


def nodes(module: GraphModule, name: str, at: str = "", direction: str = "forward") -> list[Node]:
    """The calls of an operator, in a module or anywhere below it."""
    return [
        node
        for node in module.graph.nodes
        if operator_name(node) == name
        and origin_of(node).direction == direction
        and (origin_of(node).module or "").startswith(at)
    ]


def bypass(node: Node, source: Node) -> None:
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def merge_norms(module: GraphModule) -> None:
    """Take the second norm's scale for the first's: the same call, but not of the same value."""
    first, second = [node for node in nodes(module, "rsqrt") if node.users][:2]
    bypass(second, first)


def bring_back_the_wrong_copy(module: GraphModule) -> None:
    """Reload one activation in another's place; they look alike."""
    # What is needed only to recompute something else is read by nobody yet.
    reloads = [n for n in module.graph.nodes if operator_name(n) == "reload" and all(copy.users for copy in n.users)]
    for first, second in itertools.pairwise(reloads):
        if str(first.meta["val"]) == str(second.meta["val"]):
            first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])
            return
    raise AssertionError("no two activations look alike")


def repeat_with_another_epsilon(module: GraphModule) -> None:
    """Recompute a norm with other settings than forward had."""
    norm = next(node for node in module.graph.nodes if "_recomputed" in node.name and node.args[1:] == (1e-06,))
    norm.args = (norm.args[0], 1e-4)


def join_in_reverse(module: GraphModule) -> None:
    """Concatenate one block's chunks the wrong way round."""
    joins = [node for node in nodes(module, "cat") if [x.meta.get("chunk") for x in node.args[0]] == [0, 1]]  # type: ignore[union-attr]
    node = next(node for node in joins if (origin_of(node).module or "").startswith("layers.2"))
    node.args = (list(reversed(node.args[0])), *node.args[1:])  # type: ignore[arg-type]


def take_the_first_half_twice(module: GraphModule) -> None:
    """Give chunk 1 of the first block the first half of its input."""
    half = next(
        node
        for node in module.graph.nodes
        if node.target is aten.slice.Tensor and node.meta.get("chunk") == 1 and node.meta["val"].is_floating_point()
        if (origin_of(node).module or "").startswith("layers.0")
    )
    half.args = (half.args[0], half.args[1], 0, half.args[2])


def forget_a_gradient(module: GraphModule) -> None:
    """Leave out one chunk's gradient of a parameter of the second block's attention."""
    for gradient in module.graph.output_node().args[0]:  # type: ignore[union-attr]
        if gradient.target is aten.add.Tensor and (origin_of(gradient.args[0]).module or "").startswith("layers.1.att"):
            bypass(gradient, gradient.args[0])
            return
    raise AssertionError("no gradient is added")


def fill_a_bucket_in_another_order(module: GraphModule) -> None:
    """Put two gradients of one shape into a bucket in each other's place."""
    for launch in module.graph.nodes:
        if operator_name(launch) != "reduce_scatter_tensor" or operator_name(launch.args[0]) != "cat":
            continue
        parts, *others = list(launch.args[0].args[0]), *launch.args[0].args[1:]
        alike = [i for i, part in enumerate(parts) if part.meta["val"].shape == parts[0].meta["val"].shape]
        if len(alike) > 2:  # two may be the chunks of one gradient, which are added later in any order
            parts[0], parts[alike[-1]] = parts[alike[-1]], parts[0]
            launch.args[0].args = (parts, *others)
            return
    raise AssertionError("no bucket")


def read_the_other_chunk(module: GraphModule) -> None:
    """Let chunk 1's backward read what chunk 0's forward left: the order allows it, the values do not."""
    first, second = nodes(module, "silu_backward", "layers.0.feed_forward", "backward")[:2]
    later = max(first, second, key=lambda node: node.meta["chunk"])
    sooner = min(first, second, key=lambda node: node.meta["chunk"])
    later.args = (later.args[0], sooner.args[1])


def drop_a_write(module: GraphModule) -> None:
    """Take an in-place write for dead code: nobody reads its result, but the buffer it writes into stays."""
    write = nodes(module, "add_", "layers.1.moe")[-1]
    bypass(write, write.args[0])  # type: ignore[arg-type]


DEFECTS = {
    "merge_norms": PassDefect(merge_norms, "clean_up"),
    "bring_back_the_wrong_copy": PassDefect(bring_back_the_wrong_copy, "offload"),
    "repeat_with_another_epsilon": PassDefect(repeat_with_another_epsilon, "rematerialize"),
    "join_in_reverse": PassDefect(join_in_reverse, "chunk", "layers.2"),
    "take_the_first_half_twice": PassDefect(take_the_first_half_twice, "chunk", "layers.0"),
    "forget_a_gradient": PassDefect(forget_a_gradient, "chunk", "layers.1"),
    "fill_a_bucket_in_another_order": PassDefect(fill_a_bucket_in_another_order, "bucket"),
    "read_the_other_chunk": PassDefect(read_the_other_chunk, "overlap"),
    "drop_a_write": PassDefect(drop_a_write, "concretize_symbols"),
}


def install(defect: PassDefect) -> None:
    """Put a defect into this process's pipeline, wherever there is something that it can spoil."""
    from bitproof.harness.graph import pipeline

    right = getattr(pipeline, defect.of)

    @functools.wraps(right)
    def wrong(module: GraphModule, *args: Any, **settings: Any) -> GraphModule:
        module = right(module, *args, **settings)
        try:
            defect.edit(module)
        except (StopIteration, ValueError, AssertionError):
            if defect.region is None:  # a region may not be chunked, and then there is nothing to spoil
                raise
        module.recompile()
        return module

    setattr(pipeline, defect.of, wrong)


@contextmanager
def hosts_with(name: str) -> Iterator[None]:
    """Let hosts that are started within have a defect in their pipeline."""
    start = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        if command[3:4] == ["bitproof.harness.execute.host.main"]:
            command = [*command[:3], "tests.harness.localize.pass_defects", name, *command[4:]]
        return start(command, **options)

    with mock.patch("bitproof.harness.processes.started.subprocess.Popen", popen):
        yield


def main() -> None:
    """A host with the defect that the first argument names."""
    from bitproof.harness.execute.host import main

    install(DEFECTS[sys.argv.pop(1)])
    main.main()
