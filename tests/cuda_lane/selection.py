"""Which cases the CUDA lane takes, in which order, and how they are dealt to slices. Loads no torch."""

from __future__ import annotations

import re

from cases import CASES, debug
from harness.case import Case


def every_graph_case() -> list[Case]:
    """The cases that run a graph as it is and must be EQUAL, those of one traced step side by side."""
    found = [case for case in CASES.values() if case.candidate == "graph" and case.expected == "EQUAL"]
    found = [case for case in found if case.pipeline.backend == "fx"]
    steps = [step_of(case) for case in found]
    return [case for _, case in sorted(zip(steps, found, strict=True), key=lambda pair: steps.index(pair[0]))]


def timed_cases() -> list[Case]:
    """Those of `every_graph_case` but the debug models, which take minutes and have a call of their own."""
    return [case for case in every_graph_case() if case.family != debug.FAMILY]


def step_of(case: Case) -> tuple[object, ...]:
    """All of a case that its traced step is made of."""
    dim = case.chunking.dim if case.chunking else "batch"
    return case.model, case.parallelism, case.batch, case.precision, dim


TRACE_COST, CASE_COST = 3, 14
"""CPU seconds, roughly: tracing a step for one device, and rewriting and running a case."""


def slice_of(cases: list[Case], text: str, devices: int) -> list[Case]:
    """The i-th of n parts that take about as long as each other, in order, for a text i/n and so many devices."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise SystemExit(f"--slice takes i/n, 1 <= i <= n, not {text}")
    index, count = int(found[1]) - 1, int(found[2])
    ends, total, seen = [], 0, set()
    for case in cases:
        total += CASE_COST + (TRACE_COST * devices if step_of(case) not in seen else 0)
        seen.add(step_of(case))
        ends.append(total)
    return [case for case, end in zip(cases, ends, strict=True) if (end - 1) * count // total == index]
