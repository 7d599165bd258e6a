"""Follows a wrong value through a step, by repeating the calls that read a wrong value, in program order.

An error ends if a call returns the right bits, a compared tensor is wrong, or a call fails.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bitproof.harness.capture.digest import digest
from bitproof.harness.localize.logs.call_log import NOT_LOGGED
from bitproof.harness.powers.sensitivity.lockstep import Ranks, run_call, run_collective
from bitproof.harness.powers.sensitivity.perturb import same, tensors_of
from bitproof.harness.powers.sensitivity.program import Program, ReplayedCall

FAILURE = "failure"
"""Value of `Fate.shown` if the error makes a call fail."""

KERNELS_REFUSE = (RuntimeError, IndexError, ValueError, TypeError, OverflowError)
"""Errors that kernels and collectives raise for wrong arguments. Any other error is a bug of bitproof."""


@dataclass(frozen=True)
class Fate:
    """The end of an error that was followed through a step.

    - `shown`: kind of the first compared tensor that shows the error, or None.
    - `lost`: if none shows it, the calls that returned right bits from wrong inputs; -1 if no call reads the error.
    """

    shown: str | None = None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compared:
    """Decides which wrong values are noticed if every call is compared, not only records.

    - `values`: for each rank, the digests of all values of the correct step. A value whose digest is not among these is
      noticed.
    - `packing`: nodes whose calls are not compared.
    """

    program: Program
    values: Sequence[frozenset[str]]
    packing: frozenset[str]

    @staticmethod
    def of(program: Program, ranks: Ranks, packing: Collection[str]) -> Compared:
        values = [frozenset(digest(x) for value in own for x in tensors_of(value)) for own in ranks]
        return Compared(program, values, frozenset(packing))

    def shows(self, slot: int, rank: int, value: Any) -> bool:
        """Return whether a comparison of all calls would notice `value` as the value number `slot` on this rank."""
        call = self.program.makers.get(slot)
        while call is not None and (call.is_wait or call.function is operator.getitem):  # logged as its launch
            call = self.program.makers.get(call.args[0].number)
        if call is None or not call.counts or call.operator in NOT_LOGGED or call.node in self.packing:
            return False
        # By value and not by call: a comparison of all calls looks for values that the reference never had.
        return any(digest(x) not in self.values[rank] for x in tensors_of(value))


@torch.no_grad()
def follow(
    program: Program, ranks: Ranks, wrong: Mapping[tuple[int, int], Any], compared: Compared | None = None
) -> Fate:
    """Follow wrong values through a step, and return the kind of the first compared tensor that shows the error.

    If no tensor shows the error, the result has the calls at which it disappeared.

    - `ranks`: the right values, as `[rank][value number]`.
    - `wrong`: (value number, rank) -> wrong value.
    """
    found = _Wrong(program, ranks, compared)
    for (slot, rank), value in wrong.items():
        found.mark_wrong(slot, rank, value)
    # Indices ascend in program order, so a call is repeated once, after all its wrong inputs are known.
    while found.shown is None and found.waiting:
        index = heapq.heappop(found.waiting)
        try:
            found.repeat(program.calls[index], found.on.pop(index))
        except KERNELS_REFUSE:  # a run would fail, too
            return Fate(FAILURE)
    return Fate(found.shown, () if found.shown else tuple(dict.fromkeys(found.lost)))


@torch.no_grad()
def readers_agree(program: Program, ranks: Ranks, slot: int, rank: int, value: Any) -> bool:
    """Return whether the calls that read a value on a rank return the recorded bits when they are repeated.

    They are repeated with `value`, an unchanged copy of the value number `slot`.
    """
    found = _Wrong(program, ranks)
    found.set_value(slot, rank, value)
    # The control experiment: if readers of an unchanged copy differ, kernels are not repeatable here.
    for index in program.readers[slot]:
        found.repeat(program.calls[index], {rank})
    return not found.has_wrong


class _Wrong:
    """What is known while an error is followed: the wrong values so far, and the calls to repeat, with their ranks."""

    def __init__(self, program: Program, ranks: Ranks, compared: Compared | None = None) -> None:
        self._program = program
        self._ranks = ranks
        self._compared = compared
        self._values: dict[tuple[int, int], Any] = {}
        self.waiting: list[int] = []
        self.on: dict[int, set[int]] = {}
        self.shown: str | None = None
        self.lost: list[int] = []
        self.has_wrong = False

    def set_value(self, slot: int, rank: int, value: Any) -> None:
        """Let repeated calls read `value` as the value number `slot` on a rank, without counting it as wrong."""
        self._values[slot, rank] = value

    def mark_wrong(self, slot: int, rank: int, value: Any) -> None:
        self.set_value(slot, rank, value)
        self.has_wrong = True
        if slot in self._program.shown:
            self.shown = self.shown or self._program.shown[slot]
        elif self._compared is not None and self._compared.shows(slot, rank, value):
            # An operator's output that no record holds is reported as an activation.
            self.shown = self.shown or "activation"
        for index in self._program.readers[slot]:
            if index not in self.on:
                self.on[index] = set()
                heapq.heappush(self.waiting, index)
            # A call may wait already, for another wrong input or another rank.
            self.on[index].add(rank)
        if not self._program.readers[slot] and slot not in self._program.shown:
            self.lost.append(-1)

    def repeat(self, call: ReplayedCall, wrong_on: set[int]) -> None:
        if call.partition is None:
            for rank in sorted(wrong_on):
                self._mark_wrong_results(call, rank, run_call(call, functools.partial(self._get, rank)))
            return
        gets = [functools.partial(self._get, rank) for rank in range(len(self._ranks))]
        for group in call.partition:
            # A collective is repeated for each whole group with a wrong input, as all its ranks may get a wrong result.
            if wrong_on & set(group):
                values = run_collective(call, group, gets)
                differ = [self._differs(call.result, rank, x) for rank, x in zip(group, values, strict=True)]
                if not any(differ):
                    self.lost.append(call.index)

    def _mark_wrong_results(self, call: ReplayedCall, rank: int, given: Sequence[tuple[int, Any]]) -> None:
        # A list and no generator: every wrong result must be noted.
        if not any([self._differs(slot, rank, value) for slot, value in given if self._is_known(slot)]):
            self.lost.append(call.index)

    def _is_known(self, slot: int) -> bool:
        # A result that nothing reads or compares cannot show an error.
        return bool(self._program.readers[slot]) or slot in self._program.shown

    def _differs(self, slot: int, rank: int, value: Any) -> bool:
        if same(value, self._ranks[rank][slot]):
            return False
        self.mark_wrong(slot, rank, value)
        return True

    def _get(self, rank: int, slot: int) -> Any:
        key = slot, rank
        return self._values[key] if key in self._values else self._ranks[rank][slot]
