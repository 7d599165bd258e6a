"""Shrinks a failing case greedily: finds a small case that still fails in the same way.

1. Go through the dimensions (steps, ranks, model, batch, passes). Try to make a dimension minimal, to halve it, and to
   lower it by 1. Repeat this as long as the case fails in the same way.
2. Repeat step 1 until a whole round changes nothing, or the budget is spent.

Example: a case with 8 steps that first differs at step 2 gets 3 steps.

Two runs fail in the same way if they have the same `Symptom`. A symptom has no ranks, steps, node names or layer
indices, which shrinking can change. A user's system may ignore the sizes of a case's model and batch. So one run at the
start makes all sizes minimal; if no bit changes, the sizes are reported as ignored, and stay.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bitproof.harness.case import DIM_MULTIPLE, Case, Parallelism
from bitproof.harness.case.traced import OPTIONAL_PASSES
from bitproof.harness.disturb.faults import check_fault, parse_fault
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.graph_options import check_extra_passes
from bitproof.harness.localize.culprit import HOW
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.systems.registry import BUILT_IN

FEWEST_RANKS = 2
"""On a single rank no collective moves data, so the case would no longer be a distributed step."""


class Symptom(NamedTuple):
    """How a case fails: two cases with equal symptoms fail in the same way. Unknown fields are None.

    - `verdict`: DIFFERENT or ERROR.
    - `kind`: kind of the tensor that differs first.
    - `operator`, `direction`, `module`: those of the call that differs first. Numbers in the module become `*`:
      layers.3.mlp is layers.*.mlp. A call that only the candidate makes has no module.
    - `error`: for ERROR, the first line and the `found:` line of the message, without names and numbers.
    """

    verdict: Verdict
    kind: str | None = None
    operator: str | None = None
    direction: str | None = None
    module: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.verdict.value}, {self.error}"
        first = f"{self.verdict.value}, first in a {self.kind}"
        if self.operator is None:
            return first
        direction = self.direction or "direction not known"
        module = f" of {self.module}" if self.module else ""
        return f"{first}, by {self.operator}{module} ({direction})"


def symptom_of(result: CaseResult) -> Symptom | None:
    """Return the symptom of a failed case; None if the case's verdict is neither DIFFERENT nor ERROR."""
    if result.verdict == Verdict.ERROR:
        return Symptom(Verdict.ERROR, error=_without_names(result.error or ""))
    first = result.first_divergence
    if result.verdict != Verdict.DIFFERENT or first is None:
        return None
    if (call := first.call) is None:
        return Symptom(Verdict.DIFFERENT, first.kind)
    module = None
    # An extra call gets no module: a pass adds calls in many modules, and sizes decide which of them is first.
    if call.module is not None and call.how != HOW["adds"]:
        module = re.sub(r"\d+", "*", call.module)
    return Symptom(Verdict.DIFFERENT, first.kind, call.operator, call.direction, module)


def _without_names(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if not line.startswith("    ")]
    sentences = [line for index, line in enumerate(lines) if index == 0 or line.startswith("found:")]
    # Quoted names and words with digits may change while the case shrinks.
    return re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|[\w.]*\d[\w.]*", "_", "; ".join(sentences[:2]))


@dataclass(frozen=True)
class Trial:
    """A case to try, with the candidate's extra passes and the fault to inject."""

    case: Case
    extra_passes: tuple[str, ...] = ()
    inject: str | None = None

    def check(self) -> None:
        check_extra_passes(self.extra_passes, self.case)
        if self.inject is not None:
            check_fault(parse_fault(self.inject), self.case)


@dataclass
class Budget:
    """The limits of a search: at most `tries` runs, and `seconds` seconds from its creation.

    `spent` counts the runs.
    """

    tries: int
    seconds: float
    clock: Callable[[], float] = time.monotonic
    spent: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    @property
    def is_spent(self) -> bool:
        return self.spent >= self.tries or self.elapsed >= self.seconds


