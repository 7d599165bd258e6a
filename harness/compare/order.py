"""Sort records in the order in which a step computes them, to find which of the differing records was computed
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from bitproof.harness.case import boundary_of
from bitproof.harness.records import Key

BEFORE_FORWARD = "@before_forward"
BEFORE_OPTIMIZER = "@before_optimizer"
BACKWARD = "@backward"
PHASES = (BEFORE_FORWARD, "activation", "loss", BACKWARD, "grad", "grad_norm", BEFORE_OPTIMIZER, "param", "optimizer")
"""The phases of a step: buffers before forward, activations, the loss, gradients of activations, gradients of
parameters, their norm, buffers before the optimizer, parameters, optimizer state. Unknown kinds are last.
"""


class ComputedAt(NamedTuple):
    """A record's position in a run, for sorting.

    - `phase`: an index into PHASES.
    - `tensor`: the index of the record's kind and name in the order of recording.
    """

    step: int
    phase: int
    tensor: int
    rank: int


class ComputationOrder:
    """A sort key: a function that returns a record's position in a run. Call `add` with all keys before sorting."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], int] = {}

    def add(self, recorded: Iterable[Key]) -> None:
        """Add the names of some records. Their keys must be in the order in which they were recorded."""
        # The first occurrence counts, so that the order does not depend on later steps or ranks.
        for key in recorded:
            self._tensors.setdefault((key.kind, key.name), len(self._tensors))

    def __call__(self, key: Key) -> ComputedAt:
        return ComputedAt(key.step, phase_of(key), self._tensors[key.kind, key.name], key.rank)


def computation_order(recorded: Iterable[Key]) -> Any:
    """Return a sort key that returns a record's position in a run. `recorded` has the keys in recording order."""
    order = ComputationOrder()
    order.add(recorded)
    return order


def phase_of(key: Key) -> int:
    """Return the phase of a step in which a record is computed, as an index into PHASES; len(PHASES) for an unknown
    kind.
    """
    # A buffer is recorded at two moments, which its name states. Gradients of activations have
    # the kind "activation", too.
    moments = (BEFORE_FORWARD, BEFORE_OPTIMIZER) if key.kind == "buffer" else ()
    kind = next((moment for moment in moments if key.name.endswith(moment)), key.kind)
    if kind == "activation" and (boundary := boundary_of(key.name)) and boundary.direction == "backward":
        kind = BACKWARD
    return PHASES.index(kind) if kind in PHASES else len(PHASES)


def place_of(key: Key) -> tuple[str, str]:
    """Return a pair: the module of a record's tensor, and the direction that computes it: "forward", "backward" or
    "update".

    For example, ("layers.0.mlp", "backward") for a gradient of that module's parameter. The module is "" for a tensor
    outside any module.
    """
    if key.kind == "activation" and (boundary := boundary_of(key.name)) is not None:
        return boundary.module, boundary.direction
    if key.kind not in ("grad", "param", "optimizer"):
        return "", "forward"
    # `layers.0.w` is of the module layers.0, and its optimizer state has a further part, such as `layers.0.w.exp_avg`.
    module = key.name.rpartition(".")[0]
    if key.kind == "optimizer":
        module = module.rpartition(".")[0]
    return module, "backward" if key.kind == "grad" else "update"
