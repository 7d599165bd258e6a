"""Write a difference between two graphs as one file of plain Python, with no part of this project in it.

1. Write both graphs whole, with a look at the value after each line, and run that on all ranks, as `python FILE`.
2. What differs there is what a file can show. Walk back from a differing output in both graphs, and stop at every
   value that the other graph has too, bit for bit, on all ranks: such values become inputs, with their bytes.
   So the calls that are left compute in the file what they compute in the whole, and nothing else is needed.
3. Take the output that needs the fewest calls; where a value is too large to be written down, walk further.
4. Run the file. One that does not exit with 1 is not handed out.

The whole graphs read parameters and buffers drawn at random, and the tokens of a step of the case.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import operator
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from harness.determinism import ENVIRONMENT
from harness.errors import BitproofError
from harness.graph.operators import group_name, is_collective, storage_owners, written_arguments
from harness.graph.origin import origin_of
from harness.graph.trace import StepGraph
from harness.graph.writer import CHUNK_KEY
from harness.localize import standalone_main, standalone_probe

SIDES = ("reference", "candidate")
NAMESPACES = {"aten", "prims", "_c10d_functional"}
LARGEST_CONTENT = 1 << 17
"""Characters of all values that a file holds: more is no longer to be read."""
_FEW = 16
_SECONDS = 240.0
_SUMS = {"reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_reduce", "all_reduce_coalesced"}


class NoFileError(BitproofError):
    """No file can show the difference. `what` says why."""


class Input(NamedTuple):
    """What both sides are given: dtype, shape, strides, and the content of each rank, or of all; none is drawn."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contents: tuple[Any, ...]
    origin: str

    @property
    def line(self) -> str:
        """The input's entry in the file's table."""
        return f"    {self.name!r}: {(self.dtype, self.shape, self.stride, list(self.contents))!r},  # {self.origin}"


@dataclass(frozen=True)
class Side:
    """One graph, what it gives by name, and the calls that write into a storage, by the storage's owner."""

    graph: StepGraph
    outputs: dict[str, Node]
    placeholders: dict[Node, str]
    owners: dict[Node, Node]
    writers: dict[Node, list[Node]]

    @staticmethod
    def of(graph: StepGraph, input_names: Sequence[str]) -> Side:
        """Read a graph. Outputs are the loss, gradients, and buffers as they are at the end."""
        nodes = graph.module.graph.nodes
        owners = storage_owners(nodes)
        writers: dict[Node, list[Node]] = {}
        for node in nodes:
            for written in written_arguments(node):
                writers.setdefault(owners[written], []).append(node)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        names = [*graph.parameter_names, *graph.buffer_names, *input_names]
        given: Any = graph.module.graph.output_node().args[0]
        gradients = (f"grad {name}" for name in graph.parameter_names)
        outputs: dict[str, Node] = dict(zip(("loss", *gradients), given, strict=True))
        by_node = dict(zip(placeholders, names, strict=True))
        outputs |= {f"buffer {name}": node for node, name in by_node.items() if name in graph.buffer_names}
        return Side(graph, outputs, by_node, owners, writers)

    def walk(self, outputs: Sequence[Node], is_known: Callable[[Node], bool]) -> tuple[list[Node], list[Node]]:
        """The calls that outputs need, in order, and the inputs of those: placeholders and nodes that are known.

        A storage that is written into is followed to its placeholder, with every call that writes into it.
        """
        calls, inputs, pending = set(), set(), list(outputs)
        while pending:
            node = pending.pop()
            if node in calls or node in inputs:
                continue
            owner = self.owners[node]
            if node.op == "placeholder" or (node not in outputs and owner not in self.writers and is_known(node)):
                inputs.add(node)
            else:
                calls.add(node)
                pending += node.all_input_nodes
            pending += self.writers.get(owner, ())
        nodes = self.graph.module.graph.nodes
        return [node for node in nodes if node in calls], [node for node in nodes if node in inputs]


