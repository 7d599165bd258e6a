"""Functions that a self-contained file contains only while it is being made: they save values instead of comparing.

Each rank writes JSON into the folder that the command line names: digests, and the bytes of small values.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import zlib
from typing import Any

from torch import Tensor

from bitproof.harness.powers.shrink.standalone.template import (
    bytes_of,
    candidate,
    compute,
    describe_difference,
    reference,
)

LARGEST = 4096
seen: dict[str, Any] = {}


def see(name: str, value: Any) -> None:
    """Save a call's output in `seen`: digest, dtype, shape, strides, and its bytes if there are at most LARGEST."""
    if not isinstance(value, Tensor):
        return
    data = bytes_of(value).numpy().tobytes()
    type_ = [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]
    digest = hashlib.sha256(json.dumps(type_).encode() + data).hexdigest()
    content = base64.b64encode(zlib.compress(data, 9)).decode() if len(data) <= LARGEST else None
    seen[name] = [digest, *type_, content]


def differs_on(rank: int) -> bool:
    """Compute the reference and the candidate on a rank, save all values, and return whether an output differs."""
    outputs, values = [], {}
    for function in (reference, candidate):
        seen.clear()
        outputs.append(compute(function, rank))
        values[function.__name__] = dict(seen)
    differing = [name for name in outputs[0] if describe_difference(outputs[0][name], outputs[1][name])]
    with open(os.path.join(sys.argv[1], f"rank{rank}.json"), "w") as file:
        json.dump({"values": values, "differing": differing}, file)
    return bool(differing)
