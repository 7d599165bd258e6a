"""A table of ranks, machines and GPUs stands for launchers and clusters."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bitproof.harness.errors import CaseError
from bitproof.harness.machine.devices import Placement
from bitproof.harness.powers.torchrun.seats import Whereabouts, assign_seats, own_local_rank, own_machine, place_seats

GPUS = {machine: tuple(f"GPU-{machine}{number}" for number in range(8)) for machine in "ab"}


def on(machine: str, count: int, node: str = "", **given: object) -> list[Whereabouts]:
    """Ranks of a machine that see all its GPUs; their launcher sets no variable of its own."""
    return [replace(Whereabouts(machine=machine, node=node, gpus=GPUS[machine]), **given) for _ in range(count)]


def numbered(ranks: list[Whereabouts], numbers: list[int | None]) -> list[Whereabouts]:
    return [replace(rank, local_rank=number) for rank, number in zip(ranks, numbers, strict=True)]


def one_each(ranks: list[Whereabouts]) -> list[Whereabouts]:
    """The same, each with one visible GPU, as `srun --gpus-per-task=1` has it."""
    counts = {"a": 0, "b": 0}
    found = []
    for rank in ranks:
        found.append(replace(rank, gpus=(GPUS[rank.machine][counts[rank.machine]],)))
        counts[rank.machine] += 1
    return found


SIXTEEN = [*on("a", 8), *on("b", 8)]


@pytest.mark.parametrize("given", [SIXTEEN, numbered(SIXTEEN, [*range(8), *range(8)])], ids=["srun", "torchrun"])
def test_sixteen_ranks_on_two_machines_of_eight_gpus_run_on_nccl(given):
    seats = assign_seats(given)
    assert [own.gpu for own in seats] == [own.local_rank for own in seats] == [*range(8), *range(8)]
    assert {own.local_world_size for own in seats} == {8}
    assert place_seats("auto", seats, None) == (Placement("cuda", "nccl", 8), None)
    assert place_seats("cuda", seats, None) == (Placement("cuda", "nccl", 8), None)
    assert place_seats("cpu", seats, None) == (Placement("cpu", "gloo"), None)


@pytest.mark.parametrize("numbers", [[None] * 16, [*range(8), *range(8)], [0] * 16], ids=["none", "all", "zeros"])
def test_a_rank_that_sees_one_gpu_has_index_0_and_its_number_on_its_machine(numbers):
    seats = assign_seats(numbered(one_each(SIXTEEN), numbers))
    assert [own.gpu for own in seats] == [0] * 16
    assert [own.local_rank for own in seats] == [*range(8), *range(8)]
    assert len({own.name for own in seats}) == 16
    assert place_seats("cuda", seats, None)[0] == place_seats("auto", seats, None)[0] == Placement("cuda", "nccl", 1)


def test_machines_may_have_unequal_numbers_of_ranks_and_ranks_may_alternate():
    a, b = on("a", 1)[0], on("b", 1)[0]
    seats = assign_seats([a, b, a, a])
    assert [(own.local_rank, own.local_world_size, own.gpu) for own in seats] == [
        (0, 3, 0),
        (0, 1, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]
    assert place_seats("auto", seats, None)[0] == Placement("cuda", "nccl", 3)


def test_a_launcher_may_number_its_ranks_in_another_order():
    seats = assign_seats(numbered(on("a", 3), [2, 0, 1]))
    assert [own.gpu for own in seats] == [own.local_rank for own in seats] == [2, 0, 1]


@pytest.mark.parametrize("numbers", [[0, 0, 0], [0, 1, 1], [1, 2, 3], [8, 9, 10], [0, None, 1], [0, 1, 7]])
def test_local_ranks_that_number_no_machine_do_not_count(numbers):
    seats = assign_seats(numbered(on("a", 3), numbers))
    assert [own.gpu for own in seats] == [own.local_rank for own in seats] == [0, 1, 2]


def test_two_agents_of_torchrun_on_one_machine_count_their_own_ranks_and_share_its_gpus():
    """Without CUDA_VISIBLE_DEVICES of their own, torchrun's LOCAL_RANK would put two ranks on each GPU."""
    given = numbered([*on("a", 2, "0"), *on("a", 2, "1")], [0, 1, 0, 1])
    assert [(own.local_rank, own.gpu) for own in assign_seats(given)] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    apart = [replace(rank, gpus=GPUS["a"][:4] if rank.node == "0" else GPUS["a"][4:]) for rank in given]
    assert [(own.local_rank, own.gpu, own.name) for own in assign_seats(apart)] == [
        (0, 0, "GPU-a0"),
        (1, 1, "GPU-a1"),
        (0, 0, "GPU-a4"),
        (1, 1, "GPU-a5"),
    ]


