"""Collects the content of a self-contained file: two graphs, inputs, outputs, and the values of their calls."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from bitproof.harness.errors import BitproofError
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.step.storages import Storages

_FEW = 16
_SECONDS = 240.0


class NoFileError(BitproofError):
    """No file can show the difference. `what` is the reason."""


class Input(NamedTuple):
    """An input of the functions in a self-contained file, with its values.

    - `contents`: a single entry with the values for all ranks, or an entry for each rank. Empty if the values are drawn
      at random.
    - `origin`: source of the values, for a comment.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contents: tuple[Any, ...]
    origin: str

    @property
    def line(self) -> str:
        return f"    {self.name!r}: {(self.dtype, self.shape, self.stride, list(self.contents))!r},  # {self.origin}"


@dataclass(frozen=True)
class Side:
    """The graph of the reference or of the candidate.

    - `outputs`: name -> output.
    - `placeholders`: input -> name.
    - `storages`: the graph's storages, and the calls that write them in place.
    """

    graph: StepGraph
    outputs: dict[str, Node]
    placeholders: dict[Node, str]
    storages: Storages

    @staticmethod
    def of(graph: StepGraph, input_names: Sequence[str]) -> Side:
        """Read a graph. The outputs are the loss, the gradients, and the buffers after the step."""
        nodes = graph.module.graph.nodes
        placeholders = [node for node in nodes if node.op == "placeholder"]
        names = [*graph.parameter_names, *graph.buffer_names, *input_names]
        given: Any = graph.module.graph.output_node().args[0]
        gradients = (f"grad {name}" for name in graph.parameter_names)
        outputs: dict[str, Node] = dict(zip(("loss", *gradients), given, strict=True))
        by_node = dict(zip(placeholders, names, strict=True))
        # A buffer is written in place, so its placeholder holds the new value at the end.
        outputs |= {f"buffer {name}": node for node, name in by_node.items() if name in graph.buffer_names}
        return Side(graph, outputs, by_node, Storages(nodes))

    def walk(self, outputs: Sequence[Node], is_known: Callable[[Node], bool]) -> tuple[list[Node], list[Node]]:
        """Return a pair: the calls that are needed to compute `outputs`, and the inputs of these calls. Each is in the
        graph's order.

        Inputs are placeholders, and nodes whose memory is never written and for which `is_known` returns True.
        """
        calls, inputs, pending = set(), set(), list(outputs)
        while pending:
            node = pending.pop()
            if node in calls or node in inputs:
                continue
            writers = self.storages.writers.get(self.storages.owners[node], [])
            if node.op == "placeholder" or (node not in outputs and not writers and is_known(node)):
                inputs.add(node)
            else:
                calls.add(node)
                pending += node.all_input_nodes
            # Also for an input: a placeholder that is written needs the calls that write it.
            pending += writers
        nodes = self.graph.module.graph.nodes
        return [node for node in nodes if node in calls], [node for node in nodes if node in inputs]


@dataclass
class Scene:
    """The content of a self-contained file that shows a difference between two graphs.

    - `sides`: "reference" and "candidate" -> graph.
    - `partitions`: name of a process group -> ranks of each of its groups.
    - `tokens`: for each rank, name -> input of the step.
    - `head`: docstring of the file.
    - `ordered_group`: source code of a process group that sums in rank order.
    - `timeout`: time limit in seconds for running the file.
    - `seen`: for each rank, all values of both graphs, once they have run (see `probe`).
    """

    sides: dict[str, Side]
    world_size: int
    partitions: Mapping[str, Sequence[Sequence[int]]]
    tokens: Sequence[Mapping[str, Tensor]]
    head: str
    ordered_group: str
    timeout: float = _SECONDS
    seen: list[dict[str, Any]] = field(default_factory=list)


def place_of(node: Node) -> str:
    chunk = node.meta.get(CHUNK_KEY)
    return f"{origin_of(node)}" + ("" if chunk is None else f", chunk {chunk}")


def content_of(scene: Scene, side: str, node: Node) -> Input | None:
    """Return a node's saved value as an input of the file; the input has no name yet.

    Returns None if the value is too large, if some of its elements share memory, or if its dtype, shape or strides
    differ between ranks.
    """
    found = [rank["values"][side][node.name] for rank in scene.seen]
    types = [tuple(map(str, value[1:4])) for value in found]
    _, dtype, shape, stride, _ = found[0]
    # A file states dtype, shape and strides once for all ranks, and fills an input element by element.
    overlaps = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
    contents = tuple(value[4] for value in found)
    if len(set(types)) > 1 or overlaps or None in contents:
        return None
    # A value that all ranks share is stored once.
    contents = contents[:1] if len(set(contents)) == 1 else contents
    readable = tuple(_readable(content, dtype) for content in contents)
    return Input("", dtype, tuple(shape), tuple(stride), readable, f"{node.name}, {place_of(node)}")


def _readable(content: str, dtype: str) -> Any:
    data = zlib.decompress(base64.b64decode(content))
    type_ = getattr(torch, dtype)
    if not 0 < len(data) <= _FEW * type_.itemsize or type_.is_complex:
        return content
    numbers = torch.frombuffer(bytearray(data), dtype=type_).tolist()
    # NaN and infinity are no literals of Python.
    back = torch.tensor(numbers, dtype=type_).view(torch.uint8).tolist()
    # Numbers, which a reader can check, only if they reproduce every bit.
    return numbers if bytes(back) == data and all(map(math.isfinite, numbers)) else content


def input_of(scene: Scene, side: str, node: Node, number: int) -> Input:
    """Make an input of a file from a node. `number` is the index of the input.

    A placeholder has the tokens of the case, or is drawn at random. Any other node has the bytes that `probe` saved.
    """
    given = scene.sides[side].placeholders.get(node)
    if given is None:
        found = content_of(scene, side, node)
        assert found is not None
        return found._replace(name=f"x{number}")
    value = node.meta["val"]
    name = f"{re.sub(r'[^0-9a-zA-Z]', '_', given)}_{number}"
    shape, stride = (tuple(map(int, sizes)) for sizes in (value.shape, value.stride()))
    contents = tuple(_readable(_packed(r[given]), "int64") for r in scene.tokens) if given in scene.tokens[0] else ()
    return Input(name, str(value.dtype).removeprefix("torch."), shape, stride, contents, given)


def _packed(x: Tensor) -> str:
    return base64.b64encode(zlib.compress(x.contiguous().numpy().tobytes(), 9)).decode()
