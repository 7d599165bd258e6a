"""Run a user's code in a rank: it may neither swallow an error that bitproof raises in it, nor end the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bitproof.harness.errors import UsageError
from bitproof.harness.within_user_code import refusals_raised


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run code of `what`, such as `system t.py:make`, within the block. At its end, raises the first error that
    bitproof raised in it, even if the code caught it. `sys.exit` becomes a UsageError."""
    with refusals_raised():
        try:
            yield
        except SystemExit as error:
            raise UsageError(
                f"{what} called sys.exit({error.code!r})",
                expected="code that returns: a rank records what it leaves",
                found=f"sys.argv was {sys.argv!r}; what it printed is in the rank's log",
                fix="let argparse parse no words (`parser.parse_args([])`), or take settings from the case's `options`",
            ) from error
