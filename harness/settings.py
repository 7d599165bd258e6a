"""Declare settings of a run once, as fields of a dataclass; options, keywords and replay commands follow from them.

A field states its type, its default, its documentation and the options that set it. This defines the options of the
command line and their help (`harness.cli.declare`), the keywords of `bitproof.run` and of the pytest plugin
(`bitproof.keywords`), and the command line that repeats a run (`words`).

Most settings have a single option, with the same value as the field. Several options may set one field, such as
`--stress` and `--stress-threads`: the field then has functions that convert between its value and theirs.
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

    A switch that is on by default has both of its forms as one name: `--verify/--no-verify`. `kind` is the type of its
    value in Python (None: the field's type), and `typed` the type on the command line if it differs. `least` is the
    smallest allowed number. `problem` returns the error message for a value, "" if it is valid. `names_code`: the value
    is a system or a pass, whose name may contain a file. `repeats`: the command that repeats a run contains it.
    `command_line_only` is the reason why it is no keyword in Python, "" if it is one.
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
        """The words of a command line that set this option to a value; relative paths are made absolute."""
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
    """The options of a field. `read` converts their values to the field's value, and `tell` converts back.

    `tell` returns a dict by the options' keywords. Both are None if a single option has the same value as the field.
    """

    options: tuple[Option, ...]
    read: Callable[..., Any] | None = None
    tell: Callable[[Any], dict[str, Any]] | None = None


def setting(default: Any, name: str, group: str, help: str, **more: Any) -> Any:
    """Define a dataclass field that a single option sets, with the same value."""
    return settings(default, option(name, group, help, default=default, **more))


def settings(default: Any, *options: Option, read: Any = None, tell: Any = None) -> Any:
    """Define a dataclass field that several options set, or that has another value than its option.

    `read` and `tell` convert between the options' values and the field's value (see `FieldOptions`).
    """
    # A dataclass refuses a mutable default, since all instances would share it.
    made = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"setting": FieldOptions(options=options, read=read, tell=tell)})


def option(names: str, group: str, help: str, **more: Any) -> Option:
    """Make an option. `names` are separated by spaces, a short name last, as in "--jobs -j"."""
    first, *others = names.split()
    keyword = more.pop("keyword", first.partition("/")[0].removeprefix("--").replace("-", "_"))
    return Option(names=(first, *others), keyword=keyword, group=group, help=help, **more)


def options_of(part: type[Any]) -> tuple[Option, ...]:
    """The options of a dataclass, in the order of its fields, each with its type in `kind`."""
    hints = get_type_hints(part)
    found = []
    for name, declared in _settings_of(part):
        for each in declared.options:
            found.append(dataclasses.replace(each, kind=hints[name] if each.kind is None else each.kind))
    return tuple(found)


def made(part: type[T], given: Mapping[str, Any]) -> T:
    """Make an instance of a dataclass from option values by keyword; missing ones get their defaults.

    Keywords of other dataclasses are ignored.
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
    """Check the values that a Python call gives for the options of a dataclass, and return them.

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
    """The error message for a value, by the option's type, allowed words and limits; "" for a valid value."""
    known = words_in(option.kind)
    if known and value not in known and not (value is None and type(None) in get_args(option.kind)):
        return f"{value!r}, not one of {', '.join(known)}"
    if option.kind is bool and not isinstance(value, bool):
        return f"{value!r}, neither True nor False"
    if get_origin(option.kind) is tuple and not (isinstance(value, tuple) and all(isinstance(x, str) for x in value)):
        return f"{value!r}, no list of texts"
    # Written so that a NaN, which is neither more nor less, is refused.
    if option.least is not None and value is not None and not value >= option.least:
        return f"{value}, less than {option.least}"
    return option.problem(value) if option.problem and value is not None else ""


def told(value: Any) -> dict[str, Any]:
    """The values of a dataclass's options by keyword: the inverse of `made`."""
    found: dict[str, Any] = {}
    for name, declared in _settings_of(type(value)):
        mine = getattr(value, name)
        found |= declared.tell(mine) if declared.tell else {declared.options[0].keyword: mine}
    return found


def words(*values: Any, usual: Mapping[str, Any] | None = None) -> list[str]:
    """The words of a command line that recreates these dataclasses: every option that is not at its default.

    Relative paths are made absolute, so it can be run in any folder. `usual` has other defaults, by keyword, for a
    command that has its own.
    """
    found: list[str] = []
    # RunOptions have `parts`: the options of active checks, whose fields are options of the same command.
    for part in [part for value in values for part in (value, *getattr(value, "parts", ()))]:
        now = told(part)
        for each in options_of(type(part)):
            if each.repeats and now[each.keyword] != (usual or {}).get(each.keyword, each.default):
                found += each.words(now[each.keyword])
    return found


def words_in(kind: Any) -> list[str]:
    """The words that a type allows: ["batch", "seq"] for Literal["batch", "seq"] | None; [] if it is no Literal."""
    return [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]


def absolute_source(text: str) -> str:
    """The name of a system or pass with an absolute file path, if it contains a file; otherwise unchanged.

    Names with files are `FILE:NAME` and a script's command line.
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
