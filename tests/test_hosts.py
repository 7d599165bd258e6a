"""The host that tests share: it stays when a session ends, and one that was lost or left at work is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.errors import CaseError, RankError
from bitproof.harness.execute.host_process import HostLost
from bitproof.harness.execute.requests import MachineRequest
from bitproof.harness.execute.session import open_session
from bitproof.harness.options import RunOptions
from tests import hosts


class Fake:
    """A host that does what is put into `answers`, one a request."""

    made: list[Fake]
    answers: list[Any]

    def __init__(self, log: Path, *, temporary: Path) -> None:
        self.is_killed = False
        Fake.made.append(self)

    def ask(self, *request: Any) -> Any:
        answer = Fake.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask in a session of its own what the host answers with this."""
    Fake.made, Fake.answers = [], []
    monkeypatch.setattr(hosts, "HostProcess", Fake)
    monkeypatch.setattr(hosts.SharedHost, "_host", None)
    monkeypatch.setattr(hosts.SharedHost, "_folder", None)

    def asked(answer: Any) -> Any:
        Fake.answers.append(answer)
        with hosts.one_host(), open_session(tmp_path, RunOptions(device="cpu")) as session:
            return session.ask(MachineRequest(), 1.0)

    yield asked
    hosts.SharedHost.end()


def test_a_host_serves_one_session_after_another_and_an_error_that_it_answers_does_not_end_it(asked: Any) -> None:
    assert [asked("first"), asked("second")] == ["first", "second"]
    with pytest.raises(CaseError):
        asked(CaseError("it does not fit"))
    [host] = Fake.made
    assert not host.is_killed and asked("third") == "third"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), HostLost(RankError("the host died"), silent=False)])
def test_a_host_that_is_lost_or_left_at_work_is_ended_and_another_serves_who_comes_next(asked: Any, end: Any) -> None:
    with pytest.raises((KeyboardInterrupt, RankError)):
        asked(end)
    assert asked("again") == "again"
    assert [host.is_killed for host in Fake.made] == [True, False]
