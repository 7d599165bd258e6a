"""The causes of random programs (`programs`), verified by exchange: a `Machine` runs a side with the other's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.reader_exchanges import Swap
from bitproof.harness.localize.exchange.verifier import ExchangedRun, Verifier
from bitproof.harness.localize.logs.calls import Call, returns_only_inputs
from bitproof.harness.localize.logs.replay import OTHER_INPUTS, OTHER_TYPE, UNSTEADY, Exchanged, ValueSite
from bitproof.harness.records import Key, Manifest, Record, Recording, Role, Verification
from tests.harness.localize.programs import VIEWS, Known, Machine, Op, Program, Scene, Tensor, Trace, Wrong


class ExchangingMachine(Machine):
    """Runs a program with values of the other side; `made` has what came of each exchange."""

    def __init__(self, program: Program, wrong: Wrong | None, known: Known, swaps: Sequence[Swap]) -> None:
        self.made, self.written = dict[ValueSite, Exchanged](), set[str]()
        self.swaps = {swap.site: swap for swap in swaps}
        super().__init__(program, wrong, known)

    def read_by(self, number: int, op: Op, rank: int) -> list[Tensor]:
        read, index = super().read_by(number, op, rank), len(self.trace.calls[rank])
        name = "recv_" if op.kind == "send" and rank != op.groups[0][0] else op.name
        sites = [ValueSite(rank, index, position, True) for position in range(len(read))]
        planned = [site for site in sites if site in self.swaps]
        for site in sorted(planned, key=lambda site: self.swaps[site].reads is not None):
            digests = tuple(self.digest(rank, tensor) for tensor in read)
            if (tokens := self.value_at(site, name, digests[site.position], digests)) is None:
                continue
            if self.swaps[site].in_place or (op.kind == "in_place" and not site.position):
                self.write(rank, read[site.position], tokens)
            else:
                read[site.position] = self.beside(rank, read[site.position], tokens)
        return read

    def log(self, number: int, op: Op, rank: int, read: Sequence[Tensor], results: list[list[int]] | None) -> None:
        super().log(number, op, rank, read, results)
        index = len(self.trace.calls[rank]) - 1
        for position, variable in enumerate(op.gives):
            call, site, tensor = self.trace.calls[rank][index], ValueSite(rank, index, position), self.tensors[rank]
            if site not in self.swaps:
                continue
            tokens = self.value_at(site, call.operator, call.outputs[position], call.inputs)
            if tokens is None:
                continue
            if op.kind in VIEWS:
                self.bind(rank, variable, self.beside(rank, tensor[variable], tokens)._replace(made_by=(rank, index)))
            else:
                self.write(rank, tensor[variable], tokens)
            value = self.digest(rank, tensor[variable])
            outputs = (*call.outputs[:position], value, *call.outputs[position + 1 :])
            self.trace.calls[rank][index] = call._replace(outputs=outputs)
            self.left[rank][tensor[variable].storage, value] = index
            for other in self.over[rank][tensor[variable].storage]:
                shown = tensor[other]
                self.left[rank].setdefault((shown.storage, self.digest(rank, shown)), index)
        self.log_aliases(rank, op, index)

    def log_aliases(self, rank: int, op: Op, index: int) -> None:
        """Exchange the values of the other tensors over the memory that the call has written."""
        for number, held in enumerate(self.trace.calls[rank][index].aliases, 1):
            call, site = self.trace.calls[rank][index], ValueSite(rank, index, -number)
            if site not in self.swaps or (tokens := self.value_at(site, call.operator, held, call.inputs)) is None:
                continue
            over = self.over[rank][self.tensors[rank][op.gives[0]].storage]
            shown = next(self.tensors[rank][v] for v in over if self.digest(rank, self.tensors[rank][v]) == held)
            self.write(rank, shown, tokens)
            value, own = self.digest(rank, shown), [self.digest(rank, self.tensors[rank][v]) for v in op.gives]
            aliases = (*call.aliases[: number - 1], value, *call.aliases[number:])
            self.trace.calls[rank][index] = call._replace(aliases=aliases, outputs=tuple(own))
            for other in over:
                self.left[rank][shown.storage, self.digest(rank, self.tensors[rank][other])] = index

    def beside(self, rank: int, tensor: Tensor, tokens: list[int]) -> Tensor:
        self.fresh += 1
        self.stores[rank][self.fresh] = list(tokens)
        self.writers[rank][self.fresh] = []
        self.over[rank].setdefault(self.fresh, [])
        return Tensor(self.fresh, tuple(range(len(tokens))), tensor.shape, tensor.made_by)

    def write(self, rank: int, tensor: Tensor, tokens: list[int]) -> None:
        for element, token in zip(tensor.elements, tokens, strict=True):
            self.stores[rank][tensor.storage][element] = token

    def value_at(self, site: ValueSite, operator: str, held: str, reads: tuple[str, ...]) -> list[int] | None:
        """What to put at a site, or None where nothing is to be put there; `made` then says why."""
        swap, problem = self.swaps[site], ""
        is_right = held == swap.wanted
        if operator != swap.operator:
            problem = f"another call stands there: {operator}"
        elif swap.reads is not None and reads != swap.reads:
            problem = OTHER_INPUTS
        elif swap.found not in ("", held) and not (is_right and held in self.written):
            problem = UNSTEADY
        elif not is_right and self.known[swap.wanted][0] != self.known[held][0]:
            problem = OTHER_TYPE
        self.made[site] = Exchanged(site, not problem, problem, held)
        if problem or is_right:
            return None
        self.written.add(swap.wanted)
        return self.known[swap.wanted][1]


@dataclass
class ProgramVerifier(Verifier):
    """Verifies causes of a random program, which it runs in place of a replay."""

    scene: Scene = field(kw_only=True)

    def ran(self, role: Role, swaps: Sequence[Swap]) -> tuple[Trace, Mapping[ValueSite, Exchanged]]:
        machine = ExchangingMachine(*self.scene.sides[role], self.scene.known, swaps)
        trace = machine.run()
        absent = {site: Exchanged(site, False, "the call did not come again") for site in machine.swaps}
        return trace, absent | machine.made

    def _exchanged(self, role: Role, swaps: Sequence[Swap]) -> ExchangedRun:
        self._runs += 1
        trace, made = self.ran(role, swaps)
        return ExchangedRun(trace.calls, recording_of(role, trace), made)


def recording_of(role: Role, trace: Trace) -> Recording:
    """What a run shows, as records."""
    keys = ((Key(0, name.split()[0], name, rank), value) for (name, rank), value in trace.shown.items())
    rows = {key: Record(value, "float32", ()) for key, value in keys}
    return Recording(Manifest(case={}, system=role, world_size=len(trace.calls), steps=1), rows)


def readers_of_copies(scene: Scene) -> list[Call]:
    """The calls that read a planted call's copy of a value: such a call is as wrong as one that reads the copy."""
    found, pending = list[Call](), [*scene.planted]
    while pending:
        rank, index = site = pending.pop()
        calls = scene.candidate.calls[rank]
        readers = [other for other, made_by in scene.candidate.depends.items() if site in made_by and other[0] == rank]
        readers = [other for other in readers if set(calls[index].outputs) & set(calls[other[1]].inputs)]
        if returns_only_inputs(calls[index]) and not calls[index].collective:
            found += [calls[other] for _, other in readers]
            pending += readers
    return found


