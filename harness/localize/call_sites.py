"""Find the place of the running call in a step: its module, direction and chunk. How it is found depends on what runs:

    a graph                       the graph's node (`GraphRunner`)
    around a pipeline's graphs    the half, forward or backward, that the pipeline reports to be running
    eager forward                 the stack of modules, kept by hooks
    eager backward                autograd's node, and the forward call that created it. The gradient with which
                                  backward begins counts as backward, as in a graph
    recomputation in backward     if a module is recomputed, the stack of modules; if a function is, the forward call
                                  from the same line
    a parameter's gradient        the parameter's module, for tensors of its shape. Others, such as buckets, have none
    an optimizer's step           "update", except in its closure
    outside `gradients`           "update", if the system has a function of that name, which computes gradients

Without a function `gradients`, it is not known where the update begins. Then a call after a backward belongs to the
update if both hold:

1. The call reads a gradient, or autograd does not follow it, or it writes to a module's buffer.
2. No backward is running, and no module's forward, except a forward that itself ran that backward.

The direction is unknown in two cases: within a graph that the system does not show, and for a call outside all modules
that autograd does not follow. Such calls are matched by their values.
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
from bitproof.harness.localize.logs.calls import CLIPPING, Call, CallSite
from bitproof.harness.localize.logs.node_call_sites import part_of, place_of
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

_PARTS = {clip_grad.__file__: CLIPPING, grad_scaler.__file__: "loss scaling"}
"""The parts of an update for which torch has functions, by the file of these functions."""

_FILLS_LIKE = names(lambda row: row.is_constant and row.reads_layout)
"""Names of operators that fill a tensor of another tensor's shape with a constant, such as `ones_like`."""


