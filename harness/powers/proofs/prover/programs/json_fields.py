"""Reads untrusted JSON field by field. Each read states the expected type, and an error names the path of the field:

    version = field_of(content, "model").object(("major", "minor"))
    version["major"].integer()       raises FieldError("model.major is 'x': expected an integer")

An unknown field is refused unless it is null, false or empty. So a file of a newer version can be read if it does not
use that version's new fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from bitproof.harness import validate

LARGEST_INTEGER = (1 << 63) - 1
_REALS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class FieldError(ValueError):
    """A field is missing, unknown, or of another type."""


class Field:
    """A JSON value and its path in the file, such as `model.layers[3]`."""

    def __init__(self, value: Any, path: str) -> None:
        self.value = value
        self.path = path

    def wrong(self, expected: str) -> FieldError:
        return FieldError(f"{self.path} is {_shown(self.value)}: expected {expected}")

    def object(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Field]:
        """Return the fields of a JSON object by name. A missing `optional` field has the value None.

        Raises FieldError for a missing `required` field, and for an unknown field that is not null, false or empty.
        """
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        known = (*required, *optional)
        for name, value in self.value.items():
            if name not in known and value not in (None, False, "", [], {}):
                raise FieldError(f"{self.path} has an unknown field {name[:80]!r}: expected {', '.join(known)}")
        for name in required:
            if name not in self.value:
                raise FieldError(f"{self.path} has no field {name!r}")
        return {name: Field(self.value.get(name), f"{self.path}.{name}") for name in known}

    def items(self) -> Iterator[tuple[str, Field]]:
        if self.value is None:
            return
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name, value in self.value.items():
            yield name, Field(value, f"{self.path}.{name[:80]}")

    def list(self) -> list[Field]:
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        return [Field(value, f"{self.path}[{place}]") for place, value in enumerate(self.value)]

    def one_of(self, kinds: Any) -> tuple[str, Field]:
        """Return the name and value of an object's only field: `as_int` and 3 for `{"as_int": 3}`.

        Raises FieldError unless the object has a single field, whose name is in `kinds`.
        """
        if not isinstance(self.value, dict) or len(self.value) != 1 or (kind := next(iter(self.value))) not in kinds:
            raise self.wrong(f"an object with one of these fields: {', '.join(kinds)}")
        return kind, Field(self.value[kind], f"{self.path}.{kind}")

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def integer(self) -> int:
        # `isinstance` would accept true and false.
        if type(self.value) is not int or not -LARGEST_INTEGER - 1 <= self.value <= LARGEST_INTEGER:
            raise self.wrong("an integer of 64 bits")
        return self.value

    def real(self) -> float:
        # torch writes infinities and NaN as texts.
        if isinstance(self.value, str) and self.value in _REALS:
            return _REALS[self.value]
        if type(self.value) not in (int, float) or not math.isfinite(float(self.value)):
            raise self.wrong("a number")
        return float(self.value)


def field_of(content: bytes | memoryview, name: str) -> Field:
    """Parse a JSON text. `name` begins the paths in errors.

    Raises FieldError if the text is damaged, nested too deep or ambiguous, such as an object that has a key twice.
    """
    try:
        return Field(validate.parse(bytes(content)), name)
    except (ValueError, RecursionError, OverflowError) as error:
        raise FieldError(f"{name} is no JSON: {str(error)[:200]}") from error


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
