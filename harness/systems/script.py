"""Runs a training script as a system: unchanged, as `__main__`, until the case's last optimizer step.

    train.py --lr 3e-4                  the file, with its arguments
    git:4f2a91c:train.py --lr 3e-4      the file in that revision (`harness/systems/revisions.py`)

1. With a single rank the script runs like `python train.py`, with several ranks as under torchrun.
2. A training step ends when the script's optimizers have stepped all of their parameters.
3. The recorded models are the outermost modules that own these parameters, without DistributedDataParallel and
   torch.compile.
4. Each number from which backward starts is recorded: as `loss`, or as `loss.0`, `loss.1`, ... for micro-batches.
5. `mp.spawn(fn, args, nprocs)` starts no process; each rank calls `fn(rank, *args)` instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import stat
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from bitproof.harness.case.case import Script
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.systems.files_between_runs import OUT, RunFiles
from bitproof.harness.systems.revisions import checkout_of, place_in, top_of
from bitproof.harness.systems.watched_loop import WatchedLoop, held_by
from bitproof.harness.systems.watched_step import Observe, bare, held_optimizers
from bitproof.harness.user_code.missing import missing_package
from bitproof.harness.user_code.user_file import find_beside, loading
from bitproof.harness.user_code.whose import check_own_modules
from bitproof.harness.within_user_code import refused

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

WATCH = (
    "put the training step into a function of a file, end a factory with "
    "`return bitproof.watch(step, model=model, optimizer=optimizer)`, and name it as FILE.py:factory"
)
_MOST_LOSSES = 100
"""Most backward passes that a script may run before it makes an optimizer."""

_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)


class WatchedScript(WatchedLoop):
    """A system that runs a script, and records the script's models and optimizers after each step."""

    def __init__(
        self, script: Script, path: Path, folder: Path, rank: int, world_size: int, files: RunFiles | None = None
    ) -> None:
        """Prepare to run the file `path` in the working directory `folder`.

        `files` guards against reads of files that earlier runs wrote; None to allow them.
        """
        # Models and optimizers are found while the script runs.
        super().__init__(lambda: self._run(), [], [])
        self._files = files
        self._script, self._path, self._folder = script, path, folder
        self._rank, self._world_size = rank, world_size
        # Read once, so that the digest in the manifest is that of the code that runs.
        self._code = read_plain(path)
        # Weak, as the script decides how long an optimizer lives.
        self._made: list[weakref.ref[Optimizer]] = []
        self._running: list[Optimizer] = []

    def manifest(self) -> dict[str, Any]:
        return super().manifest() | {"sha256": hashlib.sha256(self._code).hexdigest()}

    def take_steps(self, num_steps: int, taking: Callable[[int], AbstractContextManager[Observe]]) -> None:
        with (
            self._files or nullcontext(),
            _collecting_optimizers(self._made),
            _spawning_here(self._rank, self._world_size),
        ):
            super().take_steps(num_steps, taking)

    def _run(self) -> None:
        from bitproof.harness.systems.default_group import put_aside

        # The script's own init_process_group brings the lent group back.
        put_aside()
        # The value False shows that bitproof set these variables. Those of a launcher stay.
        if self._world_size == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            for name in _TORCHRUN:
                os.environ.pop(name, None)
        self._folder.mkdir(parents=True, exist_ok=True)  # a revision may lack the folder that bitproof runs in
        os.chdir(self._folder)
        self._module = module = types.ModuleType("__main__")  # its globals live as long as the rank
        module.__file__ = str(self._path)
        out = str(self._files.out) if self._files else OUT
        sys.argv[:] = [self._script.file, *(word.replace(OUT, out) for word in self._script.args)]
        find_beside(self._path.parent)
        check_own_modules(self._path, self._path.parent)
        # As in `python FILE`, `__main__` is the script: pickle and dataclasses look its classes up there.
        ours, sys.modules["__main__"] = sys.modules["__main__"], module
        printed_before = _size_of_log()
        try:
            with loading(str(self._path)):
                # With `dont_inherit`, the `__future__` imports of this file do not apply to the script.
                exec(compile(self._code, str(self._path), "exec", dont_inherit=True), module.__dict__)
        except SystemExit as error:
            # After a successful exit, the loop is judged by its number of steps, as after the last line.
            if error.code not in (None, 0):
                raise UsageError(
                    f"the script {self._script.file} called sys.exit({error.code!r}) before its last step",
                    expected="a script that runs with these arguments",
                    found=f"sys.argv was {sys.argv!r}{_last_lines(printed_before)}",
                    fix="give the script's own arguments after --, as in `bitproof run train.py -- --lr 3e-4`",
                ) from error
        except ModuleNotFoundError as error:
            raise (missing_package(error, f"the script {self._script.file}") or error) from error
        except KeyError as error:
            if self._world_size == 1 and error.args and error.args[0] in _TORCHRUN:
                raise UsageError(
                    f"the script {self._script.file} reads {error.args[0]}, which torchrun sets",
                    expected="several ranks: with one, a script runs as `python` runs it, without torchrun's variables",
                    fix="give --world-size 2, or set the variables of torchrun for one process before bitproof",
                ) from error
            raise
        finally:
            sys.modules["__main__"] = ours

    def optimizer_begins(self, optimizer: Optimizer) -> bool:
        self.note(optimizer)
        if all(each() is not optimizer for each in self._made):
            self._made.append(weakref.ref(optimizer))
        return self._find_models()

    def counts(self, optimizer: Optimizer) -> bool:
        """Return whether the training step must wait for this optimizer.

        False if the optimizer wraps another optimizer, or if a running optimizer has all of its parameters and thus
        calls it.
        """
        return held_optimizers(optimizer) == [optimizer] and not any(
            held_by([optimizer]) <= held_by([each]) for each in self._running if each is not optimizer
        )

    def show_gradients(self, optimizer: Optimizer, observe: Observe) -> Any:
        self._running.append(optimizer)
        return super().show_gradients(optimizer, observe)

    def is_complete(self, stepped: Sequence[Optimizer]) -> bool:
        self._running = [each for each in self._running if all(each is not other for other in stepped)]
        return held_by(self._optimizers()) <= held_by(stepped)

    def check_losses(self, losses: list[Tensor]) -> None:
        """Raise RecordingError if the script trains without an optimizer, since its first step would never end."""
        if len(losses) > _MOST_LOSSES and not self._made:
            raise RecordingError(
                f"the script {self._script.file} ran backward {len(losses)} times, and made no torch.optim.Optimizer",
                expected="an optimizer, whose steps are the steps that are compared",
                fix=f"{WATCH}; or update the parameters by torch.optim.SGD",
            )

    def show_losses(self, losses: list[Tensor], observe: Observe) -> None:
        # They are not added: a sum would hide that two micro-batches changed places.
        for number, loss in enumerate(losses):
            observe("loss", "loss" if len(losses) == 1 else f"loss.{number}", loss)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        # Models are otherwise found only at the first optimizer step.
        if not self.models:
            self._find_models()
        return super().named_modules()

    def too_short(self, taken: int, num_steps: int) -> RecordingError:
        if not taken:
            return RecordingError(
                f"the script {self._script.file} ended, and no torch.optim.Optimizer took a step in this process",
                expected=f"{num_steps} optimizer steps",
                found=f"sys.argv was {sys.argv!r}; the rank's log has what it printed, such as that it needs a GPU",
                fix=f"give arguments that train; if other processes train, or nothing of torch.optim does, {WATCH}",
            )
        return RecordingError(
            f"the script {self._script.file} ended after {taken} optimizer steps",
            expected=f"at least {num_steps}, as the case says",
            fix=f"let the script train for longer (its arguments come after --), or give --steps {max(taken, 1)}",
        )

    def _optimizers(self) -> list[Optimizer]:
        # An optimizer whose factory raised an error has no parameter groups.
        made = [each for made in self._made if (each := made()) is not None and hasattr(each, "param_groups")]
        return [each for each in made if held_optimizers(each) == [each]]

    def _find_models(self) -> bool:
        models = owners_of([p for each in self._optimizers() for group in each.param_groups for p in group["params"]])
        models = [bare(each) for each in models]
        if [id(each) for each in models] == [id(each) for each in self.models]:
            return False
        self.watch_models(models)
        return True