@dataclass
class Scene:
    """Everything a file is made of: both sides, ranks, groups (name to ranks), what graphs read, words for its head."""

    sides: dict[str, Side]
    world_size: int
    partitions: Mapping[str, Sequence[Sequence[int]]]
    tokens: Sequence[Mapping[str, Tensor]]
    head: str
    ordered_group: str
    timeout: float = _SECONDS
    seen: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """A file that shows the difference: its text, how many calls each side makes in it, what running it printed."""

    text: str
    num_calls: dict[str, int]
    printed: str


Run = Callable[..., tuple[int | None, str]]
"""Runs a file's text in a folder, for so many seconds, with arguments: exit status, None if too late, and output."""


def write_standalone(scene: Scene, run: Run | None = None) -> Written:
    """Write the shortest file that shows a difference, and run it, by default as a reader will.

    Raises NoFileError when none shows one.
    """
    run = run or run_plain
    with tempfile.TemporaryDirectory() as folder:
        differing = _probe(scene, Path(folder), run)
        if not differing:
            raise NoFileError("the two graphs agree in every bit: what differs is not in their code")
        for is_short in (True, False):
            text, num_calls = _shortest(scene, differing, is_short)
            status, printed = run(text, Path(folder), scene.timeout)
            if status == 1:
                return Written(text, num_calls, printed)
    raise NoFileError("a file with the code of both graphs was written, and ran without showing a difference")


def run_plain(text: str, folder: Path, timeout: float, *arguments: str) -> tuple[int | None, str]:
    """Run a file as `python FILE` does elsewhere: without this project's paths and settings. Status, and output."""
    file = folder / "standalone.py"
    file.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name not in {*ENVIRONMENT, "PYTHONPATH"}}
    try:
        done = subprocess.run(
            [sys.executable, str(file), *arguments],
            cwd=folder,
            env=environment,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return None, f"not finished after {timeout:g} s"
    return done.returncode, done.stdout


def _probe(scene: Scene, folder: Path, run: Run) -> list[str]:
    """Run both graphs whole, keep what was seen, and return the names of the outputs that differ on any rank."""
    outputs = {name: list(side.outputs) for name, side in scene.sides.items()}
    text = _render(scene, outputs["reference"], lambda side, node: False, True)[0]
    status, printed = run(text, folder, scene.timeout, str(folder))
    if status not in (0, 1):
        raise NoFileError("the code of both graphs does not run by itself", found=printed[-2000:])
    scene.seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(scene.world_size)]
    return [name for name in outputs["reference"] if any(name in seen["differing"] for seen in scene.seen)]


def _shortest(scene: Scene, differing: Sequence[str], is_short: bool) -> tuple[str, dict[str, int]]:
    """The file of the fewest calls that shows one of the differing outputs; `is_short` stops at common values."""
    values = {name: _values(scene, name) for name in SIDES}
    common = set(values["reference"].values()) & set(values["candidate"].values()) if is_short else set()

    def is_known(side: str, node: Node) -> bool:
        key = values[side].get(node.name)
        return key in common and _content(scene, side, node) is not None

    files = [_render(scene, [output], is_known, False) for output in differing]
    fitting = [file for file in files if len(file[0]) <= LARGEST_CONTENT] or files
    return min(fitting, key=lambda file: (sum(file[1].values()), len(file[0])))


def _values(scene: Scene, side: str) -> dict[str, tuple[str, ...]]:
    """By node, the digests of its value on all ranks, for all values that every rank has seen."""
    seen = [rank["values"][side] for rank in scene.seen]
    return {name: tuple(rank[name][0] for rank in seen) for name in seen[0] if all(name in rank for rank in seen)}


def _content(scene: Scene, side: str, node: Node) -> Input | None:
    """A seen value as an input; None when it is too large, has another layout on each rank, or overlaps itself."""
    found = [rank["values"][side][node.name] for rank in scene.seen]
    types = [tuple(map(str, value[1:4])) for value in found]
    _, dtype, shape, stride, _ = found[0]
    overlaps = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
    contents = tuple(value[4] for value in found)
    if len(set(types)) > 1 or overlaps or None in contents:
        return None
    contents = contents[:1] if len(set(contents)) == 1 else contents
    readable = tuple(_readable(content, dtype) for content in contents)
    return Input("", dtype, tuple(shape), tuple(stride), readable, f"{node.name}, {_place(node)}")


