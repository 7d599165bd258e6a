"""Checks that all GPUs of a machine are of the same kind, and finds which can read each other's memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from bitproof.harness.powers.doctor.setting import Answer, Setting


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that decide which kernels it runs. `peers` are the GPUs whose memory it can access."""

    name: str
    capability: str
    multiprocessors: int
    peers: frozenset[int]


def gpus_of(setting: Setting) -> list[Gpu]:
    """Return the GPU of each rank. If ranks share GPUs, return each GPU once."""
    count = setting.shared_gpus or setting.ranks
    if setting.device == "cpu":
        return [Gpu("CPU", "0.0", 1, frozenset(range(count)) - {rank}) for rank in range(count)]
    found = []
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        peers = {i for i in range(count) if i != index and torch.cuda.can_device_access_peer(index, i)}
        found.append(Gpu(facts.name, f"{facts.major}.{facts.minor}", facts.multi_processor_count, frozenset(peers)))
    return found


def check_topology(setting: Setting) -> Answer:
    """Check that all GPUs are of the same kind. Pairs without access to each other's memory are counted, but pass."""
    gpus = gpus_of(setting)
    kinds = [f"{gpu.name}, {gpu.capability}, {gpu.multiprocessors} multiprocessors" for gpu in gpus]
    # A GPU of another kind runs other kernels, with other bits.
    unlike = [index for index, kind in enumerate(kinds) if kind != kinds[0]]
    apart = [(i, j) for i, j in itertools.permutations(range(len(gpus)), 2) if j not in gpus[i].peers]
    if unlike:
        return False, f"GPU {unlike[0]} is {kinds[unlike[0]]}; GPU 0 is {kinds[0]}"
    joined = f"{len(apart)} pairs go through the host, first {apart[0]}" if apart else "each reads the others' memory"
    return True, f"{len(gpus)} x {kinds[0]}; {joined}"
