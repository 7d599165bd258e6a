"""Find agreement that is no evidence: empty or zero tensors, ranks without collectives, code that was not compiled.

Two systems that both lost every value agree in every bit. Such agreement is called vacuous. There are three kinds:

- A tensor has no elements or no finite element, or a gradient or parameter is all zeros.
- Ranks ran no collective: each trained alone, so the parallelism was not tested. A system may declare that its ranks
  are independent.
- torch.compile captured nothing from the code: eager was compared with eager.

At every step, each required kind of record needs a tensor on some rank whose agreement is not vacuous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bitproof.harness.case import Case, Kind
from bitproof.harness.records import REQUIRED_KINDS, Key, Manifest, Record, TorchCompile, required_kinds

_NUM_NAMED = 3
_CONTENTS = {"nan": "all NaN", "inf": "all infinite or NaN", "zero": "all zeros"}
_NOT_FINITE = {"nan": "nan", "inf": "inf", "-inf": "inf"}
_ZERO_IS_VACUOUS: tuple[Kind, ...] = ("grad", "param")


class Agreement:
    """Records whether agreement is evidence, for each kind of record at each step, and for each tensor.

    For example, equal tensors of zeros are no evidence: both systems may have lost every value.
    """

    def __init__(self) -> None:
        # The reasons why records are no evidence, by kind and step, and by kind and name; None for a
        # record that is evidence.
        self._steps: dict[tuple[str, int], set[str | None]] = {}
        self._tensors: dict[tuple[str, str], set[str | None]] = {}

    def add(self, key: Key, pair: tuple[Record, Record]) -> None:
        self._add(key, _vacuity(key, pair))

    def add_differing(self, key: Key) -> None:
        self._add(key, None)

    def _add(self, key: Key, reason: str | None) -> None:
        self._steps.setdefault((key.kind, key.step), set()).add(reason)
        self._tensors.setdefault((key.kind, key.name), set()).add(reason)

    def vacuous_steps(self, case: Case) -> Iterator[str]:
        """Yield a sentence for each required kind with steps at which no tensor's agreement is evidence."""
        for kind in required_kinds(case):
            # A kind without records at a step is a gap in the evidence, and is reported as one.
            steps = [step for step in case.compared_steps if None not in self._steps.get((kind, step), {None})]
            if steps:
                reasons = sorted({reason for step in steps for reason in self._steps[kind, step] if reason})
                yield f"on every rank each {kind} is {' or '.join(reasons)} at {_describe_steps(steps, case)}"

    def vacuous_tensors(self) -> Iterator[str]:
        """Yield a sentence for each required kind with tensors whose agreement is no evidence at any step on any
        rank.
        """
        for kind in REQUIRED_KINDS:
            tensors = {name: reasons for (of, name), reasons in self._tensors.items() if of == kind}
            vacuous = {name: reasons for name, reasons in tensors.items() if None not in reasons}
            if vacuous:
                reasons = sorted({reason for found in vacuous.values() for reason in found if reason})
                names = ", ".join(list(vacuous)[:_NUM_NAMED])
                more = f" and {len(vacuous) - _NUM_NAMED} more" if len(vacuous) > _NUM_NAMED else ""
                yield (
                    f"{len(vacuous)} of {len(tensors)} {kind} tensors show nothing by their agreement, being "
                    f"{' or '.join(reasons)} at every step on every rank: {names}{more}"
                )


