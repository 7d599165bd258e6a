"""Cases that differ in passes alone share the trace of their candidate."""

import pytest

from tests.traced import share_traces


@pytest.fixture(autouse=True)
def one_trace(monkeypatch):
    share_traces(monkeypatch)
