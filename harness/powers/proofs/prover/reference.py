"""Traces the reference step of a case. Cases with the same reference share the trace.

A large step can be traced in another process, while this process traces the candidate.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import PRECOMPILED, Case
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.powers.proofs.prover.answers import BUFFER, INPUT, PARAMETER
from bitproof.harness.powers.proofs.prover.graphs.open_sizes import SizeBounds
from bitproof.harness.powers.proofs.prover.pairs import MOST_ELEMENTS, Provable
from bitproof.harness.powers.proofs.prover.precompiled import precompiled_step
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.processes.forked import Send, fork
from bitproof.harness.systems.step_graphs import num_parameters, step_graph
from bitproof.harness.torch_compat import FakeTensorMode

PATIENCE_SECONDS = 60.0
"""Seconds added to the time limit of a process that traces the reference.

The limit is three times as long as the parent takes for the candidate, plus these seconds.
"""


@dataclass(frozen=True)
class Reference:
    """The traced step of a reference. Its `inputs` are fake tensors.

    If another process traced the step, `module` is None, and `written` has the graph as data and the bounds of its
    sizes.
    """

    parameter_names: list[str]
    buffer_names: list[str]
    inputs: list[Tensor]
    groups: GroupTable
    module: GraphModule | None
    written: tuple[Graph, SizeBounds] | None = None

    @property
    def num_inputs(self) -> int:
        # Without parameters and buffers.
        return len(self.inputs) - len(self.parameter_names) - len(self.buffer_names)

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the inputs, in order: parameters, buffers, then all other inputs by number (`input 0`)."""
        return [
            *(PARAMETER + name for name in self.parameter_names),
            *(BUFFER + name for name in self.buffer_names),
            *(f"{INPUT}{index}" for index in range(self.num_inputs)),
        ]

    @functools.cached_property
    def outputs(self) -> list[str]:
        """The names of the outputs, in order: the loss, then a gradient for each parameter."""
        return ["loss", *(f"gradient of {name}" for name in self.parameter_names)]

    @functools.cached_property
    def program(self) -> Provable:
        return Provable(self.module, self.names, self.inputs, self.outputs, self.groups, written=self.written)


def graph_of(case: Case, system: str, device: torch.device, options: GraphOptions) -> tuple[StepGraph, GroupTable]:
    return (
        precompiled_step(case, system, device) if system == PRECOMPILED else step_graph(case, system, device, options)
    )


def of_the_reference(case: Case) -> Case:
    """Return `case` with only the settings that affect its reference. Cases with the same reference become equal."""
    kept = ("reference", "chunking", "model", "parallelism", "batch", "schedule", "precision", "seed", "autoplace")
    return Case(name="reference", family="prove", **{name: getattr(case, name) for name in kept})


# Only a few are cached, because whole steps are large.
@functools.lru_cache(maxsize=6)
def traced_reference(case: Case, device: torch.device) -> Reference:
    step, groups = graph_of(case, case.reference, device, GraphOptions())
    inputs = [node.meta["val"] for node in step.module.graph.find_nodes(op="placeholder")]
    assert len(inputs) == len(step.parameter_names) + len(step.buffer_names) + step.num_inputs
    return Reference(step.parameter_names, step.buffer_names, inputs, groups, step.module)


@contextmanager
def reference_of(case: Case, device: torch.device, *, in_turn: bool) -> Iterator[Callable[[], Reference]]:
    """Trace a case's reference, at the start of a `with` block or during it.

    Yields a function that returns the traced reference:

    - With `in_turn`, or for a small reference, this process traces at the start of the block.
    - Otherwise a forked process traces during the block, and the function waits for the result. If the process fails or
      takes too long, the function traces the reference itself.

    Raises the errors of tracing.
    """
    # Nothing is forked while other threads run: a lock that such a thread holds would stay locked in the fork.
    if in_turn or threading.active_count() > 1 or num_parameters(case) <= MOST_ELEMENTS:
        reference = traced_reference(case, device)
        yield lambda: reference
        return
    with tempfile.TemporaryDirectory(prefix="bitproof-") as folder:
        file = Path(folder) / "reference"

        def trace(_: Send) -> int:
            reference = traced_reference(case, device)
            # Only the layouts of the fake inputs matter: `_read` makes them again.
            lies = [(tuple(x.shape), x.stride(), x.dtype) for x in reference.inputs]
            kept = reference.parameter_names, reference.buffer_names, lies, reference.groups, reference.program.exported
            file.write_bytes(pickle.dumps(kept))
            return 0

        began, child = time.monotonic(), fork(trace, log=Path(folder) / "log")

        def wait() -> Reference:
            # By now the candidate is traced, so the child has had as long as the parent.
            limit = PATIENCE_SECONDS + 2 * (time.monotonic() - began)
            child.inlet.wait(limit)  # the child sends nothing, so this waits until it ends
            child.wait(1.0 if child.inlet.is_over else 0.0)
            return _read(file, device) if child.status == 0 else traced_reference(case, device)

        try:
            yield wait
        finally:
            # The candidate may have failed before it needed the reference.
            child.kill()


def _read(file: Path, device: torch.device) -> Reference:
    # `trace` in the forked process wrote this file, so it may be unpickled.
    parameter_names, buffer_names, lies, groups, written = pickle.loads(file.read_bytes())
    with FakeTensorMode():
        inputs = [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in lies]
    return Reference(parameter_names, buffer_names, inputs, groups, None, written)
