"""Proves the update that follows a step's gradients, and with it the whole training step.

1. Trace `Trainer.update`, which balances the experts and runs the optimizer, with gradients in the layouts of each
   system's step.
2. Append the graph of the update to the graph of the step.
3. Prove the two joined graphs equal. Their outputs are the final parameters, buffers and optimizer state.
4. If step and update are PROVED, extend the proof to any number of steps (`induction`).
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
from bitproof.harness.powers.proofs.prover.pairs import PairProof, refusal_text
from bitproof.harness.powers.proofs.prover.programs.optimizers import OPTIMIZER
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.powers.proofs.prover.update_graph import update_graph

GRADIENT = "gradient of "
NOT_FOLLOWED = Induction(False, reason="what follows the step is not proved")


@dataclass(frozen=True)
class UpdateProof:
    """The proof of the update after a step.

    - `verdict`: the verdict on all answers together.
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
        return sum(answer.verdict == verdict for answer in self.answers)


def prove_update(case: Case, step: PairProof, groups: Sequence[GroupTable], device: torch.device) -> UpdateProof:
    """Prove the update that follows the proved step of a case.

    `step` is the proof of the step, and `groups` are the process groups of its two graphs. The terms of the update are
    added to the table of `step`. A refusal does not raise: the result has its reason.
    """
    assert step.graphs is not None and step.proof is not None
    if case.schedule is not None:
        return UpdateProof(REFUSED, reason="one micro-batch is proved, and no graph says how a step adds up several")
    try:
        updates = _Updates(case, device)
        joined = [join(graph, updates.of(graph, own)) for graph, own in zip(step.graphs, groups, strict=True)]
    except RefusedError as error:
        return UpdateProof(REFUSED, reason=refusal_text(error))
    proof = prove_graphs(joined[0], joined[1], must_read=(), table=step.proof.table)
    # The other outputs are those of the step, whose own proof has the answers.
    answers = tuple(answer for answer in proof.answers if answer.output.startswith(WRITTEN))
    verdict = replace(proof, answers=answers).verdict
    # If the step is not PROVED, its verdict is that of both.
    both = verdict if step.verdict == PROVED else step.verdict
    return UpdateProof(verdict, answers, induction=induction(proof, (joined[0], joined[1]), both, ()), proof=proof)


class _Updates:
    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._device = device
        self._traced: dict[Any, tuple[GraphModule, dict[str, Tensor]]] = {}
        self._written: dict[Any, Graph] = {}

    def of(self, step: Graph, groups: GroupTable) -> Graph:
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
        # Collectives are written with the ranks of their groups, which may differ between the sides.
        place = key, str(groups.partitions())
        if place not in self._written:
            self._written[place] = export_graph(module, list(fakes), list(fakes.values()), [], groups)
        return self._written[place]

    def _trace(self, like: dict[str, Tensor]) -> tuple[GraphModule, dict[str, Tensor]]:
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

    - If an input of the update has the name of an input or output of the step, such as `gradient of layers.0.w`, the
      update reads this value.
    - Any other input of the update becomes an input of the joined graph.

    Raises RefusedError if a value's layout after the step is not the layout that the update reads.
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
