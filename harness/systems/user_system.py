"""Makes a system of a user's factory: checks the values that it reports, translates their names, and records them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bitproof.harness.case import KINDS, Case
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.operators.crossings import QueueEntry
from bitproof.harness.records import Key, Record
from bitproof.harness.systems.default_group import as_lent
from bitproof.harness.systems.unrecorded_state import UnrecordedState
from bitproof.harness.user_code.names import Names
from bitproof.harness.user_code.user_frames import user_code
from bitproof.harness.within_user_code import refusing

if TYPE_CHECKING:
    from bitproof.harness.systems.compiled import Capture

Observe = Callable[..., None]
Taking = Callable[[int], AbstractContextManager[Observe]]
"""From a step's index to a context for that step. The context yields the function that records values."""


class UserSystem:
    """Wraps a user's system for the ranks that run it. Raises UsageError if it cannot take steps.

    - `made`: the result of the user's factory (`harness.systems.registry`).
    - `names`: the system's tensor names -> the reference's; by default, `made.names`.
    - `captured`: graphs that torch.compile captures, for the system `compiled`.
    """

    def __init__(
        self,
        name: str,
        made: Any,
        *,
        names: Mapping[str, str],
        origin: Mapping[str, str],
        captured: Capture | None = None,
    ) -> None:
        self.made = made
        self.captured = captured
        self.names = Names(names or getattr(made, "names", {}), f"names of system {name}")
        self.independent_ranks = bool(getattr(made, "independent_ranks", False))
        self.shows_every_buffer = bool(getattr(made, "shows_every_buffer", False))
        self._name = name
        self._origin = dict(origin)
        _refuse_what_trains_nothing(name, made)
        self._step = getattr(made, "step", made)
        # Before the first step, to find out later which state the steps have changed.
        self._kept = UnrecordedState(made)
        # `print` stands for the function that records values: only the number of arguments counts.
        self._takes_observe = _takes(self._step, 0, print)
        if not self._takes_observe and not _takes(self._step, 0):
            raise UsageError(
                f"the factory of system {name} returned something that takes no steps",
                expected="an object with step(index, observe), or with a generator step(index), or such a function",
                found=type(made).__name__,
                fix=_WATCH,
            )

    def step(self, index: int, observe: Observe) -> None:
        """Run a step and record the values that it reports.

        Raises RecordingError for a value that is not (kind, name, tensor), and for a name that occurs twice.
        """
        with self._showing(index, observe) as show, user_code(f"system {self._name}"):
            if self._takes_observe:
                self._step(index, show)
            else:
                for shown in self._yielded(index):
                    show(*(shown if isinstance(shown, (tuple, list)) else (shown,)))

    def take_steps(self, num_steps: int, taking: Taking) -> None:
        """Run all steps, each in the context `taking(index)`.

        A system that has a method `take_steps` runs the loop itself.
        """

        @contextmanager
        def shown(index: int) -> Iterator[Observe]:
            with taking(index) as observe, self._showing(index, observe) as show:
                yield show

        with user_code(f"system {self._name}"):
            if hasattr(self.made, "take_steps"):
                self.made.take_steps(num_steps, shown)
                return
            for index in range(num_steps):
                with taking(index) as observe:
                    self.step(index, observe)

    @contextmanager
    def _showing(self, index: int, observe: Observe) -> Iterator[Observe]:
        """Context for a step. Yields the function that checks and records a value.

        Raises RecordingError at the end if the step has reported no value.
        """
        own_names: dict[tuple[str, str], str] = {}

        # User code calls this, perhaps after it has destroyed the process groups.
        @refusing()
        @as_lent()
        def show(*shown: Any) -> None:
            kind, own, tensor = self._checked(index, shown)
            name = self.names.translate(own)
            if (kind, name) in own_names:
                other = own_names[kind, name]
                how = "twice" if other == own else f"from {other!r} and from {own!r}, which its names map to one"
                raise self._refuse(index, f"{kind} {name!r} {how}", "each name once a step")
            own_names[kind, name] = own
            observe(kind, name, tensor)

        yield show
        if not own_names:
            raise self._refuse(index, "nothing", "a loss, gradients, parameters and optimizer state")

    def manifest(self) -> dict[str, Any]:
        said = dict(self.made.manifest()) if hasattr(self.made, "manifest") else {}
        declared = {"independent_ranks": True} if self.independent_ranks else {}
        return said | self._origin | ({"names": self.names.rules} if self.names.rules else {}) | declared

    def unshown(self, rows: Mapping[Key, Record]) -> list[str]:
        """Return the names of states that steps have changed but no record shows, such as `buffer blocks.0.count`."""
        return self._kept.unshown(rows)

    def races(self) -> list[str]:
        from bitproof.harness.graph.hazards import hazard_lines

        graph = getattr(self.made, "graph", None)
        return hazard_lines(graph) if isinstance(graph, torch.fx.GraphModule) else []

    def queue_entries(self, ranks_in: Callable[[str], tuple[int, ...] | None]) -> list[QueueEntry]:
        """Return the launches and waits of collectives in the graph that the system reports, on this rank, in order.

        The list is empty without a graph. `ranks_in` maps a process group's name to the ranks of this rank's group, or
        to None.
        """
        from bitproof.harness.graph.hazards import find_queue_entries

        graph = getattr(self.made, "graph", None)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
        return find_queue_entries(graph, ranks_in, rank) if isinstance(graph, torch.fx.GraphModule) else []

    def _yielded(self, index: int) -> Any:
        result = self._step(index)
        if not hasattr(result, "__iter__") or isinstance(result, torch.Tensor):
            found = f"nothing: step({index}) returned {'None' if result is None else f'a {type(result).__name__}'}"
            raise self._refuse(index, found, "step(index) to yield a kind, a name and a tensor for each value", _WATCH)
        return result

    def _checked(self, index: int, shown: tuple[Any, ...]) -> tuple[str, str, torch.Tensor]:
        if len(shown) != 3:
            raise self._refuse(index, _describe(shown), "a kind, a name and a tensor")
        kind, name, tensor = shown
        if kind not in KINDS:
            raise self._refuse(index, _describe(shown), f"a kind among {', '.join(KINDS)}")
        if not isinstance(name, str) or not name:
            raise self._refuse(index, _describe(shown), "a text as name")
        if not isinstance(tensor, torch.Tensor):
            raise self._refuse(index, _describe(shown), "a tensor")
        return kind, name, tensor

    def _refuse(self, index: int, found: str, expected: str, fix: str | None = None) -> RecordingError:
        return RecordingError(f"system {self._name} showed {found} in step {index}", expected=expected, fix=fix)


