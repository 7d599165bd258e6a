"""Where in a step the running call belongs. It is found

by a graph's node, while a graph runs (`GraphRunner`)
by what a pipeline of graphs says that it does, around its graphs
by the module hooks' stack, in eager forward
by autograd's node and the forward call that made it, in eager backward; its seed is backward's, as in a graph
by the module hooks' stack again, where backward runs a module again, and where its output gets backward hooks
by what ran the same line in forward, where backward runs a function again
by the parameter whose gradient arrives, for what has its shape there; all else, such as buckets, has no module
as "update", in an optimizer's step but for its closure, and outside the function that computes gradients; of a
    system that shows no such function, after a backward, of what reads gradients, or writes to a module's buffers,
    where neither backward runs nor a module's forward, but for one within which that backward ran
by nothing, in a graph that the system runs without showing it, and, where nothing of the model runs, of calls
    that autograd does not follow: the direction is not known, and blame pairs such calls by their values
"""

from __future__ import annotations

import bisect
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.fx import GraphModule, Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bitproof.harness.graph.origin import innermost_user_line, running_part
from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.logs.node_places import part_of, place_of
from bitproof.harness.operators import names
from bitproof.harness.systems.watched_step import around_closure
from bitproof.harness.torch_compat import backward_hooks_set_within, compiled_calls_within, has_forward_hooks
from bitproof.harness.torch_operators import (
    accumulated_by,
    is_backward_running,
    is_beginning_backward,
    last_sequence_number,
    local_of,
    running_autograd_node,
    sequence_number_of,
)

_PARTS = {clip_grad.__file__: "clipping", grad_scaler.__file__: "loss scaling"}
"""The parts of an update that torch has functions for, by the file that these are in."""

_FILLS_LIKE = names(lambda row: row.is_constant and row.reads_layout)
"""Names of operators that give a constant in another tensor's shape."""


