"""Choose who runs the cases: a host process of this machine, or the ranks that torchrun started.

Under torchrun rank 0 leads: it sends requests to all ranks, and writes the report. Other ranks write nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.checks.power_modules import power_module
from bitproof.harness.errors import UsageError
from bitproof.harness.runtime import launched

if TYPE_CHECKING:
    from bitproof.harness.case import Case
    from bitproof.harness.execute.session import Client
    from bitproof.harness.options import RunOptions
    from bitproof.harness.records import CaseResult

_COORDINATOR = "torchrun.coordinator"


def is_torchrun() -> bool:
    """Whether this process is a rank of torchrun, or of a launcher that sets the same variables."""
    return launched.is_rank()


def follows() -> bool:
    """Whether this process is a rank of torchrun other than 0."""
    return is_torchrun() and os.environ["RANK"] != "0"


def open_client(cases: Sequence[Case], run_dir: Path, options: RunOptions) -> AbstractContextManager[Client]:
    """Context with the open client that runs these cases. Not for ranks of torchrun other than 0.

    Raises CaseError if a case's world size is not that of torchrun, and UsageError if a launcher started several
    unconnected copies of the command.
    """
    refuse_copies()
    if is_torchrun():
        # This package does not depend on the powers: they are looked up by name.
        coordinator = power_module(_COORDINATOR)
        coordinator.check_world_size(cases)
        client: AbstractContextManager[Client] = coordinator.open_coordinator(run_dir, options)
        return client
    from bitproof.harness.execute.session import open_session

    return open_session(run_dir, options)


def follow(cases: Sequence[Case], run_dir: Path, options: RunOptions) -> Iterator[CaseResult]:
    """Take part in rank 0's runs as another rank of torchrun. Yields the results that rank 0 sends.

    Raises CaseError at once if a case has another world size than torchrun. Raises rank 0's error during iteration.
    """
    coordinator = power_module(_COORDINATOR)
    coordinator.check_world_size(cases)
    results: Iterator[CaseResult] = coordinator.follow_rank_0(run_dir, options)
    return results


def refuse_torchrun(command: str, reason: str) -> None:
    """Raise UsageError under torchrun: `command` cannot use torchrun's ranks, for the given `reason`."""
    if is_torchrun():
        raise UsageError(
            f"{command} {reason}",
            expected=f"bitproof {command}, by itself",
            found=f"bitproof {command} under torchrun",
        )


def refuse_copies() -> None:
    """Raise UsageError if a launcher started several unconnected copies of this command: each would run all cases."""
    found = launched.unconnected_copies()
    if found is None:
        return
    launcher, number, count, many = found
    line = "torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m bitproof ..."
    # With srun, bash expands the variables in each task: the shell that submits the job does not have them yet.
    if launcher == "srun":
        line = (
            'srun --ntasks-per-node=1 bash -c "torchrun --nnodes \\$SLURM_NNODES --nproc-per-node M'
            ' --rdzv-id \\$SLURM_JOB_ID --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m bitproof ..."'
        )
    raise UsageError(
        f"{launcher} started {many} of this command, and each would run every rank",
        expected="one bitproof command, or the ranks of one, as torchrun starts them, one torchrun a machine",
        found=f"{number}={os.environ[number]} {count}={many}, and no RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        fix=f"{line}\n    with M ranks a machine, and HOST the first one",
    )