Changes = Mapping[str, Any]
"""Name of a setting -> new value, such as {"batch.seq_len": 8} or {"steps": 1}."""

Run = Callable[[Trial], CaseResult]
Show = Callable[[str], None]
"""Shows a line about a run that has ended, or about the result."""


def change(trial: Trial, changes: Changes) -> Trial:
    parts: dict[str, dict[str, Any]] = {}
    # All changes of a part are made at once, since a single change may contradict the part's other settings.
    for name, value in changes.items():
        part, _, own = name.rpartition(".")
        parts.setdefault(part, {})[own] = value
    whole = parts.pop("", {})
    extra_passes = whole.pop("extra_passes", trial.extra_passes)
    nested = {part: replace(getattr(trial.case, part), **values) for part, values in parts.items()}
    return replace(trial, case=replace(trial.case, **nested, **whole), extra_passes=extra_passes)


def shrink(start: Trial, result: CaseResult, run: Run, budget: Budget, show: Show) -> Trial:
    """Return the smallest trial found that fails in the same way as `start`. `result` is the result of running `start`.

    `show` is called with a line of text about each run. Only sizes that the case itself states are changed.
    """
    symptom = symptom_of(result)
    assert symptom is not None, "what does not fail cannot be shrunk"
    search = _Search(start, result, symptom, run, budget, show)
    # First, so that no run is spent on sizes that the systems ignore.
    search.ask_of_sizes()
    before = None
    # A smaller dimension may allow another one to shrink that could not before: hence whole rounds.
    while before != search.smallest and not budget.is_spent:
        before = search.smallest
        for place in range(len(DIMENSIONS)):
            while search.improve(place):
                pass
    if search.ignored:
        names = ", ".join(sorted(name.rpartition(".")[2] for name in search.ignored))
        systems = " and ".join(dict.fromkeys((start.case.reference, start.case.candidate)))
        show(f"left as they were, since {systems} ignore them: {names}")
    return search.smallest


def _is_ignored(case: Case, changes: Changes, before: CaseResult, after: CaseResult) -> bool:
    """Whether a run with other sizes shows that neither system uses these sizes: `after`, compared with the earlier run
    `before`.

    True if losses and counts of differences agree in every bit. Always False for built-in systems, which use all sizes.
    """
    if {case.reference, case.candidate} & set(BUILT_IN) or not any(before.losses.values()):
        return False
    # Steps and ranks always have an effect.
    if not all(name.startswith(("model.", "batch.")) for name in changes):
        return False
    names = ("losses", "compared", "mismatched", "differing", "differing_left_out")
    return all(getattr(before, name) == getattr(after, name) for name in names)


Dimension = Callable[[Trial, CaseResult], Iterator[Changes]]
"""Given a failing trial and its result, yields smaller settings to try, the largest reduction first."""


