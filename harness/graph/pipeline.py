"""The graph pipeline: which passes run, in which order, each verified and timed.

This is the only module that knows the passes by name.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from harness.errors import BitproofError
from harness.graph.chunk import chunk
from harness.graph.clean_up import clean_up
from harness.graph.concretize_symbols import concretize_symbols
from harness.graph.context import PassContext
from harness.graph.overlap import overlap
from harness.graph.verify import verify

log = logging.getLogger(__name__)

Pass = Callable[[GraphModule, PassContext], GraphModule]


@dataclass(frozen=True)
class PassReport:
    """What one pass did: seconds it took, verification left out, nodes before and after, and its own facts."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    facts: dict[str, Any] = field(default_factory=dict)


def build_pipeline(context: PassContext) -> list[Pass]:
    """The passes of a case, in order."""
    return [
        clean_up,
        *([chunk] if context.chunking else []),
        *([overlap] if context.pipeline.overlap else []),
        concretize_symbols,
    ]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A pass makes objects that stay; looking for garbage among them again and again would cost n log n."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_pipeline(
    module: GraphModule, passes: Sequence[Pass], context: PassContext
) -> tuple[GraphModule, list[PassReport]]:
    """Run the passes in order, verifying the graph after each. A failure names its pass."""
    reports = []
    for run_pass in passes:
        before = len(module.graph.nodes)
        context.facts.clear()
        try:
            with _collector_paused():
                start = time.perf_counter()
                module = run_pass(module, context)
                seconds = time.perf_counter() - start
            verify(module)
        except BitproofError as error:
            error.where = ", ".join(filter(None, (error.where, f"pass {run_pass.__name__}")))
            raise
        except Exception as error:
            error.add_note(f"  in pass: {run_pass.__name__}")
            raise
        report = PassReport(run_pass.__name__, seconds, before, len(module.graph.nodes), dict(context.facts))
        log.debug("pass %s: %d -> %d nodes in %.3f s", report.name, before, report.nodes_after, seconds)
        reports.append(report)
    return module, reports
