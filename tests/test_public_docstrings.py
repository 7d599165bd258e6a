"""Each public name of `bitproof`, and each public method of a public class, has a docstring."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import bitproof


def public_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties that our own classes among `kind` and its bases define, by qualified name."""
    for owner in kind.__mro__:
        if owner.__module__.startswith("bitproof"):
            for name, value in vars(owner).items():
                found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if not name.startswith("_") and inspect.isfunction(found):
                    yield f"{owner.__name__}.{name}", found


def undocumented(name: str, value: Any) -> list[str]:
    """`name` and the methods below it that have no docstring."""
    found = [] if inspect.getdoc(value) else [name]
    if inspect.isclass(value):
        found += [name for name, method in public_methods(value) if not inspect.getdoc(method)]
    return found


@pytest.mark.parametrize("name", bitproof.__all__)
def test_a_public_name_and_its_methods_have_docstrings(name: str) -> None:
    assert not undocumented(name, getattr(bitproof, name))


def test_a_missing_docstring_is_found() -> None:
    class Bare:
        """Has a method without one."""

        __module__ = "bitproof.harness.none"

        def run(self) -> None: ...

        @property
        def size(self) -> int: ...

    assert undocumented("Bare", Bare) == ["Bare.run", "Bare.size"]
