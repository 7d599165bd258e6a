"""What follows a case's step, proved as the step is: experts are balanced, and the optimizer updates shards.

1. Trace `Trainer.update`, which every system of ours runs, on gradients that lie as a side's own do, and on optimizer
   state as any step but the first finds it; before the first it is zeros, on both sides.
2. Join it to that side's step: it reads what the step returns, in the memory in which that lies.
3. Prove the two sides' joined graphs: outputs are the parameters, buffers and optimizer state that they leave.
4. Where these are PROVED, and the step is, so is any number of steps from equal state (`induction`).
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen

from bitproof.harness.case import Case
from bitproof.harness.certificate import data
from bitproof.harness.certificate.data import Call, Graph
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.graph.tracing.trace import fixed_fake
from bitproof.harness.prove.answers import BUFFER, PARAMETER, PROVED, REFUSED, OutputAnswer, prove_graphs
from bitproof.harness.prove.graphs.export import RefusedError, export_graph
from bitproof.harness.prove.induction import WRITTEN, Induction, induction
from bitproof.harness.prove.pairs import PairProof, told
from bitproof.harness.prove.programs.one_by_one import one_by_one, without_regions
from bitproof.harness.prove.programs.optimizers import OPTIMIZER
from bitproof.harness.torch_compat import FakeTensorMode, swapped_state, symbolic_graph
from bitproof.reference.optimizer import ShardedAdamW, layers_with_experts
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, build_sharded_model

GRADIENT = "gradient of "
NOT_FOLLOWED = Induction(False, reason="what follows the step is not proved")


@dataclass(frozen=True)
class UpdateProof:
    """What is known of a case's update: every answer about what a whole step leaves, and what follows for many."""

    verdict: str
    answers: tuple[OutputAnswer, ...] = ()
    reason: str | None = None
    induction: Induction = NOT_FOLLOWED

    def count(self, verdict: str) -> int:
        """How many outputs got a verdict."""
        return sum(answer.verdict == verdict for answer in self.answers)


def prove_update(case: Case, step: PairProof, groups: Sequence[GroupTable], device: torch.device) -> UpdateProof:
    """Prove what follows a case's step, of which both graphs are known. What cannot be understood is in the answer."""
    assert step.graphs is not None
    try:
        updates = _Updates(case, device)
        joined = [join(graph, updates.of(graph, own)) for graph, own in zip(step.graphs, groups, strict=True)]
    except RefusedError as error:
        return UpdateProof(REFUSED, reason=told(error))
    proof = prove_graphs(joined[0], joined[1], must_read=())
    answers = tuple(answer for answer in proof.answers if answer.output.startswith(WRITTEN))
    verdict = replace(proof, answers=answers).verdict
    both = verdict if step.verdict == PROVED else step.verdict
    return UpdateProof(verdict, answers, induction=induction(proof, (joined[0], joined[1]), both, ()))


