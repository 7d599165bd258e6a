"""How often Python looks for garbage in a process of ours."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""The number of new objects before Python collects garbage. With the default of 700, a step would spend 3 to 5 % of its
time on that, and a search for a cause more: both hold many objects until their end, none of them garbage."""


def look_seldom() -> None:
    """From now on, in this process and those forked from it."""
    gc.set_threshold(_NEW_OBJECTS)