@dataclass
class _Search:
    smallest: Trial
    result: CaseResult
    symptom: Symptom
    run: Run
    budget: Budget
    show: Show
    tried: set[Trial] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tried.add(self.smallest)

    def ask_of_sizes(self) -> None:
        """Run a user's systems once with all sizes minimal, to find out whether they ignore the sizes.

        If so, the names of the sizes are added to `ignored`.
        """
        is_ours = {self.smallest.case.reference, self.smallest.case.candidate} & set(BUILT_IN)
        if is_ours or self.budget.is_spent or not any(self.result.losses.values()):
            # Without losses, ignored sizes cannot be recognized.
            return
        # At most one trial: `_all_sizes` yields a single change.
        for changes, trial in self._untried_trials(_all_sizes):
            self.budget.spent += 1
            result = self.run(trial)
            ignores = symptom_of(result) == self.symptom and _is_ignored(trial.case, changes, self.result, result)
            self.ignored |= changes.keys() if ignores else set()
            text = "no bit changes, so all are ignored" if ignores else "some are followed"
            self.show(f"[{self.budget.elapsed:6.1f} s] try {self.budget.spent}: every size at its least: {text}")

    def improve(self, place: int) -> bool:
        """Try a dimension's smaller values until a trial fails in the same way, and keep this trial.

        Return whether some trial failed in the same way. `place` is the dimension's index in DIMENSIONS.
        """
        for changes, trial in self._untried_trials(DIMENSIONS[place]):
            if self.budget.is_spent:
                return False
            # Before the run: a trial that fails in another way is not tried again.
            self.tried.add(trial)
            if self._fails_the_same_way(trial, changes):
                return True
        return False

    def _untried_trials(self, dimension: Dimension) -> Iterator[tuple[Changes, Trial]]:
        for changes in dimension(self.smallest, self.result):
            if self.ignored.issuperset(changes):
                continue
            try:
                trial = change(self.smallest, changes)
                trial.check()
            # Sizes that contradict each other are refused when the case is made.
            except UsageError:
                continue
            if trial not in self.tried:
                yield changes, trial

    def _fails_the_same_way(self, trial: Trial, changes: Changes) -> bool:
        self.budget.spent += 1
        began = self.budget.elapsed
        result = self.run(trial)
        symptom = symptom_of(result)
        same = symptom == self.symptom
        found = "fails the same way" if same else str(symptom) if symptom else result.verdict.value
        # A size that no system reads can be shrunk without end, and each step would look like a success.
        if same and _is_ignored(trial.case, changes, self.result, result):
            same, found = False, "no bit changes, so it is ignored"
            self.ignored |= changes.keys()
        what = ", ".join(f"{name} {was} -> {now}" for name, was, now in differences(self.smallest, trial))
        now = self.budget.elapsed
        self.show(f"[{now:6.1f} s] try {self.budget.spent}: {what}: {found} ({now - began:.1f} s)")
        if same:
            self.smallest, self.result = trial, result
        return same


def differences(start: Trial, end: Trial) -> list[tuple[str, Any, Any]]:
    found = []
    for part in ("", "parallelism", "batch", "model", "memory", "pipeline"):
        before, after = (getattr(trial.case, part) if part else trial.case for trial in (start, end))
        names = before.__dataclass_fields__ if part else ("steps",)
        found += [(n, getattr(before, n), getattr(after, n)) for n in names if getattr(before, n) != getattr(after, n)]
    if start.extra_passes != end.extra_passes:
        found.append(("extra passes", len(start.extra_passes), len(end.extra_passes)))
    return found