class CallSiteTracker:
    """Finds the place of the running call, by hooks and by attributes that the recorder and the graph runner set.

    - `modules`: returns a system's modules by name.
    - `running_chunk`: returns the chunk that the system reports to be running, or None.
    - `running_half`: returns the direction and micro-batch that a pipeline reports to be running, or None.
    - `node`: the running node of a graph.
    """

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
        # Two parallel stacks of running modules: names (None for an unknown graph), and modules, each with whether
        # backward runs it again.
        self._running: list[str | None] = []
        self._entered: list[tuple[nn.Module, bool]] = []
        # The number of modules around the last backward: a `forward` may train.
        self._backward_within = 0
        self._hooked = set[nn.Module]()
        # By autograd's sequence numbers, in ascending order: the places, micro-batches (`_micro_batch_at`) and parts
        # (`_part_at`) of the forward calls that created the autograd nodes.
        self._numbers: list[int] = []
        self._made_at: list[CallSite] = []
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
        # The modules in which an operator was called from a line in forward, for functions that backward recomputes.
        self._made_by = defaultdict[tuple[str, str | None], set[str | None]](set)
        self._part: str | None = None
        """The part of the running call, if it is of forward or backward."""

    def __call__(
        self, name: str, tensors: Iterable[Tensor] = (), follows: bool = False
    ) -> tuple[CallSite, str | None, str | None]:
        """Return three values: the running call's place, the name of its graph node or None, the user's line or None.

        - `name`: the call's operator.
        - `follows`: whether the call reads an output of backward or of the update.
        """
        # From the surest source to the least sure: a graph's node, a pipeline's report, a running optimizer, autograd's
        # node, and last what is running around the call.
        self._part = None
        if self.node is not None:
            self._has_gradients = True
            place, source = place_of(self.node)
            self._part = part_of(self.node)
            return place, self.node.name, source
        # Two frames up: the caller is the recorder, whose frames are no user's.
        line = innermost_user_line(sys._getframe(2))
        # A pipeline prepares a graph's inputs, or processes its outputs.
        if (half := self._running_half()) is not None:
            self._has_gradients = True
            return CallSite(None, half[0]), None, line
        # This comes before backward, since a gradient's hook may run an optimizer.
        if self._optimizers:
            self._has_gradients = True
            return CallSite(None, "update"), None, line
        autograd_node = running_autograd_node()
        if autograd_node is not None:
            self._has_gradients = True
            self._backward_within = sum(not is_again for _, is_again in self._entered)
            if (parameter := accumulated_by(autograd_node)) is not None:
                return self._arriving(parameter, tensors), None, line
            place = self._backward(sequence_number_of(autograd_node))
            # Activation checkpointing recomputes a module or a function within backward.
            if self._entered and self._entered[-1][1]:
                place, self._part = place._replace(module=self._running[-1]), running_part()
            elif torch.is_grad_enabled():
                place = place._replace(module=self._repeated(place.module, self._made_by[name, line]))
            return place, None, line
        if self._is_direction_unknown():
            self._is_lost = True
            return CallSite(None, None), None, line
        # A callback at the end of backward.
        if is_backward_running():
            return CallSite(None, "backward"), None, line
        is_after = self._has_gradients and (
            follows or not torch.is_grad_enabled() or self._writes_buffer(name, tensors)
        )
        # As many modules are running as around the last backward, so this call is in no forward that began after it.
        if not self.computes_gradients or (is_after and len(self._running) == self._backward_within):
            return CallSite(None, "update"), None, line
        if is_beginning_backward() or (not self._running and self._begins_gradient(name, tensors)):
            return CallSite(None, "backward"), None, line
        place = self._forward()
        self._made_by[name, line].add(place.module)
        return place, None, line

    def _repeated(self, module: str | None, made_by: Collection[str | None]) -> str | None:
        """Return the module whose call is repeated in backward: the innermost around `module` that ran it in forward.

        `made_by` has the modules that ran the call in forward. Returns `module` if none is around it. For example,
        backward at layers.0.mlp.act recomputes a line of layers.0.mlp.
        """
        around = module
        while around and around not in made_by:
            around = around.rpartition(".")[0]
        return around if around in made_by else module

    def _is_direction_unknown(self) -> bool:
        """Whether a call that autograd does not follow may belong to either of two directions, forward or backward.

        A graph may compute gradients without autograd. Then later calls are unknown too, until a module runs with
        autograd.
        """
        if self.shows_gradients and not self.computes_gradients:
            return False
        if self._running:
            return self._running[-1] is None
        return not self._has_gradients and (self._is_lost or not torch.is_grad_enabled())

    def _begins_gradient(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Whether a call in a trainer's code creates the gradient with which backward begins, such as
        `ones_like(loss)`.
        """
        return name in _FILLS_LIKE and any(tensor.grad_fn is not None for tensor in tensors)

    def _writes_buffer(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Whether a call writes in place to a module's buffer, such as an expert bias."""
        # An in-place operator writes its first tensor.
        target = next(iter(tensors), None) if name.endswith("_") else None
        kept = (local_of(x) for module in self._names for x in module.buffers(recurse=False))
        return target is not None and any(target is x for x in kept)

    def _forward(self) -> CallSite:
        """Return the innermost running module as a place. Autograd nodes that the running call creates get this place
        too.
        """
        place = CallSite(self._running[-1] if self._running else "", "forward", self._running_chunk())
        self._part = running_part()
        # The number of the autograd node that this call has just made.
        number = last_sequence_number()
        # Only the first call with a number is noted: later calls have the same number if autograd does not follow them.
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._made_at.append(place)
            self._micro_batch_at.append(self._micro_batch)
            self._part_at.append(self._part)
        return place

    def _backward(self, number: int) -> CallSite:
        """Return the place of the forward call that created the autograd node `number`, with the direction backward."""
        # The last call with this number or a smaller one: calls that create no node of their own are not noted.
        index = bisect.bisect_right(self._numbers, number) - 1
        made_at = self._made_at[index] if index >= 0 else CallSite(None, "forward")
        self._backward_of = self._micro_batch_at[index] if index >= 0 else None
        self._part = self._part_at[index] if index >= 0 else None
        return made_at._replace(direction="backward")

    def _arriving(self, parameter: Tensor, tensors: Iterable[Tensor]) -> CallSite:
        """Return the place of a call that runs while autograd accumulates the gradient of `parameter`.

        Its module is that of `parameter`; None if no tensor of the call has that shape, as for a bucket of gradients.
        """
        if not any(tensor.shape == parameter.shape for tensor in tensors):
            return CallSite(None, "backward")
        # FSDP replaces a module's sharded parameters by gathered ones, so an unknown parameter calls for a new table.
        if parameter not in self._owners:
            named = self._names.items()
            self._owners = {local_of(x): name for module, name in named for x in module.parameters(recurse=False)}
        return CallSite(self._owners.get(parameter), "backward")

    def micro_batch_of(self, place: CallSite) -> int | None:
        """Return the number of the micro-batch of a call at `place`, counted from 1; None if unknown.

        Each call of the outermost module in forward is a micro-batch.
        """
        if (half := self._running_half()) is not None:
            return half[1] + 1
        if self.node is not None or place.chunk is not None:
            return None
        return {"forward": self._micro_batch, "backward": self._backward_of}.get(str(place.direction))

    def part_of(self, place: CallSite) -> str | None:
        """Return the part of the update, or of a mixture of experts, to which the running call belongs; else None.

        In an update: the optimizer's class, "clipping" or "loss scaling". In a mixture of experts: for example
        "dispatch".
        """
        if self.node is not None or (place.direction != "update" and (place[:2] != ("", "forward") or self._part)):
            return self._part
        if self._optimizers:
            return self._optimizers[-1]
        # Torch's functions for clipping and loss scaling call no hooks, so they are found on the Python stack.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in _PARTS:
            frame = frame.f_back
        return None if frame is None else _PARTS[frame.f_code.co_filename]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context in which hooks follow the running modules of the model.

        Compiled code is split where modules begin and end. With `stays_whole`, it is not split, and all its calls
        belong to the compiled module.
        """
        # The splits are made by hooks that are hidden from Dynamo (`_unseen`): it would trace global hooks.
        self._late = hooks = list[RemovableHandle]()
        self._hook_late()
        hooks += [
            register_module_forward_pre_hook(self._unseen(self._enter)),
            register_module_forward_hook(self._unseen(self._leave), always_call=True),
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end_update),
        ]
        try:
            with ExitStack() as stack:
                stack.enter_context(backward_hooks_set_within(self._entered_again))
                for module in self._names if self.stays_whole else ():
                    stack.enter_context(compiled_calls_within(module, functools.partial(self._within, module)))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _unseen(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return `hook`, wrapped so that Dynamo does not compile it. With `stays_whole`, return `hook` unchanged."""
        return hook if self.stays_whole else torch.compiler.disable(hook)

    def _hook_late(self) -> None:
        """Keep each module with forward hooks of its own on the stack until these hooks have run."""
        # Torch runs a module's own hooks after global hooks, so the module is popped by a last hook of its own.
        self._hooked = {module for module in self._names if has_forward_hooks(module)}
        self._late += [
            module.register_forward_hook(self._unseen(self._pop), always_call=True) for module in self._hooked
        ]

    def _within(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a module's compiled code, so that the module is on the stack while the code runs."""

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            try:
                return call(*args, **kwargs)
            finally:
                self._pop(module)

        return called

    def _enter(self, module: nn.Module, _: Any) -> None:
        # Dynamo would break the graph at the code below.
        if self.stays_whole and torch.compiler.is_compiling():
            return
        is_trained = torch.is_grad_enabled() and not is_backward_running()
        # An evaluation, or a recomputation in backward, is no new micro-batch.
        if not self._running and is_trained:
            self._micro_batches[module] += 1
            self._micro_batch = self._micro_batches[module]
        unknown = None if isinstance(module, GraphModule) else ""
        # A script's models are known once its optimizers are made.
        if not self._names:
            self._names = {known: name for name, known in self._modules()}
            self._hook_late()
        if module in self._names and unknown is not None and torch.is_grad_enabled():
            self._is_lost = False  # autograd follows from here on
        self._entered.append((module, is_backward_running()))
        # A module without a name, such as a wrapper, counts as part of the module around it.
        self._running.append(self._names.get(module, self._running[-1] if self._running else unknown))

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._optimizers.append(type(optimizer).__name__)
        return around_closure(args, kwargs, self._outside_of_updates)

    def _outside_of_updates(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap an optimizer's closure, which computes gradients, so that its calls do not count as calls of the
        update.
        """

        def called() -> Any:
            running, self._optimizers = self._optimizers, []
            try:
                return closure()
            finally:
                self._optimizers = running

        return called

    def _end_update(self, *_: Any) -> None:
        # A step may begin while hooks of the previous step still run.
        del self._optimizers[-1:]

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module not in self._hooked:
            self._pop(module)

    def _pop(self, module: nn.Module, *_: Any) -> None:
        if self.stays_whole and torch.compiler.is_compiling():
            return
        # A module that was captured whole never entered.
        if self._entered and self._entered[-1][0] is module:
            self._entered.pop()
            self._running.pop()
            if len(self._running) < self._backward_within:
                self._backward_within = 0

    @contextmanager
    def _entered_again(self, module: nn.Module) -> Iterator[None]:
        """Context in which `module` is on the stack again, while torch attaches backward hooks to its outputs."""
        # Torch attaches them after the module's forward hooks, which have popped the module from the stack already.
        self._entered.append((module, is_backward_running()))
        self._running.append(self._names.get(module, self._running[-1] if self._running else ""))
        try:
            yield
        finally:
            self._pop(module)


def finalize_calls(calls: Sequence[Call]) -> list[Call]:
    """Return a step's calls, with corrections that need the whole step.

    If a step has a single micro-batch, its calls get no micro-batch number. A call after backward, outside all modules,
    becomes part of the update if the update reads its output.
    """
    found, needed, last = [_without_update_s_part(call) for call in calls], set[int | None](), list[int]()
    if all(call.micro_batch in (None, 1) for call in calls):
        found = [call if call.micro_batch is None else call._replace(micro_batch=None) for call in found]
    # Go back from the end over the update and over calls outside all modules, to the end of backward. `needed` has the
    # producers of the calls seen so far that belong to the update.
    before = None
    for index, call in reversed([*enumerate(calls)]):
        is_loose, before = call.place[:2] == ("", "forward"), call.place.direction
        if not is_loose and before != "update":
            break
        if not is_loose or index in needed:
            last += [index] if is_loose else []
            needed.update(call.producers)
    for index in last if before == "backward" else ():
        found[index] = calls[index]._replace(place=CallSite(None, "update"), micro_batch=None)
    return found


def _without_update_s_part(call: Call) -> Call:
    """Return the call. Outside the update, drop a `part` that only the update has: "clipping" or "loss scaling".

    For example, the loss is also scaled in forward.
    """
    return call._replace(part=None) if call.place.direction != "update" and call.part in _PARTS.values() else call
