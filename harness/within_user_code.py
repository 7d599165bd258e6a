"""Keep user code from hiding bitproof's errors: each error is noted at once, and raised again when the user code ends.

bitproof's hooks and patched functions run in the middle of a trainer. The trainer may swallow their errors, for example
with `except Exception` or a `return` in `finally`. Then it continues in a way that never occurs without bitproof, and
comparing such a run proves nothing. Three contexts prevent this:

1. `refusing()` surrounds each piece of bitproof's code that user code calls. Any exception that leaves this piece is a
   refusal: an error that must end the run.
2. `theirs(call)` calls the user's code from such a piece. Exceptions of this call are the trainer's own, not refusals.
3. `refusals_raised()` surrounds the user code. When the user code ends, it raises the first refusal again, in place of
   any other exception.

A refusal is also passed to `tell` before the trainer sees it. So a rank reports it at once to the process that forked
it, which ends the run. A trainer cannot hide a refusal by running forever or by `os._exit`.

Example: `with refusing(): observe("grad", name, gradient)` inside an optimizer's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

_THEIRS = "_raised_by_user_code"


class _Scope:
    """Stores the first refusal in a context `refusals_raised()`. Later refusals are ignored, as they may be
    consequences of it."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self.first: BaseException | None = None
        self._tell = tell

    def hear(self, error: BaseException) -> None:
        if self.first is None:
            self.first = error
            self._tell(error)


_scopes: list[_Scope] = []
"""The open scopes of this process, from any thread; none outside of user code."""


def refused(error: E) -> E:
    """Record `error` as a refusal and return it, for `raise refused(...)`. Outside of user code, only return it."""
    for scope in tuple(_scopes):
        scope.hear(error)
    return error


class refusing(ContextDecorator):  # noqa: N801 (reads as a context manager: `with refusing():`, `@refusing()`)
    """Context for bitproof's code within user code: an exception that leaves it is recorded as a refusal."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and _THEIRS not in vars(error):
            refused(error)


def theirs(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the user's code from within bitproof's. Exceptions of the call are not refusals."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        vars(error)[_THEIRS] = True
        raise


@contextmanager
def refusals_raised(tell: Callable[[BaseException], None] = lambda error: None) -> Iterator[None]:
    """Context for user code, which may swallow bitproof's errors.

    The first refusal in it, an error of bitproof that must end the run, is passed to `tell` at once. When the context
    ends, the refusal is raised again, even if the user code has caught it.
    """
    scope = _Scope(tell)
    _scopes.append(scope)
    try:
        yield
    except BaseException:
        # After a refusal, the exception of the user's code is dropped: the refusal is raised below.
        if scope.first is None:
            raise
    finally:
        _scopes.remove(scope)
    if scope.first is not None:
        raise scope.first  # outside of the handler, so that it keeps its own cause and context
