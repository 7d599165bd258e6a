"""Programs of others, run to their end."""

from __future__ import annotations

import sys

import pytest

from bitproof.harness.processes.command import CommandError, Ran, run_command


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.ranks
def test_a_status_and_both_outputs_are_reported_and_input_is_empty():
    code = "import sys; print(repr(sys.stdin.read())); print('bad', file=sys.stderr); sys.exit(3)"
    assert run_command(python(code), 20) == Ran(3, "''\n", "bad\n")


@pytest.mark.ranks
def test_outputs_may_be_joined_and_need_be_no_text():
    code = "import os; os.write(1, b'a\\xff'); os.write(2, b'b')"
    assert run_command(python(code), 20, is_joined=True) == Ran(0, "a\ufffdb", "")


@pytest.mark.ranks
def test_one_that_is_late_or_not_there_is_an_error_that_says_so():
    with pytest.raises(CommandError, match=r"not finished after 0\.5 s"):
        run_command(python("import time; time.sleep(60)"), 0.5)
    with pytest.raises(CommandError, match="No such file"):
        run_command(["no-such-program"], 5)
