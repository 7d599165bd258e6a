"""What is wrong with a certificate, said and caught in one way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RejectedError(Exception):
    """What is wrong with a certificate."""


def require(holds: bool, otherwise: str) -> None:
    """Reject a certificate in which something does not hold."""
    if not holds:
        raise RejectedError(otherwise)


@contextmanager
def rejecting() -> Iterator[None]:
    """Whatever goes wrong within is what is wrong with a certificate."""
    try:
        yield
    except (OSError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RejectedError(f"{'it lacks' if type(error) is KeyError else type(error).__name__}: {error}") from error
