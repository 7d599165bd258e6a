"""Extends a proof of a single step to any number of steps, by induction.

State is everything that a later step reads: parameters, buffers, the optimizer's tensors, the state of the random
generator. If both programs begin a step with equal state, they must end it with equal state in the same layouts. Then
the proof of the step also fits the next step.

A step must change nothing else that the next step could read, such as optimizer settings, gradients or attributes. To
check this, a second step is run after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitproof.harness.powers.proofs.prover.answers import PROVED, Proof
from bitproof.harness.powers.proofs.prover.proof_data import Graph, Tensor

WRITTEN = "written "
GENERATOR = "the random generator's state"


@dataclass(frozen=True)
class Induction:
    """Whether equal bits in a single step imply equal bits in any number of steps.

    - `holds`: True if equality extends from a single step to any number of steps.
    - `state`: names of what a step changes: inputs, and the random generator's state.
    - `reason`: why the proof does not extend to further steps; None if it does.
    """

    holds: bool
    state: tuple[str, ...] = ()
    reason: str | None = None


def induction(
    proof: Proof, graphs: tuple[Graph, Graph], verdict: str, single_step_reason: Sequence[str | None]
) -> Induction:
    """Return whether a proof of a single step extends to any number of steps, and if it does not, why.

    - `verdict`: the verdict on the step.
    - `single_step_reason`: other reasons why the proof does not extend, such as a changed optimizer setting. None
      entries are skipped.
    """
    state = tuple(x.output.removeprefix(WRITTEN) for x in proof.answers if x.output.startswith(WRITTEN))
    # ("seed",) is the generator's state at the start: no call drew random numbers.
    state += (GENERATOR,) if proof.sides[0].generator != ("seed",) else ()
    reasons = [
        None if verdict == PROVED else "one step is not proved",
        *single_step_reason,
        *(_layout_change(graph) for graph in graphs),
        None if len({side.generator for side in proof.sides}) == 1 else "the two leave the generator in other states",
    ]
    reason = next(filter(None, reasons), None)
    return Induction(reason is None, state, reason)


def _layout_change(graph: Graph) -> str | None:
    # With another layout of its state, the next step would be another program.
    # In-place writes change no layout, so only outputs that replace an input are checked.
    inputs = {f"{WRITTEN}{call.name}": call.value for call in graph.calls if call.op == "input"}
    for name, index in graph.outputs:
        if name in inputs and _layout(graph.calls[index].value) != _layout(inputs[name]):
            return f"{name.removeprefix(WRITTEN)} has another layout after the step, so that the next would be another"
    return None


def _layout(x: object) -> object:
    return (x.dtype, x.device, x.shape, x.strides, x.offset) if isinstance(x, Tensor) else None
