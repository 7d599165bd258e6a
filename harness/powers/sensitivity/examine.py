"""Examines a call of a step: would the compared tensors show an error in its output?

Three kinds of errors are tried: 1 ULP in an element, grossly wrong values, and the results of formulas that round
differently.
"""

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
"""Most elements of a call's output that are changed in a step, each alone, until an error is seen."""

Isolate = Callable[[Callable[[], Fate]], Fate]
"""Runs a function that may crash, for example on a wrong index, in a forked process.

A crash counts as a visible error.
"""

Answer = Literal["seen", "same", "lost"]
"""Result of a formula with other rounding: its difference is seen or lost, or its bits are the same on these inputs."""


@dataclass(frozen=True, kw_only=True)
class CallFinding:
    """Whether errors in a call's output showed in the compared tensors.

    - `shown`: kind of the compared tensor that showed an error of 1 ULP, or None.
    - `tries`: number of elements that were changed, each alone.
    - `is_blind`: whether even gross errors, in all elements on all ranks, stayed unseen.
    - `lost`: if nothing showed, indices of the calls that returned right bits from wrong inputs; -1 if no call reads
      the output. For a blind call, these are the calls at which gross errors disappeared.
    - `neighbours`: name of a formula with other rounding -> result of computing the call by this formula.
    """

    call: int
    shown: str | None = None
    tries: int = 0
    lost: tuple[int, ...] = ()
    is_blind: bool = False
    neighbours: Mapping[str, Answer] = field(default_factory=dict)


class NotRepeatableError(Exception):
    """A call, repeated on the same inputs, returned other bits, so no error can be followed through this call."""


class Examiner:
    """Examines the calls of a step. All random choices depend only on `seed`.

    Each value of the step has a number (its slot): `ranks[rank][slot]` is the value on a rank.
    """

    def __init__(
        self, program: Program, ranks: Ranks, seed: str, isolate: Isolate, compared: Compared | None = None
    ) -> None:
        """`compared` decides which wrong values show if every call is compared; None if only records are compared."""
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
        """Try errors in the output of the call with this index, and return whether compared tensors show them.

        - `formulas`: first compute the call by each of these formulas with other rounding; None for all.
        - `needs_ulp`: then change an element by 1 ULP.
        - `may_be_blind`: try gross errors if no error of 1 ULP showed.

        Raises NotRepeatableError if calls that read the unchanged output do not repeat their bits.
        """
        call = self._program.calls[index]
        tried = names_of(self._program, call) if formulas is None else formulas
        found = {name: self._neighbour(call, name) for name in tried}
        answers = {name: answer for name, answer in found.items() if answer is not None}
        if not needs_ulp:
            return CallFinding(call=index, neighbours=answers)
        targets = [slot for slot in self._program.targets(call) if self._filled(slot)]
        # No call reads a result of this call, and none is compared.
        if not targets:
            return CallFinding(call=index, lost=(-1,), is_blind=True, neighbours=answers)
        fate = Fate()
        for attempt in range(TRIES):
            # Another element each time: one element may be masked, or its error rounded away.
            fate = self._follow_one_ulp(call, attempt)
            if fate.shown:
                return CallFinding(call=index, shown=fate.shown, tries=attempt + 1, neighbours=answers)
        # Only for unseen calls: an error of 1 ULP that shows proves that the call is not blind.
        gross = self._is_blind(call, targets) if may_be_blind else None
        # Of a blind call the gross errors show best where errors disappear.
        lost = fate.lost if gross is None else gross.lost
        return CallFinding(call=index, tries=TRIES, lost=lost, is_blind=gross is not None, neighbours=answers)

    def _filled(self, slot: int) -> list[int]:
        values = [own[slot] for own in self._ranks]
        return [rank for rank, x in enumerate(values) if tensors_of(x) or isinstance(x, (int, float))]

    def error(self, call: ReplayedCall, attempt: int) -> tuple[int, int, Any]:
        """Return an error of 1 ULP in an element of a call's output, as (value number, rank, wrong value).

        `attempt` counts from 0. Each attempt chooses another element.
        """
        chance = random.Random(f"{self._seed} {call.index} {attempt}")
        targets = [slot for slot in self._program.targets(call) if self._filled(slot)]
        # The attempts go through the results of the call in order, again and again.
        slot = targets[attempt % len(targets)]
        rank = chance.choice(self._filled(slot))
        return slot, rank, by_one_ulp(self._ranks[rank][slot], chance)

    def _follow_one_ulp(self, call: ReplayedCall, attempt: int) -> Fate:
        slot, rank, wrong = self.error(call, attempt)
        value = self._ranks[rank][slot]
        # The control experiment: the readers of an unchanged copy must return the recorded bits.
        if not readers_agree(self._program, self._ranks, slot, rank, _unchanged_copy(value)):
            raise NotRepeatableError(f"what reads {call.operator} {call.node} gives other bits when it is repeated")
        return self._followed({(slot, rank): wrong}, is_safe(value))

    def _is_blind(self, call: ReplayedCall, targets: Sequence[int]) -> Fate | None:
        """Try gross errors in all results of a call, first on a single rank, then on all ranks.

        Returns None if a compared tensor showed an error, otherwise the calls at which the last error disappeared.
        """
        fate = Fate()
        for attempt in range(3):
            chance = random.Random(f"{self._seed} {call.index} gross {attempt}")
            values = {(slot, rank): self._ranks[rank][slot] for slot in targets for rank in self._filled(slot)}
            if attempt == 0:
                chosen = chance.choice(sorted({rank for _, rank in values}))
                values = {key: value for key, value in values.items() if key[1] == chosen}
            wrong = {key: grossly(value, chance) for key, value in values.items()}
            fate = self._followed(wrong, all(map(is_safe, values.values())))
            if fate.shown:
                return None
        return fate

    def _followed(self, wrong: Mapping[tuple[int, int], Any], safe: bool) -> Fate:
        run = functools.partial(follow, self._program, self._ranks, wrong, self._compared)
        # A wrong index may crash the kernel that reads it, and with it this process.
        return run() if safe else self._isolate(run)

    def _neighbour(self, call: ReplayedCall, name: str) -> Answer | None:
        # A function per rank, which returns the value of a slot.
        gets: list[Get] = [values.__getitem__ for values in self._ranks]
        try:
            found = computed(self._program, call, name, gets)
        # The formula does not support these arguments, such as another number of dims.
        except KERNELS_REFUSE:
            return None
        wrong = {key: value for key, value in found.items() if not same(value, self._ranks[key[1]][key[0]])}
        if not wrong:
            return "same"
        return "seen" if follow(self._program, self._ranks, wrong, self._compared).shown else "lost"


def _unchanged_copy(value: Any) -> Any:
    return copied(value) if tensors_of(value) and not isinstance(value, (tuple, list)) else value