class Places:
    """Where the running call belongs, and, of a graph, which node makes it."""

    def __init__(
        self,
        modules: Callable[[], Iterable[tuple[str, nn.Module]]],
        running_chunk: Callable[[], int | None],
        running_half: Callable[[], tuple[str, int] | None] = lambda: None,
    ) -> None:
        self._modules = modules
        self._names = {module: name for name, module in modules()}
        self._owners: dict[Tensor, str] = {}
        self._running_chunk = running_chunk
        self._running_half = running_half
        self._running: list[str | None] = []  # None: an unknown graph
        self._entered: list[tuple[nn.Module, bool]] = []  # and whether backward runs it again
        self._backward_within = 0  # how many modules ran around the last backward, as where `forward` trains
        self._hooked = set[nn.Module]()
        self._numbers: list[int] = []
        self._made_at: list[Place] = []
        self.node: Node | None = None
        self.stays_whole = False
        self.shows_gradients = False
        self.computes_gradients = False
        self._has_gradients = False
        self._is_lost = False
        self._optimizers: list[str] = []  # that run
        self._micro_batches = Counter[nn.Module]()
        self._micro_batch: int | None = None
        self._micro_batch_at: list[int | None] = []
        self._backward_of: int | None = None
        self._part_at: list[str | None] = []
        self._made_by = defaultdict[tuple[str, str | None], set[str | None]](set)
        self._part: str | None = None
        """Of what runs, for calls that are no update's."""

    def __call__(
        self, name: str, tensors: Iterable[Tensor] = (), follows: bool = False
    ) -> tuple[Place, str | None, str | None]:
        """The place of the running call of an operator of this name, the node's name, and the user's line.

        `tensors` are what it is given; `follows` says that it reads what backward, or an update, has left.
        """
        self._part = None
        if self.node is not None:
            self._has_gradients = True
            place, source = place_of(self.node)
            self._part = part_of(self.node)
            return place, self.node.name, source
        line = innermost_user_line(sys._getframe(2))
        if (
            half := self._running_half()
        ) is not None:  # what a pipeline's graphs are given, and what is done with theirs
            self._has_gradients = True
            return Place(None, half[0]), None, line
        if self._optimizers:  # also one that a gradient's hook runs
            self._has_gradients = True
            return Place(None, "update"), None, line
        autograd_node = running_autograd_node()
        if autograd_node is not None:
            self._has_gradients = True
            self._backward_within = sum(not is_again for _, is_again in self._entered)
            if (parameter := accumulated_by(autograd_node)) is not None:
                return self._arriving(parameter, tensors), None, line
            place = self._backward(sequence_number_of(autograd_node))
            if self._entered and self._entered[-1][1]:  # a module runs again
                place, self._part = place._replace(module=self._running[-1]), running_part()
            elif torch.is_grad_enabled():  # a function of a module's runs again
                place = place._replace(module=self._repeated(place.module, self._made_by[name, line]))
            return place, None, line
        if self._is_untold():
            self._is_lost = True
            return Place(None, None), None, line
        if is_backward_running():  # what it calls at its end
            return Place(None, "backward"), None, line
        is_after = self._has_gradients and (
            follows or not torch.is_grad_enabled() or self._writes_buffer(name, tensors)
        )
        if not self.computes_gradients or (is_after and len(self._running) == self._backward_within):
            return Place(None, "update"), None, line
        if is_beginning_backward() or (not self._running and self._begins_gradient(name, tensors)):
            return Place(None, "backward"), None, line
        place = self._forward()
        self._made_by[name, line].add(place.module)
        return place, None, line

    def _repeated(self, module: str | None, made_by: Collection[str | None]) -> str | None:
        """Of the modules whose forward made such a call, the innermost that `module` is in, or is; or else `module`."""
        around = module
        while around and around not in made_by:
            around = around.rpartition(".")[0]
        return around if around in made_by else module

    def _is_untold(self) -> bool:
        """Whether nothing says in which direction a call belongs that autograd does not make.

        A graph may compute gradients without autograd. After such a call nothing shows where the update begins, either,
        unless autograd follows a module of the model after it: then that call only prepared what the module is given.
        """
        if self.shows_gradients and not self.computes_gradients:
            return False
        if self._running:
            return self._running[-1] is None
        return not self._has_gradients and (self._is_lost or not torch.is_grad_enabled())

    def _begins_gradient(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Whether a call fills a tensor like one that autograd made, as a trainer does that begins backward itself."""
        return name in _FILLS_LIKE and any(tensor.grad_fn is not None for tensor in tensors)

    def _writes_buffer(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Whether a call writes in place to what a module keeps beside parameters, as to an expert bias."""
        target = next(iter(tensors), None) if name.endswith("_") else None
        kept = (local_of(x) for module in self._names for x in module.buffers(recurse=False))
        return target is not None and any(target is x for x in kept)

    def _forward(self) -> Place:
        """The innermost running module; the autograd node that the call will make is filed under it."""
        place = Place(self._running[-1] if self._running else "", "forward", self._running_chunk())
        self._part = running_part()
        number = last_sequence_number()  # of the autograd node this call has just made
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._made_at.append(place)
            self._micro_batch_at.append(self._micro_batch)
            self._part_at.append(self._part)
        return place

    def _backward(self, number: int) -> Place:
        """Where the forward call ran that made an autograd node of this sequence number."""
        index = bisect.bisect_right(self._numbers, number) - 1
        made_at = self._made_at[index] if index >= 0 else Place(None, "forward")
        self._backward_of = self._micro_batch_at[index] if index >= 0 else None
        self._part = self._part_at[index] if index >= 0 else None
        return made_at._replace(direction="backward")

    def _arriving(self, parameter: Tensor, tensors: Iterable[Tensor]) -> Place:
        """The module that owns a parameter, for a call that is given something of its shape."""
        if not any(tensor.shape == parameter.shape for tensor in tensors):
            return Place(None, "backward")
        if parameter not in self._owners:  # which may change: sharded ones are others while they are gathered
            named = self._names.items()
            self._owners = {local_of(x): name for module, name in named for x in module.parameters(recurse=False)}
        return Place(self._owners.get(parameter), "backward")

    def micro_batch_of(self, place: Place) -> int | None:
        """How often the outermost module had been called for what is computed there; None where that says nothing."""
        if (half := self._running_half()) is not None:
            return half[1] + 1
        if self.node is not None or place.chunk is not None:
            return None
        return {"forward": self._micro_batch, "backward": self._backward_of}.get(str(place.direction))

    def part_of(self, place: Place) -> str | None:
        """Which part of what `place` says runs: of an update an optimizer's step, by its class, clipping, loss scaling;
        of a mixture of experts the part that its code, or its graph's node, names; None for others.
        """
        if self.node is not None or (place.direction != "update" and (place[:2] != ("", "forward") or self._part)):
            return self._part
        if self._optimizers:
            return self._optimizers[-1]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in _PARTS:
            frame = frame.f_back
        return None if frame is None else _PARTS[frame.f_code.co_filename]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep the stack of running modules, each until its own hooks have run: torch calls those after all others.

        Compiled code that stays whole says nothing of modules within: the one that was compiled has all of its calls.
        """
        self._late = hooks = list[RemovableHandle]()
        self._hook_late()
        hooks += [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end_update),
        ]
        try:
            with ExitStack() as stack:
                stack.enter_context(backward_hooks_set_within(self._again_within))
                for module in self._names if self.stays_whole else ():
                    stack.enter_context(compiled_calls_within(module, functools.partial(self._within, module)))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook_late(self) -> None:
        """Have modules with forward hooks of their own popped after these."""
        self._hooked = {module for module in self._names if has_forward_hooks(module)}
        self._late += [module.register_forward_hook(self._pop, always_call=True) for module in self._hooked]

    def _within(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of compiled code, within which its module runs."""

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            try:
                return call(*args, **kwargs)
            finally:
                self._pop(module)

        return called

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self.stays_whole and torch.compiler.is_compiling():  # below, Dynamo would break the graph
            return
        is_trained = torch.is_grad_enabled() and not is_backward_running()
        if not self._running and is_trained:  # an evaluation, or what backward recomputes, is no new micro-batch
            self._micro_batches[module] += 1
            self._micro_batch = self._micro_batches[module]
        unknown = None if isinstance(module, GraphModule) else ""
        if not self._names:  # a script's models are known once its optimizers are made
            self._names = {known: name for name, known in self._modules()}
            self._hook_late()
        if module in self._names and unknown is not None and torch.is_grad_enabled():
            self._is_lost = False  # autograd follows from here on
        self._entered.append((module, is_backward_running()))
        self._running.append(self._names.get(module, self._running[-1] if self._running else unknown))

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._optimizers.append(type(optimizer).__name__)
        return around_closure(args, kwargs, self._outside_of_updates)

    def _outside_of_updates(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer's, which computes gradients while its step runs."""

        def called() -> Any:
            running, self._optimizers = self._optimizers, []
            try:
                return closure()
            finally:
                self._optimizers = running

        return called

    def _end_update(self, *_: Any) -> None:
        del self._optimizers[-1:]  # a step may begin while hooks of the one before still run

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module not in self._hooked:
            self._pop(module)

    def _pop(self, module: nn.Module, *_: Any) -> None:
        if self._entered and self._entered[-1][0] is module:  # one that was captured whole never entered
            self._entered.pop()
            self._running.pop()
            if len(self._running) < self._backward_within:
                self._backward_within = 0

    @contextmanager
    def _again_within(self, module: nn.Module) -> Iterator[None]:
        """A module whose outputs get their backward hooks once its forward hooks have run."""
        self._entered.append((module, is_backward_running()))
        self._running.append(self._names.get(module, self._running[-1] if self._running else ""))
        try:
            yield
        finally:
            self._pop(module)


def settled(calls: Sequence[Call]) -> list[Call]:
    """The calls of a step, with what only its end shows: of one micro-batch they do not say which it is.

    Calls of no module that follow backward and lead to the update are of it, as what steers an expert bias.
    """
    found, needed, last = [_without_update_s_part(call) for call in calls], set[int | None](), list[int]()
    if all(call.micro_batch in (None, 1) for call in calls):
        found = [call if call.micro_batch is None else call._replace(micro_batch=None) for call in found]
    before = None
    for index, call in reversed([*enumerate(calls)]):
        is_loose, before = call.place[:2] == ("", "forward"), call.place.direction
        if not is_loose and before != "update":
            break
        if not is_loose or index in needed:
            last += [index] if is_loose else []
            needed.update(call.producers)
    for index in last if before == "backward" else ():
        found[index] = calls[index]._replace(place=Place(None, "update"), micro_batch=None)
    return found


def _without_update_s_part(call: Call) -> Call:
    """A call as it is outside of an update: what scales a loss is of forward."""
    return call._replace(part=None) if call.place.direction != "update" and call.part in _PARTS.values() else call