def make_script(script: Script, work: Path, ours: Sequence[Path] = ()) -> Callable[[Any, Any], WatchedScript]:
    """Return a function `make(case, mesh)` that makes the system of a script.

    - `work`: the run's folder. Checkouts of git revisions are next to it.
    - `ours`: bitproof's own folders, which are not watched for changes.
    """

    def make(case: Any, mesh: Any) -> WatchedScript:
        path, folder = Path(script.file).absolute(), Path.cwd()
        if script.revision:
            checkout = checkout_of(script, work.parent)
            path, folder = checkout / path.relative_to(top_of(script)), place_in(checkout, script, Path.cwd())
        # For a revision, the folders in its checkout and the user's own folders differ. All are watched.
        watched = {folder, path.parent, Path.cwd(), Path(script.file).absolute().parent}
        files = RunFiles(script.file, case.name, work, sorted(watched), ours)
        return WatchedScript(script, path, folder, mesh.rank, case.parallelism.world_size, files)

    return make


@contextmanager
def _collecting_optimizers(made: list[weakref.ref[Optimizer]]) -> Iterator[None]:
    from torch.optim import Optimizer

    own = Optimizer.__init__

    @functools.wraps(own)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made.append(weakref.ref(self))

    with mock.patch.object(Optimizer, "__init__", init):
        yield


