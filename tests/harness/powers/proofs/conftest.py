"""Cases that differ in passes alone share the trace of their candidate, and a proof sees one file of tests."""

from __future__ import annotations

import pytest

from bitproof.harness.powers.proofs.prover.programs import reachable
from tests.harness.report.results import make_report, make_result  # noqa: F401
from tests.traced import share_traces


@pytest.fixture(autouse=True)
def one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    share_traces(monkeypatch)


@pytest.fixture(autouse=True)
def sees_one_file_of_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof goes through the variables of all modules of a user, several times; a worker has loaded 600 of tests."""
    is_users_module, own = reachable._is_users_module, request.module.__name__
    monkeypatch.setattr(
        reachable,
        "_is_users_module",
        lambda name: (name == own or not name.startswith("tests.")) and is_users_module(name),
    )
