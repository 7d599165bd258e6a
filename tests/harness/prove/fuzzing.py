"""Mutants proved and run: does PROVED ever meet different bits?"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from harness.errors import BitproofError
from harness.prove.answers import OutputAnswer, prove_graphs
from harness.prove.evaluate import run_graph, same_bits
from harness.prove.export import export_graph
from tests.harness.prove.graphs import GROUPS, trace
from tests.harness.prove.mutants import STEPS, Mutation, copied, inputs, mutate

NAMES = ["parameter w", "parameter v", "buffer counts", "input x"]
OUTPUTS = ["first", "second"]
PARTITIONS = {name: group.partition for name, group in GROUPS.groups.items()}


@dataclass(frozen=True)
class Outcome:
    """One mutant: its kind, the outputs that are proved and differ, and those that agree and are not proved."""

    kind: str
    unsound: list[str]
    flagged: list[str]
    proved: list[str]
    failed: bool = False


class Fuzzer:
    """Mutants of small steps, each against its step itself."""

    def __init__(self) -> None:
        self.subjects = [Subject(step) for step in STEPS]

    def try_one(self, chance: random.Random) -> Outcome:
        return chance.choice(self.subjects).try_one(chance)


class Subject:
    """One small step, and mutants of it."""

    def __init__(self, step: Callable[..., list[Tensor]]) -> None:
        self.inputs = [inputs(seed) for seed in (0, 1)]
        self.module = trace(step, [x.clone() for x in self.inputs[0][0]])
        self.graph = self._export(self.module)
        self.bits = [self._run(self.module, own) for own in self.inputs]

    def prove(self, mutant: GraphModule) -> tuple[OutputAnswer, ...]:
        return prove_graphs(self.graph, self._export(mutant)).answers

    def try_one(self, chance: random.Random) -> Outcome:
        kind, mutant = mutate(self.module, chance)
        try:
            found = [self._run(mutant, own) for own in self.inputs]
        except (RuntimeError, IndexError, ValueError):  # torch itself refuses it
            return Outcome(kind, [], [], [], failed=True)
        try:
            answers = self.prove(mutant)
        except BitproofError:
            answers = ()
        equal = {
            name
            for name in self.bits[0]
            if all(
                same_bits(x, y)
                for mine, theirs in zip(self.bits, found, strict=True)
                for x, y in zip(mine[name], theirs[name], strict=True)
            )
        }
        verdicts = {answer.output: answer.verdict for answer in answers}
        proved = [name for name, verdict in verdicts.items() if verdict == "PROVED"]
        return Outcome(
            kind=kind,
            unsound=[name for name in proved if name not in equal],
            flagged=[name for name in self.bits[0] if name in equal and verdicts.get(name, "") != "PROVED"],
            proved=proved,
        )

    def applies(self, mutation: Mutation, chance: random.Random, name: str) -> bool:
        mutant = copied(self.module)
        [node] = [node for node in mutant.graph.nodes if node.name == name]
        return mutation(mutant, chance, node)

    def _export(self, module: GraphModule) -> Any:
        return export_graph(module, NAMES, self.inputs[0][0], OUTPUTS, GROUPS)

    def _run(self, module: GraphModule, own: Any) -> dict[str, Any]:
        returned, held = run_graph(module, own, PARTITIONS)
        found = {name: [values[place] for values in returned] for place, name in enumerate(OUTPUTS)}
        return found | {"written buffer counts": [values[2] for values in held]}