def test_two_ranks_on_one_gpu_are_refused_with_its_name_and_may_share_it_if_asked_to():
    seats = assign_seats([*one_each(on("a", 2)), one_each(on("a", 1))[0]])
    with pytest.raises(CaseError) as error:
        place_seats("cuda", seats, None)
    assert str(error.value) == (
        "CaseError: ranks 0, 2 would use one GPU, and NCCL gives each rank one of its own\n"
        "  expected: 3 GPUs for 3 ranks\n"
        "  found: 2 GPUs; ranks 0, 2: GPU-a0\n"
        "  fix: start as many ranks on a machine as it has GPUs, show each rank other GPUs (CUDA_VISIBLE_DEVICES), "
        "or let ranks share them over gloo, which tests no NCCL: --share-gpus"
    )
    assert place_seats("auto", seats, None) == (Placement("cpu", "gloo"), str(error.value.what))
    assert place_seats("cuda", seats, None, share_gpus=True) == (Placement("cuda", "gloo", 1, shared=True), None)


def test_more_ranks_than_gpus_on_one_of_two_machines_are_refused():
    seats = assign_seats([*on("a", 4, gpus=GPUS["a"][:4]), *on("b", 4, gpus=GPUS["b"][:3])])
    with pytest.raises(CaseError, match=re.escape("ranks 4, 7 would use one GPU")):
        place_seats("cuda", seats, None)


def test_ranks_that_see_no_gpu_are_named():
    seats = assign_seats([*on("a", 8), *on("b", 8, gpus=())])
    with pytest.raises(CaseError) as error:
        place_seats("cuda", seats, None, share_gpus=True)
    assert str(error.value) == (
        "CaseError: ranks 8 to 15 of 16 see no GPU\n"
        "  expected: at least 1 GPU that torch can use in the process of each rank\n"
        "  found: 8 GPUs in all\n"
        "  fix: run `bitproof doctor` there, look at CUDA_VISIBLE_DEVICES and the launcher's --gpus options, "
        "or run with --device cpu"
    )
    assert place_seats("auto", seats, None) == (Placement("cpu", "gloo"), "ranks 8 to 15 of 16 see no GPU")


def test_without_any_gpu_auto_is_the_cpu_and_says_nothing_of_it():
    seats = assign_seats(on("a", 2, gpus=()))
    assert place_seats("auto", seats, None) == (Placement("cpu", "gloo"), None)
    with pytest.raises(CaseError, match="this machine offers none"):
        place_seats("cuda", seats, None)


def test_gpus_without_uuids_differ_between_machines():
    seats = assign_seats([*on("a", 1, gpus=("0",)), *on("b", 1, gpus=("0",))])
    assert [own.name for own in seats] == ["GPU 0 of a", "GPU 0 of b"]
    assert place_seats("auto", seats, None)[0] == Placement("cuda", "nccl", 1)


def test_local_rank_is_a_number_or_none_is_set():
    texts = ["3", "", "x", "-1", "1.0", "²"]
    assert [own_local_rank({"LOCAL_RANK": text}) for text in texts] == [3, None, None, None, None, None]
    assert own_local_rank({}) is None


def test_a_machine_has_one_name_in_all_its_processes():
    assert own_machine() == own_machine() != ""
