"""The error of a certificate, and a context in which any error becomes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RejectedError(Exception):
    """A certificate is wrong or damaged."""


def require(holds: bool, otherwise: str) -> None:
    """Reject a certificate in which something does not hold."""
    if not holds:
        raise RejectedError(otherwise)


@contextmanager
def rejecting() -> Iterator[None]:
    """Within this context, any error is a RejectedError."""
    try:
        yield
    except (OSError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RejectedError(f"{'it lacks' if type(error) is KeyError else type(error).__name__}: {error}") from error
