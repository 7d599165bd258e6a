"""Declares each setting of a run once, as a dataclass field with its type, default, help and options.

The command line (`harness.cli.declare`), the keywords of `bitproof.run` and of the pytest plugin (`bitproof.keywords`),
and the command line that repeats a run (`to_argv`) are derived from this declaration. A field usually has a single
option with the same value. A field with several options, such as `--stress` and `--stress-threads`, has functions that
convert between the options and the field's value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from bitproof.harness.case.case import file_of, script_of
from bitproof.harness.errors import UsageError

T = TypeVar("T")

CHANGES = "Changes to each case"
MACHINE = "Where ranks run"
CHECKS = "How systems are compared"
PIPELINE = "The candidate's graph"
TIME = "Time and parallelism"
MORE = "More to find out and to write"


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option: its names on the command line, its keyword in Python, and its help.

    - `names`: a switch that is on by default has both forms as a single name, such as `--verify/--no-verify`.
    - `kind`: type of the value in Python; None for the field's type. `typed`: type on the command line, if it differs.
    - `least`: smallest allowed number.
    - `problem`: returns an error message for a value, or "" if the value is valid.
    - `names_code`: whether the value names a system or pass, possibly as a file with a name in it.
    - `repeats`: whether the printed command line for repeating a run contains this option.
    - `command_line_only`: the reason why Python has no such keyword; "" if Python has it.
    """

    names: tuple[str, ...]
    help: str
    group: str
    keyword: str = ""
    kind: Any = None
    typed: Any = None
    default: Any = None
    metavar: str | None = None
    least: int | None = None
    problem: Callable[[Any], str] | None = None
    names_code: bool = False
    repeats: bool = True
    command_line_only: str = ""

    def words(self, value: Any) -> list[str]:
        """Return the command-line words that set this option to `value`. Relative paths become absolute."""
        # A switch that is on by default is repeated by its second form, such as --no-verify.
        on, _, off = self.names[0].partition("/")
        if value is True:
            return [on]
        if value is None or value is False:
            return [off] if off else []
        return [part for one in (value if isinstance(value, tuple) else (value,)) for part in self._pair(one)]

    def _pair(self, value: Any) -> tuple[str, str]:
        if isinstance(value, Path):
            return self.names[0], str(value.absolute())
        if self.names_code:
            return self.names[0], absolute_source(value)
        # Only a type's own words have `-` on the command line; other texts, such as names, are unchanged.
        return self.names[0], value.replace("_", "-") if words_in(self.kind) else f"{value}"


@dataclass(frozen=True, kw_only=True)
class FieldOptions:
    """The options that set a field.

    - `read`: takes the options' values as keyword arguments, and returns the field's value.
    - `to_options`: takes the field's value, and returns a dict from keyword to value.

    Both are None if the field has a single option with the same value.
    """

    options: tuple[Option, ...]
    read: Callable[..., Any] | None = None
    to_options: Callable[[Any], dict[str, Any]] | None = None


def setting(default: Any, name: str, group: str, help: str, **more: Any) -> Any:
    """Define a dataclass field that is set by a single option with the same value."""
    return settings(default, option(name, group, help, default=default, **more))


def settings(default: Any, *options: Option, read: Any = None, to_options: Any = None) -> Any:
    """Define a dataclass field that is set by several options, or by an option with another value.

    `read` and `to_options` convert between the options' values and the field's value (see `FieldOptions`).
    """
    # A dataclass refuses a mutable default, since all instances would share it.
    made = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"setting": FieldOptions(options=options, read=read, to_options=to_options)})


def option(names: str, group: str, help: str, **more: Any) -> Option:
    """Make an Option. `names` are separated by spaces, the short name last, as in "--jobs -j"."""
    first, *others = names.split()
    known = [each.name for each in dataclasses.fields(Option) if each.name not in ("names", "help", "group")]
    if unknown := more.keys() - set(known):
        raise TypeError(f"option {first} has no keyword {min(unknown)!r}; its keywords are {', '.join(known)}")
    keyword = more.pop("keyword", first.partition("/")[0].removeprefix("--").replace("-", "_"))
    return Option(names=(first, *others), keyword=keyword, group=group, help=help, **more)