def _readable(content: str, dtype: str) -> Any:
    """Packed bytes as numbers, where these are few and say every bit."""
    data = zlib.decompress(base64.b64decode(content))
    type_ = getattr(torch, dtype)
    if not 0 < len(data) <= _FEW * type_.itemsize or type_.is_complex:
        return content
    numbers = torch.frombuffer(bytearray(data), dtype=type_).tolist()
    back = torch.tensor(numbers, dtype=type_).view(torch.uint8).tolist()
    return numbers if bytes(back) == data and all(map(math.isfinite, numbers)) else content


def _render(
    scene: Scene, outputs: Sequence[str], is_known: Callable[[str, Node], bool], probing: bool
) -> tuple[str, dict[str, int]]:
    """The file that computes some outputs, and how many calls each side makes in it."""
    inputs: dict[Any, Input] = {}
    functions, num_calls, collectives = [], {}, []
    for name in SIDES:
        side = scene.sides[name]
        wanted = {output: side.outputs[output] for output in outputs}
        calls, given = side.walk(list(wanted.values()), lambda node, name=name: is_known(name, node))  # type: ignore[misc]
        names = {node: node.name for node in calls}
        for node in given:
            key = side.placeholders.get(node) or tuple(rank["values"][name][node.name][0] for rank in scene.seen)
            if key not in inputs:
                inputs[key] = _input(scene, name, node, len(inputs))
            names[node] = inputs[key].name
        functions.append(_function(name, calls, names, wanted, probing))
        num_calls[name] = len(calls)
        collectives += [node for node in calls if is_collective(node)]
    arguments = ", ".join(entry.name for entry in inputs.values())
    text = "\n\n\n".join(function.replace("(INPUTS)", f"({arguments})") for function in functions)
    return _file(scene, list(inputs.values()), text, collectives, probing), num_calls


def _input(scene: Scene, side: str, node: Node, number: int) -> Input:
    """A node of a side as an input: a placeholder drawn at random, or with the case's tokens; else with its bytes."""
    given = scene.sides[side].placeholders.get(node)
    if given is None:
        found = _content(scene, side, node)
        assert found is not None
        return found._replace(name=f"x{number}")
    value = node.meta["val"]
    name = f"{re.sub(r'[^0-9a-zA-Z]', '_', given)}_{number}"
    shape, stride = (tuple(map(int, sizes)) for sizes in (value.shape, value.stride()))
    contents = tuple(_readable(_packed(r[given]), "int64") for r in scene.tokens) if given in scene.tokens[0] else ()
    return Input(name, str(value.dtype).removeprefix("torch."), shape, stride, contents, given)


def _packed(x: Tensor) -> str:
    return base64.b64encode(zlib.compress(x.contiguous().numpy().tobytes(), 9)).decode()


def _function(
    side: str, calls: Sequence[Node], names: Mapping[Node, str], outputs: Mapping[str, Node], probing: bool
) -> str:
    """One side as a function: a line a call, and a comment where another module's calls begin."""
    lines, place = [f"def {side}(INPUTS):"], ""
    for node in calls:
        if _place(node) != place:
            place = _place(node)
            lines.append(f"    # {place}")
        lines.append(f"    {names[node]} = {_call(node, names)}")
        if probing and not is_collective(node):  # a collective that was not waited for has no value yet
            lines.append(f"    see({node.name!r}, {names[node]})")
    returned = ", ".join(f"{name!r}: {names[node]}" for name, node in outputs.items())
    return "\n".join([*lines, f"    return {{{returned}}}"])


def _place(node: Node) -> str:
    chunk = node.meta.get(CHUNK_KEY)
    return f"{origin_of(node)}" + ("" if chunk is None else f", chunk {chunk}")


def _call(node: Node, names: Mapping[Node, str]) -> str:
    """A call as Python. Raises NoFileError for one that plain torch does not know."""
    if node.target is operator.getitem:
        return f"{_text(node.args[0], names)}[{_text(node.args[1], names)}]"
    arguments = [_text(argument, names) for argument in node.args]
    arguments += [f"{name}={_text(argument, names)}" for name, argument in node.kwargs.items()]
    return f"{_function_name(node)}({', '.join(arguments)})"


