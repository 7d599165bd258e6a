"""Mutants proved and run: does PROVED ever meet different bits?"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Parallelism
from bitproof.harness.errors import BitproofError
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.powers.proofs.prover.answers import MUST_READ, PROVED, OutputAnswer, prove_graphs
from bitproof.harness.powers.proofs.prover.evaluate import run_graph, same_bits
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.powers.proofs.prover.proof_data import Graph
from bitproof.harness.powers.proofs.prover.prove import random_inputs
from bitproof.harness.powers.proofs.prover.reference import of_the_reference, traced_reference
from tests.harness.powers.proofs.mutants import MUTATIONS, STEPS, Mutation, copied, inputs, mutate
from tests.harness.powers.proofs.random_programs import NAMES, random_program
from tests.harness.powers.proofs.rewrites import BREAKS, KEEPS
from tests.harness.powers.proofs.toy_graphs import GROUPS, trace


@dataclass(frozen=True)
class Outcome:
    """One mutant: its kind, the outputs that are proved and differ, and those that agree and are not proved."""

    kind: str
    unsound: list[str]
    flagged: list[str]
    proved: list[str]
    failed: bool = False


class Fuzzer:
    """Mutants of steps, each against its step itself: of three small ones unless others are given."""

    def __init__(self, subjects: Sequence[Subject] = ()) -> None:
        self.subjects = list(subjects) or [small_step(step) for step in STEPS]

    def try_one(self, chance: random.Random) -> Outcome:
        return chance.choice(self.subjects).try_one(chance)


@dataclass(frozen=True)
class Bits:
    """What a graph returned on one set of inputs, and what its inputs held then, by output; a value a rank."""

    values: dict[str, list[Tensor]]
    has_nan: bool = False

    def agree(self, other: Bits, output: str) -> bool:
        return all(same_bits(x, y) for x, y in zip(self.values[output], other.values[output], strict=True))


@dataclass
class Subject:
    """One step, and mutants of it. `inputs` are sets of them, of each every rank's; `names` and `outputs` theirs."""

    module: GraphModule
    names: Sequence[str]
    outputs: Sequence[str]
    groups: GroupTable
    like: Sequence[Tensor]
    inputs: Sequence[Sequence[Sequence[Tensor]]]
    others: Callable[[], Sequence[Sequence[Sequence[Tensor]]]] = tuple  # sets for outputs that agree and are not proved
    must_read: Sequence[str] = MUST_READ
    mutations: Mapping[str, Mutation] | None = None

    def __post_init__(self) -> None:
        self.graph = self._export(self.module)
        self.bits = [self._run(self.module, own) for own in self.inputs]
        own = self.prove(self.module)
        self.answered = [answer.output for answer in own]
        self.provable = {answer.output for answer in own if answer.verdict == PROVED}

    def prove(self, mutant: GraphModule) -> tuple[OutputAnswer, ...]:
        return prove_graphs(self.graph, self._export(mutant), must_read=self.must_read).answers

    def try_one(self, chance: random.Random) -> Outcome:
        kind, mutant = mutate(self.module, chance, self.mutations)
        try:
            found = [self._run(mutant, own) for own in self.inputs]
            found.append(self._run(mutant, self.inputs[0], late=True))
        except RefusedError:  # torch itself refuses it
            return Outcome(kind, [], [], [], failed=True)
        try:
            verdicts = {answer.output: answer.verdict for answer in self.prove(mutant)}
        except BitproofError:
            verdicts = {}
        pairs = [*zip((*self.bits, self.bits[0]), found, strict=True)]
        pairs = [pair for pair in pairs if not any(bits.has_nan for bits in pair)]  # of these a proof says nothing
        if not pairs:
            return Outcome(kind, [], [], [], failed=True)
        equal = {name: all(mine.agree(theirs, name) for mine, theirs in pairs) for name in {*self.answered, *verdicts}}
        proved = [name for name, verdict in verdicts.items() if verdict == "PROVED"]
        flagged = [name for name in self.answered if equal[name] and verdicts.get(name) != "PROVED"]
        return Outcome(
            kind=kind,
            unsound=[name for name in proved if not equal[name]],
            flagged=self._agreeing(mutant, flagged),
            proved=proved,
        )

    def _agreeing(self, mutant: GraphModule, outputs: list[str]) -> list[str]:
        """Those of these outputs that agree on further inputs, too: two sets show no equality."""
        for own in self.others() if outputs else ():
            mine, theirs = self._run(self.module, own), self._run(mutant, own)
            if not mine.has_nan and not theirs.has_nan:
                outputs = [name for name in outputs if mine.agree(theirs, name)]
        return outputs

    def applies(self, mutation: Mutation, chance: random.Random, name: str) -> bool:
        mutant = copied(self.module)
        [node] = [node for node in mutant.graph.nodes if node.name == name]
        return mutation(mutant, chance, node)

    def _export(self, module: GraphModule) -> Graph:
        return export_graph(module, self.names, self.like, self.outputs, self.groups)

    def _run(self, module: GraphModule, own: Sequence[Sequence[Tensor]], *, late: bool = False) -> Bits:
        torch.default_generator.manual_seed(0)  # torch.manual_seed asks every device, which takes longer than the graph
        nans: list[str] = []
        returned, held = run_graph(module, own, self.groups.partitions(), late=late, watch=_nans_into(nans))
        found = {name: [values[place] for values in returned] for place, name in enumerate(self.outputs)}
        written = {f"written {name}": [values[place] for values in held] for place, name in enumerate(self.names)}
        return Bits(found | written, bool(nans))


