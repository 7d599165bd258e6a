"""Runs of eager references that several cases of the lane share: each is taken once.

Cases that differ in passes and memory policy alone have one reference, which reads neither. Its first run, and the
second that is its control, leave the same files for each of them. What a graph runs is run for every case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitproof.harness.execute.host.programs import needs_program
from bitproof.harness.execute.requests import RankSlots, RunRequest
from bitproof.harness.execute.status_messages import End
from tests.cuda_lane.selection import SHARED, TAKEN, reference_of


def taken_once(run_ranks: Callable[..., End], note: Callable[[str], None]) -> Callable[..., End]:
    """`run_ranks` that takes a plain run of a system without a graph once; `note` hears if one was TAKEN or SHARED.

    Only good ends are kept, so whatever goes wrong goes wrong for every case.
    """
    kept: dict[tuple[str, str, str], tuple[End, list[bytes]]] = {}

    def run(request: RunRequest, *given: Any, **named: Any) -> End:
        if needs_program(request.system) or not _is_plain(request):
            return run_ranks(request, *given, **named)
        rank_slots: RankSlots = given[0]
        key = reference_of(request.case), request.system, request.arm
        parts = [Path(rank_slots.part.format(rank=rank)) for rank in rank_slots.ranks]
        if key in kept:
            end, contents = kept[key]
            for part, content in zip(parts, contents, strict=True):
                part.parent.mkdir(parents=True, exist_ok=True)
                part.write_bytes(content)
            note(SHARED)
            return end
        end = run_ranks(request, *given, **named)
        if end.failure is None and not end.unfinished:
            kept[key] = end, [part.read_bytes() for part in parts]
        note(TAKEN)
        return end

    return run


def _is_plain(request: RunRequest) -> bool:
    """Whether a run leaves nothing but what its ranks recorded, and nothing disturbs it."""
    options = request.options
    asked = (options.inject, request.replay, options.stress, request.profile, request.precompiled)
    return not any(asked) and not request.values_to_keep and not options.names