def _function_name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload) and target.namespace in NAMESPACES:
        return f"torch.ops.{target}"
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", str(target))
    if node.op == "call_function" and module in ("_operator", "math"):
        return f"{module.removeprefix('_')}.{name}"
    if node.op == "call_function" and module == "torch" and getattr(torch, name, None) is target:
        return f"torch.{name}"
    raise NoFileError(f"a graph has `{node.name}`, a {node.op} of {name}, which plain torch does not have")


def _text(value: Any, names: Mapping[Node, str]) -> str:
    """An argument as Python."""
    match value:
        case Node():
            return names[value]
        case list():
            return f"[{', '.join(_text(item, names) for item in value)}]"
        case tuple():
            return f"({''.join(_text(item, names) + ', ' for item in value)})"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
        case slice():
            return f"slice({', '.join(_text(item, names) for item in (value.start, value.stop, value.step))})"
        case None | bool() | int() | float() | str() | torch.dtype() | torch.layout() | torch.memory_format():
            return repr(value)
    raise NoFileError(f"a graph has an argument of type {type(value).__name__}, which cannot be written down")


def _file(scene: Scene, inputs: Sequence[Input], functions: str, collectives: Sequence[Node], probing: bool) -> str:
    """Put the file together: what is the same in every file, below what is not."""
    groups = {group_name(node): scene.partitions[group_name(node)] for node in collectives}
    tables = [f"WORLD_SIZE = {scene.world_size}", _INPUTS_ARE]
    tables += ["INPUTS = {", *(entry.line for entry in inputs), "}"]
    parts: list[Callable[..., Any]] = [*_FUNCTIONS, standalone_main.tell]
    compare: Callable[[], int] = standalone_main.compare_alone
    imports, names = _IMPORTS, _NAMES
    if groups or probing:
        tables += ["GROUPS = {", *(f"    {name!r}: {[list(p) for p in parts]}," for name, parts in groups.items()), "}"]
        tables += ["", "", _wrap_group(scene, groups, collectives)]
        parts.append(standalone_main.run_rank)
        compare = standalone_main.compare_together
        imports, names = sorted({*_IMPORTS, *_MORE_IMPORTS}), _MORE_NAMES
    probe = [f"{_PROBE_IMPORTS}\n\nLARGEST = {standalone_probe.LARGEST}\nseen = {{}}"] if probing else []
    probe += [inspect.getsource(part) for part in (standalone_probe.see, standalone_probe.differs_on) if probing]
    imported = "\n".join(f"import {name}" for name in imports)
    blocks = [
        f'"""{scene.head}"""\n\nfrom __future__ import annotations\n\n{imported}\n{names}',
        "\n".join(tables),
        functions,
        *map(inspect.getsource, parts),
        *probe,
        inspect.getsource(compare),
        f'if __name__ == "__main__":\n{_SETTINGS}    sys.exit({compare.__name__}())',
    ]
    return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _wrap_group(scene: Scene, groups: Mapping[str, Any], collectives: Sequence[Node]) -> str:
    """What a file makes of gloo's groups: themselves, unless sums of more than two ranks need an order."""
    sums = [group_name(node) for node in collectives if getattr(node.target, "_opname", "") in _SUMS]
    if any(len(groups[name][0]) > 2 for name in sums):
        return f"{scene.ordered_group}\n\nwrap_group = RankOrderGroup"
    return "def wrap_group(group):\n    return group"


_FUNCTIONS: list[Callable[..., Any]] = [
    standalone_main.make_input,
    standalone_main.compute,
    standalone_main.bytes_of,
    standalone_main.describe_difference,
    standalone_main.differs_on,
]
_IMPORTS = ["base64", "math", "operator", "os", "sys", "traceback", "zlib"]
_MORE_IMPORTS = ["multiprocessing", "tempfile"]
_PROBE_IMPORTS = "import hashlib\nimport json"
_NAMES = "from typing import Any\n\nimport torch\nfrom torch import Tensor"
_MORE_NAMES = """from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work"""
_INPUTS_ARE = (
    "# dtype, shape, strides, and the content on all ranks, or on each: numbers, packed bytes, or drawn where empty."
)
_SETTINGS = """    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
"""
