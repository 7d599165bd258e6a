"""The graph pipeline: which passes run, in which order, each verified, timed and told.

This is the only module that knows the passes by name.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from harness.errors import BitproofError, CaseError, PassError
from harness.graph.bucket import bucket
from harness.graph.chunk import chunk
from harness.graph.clean_up import clean_up
from harness.graph.collector import collector_paused
from harness.graph.concretize_symbols import concretize_symbols
from harness.graph.context import PassContext
from harness.graph.extra_pass import ExtraPass
from harness.graph.isolate_process_groups import isolate_process_groups
from harness.graph.live_memory import measure_memory
from harness.graph.offload import offload
from harness.graph.operators import operator_name
from harness.graph.overlap import overlap
from harness.graph.rematerialize import rematerialize
from harness.graph.tag_memory import tag_memory
from harness.graph.verify import verify

log = logging.getLogger(__name__)

Pass = Callable[[GraphModule, PassContext], GraphModule]
Observe = Callable[[str, GraphModule], None]


@dataclass(frozen=True)
class PassReport:
    """What one pass did: seconds it took, verification left out, nodes before and after, and its own facts.

    `settings` is what decides what it does, as JSON values: it stands in a recording's manifest. `changed`
    has, for each operator whose number changed, how many calls there were before and after.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, list[int]] = field(default_factory=dict)


BLOCKS = "layers.*"
"""The modules that activations are saved between and parameters are bucketed by."""


def build_pipeline(context: PassContext) -> list[Pass]:
    """The passes of a case, in order. What a pass is told beyond the case's own settings is bound here."""
    policy, options = context.memory.policy, context.pipeline
    column: list[tuple[bool, Pass]] = [
        (True, clean_up),
        (policy != "none", _bind(tag_memory, blocks=BLOCKS)),
        (policy == "offload", _bind(offload, blocks=BLOCKS)),
        (policy != "none", rematerialize),
        (context.chunking is not None, chunk),
        (options.isolate_groups, isolate_process_groups),
        (options.bucket, _bind(bucket, blocks=BLOCKS)),
        (options.overlap, overlap),
        (True, concretize_symbols),
        (True, measure_memory),
    ]
    return [run_pass for is_wanted, run_pass in column if is_wanted]


def apply_until(column: Sequence[Pass], until: str | None) -> list[Pass]:
    """The column up to and with the pass that `until` names: all of it for None, nothing for "".

    Any prefix gives a graph that runs. Raises CaseError, naming the column, for a name that is not in it.
    """
    names = [run_pass.__name__ for run_pass in column]
    if until is None or until == "":
        return list(column) if until is None else []
    if until not in names:
        raise CaseError(
            f"there is no pass {until} to stop after",
            expected=", ".join(names),
            found=f"until={until!r}",
            fix='name a pass of the column, or "" for none of them',
        )
    return list(column[: names.index(until) + 1])


def _bind(run_pass: Callable[..., GraphModule], **settings: Any) -> Pass:
    """A pass with its settings, under its own name."""
    return functools.update_wrapper(functools.partial(run_pass, **settings), run_pass)


# After these, no value carries the chunk symbol.
_RESOLVING = (chunk, concretize_symbols)

# Which of the context's settings a pass follows. All passes of memory policies follow one.
_FOLLOWED = {"chunk": "chunking", "tag_memory": "memory", "offload": "memory", "rematerialize": "memory"}


@collector_paused()
def run_pipeline(
    module: GraphModule, passes: Sequence[Pass], context: PassContext, observe: Observe | None = None
) -> tuple[GraphModule, list[PassReport]]:
    """Run the passes in order, verifying the graph after each. A failure names its pass.

    `observe` sees the graph as it was traced, and then what each pass left, before it is verified.
    """
    reports: list[PassReport] = []
    resolved = None
    interface, counts = _interface(module), _count_operators(module)
    observe = observe or (lambda name, module: None)
    observe("traced", module)
    for run_pass in passes:
        name, num_nodes = run_pass.__name__, len(module.graph.nodes)
        context.facts.clear()
        with _blaming(name):
            start = time.perf_counter()
            module = run_pass(module, context)
            seconds = time.perf_counter() - start
        observe(name, module)
        with _blaming(name):
            resolved = context.chunk_symbol.symbol if run_pass in _RESOLVING else resolved
            verify(module, resolved)
            _verify_interface(interface, _interface(module))
        counts_before, counts = counts, _count_operators(module)
        report = PassReport(
            name=name,
            seconds=seconds,
            nodes_before=num_nodes,
            nodes_after=len(module.graph.nodes),
            settings=_settings(run_pass, context),
            facts=dict(context.facts),
            changed=_changes(counts_before, counts),
        )
        log.debug("pass %s: %d -> %d nodes in %.3f s", name, num_nodes, report.nodes_after, seconds)
        reports.append(report)
    return module, reports


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Let what is raised within name the pass."""
    try:
        yield
    except BitproofError as error:
        error.where = ", ".join(filter(None, (error.where, f"pass {name}")))
        raise
    except Exception as error:
        error.add_note(f"  in pass: {name}")
        raise


def _interface(module: GraphModule) -> tuple[int, int]:
    """How many inputs and outputs the graph has."""
    outputs = [argument for node in module.graph.find_nodes(op="output") for argument in node.args]
    num_outputs = sum(len(values) if isinstance(values, (list, tuple)) else 1 for values in outputs)
    return len(module.graph.find_nodes(op="placeholder")), num_outputs


def _verify_interface(before: tuple[int, int], after: tuple[int, int]) -> None:
    if after != before:
        raise PassError(
            "the graph is called in another way than the traced one",
            expected="{} inputs and {} outputs".format(*before),
            found="{} inputs and {} outputs".format(*after),
        )


def _count_operators(module: GraphModule) -> Counter[str]:
    return Counter(operator_name(node) for node in module.graph.nodes if node.op == "call_function")


def _changes(before: Counter[str], after: Counter[str]) -> dict[str, list[int]]:
    names = sorted(before.keys() | after.keys())
    return {name: [before[name], after[name]] for name in names if before[name] != after[name]}


def _settings(run_pass: Pass, context: PassContext) -> dict[str, Any]:
    """What, besides the graph, decides what a pass does."""
    if isinstance(run_pass, ExtraPass):
        return {"sha256": run_pass.sha256}
    bound: dict[str, Any] = getattr(run_pass, "keywords", {})
    followed = _FOLLOWED.get(run_pass.__name__)
    return (dataclasses.asdict(getattr(context, followed)) if followed else {}) | bound
