"""A cause in two short lines: the value that was expected at the blamed call, and the value found there.

Each kind of defect has one form. For example (`w` is a parameter):

    wrong argument       expected: eps=1e-05                    found: eps=0.001
    wrong setting        expected: AdamW beta1 0.9, for w       found: AdamW beta1 0.95, for w
    wrong value          expected: bits 0x3e800000 at [0, 3]    found: bits 0x3f000000 at [0, 3]
    wrong input          expected: reads the output of mm ...   found: reads the output of silu ...
    missing call         expected: mul.Tensor of layers.0 ...   found: no such call
    extra call           expected: no such call                 found: mul.Tensor of layers.0 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.errors import cut
from bitproof.harness.localize.argument_differences import input_sources
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.wrong_setting import wrong_settings
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.records import TensorDifference

MAX_CHARS = 160

SAME_INPUTS = "the reference's output of the same inputs"

READ = "the value that the reference reads"

FIXED = {
    "compiles": ("values that the reference has", "a value of the compiled graph that the reference has nowhere"),
    "exchanges": ("its inputs in the reference's order", "the same inputs in another order"),
    "abandons": ("a collective that is waited for", "it is launched and never waited for"),
    "unwritten": (READ, "uninitialized memory: the value that new memory is filled with"),
    "outside": (READ, "a value written outside torch, such as by NumPy"),
    "misplaces": ("its output in this tensor", "another right value in this tensor"),
}


def expected_and_found(
    culprit: Culprit,
    logs: Sequence[CandidateLog],
    output: TensorDifference | None = None,
    settings: Sequence[DifferingSetting] = (),
    step: int = 0,
) -> tuple[str, str]:
    """Return a pair: the texts for the lines "expected" and "found" of a cause.

    `output` is the difference in the blamed call's output, None if unknown. `settings` are the optimizer settings that
    differ at this `step`.
    """
    log = logs[culprit.rank]
    known = log.log[culprit.candidate] if culprit.candidate is not None else None
    due = log.reference.log[culprit.reference] if culprit.reference is not None else None
    # A wrong setting explains the wrong numbers of a call, so it takes precedence over them.
    wrong = wrong_settings(known, due, settings, step)
    expected, found = _settings(wrong) if wrong else _lines(culprit, log, output)
    return cut(expected, MAX_CHARS), cut(found, MAX_CHARS)


def _settings(wrong: Sequence[DifferingSetting]) -> tuple[str, str]:
    """Return the texts for "expected" and "found" if optimizer settings are wrong, such as "AdamW beta1 0.9, for w"."""
    lines = [
        ", ".join(f"{each.name} {text}" for each, text in zip(wrong, texts, strict=True))
        for texts in ([each.expected for each in wrong], [each.found for each in wrong])
    ]
    return f"{wrong[0].optimizer} {lines[0]}, for {wrong[0].of}", f"{wrong[0].optimizer} {lines[1]}, for {wrong[0].of}"


def _lines(culprit: Culprit, log: CandidateLog, output: TensorDifference | None) -> tuple[str, str]:
    mine, theirs = culprit.candidate, culprit.reference
    due = log.reference.log[theirs] if theirs is not None else None
    # From the most telling kind of lines to the least: a missing or extra call, a defect with a fixed text, differing
    # numbers, differing inputs, and last the differing bits.
    if culprit.how == "lacks":
        reads = theirs is not None and any(log.reads_unwritten(reader) for reader in _readers(log, theirs))
        return f"{due or culprit.call}", f"no such call{': uninitialized memory in its place' if reads else ''}"
    if culprit.how == "adds":
        return culprit.instead_of or "no such call", f"{culprit.call}"
    if culprit.how in FIXED:
        return FIXED[culprit.how]
    if due is not None and mine is not None and (arguments := _arguments(log.log[mine], due)):
        return arguments
    if culprit.how == "reads" and mine is not None and theirs is not None:
        sources = input_sources(log, mine, theirs)
        if sources is not None and sources[0] != sources[1]:
            return f"reads {sources[1]}", f"reads {sources[0]}"
    if culprit.how == "inherits":
        return READ, "a value that nothing in this step computed"
    return _values(output)


def _readers(log: CandidateLog, theirs: int) -> list[int]:
    """Return the candidate's calls whose matching calls read the output of a missing call, directly or through views.

    `theirs` is the index of the missing call.
    """
    # A missing view has no match itself, so its readers are searched as well.
    pending, found = [theirs], list[int]()
    while pending:
        for reader, _ in log.reference.readers(pending.pop()):
            mine = log.matching_here(reader)
            found += [] if mine is None else [mine]
            pending += [reader] if log.reference.log[reader].view else []
    return found


def _arguments(call: Call, partner: Call) -> tuple[str, str] | None:
    """Return the texts for "expected" and "found" if two calls differ in numbers, strings or dtypes; else None."""
    if call.operator != partner.operator:
        return None
    sides = dict(partner.scalars), dict(call.scalars)
    # Only arguments that both calls have: overloads of an operator may take others.
    names = [name for name in sides[1] if name in sides[0] and sides[0][name] != sides[1][name]]
    expected, found = (", ".join(f"{name}={side[name]}" for name in names) for side in sides)
    return (expected, found) if names else None


def _values(output: TensorDifference | None) -> tuple[str, str]:
    """Return the texts for "expected" and "found" if an output differs: the bits of its first differing element."""
    sample = next(iter(output.samples or ()), None) if output is not None else None
    if sample is None:
        return SAME_INPUTS, "another output"
    where = f"at {list(sample.at)} of its output"
    return f"bits {sample.reference} {where}", f"bits {sample.candidate} {where}"
