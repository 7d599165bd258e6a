"""The records of a step in which two recordings differ."""

from __future__ import annotations

from bitproof.harness.compare.order import ComputationOrder, ComputedAt
from bitproof.harness.records import Recording


def differing_digests(reference: Recording, candidate: Recording, step: int) -> dict[int, list[tuple[str, str]]]:
    """By rank, the digests of both systems for every record of one step in which they differ, as they were computed.

    No more than one rank's records of that step are made at a time. The rank that computed the first one comes first.
    """
    found: dict[int, tuple[ComputedAt, list[tuple[str, str]]]] = {}
    order = ComputationOrder()
    for rank in reference.ranks:
        there, here = (side.records_at(rank, step) for side in (reference, candidate))
        keys = [key for key in there if key in here]
        order.add(keys)
        differing = sorted((key for key in keys if there[key].digest != here[key].digest), key=order)
        if differing:
            found[rank] = order(differing[0]), [(there[key].digest, here[key].digest) for key in differing]
    return {rank: pairs for rank, (_, pairs) in sorted(found.items(), key=lambda each: each[1][0])}
