"""Count two activities of a rank that no record shows: collectives with other ranks, and uses of torch.compile.

A run without these activities may prove nothing. For example, if two trainers find no process group, their ranks train
alone, and agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from bitproof.harness.records import TorchCompile
from bitproof.harness.torch_compile import compile_counters, on_compile
from bitproof.harness.torch_distributed import collectives_by_group, on_point_to_point
from bitproof.harness.within_user_code import refusing

_SHOWN = 160  # characters of a reason from torch

Counts = Mapping[str, int]

OP_BY_OP = {"eager", "aot_eager", "aot_eager_decomp_partition"}
"""Backends that run captured code operator by operator, so that graph breaks change no bit."""


class ActivityMonitor:
    """Counts a rank's collectives with other ranks, and its uses of torch.compile.

    - `collectives`: the number of collectives and point-to-point messages in the steps so far.
    - `stays_whole`: whether a graph break could change the bits of some compiled code, or make it fail.
    - `in_memory`: a function that returns group name -> number of collectives so far. It covers the groups in shared
      memory, whose collectives torch does not count.
    """

    def __init__(self, in_memory: Callable[[], Counts] = dict) -> None:
        self._in_memory = in_memory
        self.collectives = 0
        self.stays_whole = False
        self._groups: Counts = {}
        self._dynamo: Mapping[str, Counts] = {}
        self._found: dict[str, Counter[str]] = {}
        self._backends: dict[str, None] = {}
        self._recompiles: list[str] = []
        self._calls = 0
        self._is_in_step = False

    @contextmanager
    def at_work(self) -> Iterator[ActivityMonitor]:
        """Context in which collectives, messages and uses of torch.compile are counted.

        Enter it before the system is made, and leave it after the system's last step.
        """

        @refusing()
        def meet() -> None:
            # True counts as 1: messages before the first step do not count.
            self.collectives += self._is_in_step

        @refusing()
        def asked(backend: str, is_whole: bool) -> None:
            self._backends[backend] = None
            # With fullgraph=True a graph break is an error. Otherwise only compiled code gets other bits from a break.
            self.stays_whole |= is_whole or backend not in OP_BY_OP

        @refusing()
        def called() -> None:
            self._calls += 1

        self._dynamo = compile_counters()
        with on_point_to_point(meet), on_compile(asked, called, self._recompiles.append):
            yield self

    def begin_steps(self) -> None:
        self._groups, self._is_in_step = self._collectives(), True
        self._read_dynamo()

    def end_step(self) -> None:
        groups = self._collectives()
        self.collectives += sum(_increase(self._groups, groups).values())
        self._groups = groups
        self._read_dynamo()

    @property
    def compiled(self) -> TorchCompile | None:
        """The counts of torch.compile, summed over steps; None if the system never called a compiled function."""
        if not self._calls:
            return None
        # Dynamo counts a graph that comes from its cache apart from the graphs that it captures.
        frames, stats, cached = (self._found.get(name, Counter()) for name in ("frames", "stats", "dynamo_cache"))
        breaks, failures = (self._found.get(name, Counter()) for name in ("graph_break", "unimplemented"))
        return TorchCompile(
            backends=list(self._backends),
            frames=frames["total"],
            captured=frames["ok"],
            graphs=stats["unique_graphs"] + cached["dynamo_cache_hit"],
            operators=stats["calls_captured"],
            breaks=sum(breaks.values()),
            recompiles=len(self._recompiles),
            first_break=_first_line(breaks),
            first_recompile=_first_line(dict.fromkeys(self._recompiles[:1], 1)),
            first_failure=_first_line(failures) if frames["ok"] < frames["total"] else None,
        )

    def _read_dynamo(self) -> None:
        counts = compile_counters()
        for name, found in counts.items():
            self._found.setdefault(name, Counter()).update(_increase(self._dynamo.get(name, {}), found))
        self._dynamo = counts

    def _collectives(self) -> Counts:
        return {**collectives_by_group(), **self._in_memory()}


def _increase(before: Counts, after: Counts) -> dict[str, int]:
    # User code may clear counters, and a new group may have the name of a group that has ended.
    added = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count if count >= 0 else after[name] for name, count in added.items() if count}


def _first_line(reasons: Counts) -> str | None:
    lines = next(iter(reasons), "").strip().splitlines()
    return lines[0][:_SHOWN] if lines else None
