"""Name the activations at module boundaries, and choose those that a case records.

A boundary is an output of a module's call (`forward`), or the gradient of such an output (`backward`). Modules inside a
chunked module have a boundary per chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from bitproof.harness.case.patterns import fits, is_pattern, pattern_of
from bitproof.harness.case.traced import JOINT
from bitproof.harness.errors import CaseError

if TYPE_CHECKING:
    from bitproof.harness.case.case import Case


class Boundary(NamedTuple):
    """A tensor that a module returns in a call, or the gradient of such a tensor ("backward").

    - `output`: the tensor's index among the returned tensors; None if the module returns a single tensor.
    - `earlier`: how many calls of the module precede this call in its step and chunk.
    """

    module: str
    direction: Literal["forward", "backward"]
    output: int | None = None
    earlier: int = 0
    chunk: int | None = None

    @property
    def name(self) -> str:
        """The name of this tensor's record, such as layers.1.moe.router@forward.output0.chunk1."""
        output = "" if self.output is None else f".output{self.output}"
        call = f".call{self.earlier}" if self.earlier else ""
        chunk = "" if self.chunk is None else f".chunk{self.chunk}"
        return f"{self.module}@{self.direction}{output}{call}{chunk}"


def boundary_of(name: str) -> Boundary | None:
    """Return the module's output or gradient whose record has this name (see `Boundary.name`); None for other names."""
    # The parts in the order in which `Boundary.name` writes them. It omits parts with their defaults.
    match = re.fullmatch(r"([^@]+)@(forward|backward)(?:\.output(\d+))?(?:\.call(\d+))?(?:\.chunk([01]))?", name)
    if match is None:
        return None
    module, direction, output, earlier, chunk = match.groups()
    return Boundary(
        module,
        "forward" if direction == "forward" else "backward",
        None if output is None else int(output),
        int(earlier or 0),
        None if chunk is None else int(chunk),
    )


def check_observed(case: Case) -> None:
    for pattern in case.observe:
        if not is_pattern(pattern):
            raise CaseError(
                f"case {case.name} observes what is no pattern over module names",
                expected="components of letters, digits and _, or * for any one and ** for several, joined by dots, "
                "such as layers.*.moe or layers.**",
                found=repr(pattern),
            )
    is_compiled = case.pipeline.compiles
    if case.observe and (is_compiled or JOINT in (case.reference, case.candidate)):
        raise CaseError(
            f"case {case.name} observes activations of what does not show them",
            expected="eager, eager_chunked, a graph with the backend fx, or a system of yours",
            found=f"backend {case.pipeline.backend}" if is_compiled else f"the system {JOINT}",
            fix="leave out `observe`",
        )


def observed_modules(patterns: Sequence[str], modules: Iterable[str]) -> list[str]:
    """Return the module names that match any of the patterns, in order. Raises CaseError if a pattern matches none."""
    # The root module's name is empty.
    names = [name for name in modules if name]
    fitting = {pattern: [name for name in names if fits(pattern, name)] for pattern in patterns}
    for pattern, found in fitting.items():
        if not found:
            # Patterns, since the names of all layers would make a long error.
            known = sorted(set(map(pattern_of, names)))
            raise CaseError(
                f"the pattern {pattern!r} of what to observe matches no module",
                expected="modules of the model: " + ", ".join(known),
                found="no match",
                fix="correct --observe, or `observe` in the case",
            )
    # A module that several patterns match is listed once, in the model's order.
    chosen = {name for found in fitting.values() for name in found}
    return [name for name in names if name in chosen]
