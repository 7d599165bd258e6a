"""Check that two systems that run modules in chunks do so for the same modules, equally often.

If they chunk different modules, bits differ although no code is wrong. If nothing ran in chunks, equal bits do not show
that chunking is right.

A manifest's field `chunked` maps each module to how many of its calls per step run in chunks: {"layers.1.moe": 2}. It
is None for systems that do not chunk, and for a user's own systems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Manifest, Recording

Calls = Mapping[str, int]


def agreed_by_ranks(
    system: str, by_rank: Sequence[dict[str, int] | None], stage_ranks: int | None = None
) -> dict[str, int] | None:
    """Return the number of calls per step that run in chunks, by module; None if no module runs in chunks.

    `by_rank` has each rank's numbers. Raises RecordingError if ranks differ. If `stage_ranks`, the number of ranks of a
    pipeline stage, is given, only ranks of the same stage must agree.
    """
    agreed: dict[str, int] | None = None
    for rank, chunked in enumerate(by_rank):
        # The first rank of this rank's stage; without a pipeline, all ranks are one stage.
        first = rank - rank % (stage_ranks or len(by_rank))
        if chunked != by_rank[first]:
            raise RecordingError(
                f"rank {rank} of {system} ran other modules in chunks than rank {first}",
                expected=f"calls a step, as on rank {first}: {_describe(by_rank[first], by_rank[first], chunked)}",
                found=_describe(chunked, by_rank[first], chunked),
            )
        agreed = None if chunked is None else (agreed or {}) | chunked
    return agreed


def unlike_chunks(reference: Recording, candidate: Recording) -> Iterator[str]:
    """Yield the reasons, if any, why two systems cannot be compared: they chunk different modules, or not equally
    often.
    """
    found: list[Calls] = []
    # A system that does not chunk, or a user's own, states no chunks: then there is nothing to compare.
    for side, recording in (("reference", reference), ("candidate", candidate)):
        if not _runs_in_chunks(recording.manifest):
            continue
        chunked = recording.manifest.chunked
        if chunked and all(calls > 0 for calls in chunked.values()):
            found.append(chunked)
        else:
            yield f"the {side} does not say which modules ran in chunks: record it again"
    if len(found) == 2 and found[0] != found[1]:
        first, second = (_describe(calls, *found) for calls in found)
        yield f"the reference ran in chunks, in calls a step, {first}, the candidate {second}"


def _runs_in_chunks(manifest: Manifest) -> bool:
    passes = manifest.graph.passes if manifest.graph else []
    says_so = manifest.chunked is not None
    return says_so or manifest.system == "eager_chunked" or any(entry.name == "chunk" for entry in passes)


def _describe(calls: Calls | None, *both: Calls | None) -> str:
    names = sorted({name for side in both for name in side or {}})
    # Modules on which both agree are left out.
    differing = [name for name in names if len({(side or {}).get(name, 0) for side in both}) > 1]
    return ", ".join(f"{name} {(calls or {}).get(name, 0)}" for name in differing) or "nothing"
