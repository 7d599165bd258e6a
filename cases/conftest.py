"""Let pytest select cases as `bitproof run -k` does: by name and by family."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of tests that start ranks."""
    config.addinivalue_line("markers", "ranks: starts many ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let -k match a case's family, before pytest deselects."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and "case" in callspec.params:
            item.extra_keyword_matches.add(callspec.params["case"].family)
