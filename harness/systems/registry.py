"""Finds systems by name: built-in, an entry point, a factory in a module or file, or a script. Does not import torch.

    eager, eager_chunked, graph, joint      built in
    compiled                        built in: the case's reference, its models compiled (harness/systems/compiled.py)
    NAME                            the entry point NAME of group bitproof.systems, in an installed distribution
    PACKAGE.MODULE:FACTORY          imported
    FILE.py:FACTORY                 run
    FILE.py ARGUMENTS               a training script, run unchanged (harness/systems/script.py)

A factory is a function that makes a system. Each rank calls `factory(case, mesh)` once, or `factory()` if it has no
parameters. The factory may follow or ignore the case's model, batch and optimizer. Before the call:

- torch.distributed runs over all ranks: gloo on CPUs, NCCL if each rank has a GPU.
- `mesh.rank` is this rank, and `mesh.device` its device, which is already the current device.
- The groups of `reference.parallel.mesh` have their names.
- The seeds of random, numpy and torch are `case.seed` on every rank.
- Deterministic algorithms are on, fresh memory is filled with NaN, and a rank has one thread.

The factory returns an object with a method `step`, or a function, which is the step itself. The step runs one training
step and reports its tensors, in one of two ways:

- `step(index)` is a generator that yields `(kind, name, tensor)`.
- `step(index, observe)` calls `observe(kind, name, tensor)`.

The kinds of tensors are:

    loss        a floating-point number                              at least one a step, on some rank
    grad        a gradient as the optimizer reads it                 at least one
    param       a parameter after the optimizer                      at least one
    optimizer   its state, by custom <parameter>.<state>             at least one
    buffer      by custom <name>@before_optimizer and @after_optimizer
    grad_norm   the norm of all gradients, over all ranks            at least one, if the case sets `grad_norm`
    activation  the output of a module, as <module>@forward, and its gradient, as <module>@backward, if the case sets
                `observe`; bitproof.harness.case.observed has their names
    rng         a generator's state. The global generators of torch, cuda, python and numpy are recorded without the
                system's help after each step that drew from them

Each rank reports its own tensors (for a DTensor, the local shard), with the same names at every step, each once. A
tensor is read when it is yielded, before the step continues: yield a gradient before anything overwrites it.

Optional attributes of the object:

    names             a mapping of its own names to the reference's; see bitproof.harness.user_code.names
    model             the module: if systems differ, reports name the module of the call that caused it
    gradients         the function, called by step, that computes loss and gradients: all other calls are the update
    graph             a torch.fx.GraphModule that computes loss and gradients, which step runs as `self.graph(...)`:
                      reports then name the call that caused a difference by its node. A read of memory before the
                      wait is a race, which makes the case UNVERIFIED. Each node may state its origin in its metadata,
                      by any of five plain values: node.meta["bitproof"] = {"module": "layers.0.mlp", "direction":
                      "backward", "chunk": 1, "source": "model.py:12", "part": "dispatch"}; a direction is forward,
                      backward or update
    wrap_gradients    a method that wraps `gradients` for a fault; without it a fault changes the yielded tensors
    independent_ranks True if ranks rightly train alone. For any other system a rank without collectives in its
                      steps makes the case UNVERIFIED: such ranks do not test their parallelism
    manifest          a method: facts beyond the case that decide this rank's numbers, as plain JSON values

If a system computes gradients with a graph of its own, without autograd, it should report this graph with directions.
Otherwise the direction of its calls is unknown, and calls are paired by their values.

A rank's process has these settings:

- RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets them.
- torch's default process group exists, so a trainer that looks for it, or for these variables, trains together with the
  other ranks. It may also initialize and destroy this group (harness/systems/default_group.py).
- Groups that the factory makes exist until the run ends. Then `destroy_process_group` ends all of them.
- sys.argv has only the factory's file.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bitproof.harness.case import COMPILED, PREPARED
from bitproof.harness.case.case import file_of, script_of
from bitproof.harness.errors import UsageError
from bitproof.harness.runtime.search_path import search_path
from bitproof.harness.systems.revisions import resolve
from bitproof.harness.user_code import plugins
from bitproof.harness.user_code.missing import missing_package
from bitproof.harness.user_code.own_files import package_of
from bitproof.harness.user_code.user_file import check_signature, loading, names_in, run_file

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from bitproof.harness.case import Case
    from bitproof.harness.records import Manifest, Role

BUILT_IN = ("eager", "eager_chunked", *PREPARED)
NAMED = (*BUILT_IN, COMPILED)
"""The names of bitproof's systems. The last, `compiled`, runs user code that torch.compile compiles."""

OWN = "package.module:factory or FILE.py:factory"


class Factory(NamedTuple):
    """A function that makes a system, and the origin of its code, such as {"sha256": digest of its file}."""

    make: Callable[..., Any]
    origin: dict[str, str]


def sums_over_ranks(manifests: Mapping[Role, Manifest]) -> dict[Role, str]:
    """Return role -> the order of its sums over ranks, in words such as "in NCCL's own order".

    Roles whose system is not built in, or has a single rank, are left out.
    """
    return {role: how for role, manifest in manifests.items() if (how := _sums_of(manifest))}


def _sums_of(manifest: Manifest) -> str | None:
    if manifest.system not in BUILT_IN or manifest.world_size < 2 or manifest.collectives is None:
        return None
    if manifest.collectives == "native":
        return "in NCCL's own order"
    said = (manifest.machine or {}).get("sums_over_ranks")
    # Ranks that differ make a list of what each of them states: see `agreed_facts`.
    how = f"({'; '.join(map(str, said))})" if isinstance(said, list) else said or "by additions"
    return f"in rank order {how}" if manifest.collectives != "nccl" or said else "in rank order"


