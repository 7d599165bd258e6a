"""Records the origin of each traced node: its module, direction and source line.

Only the tracer's `create_node` is patched. A forward node gets the module that runs. A backward node gets the origin of
the forward call whose autograd node runs, which is found by autograd's sequence numbers:

1. Global module hooks keep a stack of the running modules.
2. The origin of each forward node is stored under the latest sequence number.
3. Before backward, each autograd node gets two hooks. They set the origin before it runs, and clear it afterwards.

Autograd's engine adds up gradients between autograd nodes. These additions have no module.

A model states the running part of a mixture of experts by annotations of torch, with the key that torchtitan uses:

    with torch.fx.traceback.annotate({"EP": "dispatch"}):  # or "compute", or "combine"
"""

from __future__ import annotations

import bisect
import functools
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from bitproof import harness
from bitproof.harness.torch_operators import last_sequence_number, running_annotations, sequence_number_of

Direction = Literal["forward", "backward"]

Part = Literal["dispatch", "compute", "combine"]
"""The parts of a mixture of experts: send rows to their experts, compute, and send them back."""

_PART_ANNOTATION = "EP"
_PARTS = frozenset(get_args(Part))

KEEPS_ROWS = {"keeps rows": True}
"""An annotation, as in `annotate(KEEPS_ROWS)`, of code that returns a row for each row that it gets, in the same order.

Each row of the result may depend on all rows of the call, but by a rule that also holds for a chunk of the rows. Two
examples:

- Experts with a capacity: a chunk has a capacity of its own.
- Attention within the documents of a sequence: a chunk has whole documents.
"""

META_KEY = "origin"

KEEPS_ROWS_KEY = "keeps rows"
"""The metadata key of a forward node that was traced under `annotate(KEEPS_ROWS)`."""

RECOMPUTED_KEY = "recomputed"
"""The metadata key of a node that repeats a forward call in backward."""

CALLS_KEY = "calls"
"""The metadata key of the module calls around a forward node; see `calls_of`."""

_NOT_THE_USERS = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, harness.__file__))
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = "site-packages", "dist-packages"


class Origin(NamedTuple):
    """The origin of a node.

    - `module`: the fully qualified name of its module; "" for the root, None if it belongs to no module.
    - `source`: the line of the user's code; None if there is none.
    - `part`: the part of a mixture of experts, such as "dispatch"; None outside these parts.
    """

    module: str | None
    direction: Direction
    source: str | None = None
    part: Part | None = None

    def __str__(self) -> str:
        part = f", {self.part}" if self.part else ""
        return f"{self.module if self.module else 'no module'} ({self.direction}{part})"


UNKNOWN = Origin(None, "forward")


class ModuleCall(NamedTuple):
    """A call of a module in a step. `earlier` is the number of earlier calls of the same module."""

    module: str
    earlier: int


def origin_of(node: Node) -> Origin:
    """Return a node's origin; UNKNOWN if it has none."""
    return node.meta.get(META_KEY, UNKNOWN)


def part_in(annotations: Mapping[str, Any]) -> Part | None:
    part = annotations.get(_PART_ANNOTATION)
    return part if isinstance(part, str) and part in _PARTS else None  # type: ignore[return-value]


def running_part() -> Part | None:
    return part_in(running_annotations())


def calls_of(node: Node) -> tuple[ModuleCall, ...]:
    """Return the module calls in which a forward node was created, outermost first; () for any other node."""
    calls: tuple[ModuleCall, ...] = node.meta.get(CALLS_KEY, ())
    return calls


