"""A step traced for every device of the lane, in the stage from which each program of the step is finished.

Of every device the trace is compared: code, and what each value is, must be the same but for the index.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from bitproof.harness.case import Case
from bitproof.harness.errors import PassError
from bitproof.harness.systems.graph import TracedStep, trace
from tests.cuda_lane.operators import current_device

DEVICES = "BITPROOF_LANE_DEVICES"


def devices() -> list[int]:
    """The indices that a step is traced for."""
    return [int(index) for index in os.environ.get(DEVICES, "0").split(",")]


def rewritten_for() -> list[int]:
    """Those whose trace goes through the passes: two, as to a pass an index is one value or another."""
    return list(dict.fromkeys((devices()[0], devices()[-1])))


def trace_all(case: Case) -> dict[int, TracedStep]:
    """The case's step as the first device and the last trace it. Raises PassError where two devices differ."""
    found, kept = {}, {}
    for index in devices():
        with current_device(index) as cuda:
            traced = trace(case, cuda)
        found[index] = fingerprint(traced.joint.module, cuda)
        if index in rewritten_for():
            kept[index] = traced
    if len(set(found.values())) != 1:
        raise PassError("the trace depends on the device's index", found=", ".join(found.values()))
    return kept


def fingerprint(module: GraphModule, device: torch.device) -> str:
    """A hash of code, nested graphs' too, and of every value's type, in which `device` has no index."""
    named = re.compile(rf"(device\(type='cuda'), index={device.index}\)")
    lines = []
    for name, nested in module.named_modules():
        if isinstance(nested, GraphModule):
            lines += [name, named.sub(r"\1)", nested.code)]
            lines += [f"{node.name} {tree_map(_describe, node.meta.get('val'))}" for node in nested.graph.nodes]
    return hashlib.sha256("\n".join(lines).replace(str(device), "cuda").encode()).hexdigest()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {value.requires_grad}"
    return str(value)