def vacuous_runs(side: str, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each reason why the agreement of a system's run is no evidence.

    Such a reason is a rank without collectives, or code that torch.compile did not compile. `side` is the system's
    role.
    """
    if manifest.alone:
        yield (
            f"{side} {manifest.system} ran no collective in its steps on {_describe_ranks(manifest.alone, manifest)}: "
            "each trained alone (a system whose ranks should says so: independent_ranks = True)"
        )
    # None for a rank that called no code of torch.compile.
    ranks = [rank for rank, found in enumerate(manifest.compiled or ()) if found is not None and not found.is_any]
    if ranks:
        yield (
            f"{side} {manifest.system} called code that torch.compile was to compile, and nothing of it was compiled, "
            f"on {_describe_ranks(ranks, manifest)}{_why_not_compiled(manifest)}"
        )


def compiled_runs(side: str, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence about how much of a system's code torch.compile compiled; yield nothing if it compiled none.

    If ranks differ, the sentence is about the rank with the fewest compiled graphs.
    """
    found = [compiled for compiled in manifest.compiled or () if compiled is not None and compiled.is_any]
    if found:
        # A report must not claim more than holds for every rank.
        least = min(found, key=lambda compiled: (compiled.graphs, compiled.operators))
        rank = "" if all(compiled == found[0] for compiled in found) else " on the rank with the fewest"
        yield f"{side} {manifest.system} was compiled{rank}: {_describe_compiled(least)}"


def unshown_state(side: str, manifest: Manifest) -> Iterator[str]:
    if found := manifest.unshown or []:
        more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
        yield (
            f"{side} {manifest.system} keeps state that steps change and that it does not show: "
            f"{', '.join(found[:_NUM_NAMED])}{more}; a difference there is seen once it reaches what is shown"
        )


def _describe_compiled(found: TorchCompile) -> str:
    by = f" by {', '.join(found.backends)}" if found.backends else ""
    breaks = f"{found.breaks} graph break{'' if found.breaks == 1 else 's'}" if found.breaks else "no graph break"
    first = f", the first: {found.first_break}" if found.first_break else ""
    again = f", {found.recompiles} recompile{'' if found.recompiles == 1 else 's'}" if found.recompiles else ""
    why = f", the first: {found.first_recompile}" if found.first_recompile else ""
    # Dynamo counts no frames of code that must be captured whole (fullgraph=True): it raises an error if that fails.
    frames = f"from {found.captured} of {found.frames} frames" if found.frames else "of code captured whole"
    missed = f", the first that failed: {found.first_failure}" if found.first_failure else ""
    return (
        f"{found.graphs} graph{'' if found.graphs == 1 else 's'} of {found.operators} operators{by}, "
        f"{frames}{missed}, {breaks}{first}{again}{why}"
    )


def _why_not_compiled(manifest: Manifest) -> str:
    environment = manifest.environment or {}
    off = [name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if environment.get(name) == "1"]
    failed = [found.first_failure for found in manifest.compiled or () if found is not None and found.first_failure]
    lines = [f"{name}=1 is set" for name in off] + failed[:1]
    return f": {', '.join(lines)}" if lines else ""


def _describe_ranks(ranks: Sequence[int], manifest: Manifest) -> str:
    if len(ranks) == manifest.world_size:
        return "every rank"
    named = ", ".join(map(str, ranks[:_NUM_NAMED]))
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more} of {manifest.world_size}"


def _vacuity(key: Key, pair: tuple[Record, Record]) -> str | None:
    """Return why the agreement of two records is no evidence, such as "all zeros".

    Return None if it is evidence, or if the records differ.
    """
    reference, candidate = pair
    if reference[:3] != candidate[:3]:
        return None
    if 0 in reference.shape:
        return "without elements"
    # Older recordings have no `content`, but the value of a loss shows whether it is finite.
    content = reference.content or candidate.content or _NOT_FINITE.get(reference.value or "")
    # Zeros are usual in other kinds, such as a new optimizer's state.
    if content == "zero" and key.kind not in _ZERO_IS_VACUOUS:
        return None
    return _CONTENTS.get(content or "")


def _describe_steps(steps: Sequence[int], case: Case) -> str:
    if len(steps) == len(case.compared_steps):
        return "every step"
    named = ", ".join(map(str, steps[:_NUM_NAMED]))
    more = f" and {len(steps) - _NUM_NAMED} more" if len(steps) > _NUM_NAMED else ""
    return f"step{'s' if len(steps) > 1 else ''} {named}{more} of {case.steps}"
