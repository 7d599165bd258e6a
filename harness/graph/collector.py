"""Pauses Python's garbage collector while a graph is made or a certificate is checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector in this context.

    Its code creates many objects that stay alive. Searching them for garbage again and again would take n log n.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
