"""The arguments in which calls differ from their matching calls: numbers, words, constants and optimizer settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.wrong_setting import wrong_settings
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog

Wrong = frozenset[tuple[str, str]]
"""The arguments in which a call differs from its matching call, the candidate's first: numbers, words and constants."""


@dataclass(frozen=True)
class WrongArguments:
    """Finds the arguments in which calls differ from their matching calls.

    `settings` are the optimizer settings that differ at the step `step`.
    """

    settings: Sequence[DifferingSetting] = ()
    step: int = 0

    def of_culprit(self, culprit: Culprit, logs: Sequence[CandidateLog]) -> Wrong:
        """Return the wrong arguments of the blamed call.

        For a call that only one system makes, these are only the wrong settings of its optimizer.
        """
        log = logs[culprit.rank]
        if culprit.candidate is None or culprit.reference is None:
            call = log.log[culprit.candidate] if culprit.candidate is not None else None
            partner = log.reference.log[culprit.reference] if culprit.reference is not None else None
            return self._settings_of(call, partner)
        return self.of(log, culprit.candidate, culprit.reference)

    def of(self, log: CandidateLog, mine: int, theirs: int) -> Wrong:
        """Return the arguments in which call `mine` differs from its match `theirs`."""
        call, partner = log.log[mine], log.reference.log[theirs]
        # A setting explains the numbers, and is the same defect in calls with other numbers.
        if found := self._settings_of(call, partner):
            return found
        known = dict(partner.scalars)
        unlike = {(value, known[name]) for name, value in call.scalars if known.get(name, value) != value}
        for position in differing_constants(log, mine, theirs):
            unlike.add((call.inputs[position], partner.inputs[position]))
        return frozenset(unlike)

    def has(self, log: CandidateLog, mine: int, theirs: int, wrong: Wrong) -> bool:
        """Whether call `mine` differs from its match `theirs` in exactly the arguments `wrong`.

        If there are optimizer settings among `wrong`, it suffices that the calls differ in one of these settings.
        """
        own = self.of(log, mine, theirs) if wrong else frozenset()
        return bool(own) and (own == wrong or bool(of_setting(own) & of_setting(wrong)))

    def _settings_of(self, call: Call | None, partner: Call | None) -> Wrong:
        found = wrong_settings(call, partner, self.settings, self.step)
        return frozenset((_SETTING + each.name + " " + each.found, each.expected) for each in found)


_SETTING = "setting "


def of_setting(wrong: Wrong) -> Wrong:
    """Return the wrong arguments among `wrong` that are optimizer settings."""
    return frozenset(pair for pair in wrong if pair[0].startswith(_SETTING))


def is_of_family(call: Call, blamed: Call, wrong: Wrong) -> bool:
    """Whether a call may have the blamed call's wrong argument: their operators are of the same family, or they belong
    to the same module.

    For example, dropout with another `p` passes it to `bernoulli_` and to `div_`. If the wrong argument is an optimizer
    setting, the two calls must be of the same optimizer instead.
    """
    if of_setting(wrong):
        return call.place.direction == blamed.place.direction and call.part == blamed.part
    is_one_module = bool(wrong) and call.place.module is not None and call.place.module == blamed.place.module
    return is_one_module or family_of(call.operator) == family_of(blamed.operator)


def family_of(operator: str) -> str:
    """Return the common name of an operator and its backward: `gelu` for `gelu_backward`, `mul` for `mul_.Scalar`."""
    # Longer endings come first: removing `_backward` alone would leave `_dense`.
    name = operator.partition(".")[0].strip("_")
    for ending in ("_backward_data", "_dense_backward", "_backward", "_forward"):
        name = name.removesuffix(ending)
    return name.removeprefix("foreach_").removeprefix("native_")


def differing_constants(log: CandidateLog, mine: int, theirs: int) -> list[int]:
    """Return the positions of inputs in which `mine` and `theirs` differ, and that no call of either system computed.

    For example, tracing turns a number in the code into a constant tensor.
    """
    sides = [side.log[at].inputs for side, at in ((log, mine), (log.reference, theirs))]
    given = log.log[mine].producers, log.reference.log[theirs].producers
    count = min(map(len, (*sides, *given)))
    return [
        position
        for position in range(count)
        if sides[0][position] != sides[1][position] and given[0][position] is None and given[1][position] is None
    ]
