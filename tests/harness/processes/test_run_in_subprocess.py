"""Work in a process of its own: answers that come, and those that never do."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bitproof.harness.processes.run_in_subprocess import Lost, answer_all, answers_from_subprocess

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Words:
    """A task: what is to be said back, one after the other."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """An answer."""

    word: str


def main() -> None:
    """The other end."""
    answer_all(Words, _said)


def _said(task: Words) -> Iterator[Said]:
    for word in task.words:
        if word == "die":
            sys.exit(1)
        if word == "sleep":
            time.sleep(60)
        print(f"saying {word}")
        yield Said(word)


def heard(folder, *words, timeout=20.0):
    log = folder / "logs" / "apart.log"
    with contextlib.closing(
        answers_from_subprocess(
            "tests.harness.processes.test_run_in_subprocess", Words(words), Said, len(words), log, timeout
        )
    ) as answers:
        return list(answers)


def test_answers_come_as_they_are_made_and_what_is_printed_goes_to_the_log(tmp_path):
    assert heard(tmp_path, "one", "two", timeout=float("inf")) == [Said("one"), Said("two")]
    assert (tmp_path / "logs" / "apart.log").read_text() == "saying one\nsaying two\n"


def test_a_process_that_dies_or_is_late_has_lost_what_is_still_to_be_said(tmp_path):
    ended = Lost("its process ended: see logs/apart.log")
    assert heard(tmp_path, "one", "die", "two") == [Said("one"), ended, ended]
    late = Lost("it took longer than 3 s: see logs/apart.log")
    assert heard(tmp_path, "sleep", "two", timeout=3.0) == [late, late]
