"""The differing records of a step, by rank."""

from __future__ import annotations

from bitproof.harness.compare.order import ComputationOrder, ComputedAt
from bitproof.harness.records import Recording


def differing_digests(reference: Recording, candidate: Recording, step: int) -> dict[int, list[tuple[str, str]]]:
    """Return, by rank, the digests (reference, candidate) of each differing record, in order of computation.

    Only ranks with a difference are included. The rank with the earliest difference comes first.
    """
    # Missing and extra records have no pair of digests, and are reported elsewhere.
    found: dict[int, tuple[ComputedAt, list[tuple[str, str]]]] = {}
    order = ComputationOrder()
    for rank in reference.ranks:
        # Rank by rank, so that only a single rank's records are in memory.
        there, here = (side.records_at(rank, step) for side in (reference, candidate))
        keys = [key for key in there if key in here]
        # Equal records are added too: the order of a kind's tensors is the order in which they were recorded.
        order.add(keys)
        differing = sorted((key for key in keys if there[key].digest != here[key].digest), key=order)
        if differing:
            found[rank] = order(differing[0]), [(there[key].digest, here[key].digest) for key in differing]
    return {rank: pairs for rank, (_, pairs) in sorted(found.items(), key=lambda each: each[1][0])}
