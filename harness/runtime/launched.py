"""Whether a launcher started this process, one for each rank.

Launched ranks are recognized by the variables that `init_process_group("env://")` reads, set by torchrun, or by `srun`
with a script. Ranks that bitproof forks have the same variables, and in addition `FORKED`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from bitproof.harness.runtime import interrupts

FORKED = "BITPROOF_RANK"
"""Set in every rank that bitproof forks: a command that such a rank starts is not a rank of a launcher."""

# How long a rank that ends with an error leaves rank 0 to report it: torchrun ends all ranks once one has failed.
_PATIENCE = 20.0
_rank_0_is_gone = False
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Launchers that start many processes and set none of the above: variables for a process's rank, and for how many.
_LAUNCHERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
)


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process as one rank of many."""
    environment = os.environ if environment is None else environment
    if FORKED in environment:
        return False
    is_torchruns = all(name in environment for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))
    return is_torchruns or all(environment.get(name) for name in _RENDEZVOUS)


def is_first(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process speaks for all that were started with it: rank 0, or the only one."""
    environment = os.environ if environment is None else environment
    if is_rank(environment):
        return environment["RANK"] == "0"
    found = copies(environment)
    return found is None or environment.get(found[1]) == "0"


def copies(environment: Mapping[str, str] | None = None) -> tuple[str, str, str, int] | None:
    """The launcher that started several of this command without a word of who is who, or None.

    That is its name, the variables for a process's number and for how many there are, and how many.
    """
    environment = os.environ if environment is None else environment
    if FORKED in environment or is_rank(environment):
        return None
    for launcher, number, count in _LAUNCHERS:
        if number not in environment or not environment.get(count, "").isdigit():
            continue
        # The script of a batch job knows the job's tasks, and is run once.
        if count == "SLURM_NTASKS" and environment.get("ENVIRONMENT") == "BATCH":
            return None
        many = int(environment[count])
        return (launcher, number, count, many) if many > 1 else None
    return None


def do_not_wait_for_rank_0() -> None:
    """End a following rank at once: rank 0 is gone, or cannot be reached, and says nothing."""
    global _rank_0_is_gone
    _rank_0_is_gone = True


def speaks_for_its_machine(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this following rank says what went wrong where rank 0 cannot: one does on every machine."""
    environment = os.environ if environment is None else environment
    is_beside_rank_0 = environment.get("RANK") == environment.get("LOCAL_RANK")
    return environment.get("LOCAL_RANK", "0") == ("1" if is_beside_rank_0 else "0")


def reports_for_rank_0() -> bool:
    """Whether this rank is to write the report, as rank 0 is gone and can write none."""
    return _rank_0_is_gone and speaks_for_its_machine()


def let_rank_0_tell() -> None:
    """On a following rank that fails: wait until rank 0 ends this one, for rank 0 says why.

    That is for those of rank 0's torchrun: another one ends only what is its own.
    """
    is_beside_rank_0 = os.environ.get("GROUP_RANK", "0") == "0"
    if is_rank() and os.environ["RANK"] != "0" and is_beside_rank_0 and not _rank_0_is_gone:
        with contextlib.suppress(*interrupts.STOPS):
            interrupts.wait(_PATIENCE)
