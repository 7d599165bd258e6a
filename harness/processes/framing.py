"""The format of messages between processes of bitproof: a frozen dataclass as a line of JSON.

For example, `{"kind": "StepBegan", "step": 3}`. A message can only be invalid if a user's code wrote into the pipe.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_KIND = "kind"
_SHOWN = 100  # bytes of an unreadable line


def write(message: Any) -> bytes:
    values = {_KIND: type(message).__name__} | {
        f.name: _plain(getattr(message, f.name)) for f in dataclasses.fields(message)
    }
    return json.dumps(values).encode() + b"\n"


def read(line: bytes | str, *kinds: type) -> Any:
    """Return the message in a line. Raises ValueError unless its type is among `kinds`."""
    try:
        values = json.loads(line)
        name = values.pop(_KIND)
        for kind in kinds:
            if kind.__name__ == name:
                return _read(kind, values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # a user's code wrote here
        raise ValueError(f"no message of ours: {line[:_SHOWN]!r}") from error
    raise ValueError(f"a message of kind {name}, not {' or '.join(kind.__name__ for kind in kinds)}")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, value: Any) -> Any:
    """Convert a JSON value to its declared type, `hint`. Values of JSON's own types stay unchanged."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in options if option is not types.NoneType]
        # A union of several types has only types of JSON's own.
        return _read(inner[0], value) if value is not None and len(inner) == 1 else value
    if origin is tuple:
        each = [options[0]] * len(value) if options[-1] is ... else options
        return tuple(_read(option, inner) for option, inner in zip(each, value, strict=True))
    if origin is list:
        return [_read(options[0], inner) for inner in value]
    if origin in (dict, Mapping):
        key, inner = options
        # JSON has only texts as keys.
        return {int(name) if key is int else name: _read(inner, item) for name, item in value.items()}
    if not isinstance(hint, type):
        return value
    if dataclasses.is_dataclass(hint):
        return hint(**{name: _read(_hints(hint)[name], inner) for name, inner in value.items()})
    if issubclass(hint, tuple):  # a NamedTuple
        return hint(*map(_read, _hints(hint).values(), value))
    return hint(value) if issubclass(hint, (Path, Enum)) else value