def _smaller(n: int, least: int = 1, step: int = 1) -> list[int]:
    """Return smaller sizes to try instead of n: `least`, half of n as a multiple of `step`, and n - `step`.

    Example: _smaller(8) is [1, 4, 7].
    """
    # The smallest first: most defects also show with it.
    found = (least, n // 2 // step * step, n - step)
    return list(dict.fromkeys(size for size in found if least <= size < n))


def _steps(trial: Trial, result: CaseResult) -> Iterator[Changes]:
    steps, first = trial.case.steps, result.first_divergence
    # The steps after the first difference cannot matter.
    if first is not None and first.step + 1 < steps:
        yield {"steps": first.step + 1}
    yield from ({"steps": n} for n in _smaller(steps))


def _ranks(trial: Trial, result: CaseResult) -> Iterator[Changes]:
    now = trial.case.parallelism
    for n in _smaller(now.world_size, FEWEST_RANKS):
        for ep, tp in _groups(now.ep, now.tp, n):
            yield _changed(now, world_size=n, ep=ep, tp=tp)
    # Also smaller groups with the same number of ranks.
    for ep, tp in ((now.ep // 2, now.tp), (now.ep, now.tp // 2), (now.ep // 2, now.tp // 2)):
        yield _changed(now, ep=max(1, ep), tp=max(1, tp))


def _groups(ep: int, tp: int, ranks: int) -> list[tuple[int, int]]:
    # A group's size must divide the number of ranks.
    fit = math.gcd(ep, ranks), math.gcd(tp, ranks)
    halves = max(1, ep // 2), max(1, tp // 2)
    # First the present sizes, so that only the number of ranks changes; last 1 for either of the two.
    return list(dict.fromkeys([(ep, tp), fit, (halves[0], tp), (ep, halves[1]), halves, (1, fit[1]), (fit[0], 1)]))


def _changed(now: Parallelism, **sizes: int) -> Changes:
    # Sequence parallelism needs tp of at least 2, so it is switched off together with tp.
    changes: dict[str, Any] = {**sizes, "sequence": now.sequence and sizes.get("tp", now.tp) > 1}
    return {f"parallelism.{name}": value for name, value in changes.items() if value != getattr(now, name)}


def _batch(name: str) -> Dimension:
    def smaller(trial: Trial, result: CaseResult) -> Iterator[Changes]:
        now = getattr(trial.case.batch, name)
        # Also even sizes, which are needed if the batch is split in two.
        yield from ({f"batch.{name}": n} for n in (*_smaller(now), *_smaller(now, 2, 2)))

    return smaller


def _layers(trial: Trial, result: CaseResult) -> Iterator[Changes]:
    model = trial.case.model
    if model.layers is None:
        return
    for n in _smaller(model.layers):
        if model.dense_layers is None:
            yield {"model.layers": n}
        else:
            # There are at most as many dense layers as layers. With 0, all layers have experts.
            yield from ({"model.layers": n, "model.dense_layers": d} for d in (min(model.dense_layers, n), 0))
    # Layers without experts are smaller.
    if model.dense_layers is not None and model.dense_layers < model.layers:
        yield {"model.dense_layers": model.layers}


def _size(name: str) -> Dimension:
    least = step = DIM_MULTIPLE if name == "dim" else 1

    def smaller(trial: Trial, result: CaseResult) -> Iterator[Changes]:
        model = trial.case.model
        now = getattr(model, name)
        # Dense layers have no experts: if all layers are dense, a run with fewer experts would show nothing new.
        is_read = name not in ("experts", "top_k") or model.dense_layers is None or model.dense_layers != model.layers
        if now is not None and is_read:
            yield from ({f"model.{name}": n} for n in _smaller(now, least, step))

    return smaller


PLAIN: dict[str, Any] = {
    "memory.policy": "none",
    **{f"pipeline.{name}": False for name in reversed(OPTIONAL_PASSES)},
    "pipeline.backend": "fx",
    "parallelism.shared_groups": False,
    "parallelism.sequence": False,
    "model.attention": "sdpa",
}
"""Optional settings, with the value that turns each off."""

_READ_WITH: dict[str, dict[str, Any]] = {
    "pipeline.backend": {"pipeline.regions": ()},
    "memory.policy": {"memory.save": None, "memory.prefetch": 1, "memory.defer": 1},
}
"""Settings that a case may only state together with another, with defaults: regions need a backend that compiles."""


def _passes(trial: Trial, result: CaseResult) -> Iterator[Changes]:
    for name, off in PLAIN.items():
        yield {name: off} | _READ_WITH.get(name, {})


def _extra_passes(trial: Trial, result: CaseResult) -> Iterator[Changes]:
    texts = trial.extra_passes
    return ({"extra_passes": (*texts[:index], *texts[index + 1 :])} for index in range(len(texts)))


SIZES: tuple[Dimension, ...] = (
    _layers,
    _batch("sequences"),
    _batch("seq_len"),
    _size("top_k"),  # before experts: each token needs as many
    _size("experts"),
    _size("heads"),
    _size("dim"),
)


def _all_sizes(trial: Trial, result: CaseResult) -> Iterator[Changes]:
    # The first change that each dimension yields is its smallest size.
    sizes = [next(dimension(trial, result), {}) for dimension in SIZES]
    yield {name: least for each in sizes for name, least in each.items()}


DIMENSIONS: tuple[Dimension, ...] = (_steps, _ranks, *SIZES, _passes, _extra_passes)
