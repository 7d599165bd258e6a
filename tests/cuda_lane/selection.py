"""Which cases the CUDA lane takes, in which order, and how they are dealt to slices. Loads no torch."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case, Memory, Pipeline
from bitproof.harness.case.traced import AUTOPLACE, JOINT, PREPARED
from bitproof.harness.systems.graph_key import step_part


def every_graph_case() -> list[Case]:
    """The cases that run a graph as it is, here, and must be EQUAL, those of one traced step side by side.

    Those that cut it into stages are left out: their parts are not mapped to the CPU.
    """
    found = [case for case in CASES.values() if case.candidate == "graph" and case.expected == "EQUAL"]
    found = [case for case in found if not case.pipeline.compiles and case.requires is None and case.schedule is None]
    steps = [step_of(case) for case in found]
    return [case for _, case in sorted(zip(steps, found, strict=True), key=lambda pair: steps.index(pair[0]))]


def timed_cases() -> list[Case]:
    """Those of `every_graph_case` but the debug models, which take minutes and have a call of their own."""
    return [case for case in every_graph_case() if case.model.flavor != "debugmodel"]


PLAIN: dict[str, Any] = {"backend": "fx", "regions": ()}
"""The settings of a graph that runs as it is: what compiles one comes after what is looked at."""


def traced_cases() -> list[Case]:
    """Every case whose step our passes rewrite, whatever runs its graph, those of one traced step side by side."""
    found = [case for case in CASES.values() if case.candidate in PREPARED]
    steps = list(map(traced_step, found))
    return [case for _, case in sorted(zip(steps, found, strict=True), key=lambda pair: steps.index(pair[0]))]


def traced_step(case: Case) -> object:
    """All of a case that its traced step is made of, and whether it is a joint graph; a case that is placed first has
    its own.
    """
    return case if case.candidate == AUTOPLACE else (case.candidate == JOINT, step_part(case))


def step_of(case: Case) -> tuple[object, ...]:
    """All of a case that its traced step is made of."""
    dim = case.chunking.dim if case.chunking else "batch"
    return case.model, case.parallelism, case.batch, case.precision, dim


TAKEN, SHARED = "taken", "shared"
"""What became of a run of a reference: it was run, or what an earlier case's run left is its."""


def reference_of(case: Case) -> str:
    """What decides a run of the case's reference: all but names, passes and memory policy, which it does not read."""
    plain = replace(case, name="one", family="one", memory=Memory(), pipeline=Pipeline())
    return json.dumps(plain.to_dict(), sort_keys=True)


TRACE_COST, CASE_COST, REFERENCE_COST, RANK_COST = 4.0, 3.5, 2.5, 0.5
"""CPU seconds, roughly: tracing a step for one device; rewriting a case twice; looking for modules that mix; two runs
of a rank. A step that several cases share, and a reference, is paid for by the first of them."""


def costs(cases: list[Case], devices: int) -> list[float]:
    """What each case costs where those before it have been taken, and steps are traced for so many devices."""
    steps: set[object] = set()
    references: set[str] = set()
    found = []
    for case in cases:
        step, ranks = step_of(case), case.parallelism.world_size
        reference = reference_of(replace(case, steps=1))  # the lane takes as many of each case
        cost = CASE_COST + RANK_COST * ranks
        cost += TRACE_COST * devices * (step not in steps)
        cost += (REFERENCE_COST + RANK_COST * ranks) * (reference not in references)
        steps.add(step)
        references.add(reference)
        found.append(cost)
    return found


def slice_of(cases: list[Case], text: str, devices: int) -> list[Case]:
    """The i-th of n parts that take about as long as each other, in order, for a text i/n and so many devices."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise SystemExit(f"--slice takes i/n, 1 <= i <= n, not {text}")
    index, count = int(found[1]) - 1, int(found[2])
    ends = list(itertools.accumulate(costs(cases, devices)))
    middles = [end - cost / 2 for end, cost in zip(ends, costs(cases, devices), strict=True)]
    return [case for case, middle in zip(cases, middles, strict=True) if int(middle * count / ends[-1]) == index]
