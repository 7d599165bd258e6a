"""One call of one step examined: its output off by one ULP, grossly wrong, and computed by neighbouring formulas."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bitproof.harness.powers.sensitivity.formulas import computed, names_of
from bitproof.harness.powers.sensitivity.lockstep import Get, Ranks
from bitproof.harness.powers.sensitivity.perturb import by_one_ulp, copied, grossly, is_safe, same, tensors_of
from bitproof.harness.powers.sensitivity.program import Program, ReplayedCall
from bitproof.harness.powers.sensitivity.spread import KERNELS_REFUSE, Compared, Fate, follow, readers_agree

TRIES = 3
"""How many elements of a call's output are changed in a step, one after the other, until one is seen."""

Isolate = Callable[[Callable[[], Fate]], Fate]
"""Runs what may crash, as a wrong index can, in a process of its own; a crash is a failure that a run would see."""

Answer = Literal["seen", "same", "lost"]
"""A neighbouring formula is seen, gives the same bits on these values, or its difference is lost on the way."""


@dataclass(frozen=True, kw_only=True)
class CallFinding:
    """A call's result in a step. `shown` is how one ULP was seen, at the `tries`-th element; None where it was not.

    `lost` are then the calls where the last of them was lost, by index, -1 where no call read it. `is_blind` says that
    not even gross errors in all elements on all ranks showed, and `lost` where these were lost.
    """

    call: int
    shown: str | None = None
    tries: int = 0
    lost: tuple[int, ...] = ()
    is_blind: bool = False
    neighbours: Mapping[str, Answer] = field(default_factory=dict)


class NotRepeatableError(Exception):
    """A call made again from the same values gave other bits: nothing that spreads would mean anything."""


class Examiner:
    """Examines calls of one step, whose values on every rank are `ranks`. What it draws hangs on the seed alone."""

    def __init__(
        self, program: Program, ranks: Ranks, seed: str, isolate: Isolate, compared: Compared | None = None
    ) -> None:
        """`compared` are the values of calls, where every call is compared, not only what a step leaves."""
        self._compared = compared
        self._program = program
        self._ranks = ranks
        self._seed = seed
        self._isolate = isolate

    def examine(
        self,
        index: int,
        *,
        may_be_blind: bool = True,
        formulas: Sequence[str] | None = None,
        needs_ulp: bool = True,
    ) -> CallFinding:
        """What comes of one call. `formulas` are the neighbours still to be tried, None for all.

        Without `needs_ulp` they alone are.

        Raises NotRepeatableError.
        """
        call = self._program.calls[index]
        tried = names_of(self._program, call) if formulas is None else formulas
        found = {name: self._neighbour(call, name) for name in tried}
        answers = {name: answer for name, answer in found.items() if answer is not None}
        if not needs_ulp:
            return CallFinding(call=index, neighbours=answers)
        targets = [slot for slot in self._program.targets(call) if self._filled(slot)]
        if not targets:
            return CallFinding(call=index, lost=(-1,), is_blind=True, neighbours=answers)
        fate = Fate()
        for turn in range(TRIES):
            fate = self._one_ulp(call, turn)
            if fate.shown:
                return CallFinding(call=index, shown=fate.shown, tries=turn + 1, neighbours=answers)
        gross = self._is_blind(call, targets) if may_be_blind else None
        lost = fate.lost if gross is None else gross.lost
        return CallFinding(call=index, tries=TRIES, lost=lost, is_blind=gross is not None, neighbours=answers)

    def _filled(self, slot: int) -> list[int]:
        """The ranks on which a slot holds anything to change."""
        values = [own[slot] for own in self._ranks]
        return [rank for rank, x in enumerate(values) if tensors_of(x) or isinstance(x, (int, float))]

    def error(self, call: ReplayedCall, turn: int) -> tuple[int, int, Any]:
        """The slot, the rank and the wrong value of a call's `turn`-th try."""
        chance = random.Random(f"{self._seed} {call.index} {turn}")
        targets = [slot for slot in self._program.targets(call) if self._filled(slot)]
        slot = targets[turn % len(targets)]
        rank = chance.choice(self._filled(slot))
        return slot, rank, by_one_ulp(self._ranks[rank][slot], chance)

    def _one_ulp(self, call: ReplayedCall, turn: int) -> Fate:
        slot, rank, wrong = self.error(call, turn)
        value = self._ranks[rank][slot]
        if not readers_agree(self._program, self._ranks, slot, rank, _again(value)):
            raise NotRepeatableError(f"what reads {call.operator} {call.node} gives other bits when it is repeated")
        return self._followed({(slot, rank): wrong}, is_safe(value))

    def _is_blind(self, call: ReplayedCall, targets: Sequence[int]) -> Fate | None:
        """The fate of gross errors in every element, first on one rank, then on all; None where they are seen."""
        fate = Fate()
        for turn in range(3):
            chance = random.Random(f"{self._seed} {call.index} gross {turn}")
            values = {(slot, rank): self._ranks[rank][slot] for slot in targets for rank in self._filled(slot)}
            if turn == 0:
                chosen = chance.choice(sorted({rank for _, rank in values}))
                values = {key: value for key, value in values.items() if key[1] == chosen}
            wrong = {key: grossly(value, chance) for key, value in values.items()}
            fate = self._followed(wrong, all(map(is_safe, values.values())))
            if fate.shown:
                return None
        return fate

    def _followed(self, wrong: Mapping[tuple[int, int], Any], safe: bool) -> Fate:
        run = functools.partial(follow, self._program, self._ranks, wrong, self._compared)
        return run() if safe else self._isolate(run)

    def _neighbour(self, call: ReplayedCall, name: str) -> Answer | None:
        """What becomes of a formula; None where it is not one for this call's arguments."""
        gets: list[Get] = [values.__getitem__ for values in self._ranks]
        try:
            found = computed(self._program, call, name, gets)
        except KERNELS_REFUSE:
            return None
        wrong = {key: value for key, value in found.items() if not same(value, self._ranks[key[1]][key[0]])}
        if not wrong:
            return "same"
        return "seen" if follow(self._program, self._ranks, wrong, self._compared).shown else "lost"


def _again(value: Any) -> Any:
    return copied(value) if tensors_of(value) and not isinstance(value, (tuple, list)) else value
