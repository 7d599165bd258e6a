"""Pauses Python's garbage collector while a graph is made or a certificate is checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    # The code in the context creates n objects that stay alive: searching them for garbage would cost time n log n.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
