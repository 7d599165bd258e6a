"""Placements from the package autoparallel of meta-pytorch, which comes from its repository.

On the registry the name belongs to another package, so what is installed is told by its modules, and nothing of it is
imported for that. Its placements are of a graph of its own making, per operator and on any dim of the mesh; nothing
here reads them yet, as we never had it to run: a case that asks for them is UNVERIFIED, and the error says why.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder

from bitproof.harness.errors import MachineError

NAME = "autoparallel"
_OWN_MODULES = ("api", "optimize_sharding")


def refuse_upstream() -> MachineError:
    """What is said of a case that asks for its placements."""
    fix = "leave out autoplace.source, by which our own program chooses"
    if (found := installed()) is None:
        return MachineError(
            "NOT RUN: placements of autoparallel were asked for, and it is not installed",
            expected="the package autoparallel of meta-pytorch, from its repository",
            found="no package of that name",
            fix=fix,
        )
    if not found:
        return MachineError(
            "NOT RUN: placements of autoparallel were asked for, and the package of that name is another one",
            expected=f"modules {', '.join(f'{NAME}.{name}' for name in _OWN_MODULES)}",
            found="a package without them, such as the registry's",
            fix=fix,
        )
    return MachineError(
        "NOT RUN: autoparallel is installed, and its placements cannot be read yet",
        expected="placements of our own program",
        found="autoplace.source='autoparallel'",
        fix=fix,
    )


def installed() -> bool | None:
    """Whether the package of that name is the one meant; None where there is none. Imports nothing of it."""
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return all(PathFinder.find_spec(name, places) is not None for name in _OWN_MODULES)
