"""Proves the rest of a training step, after its graph: balancing the experts, and the optimizer's update of shards.

1. For each system, trace `Trainer.update`, which all built-in systems run. Gradients have the layouts of the system's
   step. Optimizer state exists, as after the first step. Before that, it is zeros in both systems.
2. Append the update's graph to the step's. In the joined graph, the update reads the step's outputs.
3. Prove the two joined graphs. Their outputs are the final parameters, buffers and optimizer state.
4. If these and the step are PROVED, so is any number of steps from equal state (`induction`).

The terms are added to those of the step's proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import Case
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.powers.proofs.prover import proof_data as data
from bitproof.harness.powers.proofs.prover.answers import (
    BUFFER,
    PARAMETER,
    PROVED,
    REFUSED,
    OutputAnswer,
    Proof,
    prove_graphs,
)
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.powers.proofs.prover.induction import WRITTEN, Induction, induction
from bitproof.harness.powers.proofs.prover.pairs import PairProof, told
from bitproof.harness.powers.proofs.prover.programs.optimizers import OPTIMIZER
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.powers.proofs.prover.update_graph import update_graph

GRADIENT = "gradient of "
NOT_FOLLOWED = Induction(False, reason="what follows the step is not proved")


@dataclass(frozen=True)
class UpdateProof:
    """The proof of the optimizer's update after a step.

    - `answers`: an answer for each input of the step that the update changes.
    - `reason`: why the update was refused as a whole, or None.
    - `induction`: whether any number of steps is proved.
    - `proof`: the proof of step and update together. None if they were refused as a whole.
    """

    verdict: str
    answers: tuple[OutputAnswer, ...] = ()
    reason: str | None = None
    induction: Induction = NOT_FOLLOWED
    proof: Proof | None = None

    def count(self, verdict: str) -> int:
        """Return the number of answers with this verdict."""
        return sum(answer.verdict == verdict for answer in self.answers)


def prove_update(case: Case, step: PairProof, groups: Sequence[GroupTable], device: torch.device) -> UpdateProof:
    """Prove the update that follows a case's proved step.

    `step` is the proof of the step, and `groups` are the process groups of its two graphs. A refusal does not raise:
    the result has its reason.
    """
    assert step.graphs is not None and step.proof is not None
    if case.schedule is not None:
        return UpdateProof(REFUSED, reason="one micro-batch is proved, and no graph says how a step adds up several")
    try:
        updates = _Updates(case, device)
        joined = [join(graph, updates.of(graph, own)) for graph, own in zip(step.graphs, groups, strict=True)]
    except RefusedError as error:
        return UpdateProof(REFUSED, reason=told(error))
    proof = prove_graphs(joined[0], joined[1], must_read=(), table=step.proof.table)
    answers = tuple(answer for answer in proof.answers if answer.output.startswith(WRITTEN))
    verdict = replace(proof, answers=answers).verdict
    both = verdict if step.verdict == PROVED else step.verdict
    return UpdateProof(verdict, answers, induction=induction(proof, (joined[0], joined[1]), both, ()), proof=proof)


class _Updates:
    """Traces a case's update and returns it as data. Steps whose gradients have the same layouts share a trace."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._device = device
        self._traced: dict[Any, tuple[GraphModule, dict[str, Tensor]]] = {}
        self._written: dict[Any, Graph] = {}

    def of(self, step: Graph, groups: GroupTable) -> Graph:
        """Return the graph of the update after a step, for the layouts of the step's gradients.

        Raises RefusedError if the update cannot be traced, or if a gradient's layout or memory does not allow it.
        """
        lie = {name: step.calls[index].value for name, index in step.outputs if name.startswith(GRADIENT)}
        if not all(isinstance(x, data.Tensor) and x.is_closed for x in lie.values()):
            raise RefusedError("a gradient whose layout depends on data", where="the step's outputs")
        # The update writes parameters in place, so a gradient in the memory of an input would change with them.
        inputs = {
            call.value.storage for call in step.calls if call.op == "input" and isinstance(call.value, data.Tensor)
        }
        if shared := next((name for name, x in lie.items() if x.storage in inputs), None):
            raise RefusedError(
                f"{shared} lies in memory of an input, which the update writes", where="the step's outputs"
            )
        # Gradients on both sides mostly have equal layouts; then the update is traced only once.
        key = tuple((name, x.dtype, x.shape, x.strides) for name, x in lie.items())
        if key not in self._traced:
            like = {name.removeprefix(GRADIENT): _on_meta(x) for name, x in lie.items()}
            self._traced[key] = self._trace(like)
        module, fakes = self._traced[key]
        place = key, str(groups.partitions())
        if place not in self._written:
            self._written[place] = export_graph(module, list(fakes), list(fakes.values()), [], groups)
        return self._written[place]

    def _trace(self, like: dict[str, Tensor]) -> tuple[GraphModule, dict[str, Tensor]]:
        """Return the traced update, and its inputs as fake values by name.

        `like` maps each parameter's name to a tensor with the layout of its gradient.
        """
        try:
            module, *inputs = update_graph(self._case, like, self._device)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            what = f"the update cannot be traced: {type(error).__name__}: {reason}"
            raise RefusedError(what, where="what follows the step") from error
        kinds = zip((PARAMETER, BUFFER, GRADIENT, OPTIMIZER), inputs, strict=True)
        return module, {kind + name: x for kind, own in kinds for name, x in own.items()}


def _on_meta(x: data.Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, x.dtype), device="meta")


def join(step: Graph, update: Graph) -> Graph:
    """Return the graph of a step followed by its update.

    - An input of the update with the name of an input or output of the step, such as `gradient of layers.0.w`, reads
      that value.
    - Any other input of the update becomes an input of the joined graph.

    Raises RefusedError if a value has another layout after the step than the update reads.
    """
    known = {call.name: index for index, call in enumerate(step.calls) if call.op == "input"} | dict(step.outputs)
    calls = [*step.calls]
    # The update's own storages are numbered after those of the step.
    num_storages = 1 + max((x.storage for call in calls for x in call.results), default=-1)
    places: list[int] = []
    # By storage of the update, its storage in the joined graph, and the offset at which it begins there.
    memory: dict[int, tuple[int, int]] = {}

    def relocated(x: Any) -> Any:
        match x:
            case data.Tensor():
                storage, offset = memory.get(x.storage, (num_storages + x.storage, 0))
                return replace(x, storage=storage, offset=x.offset + offset)
            case ("node", index):
                return ("node", places[index])
            case tuple():
                return tuple(map(relocated, x))
        return x

    for call in update.calls:
        if call.op == "input" and call.name in known:
            places.append(known[call.name])
            value = step.calls[places[-1]].value
            # A gradient may begin within a larger storage of the step, e.g. that of a bucket.
            memory[call.value.storage] = value.storage, value.offset - call.value.offset
            if relocated(call.value) != value:
                raise RefusedError(f"{call.name} has another layout after the step than before", where="the update")
        else:
            places.append(len(calls))
            args = tuple((name, relocated(x)) for name, x in call.args)
            calls.append(replace(call, args=args, value=relocated(call.value)))
    return Graph(tuple(calls), step.outputs)
