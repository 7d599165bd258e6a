"""Cases that differ in passes alone share the trace of their candidate."""

import pytest

from tests.harness.report.results import make_report, make_result  # noqa: F401
from tests.traced import share_traces


@pytest.fixture(autouse=True)
def one_trace(monkeypatch):
    share_traces(monkeypatch)
