"""Run a command on torchrun's ranks other than 0: answer rank 0's requests, and print nothing."""

from __future__ import annotations

from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError
from bitproof.harness.execute.transport import follow
from bitproof.harness.options import RunOptions
from bitproof.harness.report.status import SUCCESS, error_status
from bitproof.harness.report.write import discard_if_bare, prepare_run_dir
from bitproof.harness.runtime import interrupts


def follow_rank_0(case: Case, options: RunOptions, report_dir: Path) -> int:
    """Answer rank 0's requests until rank 0 is done. Returns 0, or the status of the error that ended rank 0. The
    command's own status is that of rank 0, which may still find a difference after the last request."""
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        try:
            with interrupts.let_in():
                for _ in follow([case], run_dir, options):
                    pass
        except BitproofError as error:
            return error_status(error)
        finally:
            discard_if_bare(run_dir)
    return SUCCESS
