"""Python's garbage collector, paused while a graph is made, or a certificate of one is checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Making or checking a graph makes many objects that stay: to search them for garbage would cost n log n."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