class OriginRecorder:
    """Records the origin of each node of a trace, as metadata of the node.

    Use `recording` around forward and backward, and call `before_backward` between the two.

    - `name`: the model's fully qualified name, if the model is part of a larger model; otherwise "".
    - `num_calls`: module name -> number of calls. The root is left out.
    """

    def __init__(self, model: nn.Module, name: str = "") -> None:
        self._name = name
        self._names = {module: below for below, module in model.named_modules(prefix=name)}
        self.num_calls: Counter[str] = Counter()
        # Stacks of the modules that run, by name, and of the module calls around the next node.
        self._running: list[str] = []
        self._calls: list[tuple[ModuleCall, ...]] = [()]
        self._backward: Origin | None = None
        self._in_backward = False
        # The origin stored under `_sequence_numbers[i]` is `_origins[i]`; the numbers ascend.
        self._sequence_numbers: list[int] = []
        self._origins: list[Origin] = []

    @contextmanager
    def recording(self, tracer: Any) -> Iterator[None]:
        """Return a context in which every node that `tracer` makes gets its origin as metadata."""
        create_node = tracer.create_node
        hooks = [
            register_module_forward_pre_hook(self._enter),
            # Also after an error, so that the stack stays right if the caller catches it.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        tracer.create_node = self._stamping(create_node)
        try:
            yield
        finally:
            tracer.create_node = create_node
            for hook in hooks:
                hook.remove()

    def before_backward(self, loss: torch.Tensor) -> None:
        """Mark the beginning of backward from `loss`: later nodes are backward nodes."""
        self._in_backward = True
        # The hooks set the origin before the autograd node runs, and clear it afterwards.
        for autograd_node in _reachable(loss.grad_fn) if loss.grad_fn else ():
            origin = self._forward_origin(sequence_number_of(autograd_node))
            autograd_node.register_prehook(self._setter(origin))
            autograd_node.register_hook(self._setter(None))

    def after_backward(self) -> None:
        """Mark the end of backward: later nodes are forward nodes again."""
        self._in_backward = False

    def module_of(self, error: BaseException) -> str | None:
        """Return the name of the innermost module of the model whose forward raised `error`; None if no forward did."""
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        # A forward has its module as `self`, so the traceback shows which modules ran.
        names = [self._names.get(module) for module in frames if isinstance(module, nn.Module)]
        return next((name for name in reversed(names) if name is not None), None)

    def _stamping(self, create_node: Callable[..., Node]) -> Callable[..., Node]:
        def stamped(*args: Any, **kwargs: Any) -> Node:
            node = create_node(*args, **kwargs)
            if node.op not in ("placeholder", "output"):
                node.meta[META_KEY] = self._current()
                # Backward has no running module, so only forward nodes have calls and declarations.
                if self._calls[-1] and not self._in_backward:
                    node.meta[CALLS_KEY] = self._calls[-1]
                if not self._in_backward and KEEPS_ROWS.items() <= running_annotations().items():
                    node.meta[KEEPS_ROWS_KEY] = True
            return node

        return stamped

    def _current(self) -> Origin:
        if self._in_backward:
            return self._backward or Origin(None, "backward")
        module = self._running[-1] if self._running else self._name
        origin = Origin(module, "forward", innermost_user_line(sys._getframe(2)), running_part())
        # The autograd node of this operator exists already. Numbers only grow, so the list stays sorted; an operator
        # that makes no autograd node leaves the number as it is, and the first origin under a number is kept.
        number = last_sequence_number()
        if not self._sequence_numbers or number > self._sequence_numbers[-1]:
            self._sequence_numbers.append(number)
            self._origins.append(origin)
        return origin

    def _forward_origin(self, number: int) -> Origin | None:
        """Return the origin of the forward call that made an autograd node, its direction changed to "backward".

        `number` is the autograd node's sequence number. Return None if the call is unknown.
        """
        # The largest stored number up to `number`.
        index = bisect.bisect_right(self._sequence_numbers, number) - 1
        return self._origins[index]._replace(direction="backward") if index >= 0 else None

    def _setter(self, origin: Origin | None) -> Callable[..., None]:
        def set_origin(*_: Any) -> None:
            self._backward = origin

        return set_origin

    def _enter(self, module: nn.Module, _: Any) -> None:
        # A module outside the model, such as one of the loss, counts as part of the module that calls it.
        name = self._names.get(module)
        self._running.append(name if name is not None else self._running[-1] if self._running else self._name)
        call = (ModuleCall(name, self.num_calls[name]),) if name else ()
        self._calls.append((*self._calls[-1], *call))
        if name:
            self.num_calls[name] += 1

    def _leave(self, module: nn.Module, *_: Any) -> None:
        self._running.pop()
        self._calls.pop()


def _reachable(root: Any) -> list[Any]:
    seen, stack = {root}, [root]
    while stack:
        for parent, _ in stack.pop().next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return list(seen)


def innermost_user_line(frame: FrameType | None) -> str | None:
    """Return the innermost line of the user's code in the stack that ends with `frame`; None if there is none."""
    while frame is not None:
        if _user_file(frame.f_code.co_filename):
            return user_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def user_line(path: str, line: int) -> str | None:
    """Return a line as `folder/folder/file.py:line`; None unless it is in the user's code.

    Torch, this package, the standard library and generated code are not the user's.
    """
    return f"{file}:{line}" if (file := _user_file(path)) else None


@functools.cache  # called for each frame around each node
def _user_file(path: str) -> str | None:
    if path.startswith((*_NOT_THE_USERS, "<")):
        return None
    # Without a virtual environment, installed packages lie in the folder of the standard library.
    if path.startswith(_STANDARD_LIBRARY) and not path.removeprefix(_STANDARD_LIBRARY).startswith(_INSTALLED):
        return None
    return "/".join([part for part in path.split("/") if part][-3:])
