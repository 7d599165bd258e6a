"""Let pytest select cases as `bitproof run -k` does: by name and by family, and one alone by its whole name."""

from __future__ import annotations

import pytest

from harness.case import Case


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks: starts many ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = {item: case for item in items if (case := _case_of(item))}
    for item, case in cases.items():
        item.extra_keyword_matches.add(case.family)
    whole = config.option.keyword.strip()
    if whole in {case.name for case in cases.values()}:
        others = [item for item, case in cases.items() if case.name != whole]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _case_of(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("case") if callspec else None
