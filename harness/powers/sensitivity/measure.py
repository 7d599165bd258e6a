"""Replays a case's steps for all ranks in this process, and checks that they have the recorded bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.capture.digest import digest
from bitproof.harness.case import Case
from bitproof.harness.errors import PassError, RecordingError
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.powers.sensitivity.lockstep import after, run_step
from bitproof.harness.powers.sensitivity.program import BUFFER, INPUT, PARAM, STATE, Program, add_graph
from bitproof.harness.powers.sensitivity.update import TrainerLike, add_update, begin_state, held
from bitproof.harness.records import Key, Recording
from bitproof.harness.systems.step_graphs import all_trainers, step_graph

KNOWN_SYSTEMS = ("eager", "eager_chunked", "graph")


def why_not(case: Case) -> str | None:
    """Return why a case's sensitivity cannot be measured; None if no reason is known in advance."""
    if case.candidate not in KNOWN_SYSTEMS:
        return f"system {case.candidate} is not known as a graph"
    if case.pipeline.compiles:
        return f"backend {case.pipeline.backend} compiles the graph into code whose calls are not known"
    if case.schedule is not None:
        return "a step in micro-batches is several runs of its graph, with sums between them"
    if case.observe and case.candidate != "graph":
        return f"what {case.candidate} shows of its activations is not known in the form of a graph"
    return None


@dataclass
class Steps:
    """The steps of a case's candidate, replayed in order for all ranks in this process.

    After `advance`, `ranks[rank][slot]` has the values of the current step; a slot is the number of a value.
    """

    program: Program
    trainers: Sequence[TrainerLike]
    held: list[dict[Any, Tensor]]
    ranks: list[list[Any]]
    step: int = -1

    @staticmethod
    def of(case: Case, options: GraphOptions | None = None) -> Steps:
        graph, groups = step_graph(case, case.candidate, torch.device("cpu"), options or GraphOptions(), observed=True)
        trainers: list[Any] = list(all_trainers(case))
        for trainer in trainers:
            # As the program's inputs include the optimizer's state, which exists only after a first update.
            begin_state(trainer)
        program, first = Program(), trainers[0]
        partitions = groups.partitions()
        sources = [
            *((PARAM, name) for name in graph.parameter_names),
            *((BUFFER, name) for name in graph.buffer_names),
            *((INPUT, name) for name in first.data.step(0)._fields),
        ]
        add_graph(
            program,
            graph.module,
            sources,
            [("loss", "loss"), *(("grad", name) for name in graph.parameter_names)],
            partitions,
        )
        for name in first.state_buffers:
            # `last` is still the value after the graph; `add_update` moves it on.
            program.compared["buffer", f"{name}@before_optimizer"] = program.last[BUFFER, name]
        add_update(program, first, partitions)
        for name in first.parameters:
            program.compared["param", name] = program.last[PARAM, name]
        for name, _ in first.optimizer.state():
            program.compared["optimizer", name] = program.last[STATE, name]
        for name in first.state_buffers:
            program.compared["buffer", f"{name}@after_optimizer"] = program.last[BUFFER, name]
        # Last, when all that the step leaves and all that is compared is known.
        refuse_hidden_state(program)
        return Steps(program, trainers, [dict(held(trainer)) for trainer in trainers], [])

    def advance(self, recording: Recording) -> None:
        """Replay the next step on all ranks. Raises RecordingError if its tensors differ from the recorded tensors."""
        self.step += 1
        if self.ranks:
            self.held = [after(self.program, values) for values in self.ranks]
        self.ranks = []  # frees these values before the next step makes as many
        before = [
            own | {(INPUT, name): x for name, x in trainer.data.step(self.step)._asdict().items()}
            for own, trainer in zip(self.held, self.trainers, strict=True)
        ]
        self.ranks = run_step(self.program, before)
        check(self.program, self.ranks, recording, self.step)


def refuse_hidden_state(program: Program) -> None:
    """Raise PassError if a step changes a value that the next step reads, but that no record compares.

    Errors could hide in such a value.
    """
    compared = set(program.compared.values())
    for source, slot in program.last.items():
        if slot != program.inputs[source] and slot not in compared:
            raise PassError("the step leaves something to the next one that is not compared", found=" ".join(source))


def check(program: Program, ranks: Sequence[Sequence[Any]], recording: Recording, step: int) -> None:
    """Raise RecordingError if a replayed step's compared tensors differ from the ranks' records."""
    found: Mapping[Key, str] = {
        Key(step, kind, name, rank): digest(values[slot])
        for rank, values in enumerate(ranks)
        for (kind, name), slot in program.compared.items()
    }
    recorded = {key: record.digest for key, record in recording.records.items() if key.step == step}
    # Keys of both sides, so that a missing record is a difference, too.
    if wrong := [key for key in {**recorded, **found} if found.get(key) != recorded.get(key)]:
        first = min(wrong, key=lambda key: (key.rank, key.kind, key.name))
        raise RecordingError(
            "the step that is replayed in one process has other bits than the ranks recorded, so it shows nothing",
            expected=f"the digests of all {len(recorded)} records of step {step}",
            found=f"{len(wrong)} others, such as {first.kind} {first.name} on rank {first.rank}",
        )
