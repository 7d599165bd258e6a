"""The error for a rejected certificate, and a context that turns any error into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RejectedError(Exception):
    """A certificate is wrong or damaged."""


def require(holds: bool, otherwise: str | Callable[[], str]) -> None:
    """Reject the certificate unless a condition holds; a function says why where saying it is much of the work."""
    if not holds:
        raise RejectedError(otherwise if isinstance(otherwise, str) else otherwise())


@contextmanager
def rejecting() -> Iterator[None]:
    """Within this context, any error is a RejectedError."""
    try:
        yield
    except (OSError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RejectedError(f"{'it lacks' if type(error) is KeyError else type(error).__name__}: {error}") from error
