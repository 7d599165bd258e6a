"""Detect whether a launcher, such as torchrun, started this process as a rank.

Such a rank has the variables that `init_process_group("env://")` reads. Ranks that bitproof forks also have the
variable `FORKED`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from bitproof.harness.runtime import interrupts

FORKED = "BITPROOF_RANK"
"""A variable in the environment of each rank that bitproof forks. It shows that a command started there is no rank of a
launcher."""

# How long a failed rank waits for rank 0 to report it: torchrun ends all ranks after the first failure.
_PATIENCE = 20.0
_rank_0_is_gone = False
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Launchers that start many processes without those variables: their variables for a process's rank and the number.
_LAUNCHERS = (
    # A step may have fewer tasks than its job, so the step's number comes first.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
)


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun, or another launcher that sets the same variables, started this process as a rank."""
    environment = os.environ if environment is None else environment
    if FORKED in environment:
        return False
    is_torchruns = all(name in environment for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))
    return is_torchruns or all(environment.get(name) for name in _RENDEZVOUS)


def is_first(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process reports for all that were started with it: it is the first of them, or the only
    one."""
    environment = os.environ if environment is None else environment
    if is_rank(environment):
        return environment["RANK"] == "0"
    found = unconnected_copies(environment)
    return found is None or environment.get(found[1]) == "0"


def unconnected_copies(environment: Mapping[str, str] | None = None) -> tuple[str, str, str, int] | None:
    """Return facts about a launcher that started several copies of this command; None if no launcher did.

    The copies cannot communicate. The facts are the launcher's name, the variable with this process's number, the
    variable with the number of processes, and that number: ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    8).
    """
    environment = os.environ if environment is None else environment
    if FORKED in environment or is_rank(environment):
        return None
    for launcher, number, count in _LAUNCHERS:
        if number not in environment or not environment.get(count, "").isdigit():
            continue
        # The script of a batch job sees the job's number of tasks, and runs once.
        if count == "SLURM_NTASKS" and environment.get("ENVIRONMENT") == "BATCH":
            return None
        many = int(environment[count])
        return (launcher, number, count, many) if many > 1 else None
    return None


def do_not_wait_for_rank_0() -> None:
    """Note that rank 0 has ended or cannot be reached. If this rank fails, it does not wait for rank 0's report."""
    global _rank_0_is_gone
    _rank_0_is_gone = True


def reports_for_its_machine(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this is the one rank of its machine that reports an error if rank 0 cannot."""
    environment = os.environ if environment is None else environment
    # On rank 0's machine local rank 0 is rank 0 itself, so local rank 1 reports; on any other machine local rank 0
    # does.
    is_beside_rank_0 = environment.get("RANK") == environment.get("LOCAL_RANK")
    return environment.get("LOCAL_RANK", "0") == ("1" if is_beside_rank_0 else "0")


def reports_for_rank_0() -> bool:
    """Return whether this rank must write the report, because rank 0 has ended or cannot be reached."""
    return _rank_0_is_gone and reports_for_its_machine()


def wait_for_rank_0() -> None:
    """Wait a while in a failed rank other than rank 0, so that rank 0 can report the error before torchrun ends all
    ranks.

    A rank on another machine than rank 0 does not wait, since torchrun ends only the ranks of its own machine.
    """
    # GROUP_RANK is the number of the machine: rank 0 runs on machine 0.
    is_beside_rank_0 = os.environ.get("GROUP_RANK", "0") == "0"
    if is_rank() and os.environ["RANK"] != "0" and is_beside_rank_0 and not _rank_0_is_gone:
        with contextlib.suppress(*interrupts.STOPS):
            interrupts.wait(_PATIENCE)