def registered() -> dict[str, EntryPoint]:
    """Return name -> entry point, for systems in installed distributions.

    Raises UsageError if two distributions claim the same name, or if one claims the name of a built-in system.
    """
    found = plugins.entry_points(plugins.SYSTEMS)
    for name in NAMED:
        if name in found:
            raise UsageError(
                f"a distribution claims the name of the built-in system {name}",
                expected="a name of its own for every system",
                found=plugins.describe(found[name]),
                fix="uninstall it, or rename its entry point",
            )
    return found


def check_system(name: str) -> None:
    """Raise UsageError if a system or factory does not exist, before anything starts.

    No user code runs: the file of a factory is only parsed.
    """
    entries = registered()
    if name in NAMED:
        return
    if script := script_of(name):
        if script.revision:
            resolve(script)
        else:
            names_in(Path(script.file), f"script {script.file}")
        return
    # Otherwise a factory: FILE.py:NAME, MODULE:NAME, or the name under which a distribution registers one.
    source, _, factory = (entries[name].value if name in entries else name).rpartition(":")
    if not source or not factory:
        known = (*NAMED, *entries)
        close = [] if ":" in name else difflib.get_close_matches(name, known, n=1)
        likely = f"did you mean {close[0]}?" if close else None
        file = name.rstrip(":") if name.rstrip(":").endswith(".py") else None
        raise UsageError(
            f"unknown system {name!r}",
            expected=f"{', '.join(known)}, {OWN}, or a script: train.py --lr 3e-4",
            found=repr(name),
            fix=f"name a factory of the file, such as {file}:make" if file else likely,
        )
    path = file_of(source) or _file_of_module(name, source)
    bound = names_in(path, f"system {name}") if path is not None else None
    # None: the file defines names while it runs, so only a run shows them.
    if bound is not None and factory.partition(".")[0] not in bound:
        close = difflib.get_close_matches(factory, bound, n=3)
        raise UsageError(
            f"{source} has no factory {factory}",
            expected=f"a name that it has, such as {', '.join(close or sorted(bound)[:3])}",
            found=f"system {name}",
            fix=f"did you mean {source}:{close[0]}?" if close else None,
        )
    if path is not None and bound is not None:
        check_signature(path, factory, f"system {name}", (0, 2), "case, mesh")


def check_preload(case: Case) -> None:
    """Raise UsageError if a module in a case's `preload` is not found for either system. Nothing is imported."""
    own = [str(folder) for name in (case.reference, case.candidate) if (folder := folder_of(name, case)) is not None]
    for name in case.preload:
        # Only the outermost package, as a search for a module in it would import it.
        first = name.partition(".")[0]
        path = [*own, *search_path()]
        is_there = first in sys.modules or importlib.machinery.PathFinder.find_spec(first, path) is not None
        if not is_there and importlib.util.find_spec(first) is None:  # this also searches editable installations
            raise UsageError(
                f"the preloaded module {name} is not found",
                expected=f"a module {first} in the working directory, or installed",
                found=f"--preload {name}",
                fix="run from the folder that holds the package, or install it",
            )


def folder_of(name: str, case: Case) -> Path | None:
    """Return the folder that is searched first for the modules of a case's system; None if the system has no file."""
    if script := script_of(name):
        return None if script.revision else Path(script.file).resolve().parent
    source, _, factory = (case.reference if name == COMPILED else name).rpartition(":")
    path = file_of(source) if source and factory else None
    return None if path is None else package_of(path.resolve())[0]


def program_name(name: str) -> str:
    """Return `sys.argv[0]` for a rank that runs a user's system: its file, or its module's name if it has no file."""
    if script := script_of(name):
        return script.file
    entries = registered()
    source = (entries[name].value if name in entries else name).rpartition(":")[0]
    return str(file_of(source) or _file_of_module(name, source) or source)


def load_factory(name: str, work: Path = Path("run"), ours: Sequence[Path] = ()) -> Factory:
    """Load the factory of a system that is not built in. Raises UsageError if it cannot be loaded.

    - `work`: the run's folder. Checkouts of git revisions are next to it.
    - `ours`: folders that are not watched for changes.
    """
    if script := script_of(name):
        from bitproof.harness.systems.script import make_script

        return Factory(make_script(script, work, ours), {})
    entries = registered()
    if name in entries:
        return Factory(plugins.load(entries[name]), {"distribution": plugins.distribution_of(entries[name])})
    source, _, factory = name.rpartition(":")
    origin = {}
    try:
        if path := file_of(source):
            found, origin["sha256"] = run_file(path)
        else:
            with loading(source):
                found = importlib.import_module(source)
        for part in factory.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, OSError) as error:
        if missing := missing_package(error, f"system {name}", asked_for=source):
            raise missing from error
        raise UsageError(
            f"system {name} cannot be imported",
            found=f"{type(error).__name__}: {error}",
            fix="run from the folder that holds the package, install it, or name a file: path/to/file.py:factory",
        ) from error
    return Factory(found, origin)  # type: ignore[arg-type]


def _file_of_module(name: str, module: str) -> Path | None:
    first, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(first, search_path())
    try:
        spec = spec or importlib.util.find_spec(first)
    except ValueError:  # a loaded module without a spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            spec = None
            break
        # Search for the last name in the parent's folders: with a dotted name, find_spec would import the parents.
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None:
        raise UsageError(
            f"the module of system {name} is not found",
            expected=f"a module {module} in the working directory, or installed",
            found=f"sys.path {', '.join(repr(path) for path in search_path())}",
            fix="run from the folder that holds the package, install it, or name a file: path/to/file.py:factory",
        )
    return Path(spec.origin) if spec.has_location and spec.origin and spec.origin.endswith(".py") else None
