"""A user's pass: a function that changes a graph, inserted anywhere in the pass list.

Needs:    a function of a GraphModule, and of a PassContext if it takes two; it changes the module in
          place and returns None, or returns a new module.
Promises: the function's changes, with metadata on every new or changed node.
Refuses:  a function that returns something else; a call that does not run on its inputs' fake values.

The function need not set metadata. Fake values (`val`) are computed again for each call that is new, has other
arguments, or reads a value whose layout changed. The origin of a new node is unknown.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from bitproof.harness.errors import PassError, UsageError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.graph_options import PassSpec
from bitproof.harness.graph.observation import hand_on_lost_marks, marked_nodes
from bitproof.harness.graph.origin import META_KEY, UNKNOWN
from bitproof.harness.graph.verify import verify_order
from bitproof.harness.graph.writer import layout_key
from bitproof.harness.torch_compat import FakeTensor, FakeTensorMode
from bitproof.harness.user_code.user_file import run_file


class ExtraPass:
    """A user's function as a pass.

    - `sha256`: the hash of the function's file.
    - `spec`: where the function is defined, and where it runs in the pass list.
    """

    def __init__(self, function: Callable[..., Any], sha256: str, spec: PassSpec) -> None:
        self.__name__ = function.__name__
        self.sha256 = sha256
        self.spec = spec
        self._function = function
        self._takes_context = len(inspect.signature(function).parameters) > 1

    @property
    def settings(self) -> dict[str, str]:
        return {"sha256": self.sha256}

    def __call__(self, module: GraphModule, context: PassContext) -> GraphModule:
        """Run the function, and then complete the graph's metadata and code.

        Raises PassError if the result is not valid.
        """
        # As text, since the function may change nodes in place, or return a copy of the graph.
        before, marked = _calls(module), marked_nodes(module.graph)
        result = self._function(module, context) if self._takes_context else self._function(module)
        result = module if result is None else result
        if not isinstance(result, GraphModule):
            raise PassError(
                f"{self.__name__} did not return a graph",
                expected="a GraphModule, or None after changing the given one in place",
                found=type(result).__name__,
            )
        # Before metadata is computed in graph order, since a wrong order would raise errors of its own.
        verify_order(result.graph)
        hand_on_lost_marks(result.graph, marked)
        _propagate(result, before)
        result.recompile()
        return result


def load_pass(spec: PassSpec) -> ExtraPass:
    """Load the function that `spec` names.

    Raises UsageError if the module or the function does not exist. Exceptions of the user's module are not caught.
    """
    if spec.file is not None:
        module, sha256 = run_file(spec.file)
    else:
        try:
            module = importlib.import_module(spec.source)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the module of extra pass {spec.function} cannot be imported",
                found=f"{type(error).__name__}: {error}",
                fix="run from the folder that holds it, install it, or name a file: path/to/file.py:function",
            ) from error
    function = getattr(module, spec.function, None)
    if not inspect.isfunction(function):
        raise UsageError(
            f"{spec.source} has no function {spec.function}",
            expected="a function of a GraphModule, and of a PassContext if it takes two",
            found="nothing" if function is None else type(function).__name__,
        )
    if spec.file is None:
        # The function may be defined in another file than the named module.
        sha256 = hashlib.sha256(Path(function.__code__.co_filename).read_bytes()).hexdigest()
    return ExtraPass(function, sha256, spec)


def insert(pass_list: Sequence[Callable[..., Any]], extras: Sequence[ExtraPass]) -> list[Callable[..., Any]]:
    """Return the pass list with the extra passes inserted. Extra passes with the same position keep their order.

    Raises UsageError if an extra pass refers to an unknown pass, or has the name of another pass.
    """
    pass_list = list(pass_list)
    for extra in extras:
        spec, names = extra.spec, [run_pass.__name__ for run_pass in pass_list]
        if spec.anchor not in names:
            raise UsageError(
                f"there is no pass {spec.anchor} for {extra.__name__} to stand {spec.side}",
                expected=", ".join(names),
                found=f"@{spec.side}={spec.anchor}",
            )
        if extra.__name__ in names:
            raise UsageError(
                f"two passes are named {extra.__name__}",
                expected="a unique name for every pass, as reports and errors use it",
                found=f"pass list {', '.join(names)}",
                fix="rename the function",
            )
        place = names.index(spec.anchor) + (spec.side == "after")
        # Passes before an anchor keep their order without this: each is inserted directly before the anchor.
        while spec.side == "after" and place < len(pass_list) and _stands_at(pass_list[place], spec):
            place += 1
        pass_list.insert(place, extra)
    return pass_list


def _stands_at(run_pass: Callable[..., Any], spec: PassSpec) -> bool:
    return isinstance(run_pass, ExtraPass) and (run_pass.spec.side, run_pass.spec.anchor) == (spec.side, spec.anchor)


def _calls(module: GraphModule) -> dict[str, str]:
    return {node.name: f"{node.target}{node.args}{node.kwargs}" for node in module.graph.nodes}


def _propagate(module: GraphModule, before: dict[str, str]) -> None:
    """Compute fake values of calls that differ from `before`, or that read a value whose layout changed.

    `before` is the result of `_calls` before the user's pass.
    """
    mode = _mode_of(module)
    changed: set[Node] = set()
    now = _calls(module)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        node.meta.setdefault(META_KEY, UNKNOWN)
        is_as_before = "val" in node.meta and before.get(node.name) == now[node.name]
        if is_as_before and changed.isdisjoint(node.all_input_nodes):
            continue
        key = layout_key(node.meta.get("val"))
        node.meta["val"] = _evaluate(node, module, mode)
        # Only another layout matters to readers: fake values have no elements.
        if layout_key(node.meta["val"]) != key:
            changed.add(node)


def _mode_of(module: GraphModule) -> FakeTensorMode:
    values = (node.meta.get("val") for node in module.graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return next(modes, None) or FakeTensorMode(shape_env=ShapeEnv())


def _evaluate(node: Node, module: GraphModule, mode: FakeTensorMode) -> Any:
    def value_of(read: Node) -> Any:
        value = read.meta["val"] if "val" in read.meta else getattr(module, str(read.target))
        # Passes may have used another fake mode.
        if isinstance(value, FakeTensor) and value.fake_mode is not mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    # A call that reads data makes new symbols here, which torch would otherwise report as lost.
    fresh = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
    try:
        with torch.no_grad(), mode, fresh:
            return node.target(*map_arg(node.args, value_of), **map_arg(node.kwargs, value_of))  # type: ignore[operator]
    except Exception as error:
        raise PassError(
            f"node `{node.name}` ({node.target}) does not run on the values it reads",
            expected="arguments that the operator takes",
            found=f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0]}",
        ) from error
