"""Declare commands: their options are made from the fields of dataclasses, and help shows options in groups.

- The decorator `takes(Changes, RunOptions, only=...)` gives a function the options of these dataclasses, and passes an
  instance of each to it.
- The decorator `command` adds the function to the program as a command, with examples in its help.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from bitproof.harness.checks.check import Check
from bitproof.harness.checks.shipped import active
from bitproof.harness.cli.app import app
from bitproof.harness.cli.completion import COMPLETED
from bitproof.harness.errors import UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import Option, from_options, options_of, words_in

JUDGED = (
    "as expected: each case has the verdict that it states",
    "not as expected, such as DIFFERENT or NONDETERMINISTIC",
    "a case could not be judged: UNVERIFIED or ERROR",
)
"""The meanings of exit statuses 0, 1 and 3 of a command that runs cases. 2 is a wrong call or case for all commands."""

DONE = ("done", None, "failed")
"""The meanings of exit statuses 0, 1 and 3 of a command that judges nothing; None for a status it never returns."""


class Command(TyperCommand):
    """A command whose help shows options in groups, then examples and exit statuses, an example or status per line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        # `--help` and other ungrouped options come last; the sort is stable.
        for name in sorted(groups, key=lambda name: name == "Options"):
            with formatter.section(name):
                formatter.write_dl(groups[name])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        right, wrong, failed = self.context_settings["obj"]
        statuses = (right, wrong, "the call or a case is wrong, or nothing is selected", f"{failed}, or interrupted")
        lines = [f"{status}  {text}" for status, text in enumerate(statuses) if text is not None]
        for name, each in (("Examples", (self.epilog or "").splitlines()), ("Exit status", lines)):
            formatter.write(f"\n{name}:\n" + "".join(f"  {line}\n" for line in each))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. A command that takes one case also accepts it as `-k CASE`, like other commands."""
        if not any("-k" in param.opts for param in self.params) and any(each.name == "case" for each in self.params):
            args = [word.removeprefix("-k") for word in args if word != "-k"]
        if [*takewhile(lambda word: word != "--", args)].count("-k") > 1:
            # The parser would take the last one, and leave the cases of the others out without a word.
            raise UsageError("-k is given twice", expected="one expression, such as -k 'moe_seq or moe_batch'")
        # `run train.py --lr 1` is a likely mistake, so its error shows how to pass arguments to the script.
        try:
            return super().parse_args(ctx, [*args])  # which takes words out of it
        except Exception as error:  # of click, or of typer's copy of it
            script = next((word for word in args if word.endswith(".py")), None)
            if self.name == "run" and script and "--" not in args and hasattr(error, "option_name"):
                error.message = (  # type: ignore[attr-defined]
                    f"No such option: {error.option_name}. "
                    f"The script's own arguments come after --: bitproof run {script} -- {error.option_name} ..."
                )
            raise


def command(
    name: str,
    *examples: str,
    brief: str | None = None,
    statuses: tuple[str, str | None, str] = JUDGED,
    to: typer.Typer = app,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds a command to the program, with examples of its use.

    - `brief`: the command's line in the program's help; by default, the first sentence of its docstring.
    - `statuses`: the meanings of exit statuses 0, 1 and 3.
    """
    return to.command(
        name, cls=Command, epilog="\n".join(examples), short_help=brief, context_settings={"obj": statuses}
    )


def takes(
    *parts: type[Any],
    only: Sequence[str],
    usual: Mapping[str, Any] | None = None,
    says: Mapping[str, str] | None = None,
    checks: Sequence[type[Check]] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that gives a command some options of dataclasses, and passes it an instance of each dataclass.

    - `parts`: the dataclasses. The command's last parameters get the instances.
    - `only`: the keywords of the options.
    - `usual`, `says`: other defaults, and other help texts, for single options, by keyword.
    - `checks`: checks whose options follow. If the user's options switch on a check, the check is in the field `active`
      of the run options.
    """
    usual, says = usual or {}, says or {}

    def declare(body: Callable[..., None]) -> Callable[..., None]:
        # `eval_str`, as annotations are texts with `from __future__ import annotations`, and Typer needs types.
        own = list(inspect.signature(body, eval_str=True).parameters.values())
        # The body's last parameters take the instances; the others are options of the command itself.
        own, mine = own[: -len(parts)], [each.name for each in own[-len(parts) :]]
        offered = {part: [each for each in options_of(part) if each.keyword in only] for part in parts}
        known = [each.keyword for options in offered.values() for each in options]
        assert sorted(known) == sorted(only), f"no options: {set(only) - set(known)}"

        @functools.wraps(body)
        def declared(**given: Any) -> None:
            values = {}
            for name, (part, options) in zip(mine, offered.items(), strict=True):
                asked = {each.keyword: _from_words(each.kind, given.pop(each.keyword)) for each in options}
                # An option that was not given keeps the default of its dataclass.
                values[name] = from_options(part, {key: each for key, each in asked.items() if each is not None})
                if part is RunOptions:
                    values[name] = replace(values[name], active=_active(checks, given))
            body(**given, **values)

        typed = [each for options in offered.values() for each in options]
        typed += [each for check in checks for each in options_of(check.Options)]
        params = [*own, *(_parameter(each, usual.get(each.keyword, each.default), says) for each in typed)]
        # Typer reads a command's options from its signature.
        declared.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in params]
        )
        declared.__annotations__ = {each.name: each.annotation for each in params}
        return declared

    return declare


def _active(checks: Sequence[type[Check]], given: dict[str, Any]) -> tuple[Check, ...]:
    # The body has no parameters for these options, so none of them may stay in `given`.
    own = [each for check in checks for each in options_of(check.Options)]
    asked = {each.keyword: _from_words(each.kind, given.pop(each.keyword)) for each in own}
    return active(checks, {name: value for name, value in asked.items() if value is not None})


def _parameter(option: Option, default: Any, says: Mapping[str, str]) -> inspect.Parameter:
    # The type that Typer parses may be narrower than the type of a Python call.
    kind = _typed(option.kind if option.typed is None else option.typed)
    shown = typer.Option(
        *option.names,
        help=says.get(option.keyword, option.help),
        rich_help_panel=option.group,
        metavar=option.metavar,
        min=option.least,
        callback=None if option.problem is None else _refusing(option.problem),
        show_default=default not in (None, False, ()),
        autocompletion=COMPLETED.get(option.keyword),
    )
    return inspect.Parameter(
        option.keyword,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[kind, shown],
    )


def _typed(kind: Any) -> Any:
    parts = [part for part in get_args(kind) if part is not type(None)]
    # Words have `-` on the command line and `_` in Python.
    if get_origin(kind) is Literal:
        return Literal[tuple(word.replace("_", "-") for word in parts)]
    if get_origin(kind) is tuple:
        # Typer reads a repeatable option from a list type.
        return list[str] | None
    if type(None) in get_args(kind):
        # Typer takes no unions: of `str | Path | None` it gets `Path | None`.
        return (Path if Path in parts else _typed(parts[0])) | None
    return kind


def _from_words(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value.replace("-", "_") if words_in(kind) and isinstance(value, str) else value


def _refusing(problem: Callable[[Any], str]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and (text := problem(value)):
            raise typer.BadParameter(text)
        return value

    return check
