"""A cause, with all calls that have its defect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.exchange_plan import WrongCall
from bitproof.harness.localize.exchange.wrong_arguments import Wrong, family_of, is_of_family, of_setting
from bitproof.harness.localize.logs.calls import CLIPPING, Call

_OTHER_CALLS = "adds", "lacks", "reads"
"""Defects of a forward call that change the backward calls which autograd derives from it."""


@dataclass
class Cause:
    """A cause: the first wrong call, its wrong arguments, and the exchanges for all calls with this defect.

    `accounts` is the number of tensors that become equal by these exchanges, and `ways` is how the call misreads its
    inputs (`ways_of`).
    """

    culprit: Culprit
    wrong: Wrong
    ways: Collection[str] = ()
    groups: list[WrongCall] = field(default_factory=list)
    accounts: int = 0

    def has(self, culprit: Culprit, wrong: Wrong, reads: Collection[str] = (), ways: Collection[str] = ()) -> bool:
        """Whether `culprit`, a wrong call that was found later, belongs to this cause: it has the same defect.

        Example: a wrong forward call of a module, and its backward call. `reads` has digests that `culprit` reads in
        addition to its inputs, and `ways` is how it misreads these.
        """
        if not set(ways).isdisjoint(self.ways):
            return True
        # The order matters: a wrong setting or a backward call of the same module is decisive, before operators and
        # lines are compared.
        if settings := of_setting(wrong):
            return bool(settings & of_setting(self.wrong))
        mine, other = self.culprit.call, culprit.call
        is_there = (mine.place.module, mine.micro_batch) == (other.place.module, other.micro_batch)
        directions = mine.place.direction, other.place.direction
        if is_there and directions == ("forward", "backward") and culprit.how in _OTHER_CALLS:
            return self.culprit.how in _OTHER_CALLS or self._is_argument_of(other, culprit.how)
        # One call of `clip_grad_norm_` makes several operator calls.
        if mine.part == other.part == CLIPPING and mine.source is not None and mine.source == other.source:
            return True
        if self._takes_place_of(culprit, {*culprit.call.inputs, *reads}):
            return True
        if wrong and wrong == self.wrong and is_of_family(mine, other, wrong):
            return True
        if family_of(mine.operator) != family_of(other.operator):
            return False
        # The calls of an update have no module, so only their lines distinguish clipping from scaling.
        if "update" in directions and None not in (mine.source, other.source):
            return mine.source == other.source
        is_one_line = mine.source is not None and (mine.source, mine.operator) == (other.source, other.operator)
        return is_there or is_one_line

    def _takes_place_of(self, culprit: Culprit, reads: Collection[str]) -> bool:
        """Whether this cause and `culprit` are a superfluous and a missing call ("adds" and "lacks") that share an
        input.

        For example, the reference reduces a gradient. The candidate first adds another gradient to it, and reduces the
        sum.
        """
        direction = culprit.call.place.direction
        if {self.culprit.how, culprit.how} != {"adds", "lacks"} or self.culprit.call.place.direction != direction:
            return False
        calls = [self.culprit.call, *(group.call for group in self.groups if group.rank == culprit.rank)]
        return any(not set(call.inputs).isdisjoint(reads) for call in calls)

    def _is_argument_of(self, call: Call, how: str) -> bool:
        """Whether only one system makes `call` because of this cause's wrong argument.

        A call that only the candidate makes ("adds") then has the wrong argument, and a call that only the reference
        makes ("lacks") has the right one. For example, the backward of `add` with `alpha=0.99` makes a `mul` by 0.99;
        with `alpha=1` it makes none.
        """
        # A pair has the candidate's value at 0, and the reference's at 1.
        values = {pair[how == "lacks"] for pair in self.wrong}
        return any(value in values for _, value in call.scalars)

    @property
    def others(self) -> list[str]:
        """Return a text for each other call of the cause, with its ranks: `mul of layers.0 (backward) on ranks 0,
        1`.
        """
        ranks: dict[str, set[int]] = {}
        for group in self.groups:
            ranks.setdefault(str(group.call), set()).add(group.rank)
        ranks.pop(str(self.culprit.call), None)
        return [
            f"{call} on rank{'s' if len(on) > 1 else ''} {', '.join(map(str, sorted(on)))}"
            for call, on in ranks.items()
        ]
