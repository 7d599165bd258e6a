"""Runs a rank's part of a pipeline's step: its actions in order, and messages between stages.

Needs:    the parts of the rank's stages, the rank's actions (orders/), and a group for each kind of message
          (stage_messages.py explains why). A group has one rank from each stage: the rank whose other coordinates
          equal those of this rank.
Promises: gradients and losses are added in the order of micro-batches. Ranks cannot deadlock if `refuse_waiting`
          accepts their actions.

A rank waits for each receive at once, and for each send later:

- for the send of an activation after the backward that read the activation's gradient;
- for other sends at the end of the step.

Every message has a unique tag, for backends with tags. Neighbouring stages on one rank, as at the turn of a V, pass
values without messages. A stage's forward values are kept until its backward has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import StageMap
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.cut_graph import CutGraph, Part
from bitproof.harness.graph.staged.placed_calls import MOST_CROSSINGS, Crossing, OnceAStep
from bitproof.harness.graph.staged.stage_messages import group_of

Run = Callable[..., Any]
Values = Mapping[str, Any]
"""Values by the names of the whole graph's nodes."""


class StagedStep:
    """Runs a rank's part of a step.

    - `running`: the current action; None outside the step.
    - `reduce`: the dtype for the sums of gradients that are reduced once a step.
    - `groups`: the groups for messages, by the numbers of `group_of`; empty without a pipeline.
    - `stage_map`: the ranks of all stages.
    - `join`: adds the gradients of parameters that two stages share. The trainer calls `join` once per step with the
      gradients by parameter name.
    """

    def __init__(
        self,
        parts: CutGraph,
        actions: Sequence[Action],
        groups: Sequence[dist.ProcessGroup],
        stage_map: StageMap,
        device: torch.device,
        reduce: torch.dtype = torch.float32,
    ) -> None:
        self._reduce = reduce
        self.parts = parts
        self.actions = tuple(actions)
        self.running: Action | None = None
        self.join: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
        self._groups = tuple(groups)
        self._stage_map = stage_map
        self._device = device
        self._run: Callable[[GraphModule], Run] = lambda module: module
        self._sending: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        self._kept: dict[tuple[int, int], Values] = {}
        self._passed: dict[Action, Values] = {}

    def __call__(self, state: Values, micro_batches: Sequence[Values]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run the rank's part of a step. Returns (losses of the micro-batches, the rank's gradients by parameter).

        Only a rank with the last stage has losses. `state` has parameters and buffers by name, and `micro_batches` has
        the inputs of each micro-batch by name.
        """
        losses: list[Tensor] = []
        gradients: dict[str, Tensor] = {}
        stages = sorted({action.stage for action in self.actions})
        for stage in stages:
            state = {**state, **self.run_once("gathers", Action("forward", stage, 0), state)}
        for action in self.actions:
            self.running = action
            is_weights = action.part == "weights"
            part = self.parts.weights[action.stage] if is_weights else self.parts.by_place[action.stage, action.half]
            known = {**self.taken(action), **self.received(action, part)}
            given = {**state, **self.inputs(action, micro_batches), **known}
            found = dict(zip(part.outputs, self._run(part.module)(*(given[name] for name in part.inputs)), strict=True))
            # Sent at once, so the neighbour can start while this rank continues.
            if part.sent:
                self.pass_on(action, {name: found[name] for name in part.sent})
            if action.half == "backward":
                self._await_sent(Action("forward", action.stage, action.micro_batch))  # its gradient has arrived
            if action.half == "forward" or action.part == "input":
                later = {*self.parts.weights[action.stage].inputs} if self.parts.weights else set()
                if action.half == "forward":
                    later |= {*self.parts.by_place[action.stage, "backward"].inputs}
                # Everything else of this micro-batch is freed here.
                kept = {name: x for name, x in {**known, **found}.items() if name in later}
                self._kept[action.stage, action.micro_batch] = kept
            for name in part.results:
                if name == self.parts.loss:
                    losses.append(found[name])
                    continue
                # Added in the dtype of the reduction, like the sum over ranks that follows.
                gradient = found[name].to(self._reduce) if name in self.parts.summed else found[name]
                gradients[name] = self.add(gradients[name], gradient) if name in gradients else gradient
        # The gradients that were sent: no later action of this rank shows that they have arrived.
        for action in list(self._sending):
            self._await_sent(action)
        losses, gradients = self.finish(losses, gradients)
        for stage in stages:
            last = self.actions[-1]._replace(stage=stage)
            gradients = gradients | self.run_once("reductions", last, {**state, **gradients})
        self.running = None
        return losses, gradients

    def run_once(self, kind: OnceAStep, action: Action, known: Values) -> dict[str, Any]:
        """Run the calls of a stage that run once a step, and return their results by name; {} if there are none.

        In logs, they belong to `action`, the stage's first forward or last backward.
        """
        if (part := self.parts.once_parts.get((action.stage, kind))) is None:
            return {}
        self.running = action
        found = self._run(part.module)(*(known[name] for name in part.inputs))
        return dict(zip(part.outputs, found, strict=True))

    @contextmanager
    def run_by(self, runner: Callable[[GraphModule], Run]) -> Iterator[None]:
        """Return a context in which parts run by `runner`: for a part's graph, it returns the function that runs it."""
        own, self._run = self._run, runner
        try:
            yield
        finally:
            self._run = own

    def inputs(self, action: Action, micro_batches: Sequence[Values]) -> Values:
        """Return the inputs of an action's micro-batch, by name."""
        return micro_batches[action.micro_batch]

    def taken(self, action: Action) -> Values:
        """Remove and return the values, by name, that a stage's forward kept for the backward `action`.

        Returns {} for a forward.
        """
        return self._kept.pop((action.stage, action.micro_batch), {})

    def pass_on(self, action: Action, values: Values) -> None:
        """Pass an action's results to the neighbouring stage, in messages unless the stage is on this rank."""
        if self._is_here(action.stage, action.receiver):
            self._passed[action] = values
            return
        for index, value in enumerate(values.values()):
            self.send(action, index, value)

    def received(self, action: Action, part: Part) -> Values:
        """Receive the values that an action reads from the neighbouring stage, and return them by name."""
        if part.received and self._is_here(action.stage, action.sender.stage):
            return self.passed(action.sender)
        return {x.name: self.receive(action.sender, index, x) for index, x in enumerate(part.received)}

    def passed(self, sender: Action) -> Values:
        """Remove and return the values, by name, that the action `sender` of this rank passed on."""
        return self._passed.pop(sender)

    def receive(self, sender: Action, index: int, crossing: Crossing) -> Tensor:
        """Wait for a message that the action `sender` sends, and return its value.

        `index` is the message's number among the messages of `sender`.
        """
        # The layout is known from the trace, so no message describes it.
        value = torch.empty(crossing.shape, dtype=crossing.dtype, device=self._device)
        group, source = self._groups[group_of(sender, self._stage_map)], self._stage_map.rank_of(sender.stage)
        work = dist.irecv(value, group=group, group_src=source, tag=tag_of(sender, index))
        assert work is not None, "this rank is in the group"
        work.wait()
        return value

    def send(self, action: Action, index: int, value: Tensor) -> None:
        """Start to send a value to the next stage, or to the previous stage if `action` is a backward. Does not wait.

        `index` is the value's number among those that the action sends.
        """
        group, to = self._groups[group_of(action, self._stage_map)], self._stage_map.rank_of(action.receiver)
        # `_sending` keeps the tensor until the send is awaited: its memory must not be reused before.
        value = value.contiguous()
        work = dist.isend(value, group=group, group_dst=to, tag=tag_of(action, index))
        assert work is not None, "this rank is in the group"
        self._sending.setdefault(action, []).append((work, value))

    def _await_sent(self, action: Action) -> None:
        for work, _ in self._sending.pop(action, []):
            work.wait()

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of `total`, a parameter's gradient over earlier micro-batches, and its next gradient."""
        return total + gradient

    def finish(self, losses: list[Tensor], gradients: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the losses and the sums of gradients; a subclass may change them."""
        return losses, gradients

    def _is_here(self, stage: int, other: int) -> bool:
        return self._stage_map.rank_of(stage) == self._stage_map.rank_of(other)


def tag_of(sender: Action, index: int) -> int:
    """Return a unique tag for a message of the action `sender`; `index` is its number among that action's messages.

    `index` must be below MOST_CROSSINGS, and the number of a stage below 512.
    """
    return ((sender.micro_batch * 512 + sender.stage) * 2 + (sender.half == "backward")) * MOST_CROSSINGS + index