_WATCH = (
    "return the loss from step, and bitproof.watch(step, model=..., optimizer=...) from the factory: it shows the rest"
)


def _refuse_what_trains_nothing(name: str, made: Any) -> None:
    what, fix = None, _WATCH
    if made is None:
        what, fix = (
            "None",
            f"end the factory with `return`, such as `return system`; to show a trainer's values, {_WATCH}",
        )
    elif isinstance(made, type):
        what, fix = f"the class {made.__name__}", f"return an object of it: {made.__name__}(...)"
    # A module with a method `step` may itself be a system.
    elif isinstance(made, torch.nn.Module) and not hasattr(made, "step"):
        what, fix = f"a model ({type(made).__name__})", f"wrap it in bitproof.watch: {_WATCH}"
    elif isinstance(made, torch.optim.Optimizer):
        what = f"an optimizer ({type(made).__name__})"
    if what is not None:
        raise UsageError(
            f"the factory of system {name} returned {what}, which trains nothing",
            expected="an object with step(index, observe), or with a generator step(index), or such a function",
            fix=fix,
        )


def make(factory: Callable[..., Any], case: Case, mesh: Any) -> Any:
    # A factory whose parameters all have defaults gets the case and the mesh.
    return factory() if _takes(factory) and not _takes(factory, case, mesh) else factory(case, mesh)


def _takes(step: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(step).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _describe(shown: tuple[Any, ...]) -> str:
    return f"({', '.join(repr(part) if isinstance(part, str) else type(part).__name__ for part in shown)})"
