"""Let pytest select cases as `bitproof run -k` does: by name and by family."""

from __future__ import annotations

import pytest

from cases import all_cases
from harness.errors import UsageError
from harness.select import select


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks: starts many ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [_case_name(item) for item in items]
    if not config.option.keyword or None in names:
        return  # other tests are there, too: pytest's own selection holds for all
    try:
        chosen = {case.name for case in select(all_cases(), config.option.keyword)}
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    config.hook.pytest_deselected(items=[item for item, name in zip(items, names, strict=True) if name not in chosen])
    items[:] = [item for item, name in zip(items, names, strict=True) if name in chosen]
    config.option.keyword = ""  # done


def _case_name(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params["case"].name if callspec and "case" in callspec.params else None
