"""Reads untrusted JSON into dataclasses; an error names the first wrong field.

Such a dataclass has the class attribute `__pydantic_config__ = STRICT` or `GROWING`. `That` in a field's annotation
adds a condition. A field of a tuple type must not be a NamedTuple, because pydantic would accept `true` for a number in
it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bitproof.harness.errors import BitproofError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

T = TypeVar("T")

STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""Types exactly as declared, finite numbers, and no undeclared fields."""

GROWING = STRICT | {"extra": "ignore"}
"""STRICT, but unknown fields are ignored: later versions of a format may add fields."""

_MAX_FOUND = 200

MOST_FIELDS = 1 << 21
"""Limit on the fields of all objects in a JSON text, as a wrong field takes a kilobyte of memory."""

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "missing": "a value",
}
# JSON can escape halves of surrogate pairs, which are no text alone, and pydantic refuses them. Names of files
# and messages of errors contain them nevertheless, so they are read as private characters, and converted back.
_HALVES = {code: code - 0xD800 + 0xF0000 for code in range(0xD800, 0xE000)}
_WHOLE = {private: half for half, private in _HALVES.items()}


@dataclass(frozen=True, eq=False)  # equality would make tables unhashable, and unions need a hash
class That:
    """A condition on a value.

    - `expected`: the condition in words.
    - `holds`: a function that tests the condition.
    - `schema`: the condition in JSON Schema.

    Example: `Annotated[int, That("an integer, zero or more", lambda n: n >= 0, {"minimum": 0})]`.
    """

    expected: str
    holds: Callable[[Any], bool]
    schema: Mapping[str, Any] = field(default_factory=dict)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Any:
            # The error's context carries `expected` to `_describe`.
            if not self.holds(value):
                raise PydanticCustomError("that", "{expected}", {"expected": self.expected})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return handler(schema) | dict(self.schema)


