"""`bitproof moved`: find the operator calls whose results change between two environments."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitproof.harness.changes import Changes
from bitproof.harness.cli.arguments import find_case
from bitproof.harness.cli.declare import command
from bitproof.harness.errors import UsageError
from bitproof.harness.settings import TIME
from bitproof.harness.systems.registry import NAMED, check_system

if TYPE_CHECKING:
    from bitproof.harness.powers.moved.program_runs import ProgramRuns

FORMS = "PROGRAM or CASE, record DIR PROGRAM, replay DIR, or check FILE.json"
MEBIBYTE = 1 << 20
WATCHED = ("eager", "eager_chunked", "graph")
"""Built-in systems whose operator calls can be watched. A user's systems can be watched as well."""


@command(
    "moved",
    "bitproof moved train.py --to torch==2.15.0",
    "bitproof moved model.py:forward --env ATEN_CPU_CAPABILITY=avx2",
    "bitproof moved moe_seq --env ATEN_CPU_CAPABILITY=avx2 -- --world-size 2",
    "bitproof moved record calls train.py --steps 2 -- --lr 3e-4",
    "bitproof moved replay calls --python /other/bin/python",
    brief="Find calls whose bits another environment changes.",
    statuses=(
        "no call moved, and the program's records are equal",
        "a call moved or differs from itself, or the program differs",
        "a call could not be judged, or an archive is refused",
    ),
)
def moved_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM | CASE | record DIR PROGRAM | replay DIR | check FILE.json",
            help="A script FILE.py, FILE.py:FUNCTION, or a case; after -- come a script's arguments, or options of "
            "`record` for a case.",
        ),
    ],
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The new environment's Python. It needs torch, not bitproof.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="REQUIREMENT", help="Install this torch or other package into a new environment and use it."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set a variable in the new environment. Repeatable."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Replay an archive's calls on this device, such as cuda.")
    ] = "cpu",
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take N steps; by default 1, or as many as the case has.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="SYSTEM", help="The system of a case; by default its reference.")
    ] = None,
    budget: Annotated[
        int, typer.Option(min=0, metavar="MIB", help="Keep at most so many MiB of values; draw other inputs again.")
    ] = 1024,
    memory: Annotated[
        int, typer.Option(min=64, metavar="MIB", help="Let a replay take at most so many MiB of memory.")
    ] = 8192,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the certificate, moved.json and moved.md.")
    ] = None,
    no_causes: Annotated[
        bool, typer.Option("--no-causes", help="Do not probe for causes, nor move each call alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Time limit of each process.", rich_help_panel=TIME),
    ] = 1800.0,
) -> None:
    """Find the operator calls whose bits change between two environments, and whether they are all that changed."""
    from bitproof.harness.powers.moved import command as commands
    from bitproof.harness.powers.moved.environments import Environment, installed, package_of
    from bitproof.harness.powers.moved.two_environments import TwoEnvironments

    variables = dict(_variable(text) for text in env or ())
    if python is not None and to is not None:
        raise UsageError("--python and --to both name the new environment", expected="one of them")
    if python is not None and not os.access(python, os.X_OK):
        raise UsageError("--python takes an interpreter", expected="a program that runs", found=str(python))
    elsewhere = bool(python or to or variables)
    # The first word is a subcommand or a program; Typer has no syntax for such a choice.
    first, *rest = words
    if first == "check":
        if len(rest) != 1 or elsewhere:
            raise UsageError("check takes one certificate", expected="check FILE.json", found=" ".join(words))
        raise typer.Exit(commands.check(Path(rest[0]), as_json=as_json))
    if first == "record":
        if len(rest) < 2 or elsewhere:
            raise UsageError(
                "record takes a new folder and a program", expected="record DIR PROGRAM", found=" ".join(words)
            )
        folder, program, *arguments = rest
        runs = _program(program, arguments, steps, system)
        raise typer.Exit(commands.record(Path(folder), runs, budget=budget * MEBIBYTE, seconds=timeout))
    if first == "replay" and len(rest) != 1:
        raise UsageError("replay takes an archive's folder", expected="replay DIR", found=" ".join(words))
    if first != "replay" and device != "cpu":
        raise UsageError(
            "--device is for the calls of an archive; a program chooses its own device",
            expected="replay DIR --device DEVICE",
            found=f"{first} --device {device}",
        )
    if first != "replay" and not elsewhere:
        raise UsageError(
            "moved compares this environment with another one",
            expected=f"{FORMS}; a program with --python, --to or --env",
            found=" ".join(words),
        )
    interpreter = installed(to) if to else str(python) if python else sys.executable
    new = Environment(python=interpreter, variables=variables, package=package_of(to or ""))
    comparison = TwoEnvironments(
        old=Environment(),
        new=new,
        folder=Path(rest[0] if first == "replay" else "."),
        program=None if first == "replay" else _program(first, rest, steps, system),
        budget=budget * MEBIBYTE,
        memory=memory * MEBIBYTE,
        seconds=timeout,
        device=device,
        explains=not no_causes,
    )
    if first == "replay":
        raise typer.Exit(commands.replay(comparison, out, as_json=as_json))
    raise typer.Exit(commands.compare(comparison, out, as_json=as_json))


def _program(name: str, arguments: list[str], steps: int | None, system: str | None) -> ProgramRuns:
    from bitproof.harness.powers.moved.program_runs import CaseOnRanks, OneProcess

    if ".py" in name:
        if system is not None:
            raise UsageError("--system is for a case", expected="bitproof moved CASE --system SYSTEM", found=name)
        return OneProcess(name, arguments, steps or 1)
    case = find_case(name, Changes(steps=steps))
    check_system(asked := system or case.reference)
    if asked in NAMED and asked not in WATCHED:
        raise UsageError(f"calls of {asked} are not watched", expected=" or ".join(WATCHED), found=f"--system {asked}")
    return CaseOnRanks(name, asked, [*arguments, *(() if steps is None else ("--steps", str(steps)))])


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.replace("_", "a").isalnum():
        raise UsageError("--env sets a variable", expected="NAME=VALUE", found=text)
    return name, value
