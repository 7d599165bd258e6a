"""Replaces calls of some operators by wrong calls, in any system.

A dispatch mode that is entered later and records the calls sees the correct inputs and the wrong output, as if the
kernel were wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bitproof.harness.disturb.entry import Entry
from bitproof.harness.disturb.faults.clock import Clock
from bitproof.harness.graph.operators import name_of
from bitproof.harness.torch_compat import TorchDispatchMode, disable_current_modes
from bitproof.harness.torch_operators import schema_of


@dataclass
class TamperedCall:
    """A call of an operator that a fault replaces.

    `turn` is the number of earlier calls of the operator in this step. `fire` records that the fault was applied.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    turn: int
    clock: Clock
    fire: Callable[[], None]

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def with_(this, **changes: Any) -> Any:  # noqa: N805 (an argument of an operator may be named self)
        """Run the call with some arguments replaced, given by name, and record that the fault was applied."""
        this.fire()
        # A changed argument stays at its position if the call gave it by position; all others go by name.
        names = [argument.name for argument in schema_of(this.function).arguments]
        args = [changes.pop(name, value) for name, value in zip(names, this.args, strict=False)]
        return this.function(*args, **{**this.kwargs, **changes})

    def given(self, name: str) -> Any:
        """Return the argument called `name`; None if the call omits it."""
        names = [argument.name for argument in schema_of(self.function).arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}.get(name)


@contextmanager
def tampered(entry: Entry | None, clock: Clock, fire: Callable[[], None]) -> Iterator[Counter[str]]:
    """Context in which the fault `entry` replaces calls of its operators. Yields the number of calls in this step, by
    operator.

    The caller clears these counts at each step. If `entry` is None or replaces no calls, nothing changes.
    """
    turns: Counter[str] = Counter()
    if entry is None or entry.call is None:
        yield turns
        return
    wanted, tamper = frozenset(entry.operators), entry.call

    class Tampering(TorchDispatchMode):
        # By default, torch refuses higher-order operators, such as FlexAttention, under a mode.
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            # Compiled code stays compiled: by default it runs uncompiled under a mode, with other bits.
            return True

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = name_of(function)
            if name not in wanted:
                return function(*args, **kwargs or {})
            turns[name] += 1
            # A mode is off inside its own `__torch_dispatch__`, so calls that `tamper` makes are not replaced again.
            return tamper(TamperedCall(function, args, kwargs or {}, turns[name] - 1, clock, fire))

    with Tampering():  # type: ignore[no-untyped-call]
        yield turns


def untampered(observe: Callable[..., None]) -> Callable[..., None]:
    """Wrap an observer of the system, so that its operator calls are hidden from dispatch modes, and so from faults."""

    def observed(*args: Any) -> None:
        with disable_current_modes():
            observe(*args)

    return observed
