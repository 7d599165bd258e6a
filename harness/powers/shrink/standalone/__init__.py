"""Writes a difference between two graphs as a self-contained Python file that needs only torch.

1. Write both whole graphs into a temporary file that also saves each value, and run it on all ranks. The inputs are the
   tokens of a step; parameters and buffers are drawn at random.
2. In both graphs, walk back from a differing output. Stop at every value that the other graph has too, bit for bit, on
   all ranks. Such values become inputs of the final file, which stores their bytes. For example, if a wrong `sum`
   follows 500 equal calls, only the `sum` remains.
3. Choose the output that needs the fewest calls.
4. Run the final file. Keep it only if it exits with 1, which means that the graphs differ.

`reading` collects the content of a file, `statements` writes a graph as Python, and `rendering` assembles the file.
`shortening` finds the file with the fewest calls. The functions of `template` and `probe` are copied into files.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.powers.shrink.standalone.reading import NoFileError, Scene, Side
from bitproof.harness.powers.shrink.standalone.rendering import render
from bitproof.harness.powers.shrink.standalone.shortening import shortest
from bitproof.harness.processes.command import CommandError, run_command

__all__ = ["NoFileError", "Scene", "Side", "Written", "run_plain", "write_standalone"]


@dataclass(frozen=True)
class Written:
    """A file that shows a difference: its text, the number of calls of each graph, and the output of running it."""

    text: str
    num_calls: dict[str, int]
    printed: str


Run = Callable[..., tuple[int | None, str]]
"""Runs a file's text in a folder, with a timeout in seconds and arguments. Returns (exit status, output).

The exit status is None after the timeout.
"""


def write_standalone(scene: Scene, run: Run | None = None) -> Written:
    """Make the shortest file that shows a difference between two graphs, and run it. By default, `run` is `run_plain`.

    Raises NoFileError if no file shows a difference.
    """
    run = run or run_plain
    with tempfile.TemporaryDirectory() as folder:
        differing = _probe(scene, Path(folder), run)
        if not differing:
            raise NoFileError("the two graphs agree in every bit: the difference is not in their code")
        # First with common values as inputs; if that file shows nothing, with all calls.
        for is_short in (True, False):
            text, num_calls = shortest(scene, differing, is_short)
            status, printed = run(text, Path(folder), scene.timeout)
            if status == 1:
                return Written(text, num_calls, printed)
    raise NoFileError("a file with the code of both graphs was written, and ran without showing a difference")


def run_plain(text: str, folder: Path, timeout: float, *arguments: str) -> tuple[int | None, str]:
    """Run a file as `python FILE` would run elsewhere, without this project's paths and settings.

    Returns a pair: the exit status, and the output. If the file did not end within `timeout` seconds, the pair is None
    and the reason.
    """
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
    """Run both whole graphs in a file, and read all their values into `scene.seen`.

    Returns the names of outputs that differ.
    """
    outputs = {name: list(side.outputs) for name, side in scene.sides.items()}
    text = render(scene, outputs["reference"], lambda side, node: False, True)[0]
    status, printed = run(text, folder, scene.timeout, str(folder))
    # 0 and 1 are answers: the graphs agree or differ. Anything else is a crash.
    if status not in (0, 1):
        raise NoFileError("the code of both graphs does not run by itself", found=printed[-2000:])
    scene.seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(scene.world_size)]
    return [name for name in outputs["reference"] if any(name in seen["differing"] for seen in scene.seen)]