class _Updates:
    """A case's update as data, for gradients that lie anyhow; traced once for each way in which they lie."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._device = device
        self._model = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"))
        self._traced: dict[Any, tuple[GraphModule, dict[str, Tensor]]] = {}

    def of(self, step: Graph, groups: GroupTable) -> Graph:
        """The update of gradients that lie as a step's do. Raises RefusedError."""
        lie = {name: step.calls[index].value for name, index in step.outputs if name.startswith(GRADIENT)}
        if not all(isinstance(x, data.Tensor) and x.is_closed for x in lie.values()):
            raise RefusedError("a gradient whose layout depends on data", where="the step's outputs")
        key = tuple((name, x.dtype, x.shape, x.strides) for name, x in lie.items())
        if key not in self._traced:
            self._traced[key] = self._trace(lie)
        module, fakes = self._traced[key]
        return export_graph(module, list(fakes), list(fakes.values()), [], groups)

    def _trace(self, lie: Mapping[str, data.Tensor]) -> tuple[GraphModule, dict[str, Tensor]]:
        """The graph of the update, and its inputs on fake values, by name."""
        mode = step_fake_mode(ShapeEnv())
        parameters = {name: fixed_fake(mode, x, self._device) for name, x in self._model.named_parameters()}
        buffers = {name: fixed_fake(mode, x, self._device) for name, x in self._model.named_buffers()}
        gradients = {name: _fake(mode, x, self._device) for name, x in lie.items()}
        by_name = {name.removeprefix(GRADIENT): x for name, x in gradients.items()}
        state = {OPTIMIZER + name: x for name, x in self._state(mode, parameters, by_name).items()}
        given = {PARAMETER + name: x for name, x in parameters.items()} | {BUFFER + x: y for x, y in buffers.items()}
        given |= gradients | state

        def update(tensors: list[Tensor]) -> list[Tensor]:
            own = dict(zip(given, tensors, strict=True))
            kinds = [_of_kind(own, kind) for kind in (PARAMETER, BUFFER, GRADIENT, OPTIMIZER)]
            optimizer = ShardedAdamW(kinds[0], self._case.optimizer)  # type: ignore[arg-type]
            optimizer.load(kinds[3])
            with swapped_state(self._model, kinds[0] | kinds[1]), one_by_one():
                layers = layers_with_experts(self._model)
                trainer = types.SimpleNamespace(case=self._case, optimizer=optimizer, _layers_with_experts=layers)
                Trainer.update(trainer, kinds[2])  # type: ignore[arg-type]
            return []

        try:
            module = without_regions(symbolic_graph(update, mode)(list(given.values())))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            what = f"the update cannot be traced: {type(error).__name__}: {reason}"
            raise RefusedError(what, where="what follows the step") from error
        module.graph.set_codegen(CodeGen())
        module.recompile()
        return module, given

    def _state(
        self, mode: FakeTensorMode, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What the optimizer keeps after a step, in new tensors of which nothing is known but how they lie."""
        with mode:
            optimizer = ShardedAdamW(parameters, self._case.optimizer)  # type: ignore[arg-type]
            optimizer.step(gradients)
        return {name: fixed_fake(mode, x, x.device) for name, x in optimizer.state()}


def _of_kind(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.removeprefix(kind): x for name, x in tensors.items() if name.startswith(kind)}


def _fake(mode: FakeTensorMode, x: data.Tensor, device: torch.device) -> Tensor:
    with mode:
        return torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, x.dtype), device=device)


def join(step: Graph, update: Graph) -> Graph:
    """One graph of both: what the update is handed by a name of the step's is what the step has by that name, in its
    memory; all else that it is handed is an input of both."""
    known = {call.name: index for index, call in enumerate(step.calls) if call.op == "input"} | dict(step.outputs)
    calls = [*step.calls]
    num_storages = 1 + max((x.storage for call in calls for x in call.results), default=-1)
    places: list[int] = []
    memory: dict[int, tuple[int, int]] = {}  # an update's storage, as the joined graph's and an offset there

    def told(x: Any) -> Any:
        match x:
            case data.Tensor():
                storage, offset = memory.get(x.storage, (num_storages + x.storage, 0))
                return replace(x, storage=storage, offset=x.offset + offset)
            case ("node", index):
                return ("node", places[index])
            case tuple():
                return tuple(map(told, x))
        return x

    for call in update.calls:
        if call.op == "input" and call.name in known:
            places.append(known[call.name])
            value = step.calls[places[-1]].value
            memory[call.value.storage] = value.storage, value.offset - call.value.offset
            if told(call.value) != value:
                raise RefusedError(f"{call.name} lies otherwise after the step than before", where="the update")
        else:
            places.append(len(calls))
            calls.append(_moved(call, told))
    return Graph(tuple(calls), step.outputs)


def _moved(call: Call, told: Any) -> Call:
    args = tuple((name, told(x)) for name, x in call.args)
    return replace(call, args=args, value=told(call.value))