@dataclass(frozen=True, eq=False)  # equality would make tables unhashable, and unions need a hash
class Whole:
    """Marks a field whose value is an object with an error class of its own.

    If the object is invalid, the outer error contains the text of that error, and says that the value is not `noun`.
    Example: `Annotated[Case, Whole("a case", CaseError)]`.
    """

    noun: str
    error: type[BitproofError]

    def __get_pydantic_core_schema__(self, source: type[Any], handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def read_it(value: Any) -> Any:
            if not isinstance(value, dict):
                raise PydanticCustomError("that", "{expected}", {"expected": "an object"})
            try:
                return read(source, value, self.noun.split()[-1], self.error)
            except BitproofError as error:
                raise PydanticCustomError("whole", "{text}", {"noun": self.noun, "text": str(error)}) from error

        return core_schema.no_info_plain_validator_function(read_it, json_schema_input_schema=handler(source))


def parse(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises ValueError if the text is invalid, or has NaN, infinity, a repeated field, or more than MOST_FIELDS fields.
    Raises RecursionError if it is nested too deeply.
    """
    # Counted while parsing, since the objects of a hostile text would fill the memory before any later check.
    left = MOST_FIELDS

    def table(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal left
        left -= len(fields)
        if left < 0:
            raise ValueError(f"more than {MOST_FIELDS:,} fields")
        return _table(fields)

    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=table)


def read(
    cls: type[T],
    values: Any,
    name: str,
    error: type[BitproofError],
    *,
    damaged: str | None = None,
    where: str | None = None,
) -> T:
    """Convert JSON values to an object of `cls`, a dataclass or another type.

    Raises `error` with the path of the first invalid field, its value, and the expected value. Errors of the
    dataclasses' constructors are passed on.

    - `name`: start of the path, such as "report" in `report.cases[0].steps`.
    - `damaged`: text that replaces the description of the problem; None to describe the problem.
    - `where`: the file, for the error.
    """
    from pydantic import ValidationError

    # As JSON text: pydantic's strict mode accepts arrays for tuples only when it reads JSON.
    text = json.dumps(values, ensure_ascii=False)
    has_halves = not _is_unicode(text)
    try:
        found: T = _validator(typing.cast(Any, cls)).validate_json(text.translate(_HALVES) if has_halves else text)
    except ValidationError as refusal:
        first = refusal.errors(include_url=False)[0]
        # For an invalid key, report its table.
        loc = first["loc"][:-2] if first["loc"][-1:] == ("[key]",) else first["loc"]
        path = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
        problem, expected, shown = _describe(cls, first)
        # A nested value's own error is more precise than "is damaged".
        if first["type"] == "whole":
            damaged = None
        fix = _suggestion(cls, first["loc"]) if first["type"] == "unexpected_keyword_argument" else None
        raise error(f"{path} {damaged or problem}", expected=expected, found=shown, where=where, fix=fix) from refusal
    return _restored(found) if has_halves else found


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


@functools.cache
def _validator(cls: Any) -> SchemaValidator:
    # Without that, the errors of 2 million wrong items once took 3.6 GB.
    from pydantic_core import SchemaValidator

    return SchemaValidator(_with_fail_fast(_adapter(cls).core_schema))


def _with_fail_fast(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_fail_fast, schema))
    if not isinstance(schema, dict):
        return schema
    # `metadata` has functions and objects of pydantic's own, and no schemas.
    found = {key: value if key == "metadata" else _with_fail_fast(value) for key, value in schema.items()}
    return found | {"fail_fast": True} if found.get("type") in ("list", "tuple") else found


def json_schema(cls: type[Any]) -> dict[str, Any]:
    return _adapter(typing.cast(Any, cls)).json_schema(mode="validation")


def _describe(cls: type[Any], refusal: Any) -> tuple[str, str | None, str]:
    # "whole" and "that" are the error types of `Whole` and `That`; all others are pydantic's.
    kind, facts = refusal["type"], refusal.get("ctx", {})
    if kind == "whole":
        # The error of a `Whole` itself states the expected value.
        return f"is not {facts['noun']}", None, facts["text"]
    found = "nothing" if kind == "missing" else repr(_restored(refusal["input"]))[:_MAX_FOUND]
    if kind == "unexpected_keyword_argument":
        return "is not a field", ", ".join(_fields_at(cls, refusal["loc"][:-1])), found
    expected = _EXPECTED.get(kind) or facts.get("expected") or refusal["msg"]
    text = (
        "is missing" if kind == "missing" else "has the wrong type" if kind.endswith("_type") else "has the wrong value"
    )
    return text, str(expected), found


def _suggestion(cls: Any, path: Sequence[str | int]) -> str | None:
    # A setting in the wrong object is the commoner mistake, and its name is right, so nested objects come first.
    *parents, unknown = path
    own = _fields_at(cls, parents)
    inside = [f"{part}.{name}" for part in own for name in _fields_at(cls, [*parents, part]) if name == unknown]
    close = inside[:1] or difflib.get_close_matches(str(unknown), own, n=1)
    return f"did you mean {close[0]}?" if close else None


def _fields_at(cls: Any, path: Sequence[str | int]) -> list[str]:
    for part in path:
        if dataclasses.is_dataclass(cls):
            cls = typing.get_type_hints(cls).get(str(part), cls)
        # Unwrap annotations such as list[X], dict[str, X] and X | None, down to a dataclass.
        while not dataclasses.is_dataclass(cls) and typing.get_args(cls):
            nested = [option for option in typing.get_args(cls) if option is not type(None)]
            # The last type argument is the type of the values: of a mapping's, a list's or an optional's.
            cls = nested[-1]
    return [item.name for item in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _table(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(fields)
    # A repeated field is searched for only now, as that takes quadratic time.
    if len(table) != len(fields):
        names = [name for name, _ in fields]
        twice = next(name for name in table if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is there twice")
    return table


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _restored(value: Any) -> Any:
    # Members of string enums are strings too, and must stay members.
    if isinstance(value, str) and type(value) is str:
        return value.translate(_WHOLE)
    if isinstance(value, dict):
        return {_restored(name): _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, tuple):
        items = [_restored(item) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)  # a NamedTuple
    # A dataclass itself, as a class, also counts as one for `is_dataclass`.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: _restored(item) for name, item in vars(value).items()})
    return value
