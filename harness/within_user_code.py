"""Raises bitproof's errors again when the user code ends, in case the user code has swallowed them.

bitproof's hooks run in the middle of a trainer. The trainer may catch their errors, for example by `except Exception`,
and continue in a way that never occurs without bitproof. Comparing such a run would prove nothing. An error of
bitproof's code inside user code is called a refusal; it must end the run.

1. `refusing()` surrounds bitproof's code that user code calls. An exception that leaves this context is a refusal.
2. `theirs(call)` calls user code from there. Its exceptions are not refusals.
3. `refusals_raised()` surrounds the user code, and raises the first refusal again at its end.

Example: `with refusing(): observe("grad", name, gradient)` inside an optimizer's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

_THEIRS = "_raised_by_user_code"


class _Scope:
    """Stores the first error that must end the run, within `refusals_raised()`. Later errors may follow from it."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self.first: BaseException | None = None
        self._report = report

    def hear(self, error: BaseException) -> None:
        if self.first is None:
            self.first = error
            self._report(error)


_scopes: list[_Scope] = []
"""The open scopes of this process, from all threads."""


def refused(error: E) -> E:
    """Record `error` as an error that must end the run, and return it, as in `raise refused(...)`.

    Outside user code, it is only returned.
    """
    for scope in tuple(_scopes):
        scope.hear(error)
    return error


class refusing(ContextDecorator):  # noqa: N801 (reads as a context manager: `with refusing():`, `@refusing()`)
    """Context for bitproof's code inside user code: an exception that leaves it is recorded, and must end the run."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and _THEIRS not in vars(error):
            refused(error)


def theirs(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call user code from within bitproof's code.

    An exception of the user code is not treated as an error of bitproof.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        vars(error)[_THEIRS] = True
        raise


@contextmanager
def refusals_raised(report: Callable[[BaseException], None] = lambda error: None) -> Iterator[None]:
    """Context for user code, which may swallow bitproof's errors.

    The first refusal (an error of bitproof that must end the run) is passed to `report` at once. It is raised again
    when the context ends, even if the user code has caught it.
    """
    # On a rank, this reports the refusal to the parent process, which ends the run even if the trainer never returns.
    scope = _Scope(report)
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
