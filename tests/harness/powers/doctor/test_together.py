"""What ranks do together, over gloo: each check fails where what it checks is broken on one rank."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.powers.doctor import processes, together
from bitproof.reference.parallel import collectives, device_order_group, mesh
from bitproof.reference.parallel.other_order_group import OtherOrderGroup
from tests.harness.powers.doctor.test_checks import found_by

pytestmark = pytest.mark.ranks


def test_a_rank_with_another_library_is_named(monkeypatch):
    right = together.library

    def library(device):
        return [*right(device)[:-1], 99 if torch.distributed.get_rank() == 1 else 0]

    monkeypatch.setattr(together, "library", library)
    found = found_by("NCCL")
    assert not found.is_ok and "rank 1 has version [2, 13, 99], not [2, 13, 0]" in found.found


def test_a_group_whose_ranks_are_in_another_order_is_named(monkeypatch):
    right = collectives.all_gather
    monkeypatch.setattr(
        collectives,
        "all_gather",
        lambda x, size, group: right(x, size, group).flip(0) if group == "efsdp" else right(x, size, group),
    )
    found = found_by("NCCL")
    assert not found.is_ok and "group efsdp gathers of ranks [2, 1, 0], not [0, 1, 2]" in found.found


def test_two_groups_whose_launches_one_rank_swaps_fail_and_the_launch_is_named(monkeypatch):
    right = together.launch_order

    def swapped(index, rank):
        order = right(index, rank)
        return order[::-1] if (index, rank) == (7, 1) else order

    monkeypatch.setattr(together, "launch_order", swapped)
    found = found_by("two groups at once")
    assert not found.is_ok
    assert found.found == (
        "rank 0: 30 rounds of two groups at once, 60 launches, 1 wrong: launch 14 of rank 0 is all_reduce 8 of group "
        "first, 1024 bytes of float32, and rank 1 launches something else there"
    )


def test_a_group_that_brings_the_other_ones_sums_fails(monkeypatch):
    right = together.OPS.all_reduce

    class Ops:
        wait_tensor = together.OPS.wait_tensor

        @staticmethod
        def all_reduce(x, operation, name):
            return right(x + 1 if name == together.SECOND and torch.distributed.get_rank() == 2 else x, operation, name)

    monkeypatch.setattr(together, "OPS", Ops)
    found = found_by("two groups at once")
    assert not found.is_ok and "30 wrong: round 0, group second: other sums" in found.found


def test_a_rank_that_adds_its_part_in_another_order_fails(monkeypatch):
    right = device_order_group.sum_in_rank_order

    def other(parts):
        return right(parts.flip(0) if torch.distributed.get_rank() == 1 else parts)

    monkeypatch.setattr(device_order_group, "sum_in_rank_order", other)
    found = found_by("sums by parts")
    assert not found.is_ok and "wrong: float32 of 3001 elements: not in rank order" in found.found


def test_native_sums_in_another_order_pass_and_are_counted_and_a_lost_part_fails(monkeypatch):
    def reducer(order):
        return lambda group: OtherOrderGroup(group, order, lambda: True, lambda: None)

    monkeypatch.setattr(mesh, "RankOrderGroup", reducer("descending"))
    found = found_by("native order")
    assert found.is_ok and "other bits than in rank order: 0 of" not in found.found
    right = collectives.reduce_scatter
    monkeypatch.setattr(
        collectives,
        "reduce_scatter",
        lambda x, size, group: right(x * (torch.distributed.get_rank() != 1), size, group),
    )
    found = found_by("native order")
    assert not found.is_ok and "sums are off by more than rounding" in found.found


def test_processes_of_one_generation_or_rank_that_compute_other_bits_fail(monkeypatch):
    right = processes.layers

    def other(device, dtype):
        tensors = right(device, dtype)
        if torch.initial_seed() == 1:
            tensors[1] = tensors[1] + 1
        return tensors

    monkeypatch.setattr(processes, "layers", other)
    assert found_by("repeatability").is_ok
    compute = processes.compute

    def on_rank(setting, rank):
        torch.manual_seed(rank == 2)
        return compute(setting, rank)

    found = found_by("repeatability", compute=on_rank)
    assert not found.is_ok and found.found == "process 2 has other bits of layers in bfloat16"


def test_a_list_of_what_processes_said_names_the_first_that_is_unlike():
    assert processes.first_unlike(["a 1; b 2"] * 3) is None
    assert processes.first_unlike(["a 1; b 2", "a 1; b 2", "a 1; b 3"]) == "process 2 has other bits of b"
    assert processes.first_unlike(["a 1; b 2", "a 1"]) == "process 1 has other bits of a"
