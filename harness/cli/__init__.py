"""Parse the command line; each command has its own module.

`cli/<command>.py` declares a command's options, and calls `commands/<command>.py`, which runs it. This loads neither
torch nor pandas, so `bitproof list` answers immediately. The exit status of a command is:

    0    all is as expected
    1    it is not
    2    the command line or a case is wrong
    3    something was not judged
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence

from bitproof.harness.cli.app import app
from bitproof.harness.cli.command_table import load_commands
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.report.status import SUCCESS, UNJUDGED, error_status, worst
from bitproof.harness.runtime import interrupts, launched
from bitproof.harness.runtime.launched import wait_for_rank_0
from bitproof.harness.runtime.output import SafeStream, safe_output

WRITING = (
    "run",
    "record",
    "accept",
    "shrink",
    "bisect",
    "localize",
    "faults",
    "sensitivity",
    "moved",
    "precompile",
    "merge",
)
"""The commands that write files. All others only print."""

_REMOVED = {
    "history": "keep each run's report.json, for instance as an artifact of CI, and compare two runs with "
    "`bitproof report RUN_DIR --format comment --against EARLIER_RUN_DIR`"
}
"""Commands of earlier releases, each with a text about its replacement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Prints a user's mistake in words, and a bug as a traceback.

    If standard output cannot be written, a command that only prints returns 3, unless the reader closed the pipe early.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    with safe_output() as printed:
        try:
            with interrupts.raising():
                status = _run(words)
                # A rank above 0 waits here, since only rank 0 can name the cause.
                if status != SUCCESS:
                    wait_for_rank_0()
        except interrupts.Interrupt:
            print(interrupts.MESSAGE, file=sys.stderr)
            status = UNJUDGED
        # Inside the block, so that an error of the last write is seen before the status is chosen.
        printed.flush()
        return status if printed.lost is None else worst([status, _report_lost_output(printed, words)])


def _run(words: list[str]) -> int:
    try:
        if words and words[0] in _REMOVED:
            raise UsageError(f"`bitproof {words[0]}` was removed", fix=_REMOVED[words[0]])
        if words and words[0].endswith((".py", ".json")):
            kind = "a script" if words[0].endswith(".py") else "a case"
            raise UsageError(
                f"{words[0]} is {kind}, and no command",
                expected="a command, which `bitproof --help` lists",
                fix=shlex.join(["bitproof", "run", *words]),
            )
        # Before the words are parsed: a command and its options must be declared first.
        load_commands(words)
        if words[:1] == ["run"]:
            from bitproof.harness.cli.run import declare_asked

            declare_asked(words)
        app(args=words, prog_name="bitproof")
    except SystemExit as end:
        # Typer ends every command by SystemExit, also after `--help`.
        return end.code if isinstance(end.code, int) else SUCCESS if end.code is None else UNJUDGED
    except BitproofError as error:
        if launched.is_first() or not isinstance(error, UsageError):  # a wrong call is wrong on every rank
            print(error, file=sys.stderr)
        return error_status(error)
    except Exception:
        # A bug of bitproof: whatever was to be judged is not judged.
        traceback.print_exc()
        return UNJUDGED
    return SUCCESS


def _report_lost_output(printed: SafeStream, words: list[str]) -> int:
    assert printed.lost is not None
    print(f"bitproof: standard output cannot be written: {printed.lost.strerror}", file=sys.stderr)
    return SUCCESS if words and words[0] in WRITING else UNJUDGED
