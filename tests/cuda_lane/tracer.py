"""One process that traces for all cases of a lane, and forks from itself whoever makes a case's program.

Cases that differ in passes, memory policies or chunked modules alone are traced from the same step: it is traced once
for each device, and every case takes it from there, in a process of its own that may change it as it likes.

Of every device the trace is compared: code, and what each value is, must be the same but for the index.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from harness.case import Case
from harness.errors import PassError
from harness.execute import stage
from harness.execute.requests import AnyRequest, Request, SeatedRunRequest
from harness.execute.runs import Finisher
from harness.graph.options import GraphOptions
from harness.graph.trace import JointGraph
from harness.machine.determinism import set_determinism
from harness.systems import graph as graph_system
from tests.cuda_lane.operators import current_device
from tests.cuda_lane.selection import step_of

A = TypeVar("A")
DEVICES, FACTS, TRACER = "BITPROOF_LANE_DEVICES", "BITPROOF_LANE_FACTS", "tracer.seconds"

TRACED: Any = "by the tracer, for each device"

_trace = graph_system.trace_joint_step
_traces: dict[tuple[Any, int], JointGraph] = {}
_fingerprints: dict[Any, dict[int, str]] = {}


class Traced(Exception):  # noqa: N818 (a message: tracing is all that was wanted)
    """The step was traced."""


def devices() -> list[int]:
    """The indices that a step is traced for."""
    return [int(index) for index in os.environ.get(DEVICES, "0").split(",")]


def rewritten_for() -> list[int]:
    """Those whose trace goes through the passes: two, as to a pass an index is one value or another."""
    return list(dict.fromkeys((devices()[0], devices()[-1])))


def trace_all(case: Case) -> None:
    """Trace the case's step for every device, unless that was done. Raises PassError where two devices differ."""
    key = step_of(case)
    if key in _fingerprints:
        return
    found = {}
    for index in devices():
        with current_device(index) as cuda:
            joint = _trace_alone(case, cuda)
        found[index] = fingerprint(joint.module, cuda)
        if index in rewritten_for():
            _traces[key, index] = joint
    if len(set(found.values())) != 1:
        raise PassError("the trace depends on the device's index", found=", ".join(found.values()))
    _fingerprints[key] = found


def _trace_alone(case: Case, device: torch.device) -> JointGraph:
    kept: list[JointGraph] = []

    def keep(*args: Any, **kwargs: Any) -> JointGraph:
        kept.append(_trace(*args, **kwargs))
        raise Traced

    graph_system.trace_joint_step = keep
    try:
        graph_system.prepare(case, device, GraphOptions())
    except Traced:
        return kept[0]
    finally:
        graph_system.trace_joint_step = _trace
    raise AssertionError("prepare traces")


def take(case: Case, device: torch.device) -> Callable[..., JointGraph]:
    """What stands for `trace_joint_step` where the step has been traced."""
    return lambda *args, **kwargs: _traces.pop((step_of(case), device.index))


def fingerprint(module: GraphModule, device: torch.device) -> str:
    """A hash of code, nested graphs' too, and of every value's type, in which `device` has no index."""
    named = re.compile(rf"(device\(type='cuda'), index={device.index}\)")
    lines = []
    for name, nested in module.named_modules():
        if isinstance(nested, GraphModule):
            lines += [name, named.sub(r"\1)", nested.code)]
            lines += [f"{node.name} {tree_map(_tell, node.meta.get('val'))}" for node in nested.graph.nodes]
    return hashlib.sha256("\n".join(lines).replace(str(device), "cuda").encode()).hexdigest()


def _tell(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {value.requires_grad}"
    return str(value)


class Tracer:
    """What the tracing process does: trace for a case, then have a process forked here make its program and run it."""

    def __init__(self) -> None:
        self._stage: stage.Stage | None = None
        self._case: Case | None = None

    def answer(self, request: AnyRequest, send: stage.Send, hangup: int) -> Any:
        """What a stage of `runs.Finisher` answers, with the case's own stage in between."""
        assert isinstance(request, SeatedRunRequest), "a runner asks for nothing else"
        run = request.run
        if run.case != self._case:
            self.end()
            send(stage.Place("in tracing"))
            set_determinism(run.case.seed)
            trace_all(run.case)
            finisher = Finisher(TRACED, None, None)
            self._stage, self._case = stage.Stage(finisher.answer, log=run.trace_log, end=finisher.end), run.case
        assert self._stage is not None, "it was made with the case"
        if request.is_ahead:
            self._stage.tell(request)
            return None
        what = f"the program of {run.system}"
        try:
            return self._stage.ask(
                request, send, what=what, timeout=run.timeout, case_timeout=run.case_timeout, hangup=hangup
            )
        finally:
            if folder := os.environ.get(FACTS):  # nobody waits for this process, so nobody else can tell
                used = os.times()
                Path(folder, TRACER).write_text(str(sum(used[:4])))

    def end(self) -> None:
        """End the case's stage."""
        if self._stage is not None:
            self._stage.close()
        self._stage = self._case = None


class SharedStage:
    """Stands for `stage.Stage` in a host's runner: all cases have the one tracer, which outlives them."""

    tracer: stage.Stage | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runs_user_code = False

    def ask(self, request: Request[A], *args: Any, **kwargs: Any) -> A:
        """As a stage does."""
        return self._tracer(request).ask(request, *args, **kwargs)

    def tell(self, request: Request[Any]) -> None:
        """As a stage does."""
        self._tracer(request).tell(request)

    def close(self) -> None:
        """Leave the tracer as it is: the next case ends what this one began. A user's pass runs in one process once."""
        if self._runs_user_code:
            self.kill()

    def kill(self) -> None:
        """End the tracer, and all that it forked."""
        if SharedStage.tracer is not None:
            SharedStage.tracer.kill()
        SharedStage.tracer = None

    def _tracer(self, request: Any) -> stage.Stage:
        self._runs_user_code = request.run.runs_user_code
        if SharedStage.tracer is None:
            tracer = Tracer()
            SharedStage.tracer = stage.Stage(tracer.answer, end=tracer.end)
        return SharedStage.tracer
