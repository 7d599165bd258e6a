"""Writes each graph of a pipeline for reviewers: as text, as a diff, and for tlparse.

The files are numbered in order, from the traced graph to the last pass:

    00-traced.txt     a line per node, with a headline before a change of module, direction or chunk
    01-clean_up.txt   the graph after the pass
    01-clean_up.diff  its changes, as a unified diff of the two texts
    tlparse/*.log     the same texts as torch's structured trace, which `tlparse tlparse/*.log` turns into pages

Lines have no numbers and nodes keep their names from pass to pass, so that a diff shows only a pass's changes.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sympy
import torch
from torch.fx import GraphModule, Node

from bitproof.harness.files.folder_names import file_name
from bitproof.harness.graph import symbols
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.torch_compat import LazyTraceHandler, OpOverload, TorchLogsFormatter, trace_log
from bitproof.harness.torch_compile import trace_artifact


class GraphDump:
    """Writes a graph into `folder` at each call. Use it in a `with` block.

    `parameter_names` and `buffer_names` are in the order of the graph's inputs. The text shows these names beside
    inputs and gradients.
    """

    def __init__(self, folder: Path, parameter_names: Sequence[str], buffer_names: Sequence[str]) -> None:
        self._folder = folder
        self._inputs = [f"parameter {name}" for name in parameter_names] + [f"buffer {name}" for name in buffer_names]
        self._outputs = ["loss", *(f"gradient {name}" for name in parameter_names)]
        self._label = ""
        self._lines: list[str] = []
        self._count = 0
        self._trace = LazyTraceHandler(str(folder / "tlparse"))
        self._trace.setFormatter(TorchLogsFormatter(trace=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._trace.close()

    def __call__(self, name: str, module: GraphModule) -> None:
        """Write the next graph, and its differences from the previous graph.

        `name` is the name of the pass that made it.
        """
        # Without the empty line at the start of the first section.
        label, lines = f"{self._count:02d}-{file_name(name)}", list(self._describe(module))[1:]
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{label}.txt").write_text("\n".join(lines) + "\n")
        if self._count:
            diff = difflib.unified_diff(self._lines, lines, f"{self._label}.txt", f"{label}.txt", lineterm="")
            (self._folder / f"{label}.diff").write_text("".join(f"{line}\n" for line in diff))
        # Attached only for this artifact: torch's own go to the same log.
        with _attached(self._trace):
            trace_artifact(label, "\n".join(lines))
        self._label, self._lines, self._count = label, lines, self._count + 1

    def _describe(self, module: GraphModule) -> Iterator[str]:
        yield from _graph_lines(module, self._inputs, self._outputs)
        for name, nested in module.named_modules():
            if name and isinstance(nested, GraphModule):
                yield from ("", f"## nested graph {name}")
                yield from _graph_lines(nested, [], [])


def _graph_lines(module: GraphModule, inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[str]:
    headline = ""
    waiting = iter(inputs)
    for node in module.graph.nodes:
        before, headline = headline, (f"{node.op}s" if node.op in ("placeholder", "output") else _place(node))
        if headline != before:
            yield from ("", f"# {headline}")
        if node.op == "placeholder":
            yield f"{node.name} = input{_value(node)}  # {next(waiting, 'input')}"
        elif node.op == "output":
            yield from _output_lines(node, outputs)
        else:
            yield f"{node.name} = {_call(node)}{_value(node)}  # {_comment(node)}"


def _place(node: Node) -> str:
    chunk = node.meta.get(CHUNK_KEY)
    return str(origin_of(node)) + ("" if chunk is None else f", chunk {chunk}")


def _comment(node: Node) -> str:
    return ", ".join(filter(None, (_place(node), origin_of(node).source)))


def _call(node: Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    arguments = [_text(argument) for argument in node.args]
    arguments += [f"{name}={_text(argument)}" for name, argument in node.kwargs.items()]
    return f"{_operator(node.target)}({', '.join(arguments)})"


def _operator(target: Any) -> str:
    return str(target) if isinstance(target, (str, OpOverload)) else getattr(target, "__name__", str(target))


def _output_lines(node: Node, names: Sequence[str]) -> Iterator[str]:
    values = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else node.args
    for index, value in enumerate(values):
        yield f"return {_text(value)}" + (f"  # {names[index]}" if index < len(names) else "")


def _text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument) if isinstance(argument, Node) else repr(argument)


def _value(node: Node) -> str:
    value = node.meta.get("val")
    return "" if value is None or isinstance(value, GraphModule) else f" -> {_describe_value(value)}"


def _describe_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_describe_value, value))})"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    shape, strides = _expressions(value.shape), _expressions(value.stride())
    text = f"{str(value.dtype).removeprefix('torch.')}{_sizes(shape)}"
    text += "" if _is_contiguous(shape, strides) else f" strides {_sizes(strides)}"
    return text if value.device.type == "cpu" else f"{text} on {value.device}"


def _expressions(sizes: Sequence[Any]) -> list[Any]:
    return [symbols.expression(size) for size in sizes]


def _sizes(sizes: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _is_contiguous(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    # With any number for all symbols, as a stride and a size may be different expressions for the same number.
    sizes = [max(1, _any_number(size)) for size in shape]
    wanted = list(itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1))[: len(sizes)]
    return [_any_number(stride) for stride in strides] == wanted[::-1]


def _any_number(size: Any) -> int:
    return int(size.subs(dict.fromkeys(size.free_symbols, 7))) if isinstance(size, sympy.Basic) else size


@contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    trace_log.addHandler(handler)
    try:
        yield
    finally:
        trace_log.removeHandler(handler)
        handler.flush()
