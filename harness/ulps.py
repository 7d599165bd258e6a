"""Names the buckets of histograms of distances in ULPs."""

from __future__ import annotations

from typing import Annotated

from bitproof.harness.validate import That

Count = Annotated[int, That("an integer, zero or more", lambda number: number >= 0, {"minimum": 0})]

UNLIKE = "unlike"


def ulp_bucket(power: int) -> str:
    """Return the name of the bucket of distances up to 2^power ULPs: "1", "2", "3-4", "5-8" for 0, 1, 2, 3."""
    return str(2**power) if power < 2 else f"{2 ** (power - 1) + 1}-{2**power}"


# Powers up to 64: the distance of two float64s of opposite signs can exceed 2^63.
BUCKETS = ("0", *(ulp_bucket(power) for power in range(65)), UNLIKE)
"""All buckets of a ULP histogram, in order."""

Bucket = Annotated[str, That("ranges of ULPs such as 3-4", BUCKETS.__contains__, {"enum": list(BUCKETS)})]
Histogram = dict[Bucket, Count]