def _nans_into(found: list[str]) -> Callable[[Node, Sequence[object]], None]:
    """Watch a graph for values that are NaNs."""

    def watch(node: Node, values: Sequence[object]) -> None:
        for value in values:
            for x in value if isinstance(value, list | tuple) else [value]:
                if isinstance(x, Tensor) and x.is_floating_point() and bool(x.isnan().any()):
                    found.append(node.name)

    return watch


def random_subject(chance: random.Random) -> Subject:
    """A random program of operators that trace, on one rank, with changes that keep its bits and others that do not."""
    program = random_program(chance)
    graph = program.module.graph
    sets = [[program.like], [special(program.like, chance)], [special(program.like, chance)]]
    return Subject(
        module=program.module,
        names=NAMES,
        outputs=[f"out {i}" for i in range(len(graph.output_node().args[0]))],  # type: ignore[arg-type]
        groups=GroupTable(),
        like=program.like,
        inputs=sets,
        must_read=(),
        mutations=MUTATIONS | BREAKS | KEEPS | {f"{name} again": keep for name, keep in KEEPS.items()},
    )


def special(like: Sequence[Tensor], chance: random.Random) -> list[Tensor]:
    """Inputs that lie so, with zeros of either sign, denormals, large numbers and equal ones among them."""
    found = []
    for x in like:
        if x.is_floating_point():
            values = [0.0, -0.0, 1.0, -1.0, 2.0, torch.finfo(x.dtype).tiny / 4, 1.5, 100.0]
            places = torch.tensor(chance.choices(range(len(values)), k=x.numel())).reshape(x.shape)
            drawn = torch.tensor(values, dtype=torch.float64)[places].to(x.dtype)
            kept = torch.tensor([chance.random() < 0.5 for _ in range(x.numel())]).reshape(x.shape)
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(torch.where(kept, x, drawn))
        found.append(x)
    return found


def small_step(step: Callable[..., list[Tensor]]) -> Subject:
    """A step of some forty calls, on four ranks."""
    sets = [inputs(seed) for seed in (0, 1)]
    return Subject(
        module=trace(step, [x.clone() for x in sets[0][0]]),
        names=["parameter w", "parameter v", "buffer counts", "input x"],
        outputs=["first", "second"],
        groups=GROUPS,
        like=sets[0][0],
        inputs=sets,
        others=functools.cache(lambda: [_scaled(seed) for seed in range(2, 10)]),
    )


def _scaled(seed: int) -> list[list[Tensor]]:
    """Inputs of other magnitudes: at the edges of 16-bit floats, numbers round, overflow and vanish."""
    return [[x * 10.0 ** (seed % 4 * 2 - 4) for x in own] for own in inputs(seed)]


def one_layer(name: str) -> Subject:
    """A case's reference with one MoE layer on two ranks, as it was traced; one set of inputs."""
    case = CASES[name]
    ranks = Parallelism(world_size=2, ep=2)
    case = replace(case, model=replace(case.model, layers=1, dense_layers=0), parallelism=ranks)
    reference = traced_reference(of_the_reference(case), torch.device("cpu"))
    both = ((0, 1),)
    others = {"renamed": Group("renamed", both), "reversed": Group("reversed", ((1, 0),))}
    return Subject(
        module=reference.module,
        names=reference.names,
        outputs=reference.outputs,
        groups=GroupTable(reference.groups.groups | others),
        like=reference.inputs,
        inputs=[random_inputs(case, reference.names, reference.inputs)],
    )