def options_of(part: type[Any]) -> tuple[Option, ...]:
    """Return the options of a dataclass in the order of its fields, each with its type in `kind`."""
    hints = get_type_hints(part)
    found = []
    for name, declared in _settings_of(part):
        for each in declared.options:
            found.append(dataclasses.replace(each, kind=hints[name] if each.kind is None else each.kind))
    return tuple(found)


def from_options(part: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass from option values by keyword.

    Missing options have their defaults; other keywords are ignored.
    """
    values: dict[str, Any] = {}
    for name, declared in _settings_of(part):
        asked = {each.keyword: given.get(each.keyword, each.default) for each in declared.options}
        # No option of the field is given: the field's own default applies.
        if not asked.keys() & given.keys() and declared.read is None:
            continue
        values[name] = declared.read(**asked) if declared.read else asked[declared.options[0].keyword]
    return part(**values)


def checked(part: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values that a Python call passes for the options of a dataclass, and return them as keyword -> value.

    Lists become tuples. Raises UsageError for an invalid value.
    """
    values = {}
    for each in options_of(part):
        if each.keyword not in given:
            continue
        value = given[each.keyword]
        if isinstance(value, str) and words_in(each.kind):
            value = value.replace("-", "_")  # as the command line writes it
        values[each.keyword] = tuple(value) if isinstance(value, list) else value
        if problem := _problem(each, values[each.keyword]):
            raise UsageError(f"{each.keyword} has no value that {each.names[0]} takes", found=problem)
    return values


def _problem(option: Option, value: Any) -> str:
    known = words_in(option.kind)
    if known and value not in known and not (value is None and type(None) in get_args(option.kind)):
        return f"{value!r}, not one of {', '.join(known)}"
    if option.kind is bool and not isinstance(value, bool):
        return f"{value!r}, neither True nor False"
    if get_origin(option.kind) is tuple and not (isinstance(value, tuple) and all(isinstance(x, str) for x in value)):
        return f"{value!r}, no list of texts"
    if option.kind in (int, float) and (isinstance(value, bool) or not isinstance(value, option.kind | int)):
        return f"{value!r}, no number" if option.kind is float else f"{value!r}, no whole number"
    # Written so that a NaN, which is neither more nor less, is refused.
    if option.least is not None and value is not None and not value >= option.least:
        return f"{value}, less than {option.least}"
    return option.problem(value) if option.problem and value is not None else ""


def option_values(value: Any) -> dict[str, Any]:
    """Return the values of a dataclass's options as keyword -> value; the inverse of `from_options`."""
    found: dict[str, Any] = {}
    for name, declared in _settings_of(type(value)):
        mine = getattr(value, name)
        found |= declared.to_options(mine) if declared.to_options else {declared.options[0].keyword: mine}
    return found


def to_argv(*values: Any, usual: Mapping[str, Any] | None = None) -> list[str]:
    """Return the command-line words that recreate these dataclasses: all options that are not at their defaults.

    Relative paths become absolute, so that the command works in any folder. `usual` maps keywords to the defaults of a
    command whose defaults differ.
    """
    found: list[str] = []
    # RunOptions have `parts`: the options of active checks, whose fields are options of the same command.
    for part in [part for value in values for part in (value, *getattr(value, "parts", ()))]:
        now = option_values(part)
        for each in options_of(type(part)):
            if each.repeats and now[each.keyword] != (usual or {}).get(each.keyword, each.default):
                found += each.words(now[each.keyword])
    return found


def words_in(kind: Any) -> list[str]:
    """Return the words that a type allows, such as ["batch", "seq"] for Literal["batch", "seq"] | None.

    The list is empty for a type without a Literal.
    """
    return [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]


def absolute_source(text: str) -> str:
    """Make the file path in the name of a system or pass absolute; return a name without a file unchanged.

    A name with a file is `FILE:NAME`, or the command line of a script.
    """
    if script := script_of(text):
        return str(script._replace(file=str(Path(script.file).absolute())))
    source, colon, name = text.rpartition(":")
    file = file_of(source) if colon else None
    return text if file is None else f"{file.absolute()}:{name}"


def _settings_of(part: type[Any]) -> Iterator[tuple[str, FieldOptions]]:
    for each in fields(part):
        if declared := each.metadata.get("setting"):
            yield each.name, declared
