"""Runs a user's program, a script or a function, and records its losses, gradients, parameters and results.

- A function `FILE.py:NAME` is called once per step. If its first call returns an object with a method `step`, as
  `bitproof.watch` does, `step(index)` is called for each step instead.
- A script is stopped after the requested number of optimizer steps.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import random
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .call_values import digest_of


class ProgramError(Exception):
    """The program cannot be run as requested, for the reason in the message."""


class FailedProgramError(Exception):
    """The program raised an error or ended its process. The message has the end of the traceback."""


class _LastStepDone(BaseException):
    """An exception that is raised inside a script, to stop it after its last step."""


class Records:
    """The records of a run. A row of `rows` is [step, kind, name, digest, number of calls logged so far]."""

    def __init__(self, events: Any, steps: int, leaves_after: bool) -> None:
        self.events, self.steps, self.leaves_after = events, steps, leaves_after
        self.rows: list[list[Any]] = []
        self.step, self._losses = 0, 0
        self._optimizers: list[Any] = []

    def add(self, kind: str, name: str, value: Any) -> None:
        with self.events.remembering():
            self.rows.append([self.step, kind, name, digest_of(value), len(self.events.log)])

    def add_nested(self, value: Any, name: str = "result") -> None:
        if isinstance(value, Tensor) or type(value) in (int, float, bool, complex):
            self.add("result", name, value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.add_nested(item, f"{name}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self.add_nested(item, f"{name}.{index}")
        elif hasattr(value, "__dataclass_fields__"):
            for key in value.__dataclass_fields__:
                self.add_nested(getattr(value, key), f"{name}.{key}")

    def backward(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            self.add("loss", "loss" if self._losses == 0 else f"loss.{self._losses}", tensor)
            self._losses += 1

    def optimizer_step(self, optimizer: Any, *_: Any) -> None:
        """Record all gradients and parameters of an optimizer, after its step.

        In a script, the first optimizer's step also ends the training step, and the last training step stops the
        script.
        """
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers.append(optimizer)
        at = next(index for index, each in enumerate(self._optimizers) if each is optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                self.add("grad", f"{at}.{index}", parameter.grad)
            self.add("param", f"{at}.{index}", parameter)
        if self.leaves_after and at == 0:
            self.next_step()
            if self.step >= self.steps:
                raise _LastStepDone

    def next_step(self) -> None:
        self.step, self._losses = self.step + 1, 0


def run_program(program: str, arguments: Sequence[str], steps: int, events: Any) -> list[list[Any]]:
    """Run a program under the dispatch mode `events`, with fixed seeds. Return its records (see `Records.rows`).

    Raises ProgramError if the program cannot be run, or has nothing to compare.
    """
    path, _, name = program.partition(":")
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ProgramError(f"{path} is not a file of Python")
    records = Records(events, steps, leaves_after=not name)
    # A program that sets no seed would differ from itself.
    random.seed(0)
    torch.manual_seed(0)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    backward = torch.autograd.backward

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        records.backward(tensors)
        return backward(tensors, *args, **kwargs)

    hook = register_optimizer_step_post_hook(records.optimizer_step)
    # torch has no hook for the tensors with which backward begins, so the function itself is replaced.
    torch.autograd.backward = watched
    # As Python itself starts a script: its folder first, its own arguments.
    kept = sys.argv, [*sys.path]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path, *arguments]
    try:
        with events:
            _run_script(path) if not name else _call(path, name, steps, records)
    finally:
        hook.remove()
        torch.autograd.backward = backward
        sys.argv, sys.path[:] = kept
        if events.errors:
            raise events.errors[0]
    if not records.rows:
        raise ProgramError(f"{program} has nothing to compare: no result, no backward, no optimizer step")
    return records.rows


def _run_script(path: str) -> None:
    try:
        runpy.run_path(path, run_name="__main__")
    except _LastStepDone:
        return
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ProgramError(f"{path} ended with status {end.code}") from end


def _call(path: str, name: str, steps: int, records: Records) -> None:
    stem = os.path.basename(path)[:-3]
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    # Registered before its code runs, as by an import: dataclasses and pickle look a class's module up.
    module = sys.modules[stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ProgramError(f"{path} has no function {name}")
    # Kinds below 2 are the parameters that can be given by position, unlike `*args` and keyword-only ones.
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed and needed != ["index"]:
        raise ProgramError(f"{name} takes {', '.join(needed)}: give a function that takes nothing, or index")
    # A function that returns a system (an object with `step`) is called once; any other is called for each step.
    result = function(0) if needed else function()
    step = getattr(result, "step", None)
    if callable(step) and not isinstance(result, Tensor):
        for index in range(steps):
            _system_step(step, index, records)
            records.next_step()
        return
    for index in range(steps):
        if index:
            # The call above was step 0.
            result = function(index) if needed else function()
        records.add_nested(result)
        records.next_step()


def _system_step(step: Any, index: int, records: Records) -> None:
    # The step passes tensors to its second parameter, `observe`; without one it yields them, or returns a value.
    takes = len(inspect.signature(step).parameters)
    shown: Any = step(index, records.add) if takes > 1 else step(index)
    if inspect.isgenerator(shown):
        rows: Any = shown
        for kind, name, tensor in rows:
            records.add(str(kind), str(name), tensor)
    elif takes < 2:
        records.add_nested(shown)
