"""Run a command on the ranks of torchrun other than 0: follow rank 0's requests, and print nothing."""

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
    """Follow rank 0's requests until rank 0 is done.

    Return 0 or, if an error ended rank 0, the exit status for this error.
    """
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        try:
            with interrupts.let_in():
                # The results are rank 0's to report.
                for _ in follow([case], run_dir, options):
                    pass
        except BitproofError as error:
            return error_status(error)
        finally:
            discard_if_bare(run_dir)
    # Only rank 0 knows the command's real status: it may find a difference after its last request.
    return SUCCESS
