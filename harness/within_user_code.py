"""Refusals inside a user's code: recorded when they are raised, and raised again when that code has ended.

Hooks, patched functions and dispatch modes of ours run in the middle of a trainer. The trainer may catch their
exceptions (`except Exception`, `contextlib.suppress`, a `return` in `finally`), or a thread or a callback of C++ may
lose them. Then it trains on as it never would alone, and comparing that means nothing. So nothing depends on what
happens to the exception:

1. `refusing()` surrounds each piece of our code that user code reaches: any exception that leaves it is a refusal.
2. `theirs(call)` makes a call of the user's within such a piece: its exceptions are the trainer's own, not refusals.
3. `refusals_raised()` surrounds user code. It passes a refusal to `tell` before the trainer sees it, and raises it
   again when the user code ends, in place of any other exception. A rank reports it to its watcher, which ends the run:
   a trainer that never ends, or that leaves by `os._exit`, hides nothing either.

Example: `with refusing(): observe("grad", name, gradient)` inside an optimizer's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

_THEIRS = "_raised_by_user_code"


class _Scope:
    """The first refusal within a `refusals_raised()`: later ones may only follow from it."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self.first: BaseException | None = None
        self._tell = tell

    def hear(self, error: BaseException) -> None:
        if self.first is None:
            self.first = error
            self._tell(error)


_scopes: list[_Scope] = []
"""Those that are open in this process, whichever thread opened them; none outside of user code."""


def refused(error: E) -> E:
    """Record a refusal, for `raise refused(...)`. Does nothing where no user code runs."""
    for scope in tuple(_scopes):
        scope.hear(error)
    return error


class refusing(ContextDecorator):  # noqa: N801 (reads as a context manager: `with refusing():`, `@refusing()`)
    """Our code within user code: an exception that leaves this block is a refusal, and recorded."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and _THEIRS not in vars(error):
            refused(error)


def theirs(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make a call of the user's code: what it raises is no refusal of ours."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        vars(error)[_THEIRS] = True
        raise


@contextmanager
def refusals_raised(tell: Callable[[BaseException], None] = lambda error: None) -> Iterator[None]:
    """User code: `tell` takes its first refusal at once, and it is raised at the end, whatever the block raised."""
    scope = _Scope(tell)
    _scopes.append(scope)
    try:
        yield
    except BaseException:
        if scope.first is None:
            raise
    finally:
        _scopes.remove(scope)
    if scope.first is not None:
        raise scope.first  # out of the handler, so that it keeps its own cause and context
