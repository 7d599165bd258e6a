"""Lets pytest select cases by name and by family, as `bitproof run -k` does."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `ranks`, of tests that start many processes."""
    config.addinivalue_line("markers", "ranks: starts many ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add a case's family to the keywords of its test, before pytest applies -k."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and "case" in callspec.params:
            item.extra_keyword_matches.add(callspec.params["case"].family)