class Verified(NamedTuple):
    """The answer for a program after verification, and what of it is right by truth."""

    culprit: Culprit | None
    verification: Verification | None
    place: bool
    operator: bool
    rank: bool

    @property
    def is_right(self) -> bool:
        return self.place and self.operator and self.rank


def verified(scene: Scene) -> Verified:
    """Find and verify the cause of a scene."""
    sides: dict[Role, Trace] = {"reference": scene.reference, "candidate": scene.candidate}
    recordings = {role: recording_of(role, trace) for role, trace in sides.items()}
    logs = {role: trace.calls for role, trace in sides.items()}
    verifier = ProgramVerifier(recordings, Path(), 0, logs, lambda *_: None, scene=scene)
    found = verifier.blamed(recordings["candidate"], verifier.ready)
    if not found:
        return Verified(None, None, False, False, False)
    culprit, verification = verifier.verify(*found)
    planted = [scene.candidate.calls[rank][index] for rank, index in scene.planted]
    planted += readers_of_copies(scene)
    reported = culprit.call.place[:2] if culprit.candidate is None else None
    own = reported or verifier.ready[culprit.rank].log[culprit.candidate or 0].place[:2]
    return Verified(
        culprit,
        verification,
        not {own, culprit.call.place[:2]}.isdisjoint({scene.place[:2], *(call.place[:2] for call in planted)}),
        any(culprit.call.operator == call.operator for call in planted),
        culprit.rank in {rank for rank, _ in scene.planted},
    )
