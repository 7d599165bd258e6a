"""The command line, a module a group of commands. Exit status: 0 as expected, 1 not, 2 wrong call, 3 not judged.

Loads neither torch nor pandas: `bitproof list` answers at once, and ranks start from a clean process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

# isort: off
# Commands are listed in the order of these imports.
from harness.cli import listing, running, searching, shrinking, recording  # noqa: F401
from harness.cli import reporting, merging, history, machine  # noqa: F401

# isort: on
from harness.cli.app import app
from harness.errors import BitproofError
from harness.report.status import SUCCESS, UNJUDGED, error_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A user's mistake is told in words, our own as a traceback."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="bitproof")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else SUCCESS if end.code is None else UNJUDGED
    except BitproofError as error:
        print(error, file=sys.stderr)
        return error_status(error)
    except Exception:
        traceback.print_exc()
        return UNJUDGED
    return SUCCESS
