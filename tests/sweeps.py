"""Sweeps over many values: `make test` takes those named, and the weekly job the others, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters, slow but for `quick`, each of which must be one of them. A tuple is several."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, unknown
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.slow
        )
        for value in values
    ]
