"""Who started this process."""

import pytest

from bitproof.harness.runtime.launched import FORKED, is_first, is_rank, reports_for_its_machine, unconnected_copies

ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "rank", "first"),
    [
        ({}, False, True),
        (ENV, True, False),
        (ENV | {"RANK": "0"}, True, True),
        (TORCHRUN, True, True),
        (TORCHRUN | {"RANK": "1"}, True, False),
        ({"RANK": "1", "WORLD_SIZE": "4"}, False, True),
        (ENV | {FORKED: "1"}, False, True),
        (TORCHRUN | ENV | {FORKED: "1"}, False, True),
    ],
)
def test_ranks_are_reported_by_what_every_launcher_of_ranks_sets(environment, rank, first):
    assert (is_rank(environment), is_first(environment)) == (rank, first)


@pytest.mark.parametrize(
    ("environment", "found", "first"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "16"}, ("srun", 16), False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16"}, ("srun", 16), True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1"}, ("srun", 1), True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "ENVIRONMENT": "BATCH"}, None, True),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "ENVIRONMENT": "BATCH"},
            ("srun", 2),
            False,
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, True),
        ({"SLURM_NTASKS": "16"}, None, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"} | TORCHRUN, None, True),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"} | ENV, None, False),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", FORKED: "0"}, None, True),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, ("mpirun", 8), False),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, ("mpiexec", 8), True),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "many"}, None, True),
    ],
)
def test_copies_that_do_not_know_of_each_other_are_seen(environment, found, first):
    seen = unconnected_copies(environment)
    if found is not None and found[1] == 1:
        found = None
    assert (seen and (seen[0], seen[3])) == found
    assert is_first(environment) == first


@pytest.mark.parametrize(
    ("rank", "local_rank", "speaks"),
    [("1", "0", True), ("1", "1", True), ("2", "2", False), ("3", "1", False), ("2", "0", True), ("3", None, True)],
)
def test_one_rank_a_machine_speaks_where_rank_0_cannot(rank, local_rank, speaks):
    reported = {"RANK": rank} | ({"LOCAL_RANK": local_rank} if local_rank else {})
    assert reports_for_its_machine(reported) == speaks
