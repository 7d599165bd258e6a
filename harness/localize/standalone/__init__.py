"""Write a difference between two graphs as one file of plain Python, with no part of this project in it.

1. Write both graphs whole, with a look at the value after each line, and run that on all ranks, as `python FILE`.
2. What differs there is what a file can show. Walk back from a differing output in both graphs, and stop at every
   value that the other graph has too, bit for bit, on all ranks: such values become inputs, with their bytes.
   So the calls that are left compute in the file what they compute in the whole, and nothing else is needed.
3. Take the output that needs the fewest calls; where a value is too large to be written down, walk further.
4. Run the file. One that does not exit with 1 is not handed out.

`reading` says what there is, `statements` writes a graph as Python, `rendering` puts the file together, `shortening`
finds the one of fewest calls; `main` and `probe` are text that is copied into files, and run nowhere else.

The whole graphs read parameters and buffers drawn at random, and the tokens of a step of the case.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.localize.standalone.reading import NoFileError, Scene, Side
from bitproof.harness.localize.standalone.rendering import render
from bitproof.harness.localize.standalone.shortening import shortest
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.processes.command import CommandError, run_command

__all__ = ["NoFileError", "Scene", "Side", "Written", "run_plain", "write_standalone"]


@dataclass(frozen=True)
class Written:
    """A file that shows the difference: its text, how many calls each side makes in it, what running it printed."""

    text: str
    num_calls: dict[str, int]
    printed: str


Run = Callable[..., tuple[int | None, str]]
"""Runs a file's text in a folder, for so many seconds, with arguments: exit status, None if too late, and output."""


def write_standalone(scene: Scene, run: Run | None = None) -> Written:
    """Write the shortest file that shows a difference, and run it, by default as a reader will.

    Raises NoFileError when none shows one.
    """
    run = run or run_plain
    with tempfile.TemporaryDirectory() as folder:
        differing = _probe(scene, Path(folder), run)
        if not differing:
            raise NoFileError("the two graphs agree in every bit: what differs is not in their code")
        for is_short in (True, False):
            text, num_calls = shortest(scene, differing, is_short)
            status, printed = run(text, Path(folder), scene.timeout)
            if status == 1:
                return Written(text, num_calls, printed)
    raise NoFileError("a file with the code of both graphs was written, and ran without showing a difference")


def run_plain(text: str, folder: Path, timeout: float, *arguments: str) -> tuple[int | None, str]:
    """Run a file as `python FILE` does elsewhere: without this project's paths and settings. Status, and output."""
    file = folder / "standalone.py"
    file.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name not in {*ENVIRONMENT, "PYTHONPATH"}}
    try:
        done = run_command(
            [sys.executable, str(file), *arguments], timeout, environment=environment, folder=folder, is_joined=True
        )
    except CommandError as error:
        return None, str(error)
    return done.status, done.out


def _probe(scene: Scene, folder: Path, run: Run) -> list[str]:
    """Run both graphs whole, keep what was seen, and return the names of the outputs that differ on any rank."""
    outputs = {name: list(side.outputs) for name, side in scene.sides.items()}
    text = render(scene, outputs["reference"], lambda side, node: False, True)[0]
    status, printed = run(text, folder, scene.timeout, str(folder))
    if status not in (0, 1):
        raise NoFileError("the code of both graphs does not run by itself", found=printed[-2000:])
    scene.seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(scene.world_size)]
    return [name for name in outputs["reference"] if any(name in seen["differing"] for seen in scene.seen)]
