"""From one step to any number: a step that is proved from equal state to equal state is proved as often as it is taken.

1. State is what a step reads and the next one reads again: parameters, buffers, an optimizer's tensors, inputs that are
   written, the state of the random generator. Both sides begin with the same.
2. What a step writes of it is an output, and PROVED; what it does not write stays. So both hold the same afterwards.
3. It lies in memory as before, so that the next step is the one that was proved: what is put in a tensor's place has
   its layout, and what is written stays where it is.
4. Both leave the generator in one state.
5. Nothing else that a step changes is read by the next: that is known of optimizers' settings, of state that they make,
   and of gradients left behind. What Python keeps elsewhere, in a closure or an attribute, nobody looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitproof.harness.certificate.data import Graph, Tensor
from bitproof.harness.prove.answers import PROVED, Proof

WRITTEN = "written "
GENERATOR = "the random generator's state"


@dataclass(frozen=True)
class Induction:
    """Whether any number of steps has equal bits, as one has. `state` are the inputs, by name, that a step changes;
    `reason` says why not."""

    holds: bool
    state: tuple[str, ...] = ()
    reason: str | None = None


def induction(proof: Proof, graphs: tuple[Graph, Graph], verdict: str, keeps_less: Sequence[str | None]) -> Induction:
    """What a proof of one step says of the next ones. `keeps_less` are reasons why a side's next call would find
    something otherwise that is no value of an input."""
    state = tuple(x.output.removeprefix(WRITTEN) for x in proof.answers if x.output.startswith(WRITTEN))
    state += (GENERATOR,) if proof.sides[0].generator != ("seed",) else ()
    reasons = [
        None if verdict == PROVED else "one step is not proved",
        *keeps_less,
        *(_moved(graph) for graph in graphs),
        None if len({side.generator for side in proof.sides}) == 1 else "the two leave the generator in other states",
    ]
    reason = next(filter(None, reasons), None)
    return Induction(reason is None, state, reason)


def _moved(graph: Graph) -> str | None:
    """What a graph returns for a tensor that it was handed, and lays out otherwise."""
    inputs = {f"{WRITTEN}{call.name}": call.value for call in graph.calls if call.op == "input"}
    for name, index in graph.outputs:
        if name in inputs and _lies(graph.calls[index].value) != _lies(inputs[name]):
            return f"{name.removeprefix(WRITTEN)} lies otherwise after the step, so that the next would be another"
    return None


def _lies(x: object) -> object:
    return (x.dtype, x.device, x.shape, x.strides, x.offset) if isinstance(x, Tensor) else None