@contextmanager
def _spawning_here(rank: int, world_size: int) -> Iterator[None]:
    """Context in which `mp.spawn` calls its function in this process, for this rank, instead of starting processes.

    `mp.spawn` then raises UsageError unless it asks for as many processes as there are ranks.
    """
    import torch.multiprocessing

    def spawn(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> None:
        num_ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if nprocs != world_size:
            raise refused(
                UsageError(
                    f"the script spawns {nprocs} processes, and runs on {num_ranks}",
                    expected="as many ranks as processes: each rank makes the call for one of them",
                    fix=f"give --world-size {nprocs}",
                )
            )
        fn(rank, *args)

    # Scripts use either name: `mp.spawn` or `torch.multiprocessing.spawn.spawn`.
    places = (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"])
    with mock.patch.object(places[0], "spawn", spawn), mock.patch.object(places[1], "spawn", spawn):
        yield


def owners_of(parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return the outermost modules that own these parameters: as few as possible, ordered by their first parameter."""
    from torch import nn

    # Only the garbage collector knows all modules. `isinstance` would read `__class__`, which some objects compute.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    inner = {id(child) for each in modules for child in vars(each)["_modules"].values()}
    # Reversed, so that a parameter that occurs twice has its first position.
    order = {id(parameter): number for number, parameter in reversed([*enumerate(parameters)])}
    owned: list[tuple[set[int], int, nn.Module]] = []
    for each in modules:
        if id(each) not in inner:
            own = {id(parameter) for parameter in each.parameters()}
            if found := own & order.keys():
                owned.append((found, len(own), each))
    left, chosen = set(order), []
    # A greedy cover: the module with the most parameters not yet covered, the smallest among equals.
    while best := max(owned, key=lambda one: (len(one[0] & left), -one[1]), default=None):
        if not best[0] & left:
            break
        chosen.append((min(order[each] for each in best[0]), best[2]))
        left -= best[0]
    return [model for _, model in sorted(chosen, key=lambda one: one[0])]


_LOG = "/proc/self/fd/2"
"""On Linux, the path of standard error, which is the rank's log."""


def _size_of_log() -> int:
    # Buffered text would otherwise count as printed later.
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        found = os.stat(_LOG)
        return found.st_size if stat.S_ISREG(found.st_mode) else 0
    return 0


def _last_lines(begin: int) -> str:
    # For example, an error of `argparse`.
    lines: list[str] = []
    if (size := _size_of_log()) > begin:
        with contextlib.suppress(OSError), open(_LOG, "rb") as log:
            log.seek(max(begin, size - 4096))
            lines = log.read().decode(errors="replace").splitlines()
    return "".join(f"\n{line}" for line in lines[-6:])
