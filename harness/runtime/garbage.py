"""Sets how often Python collects garbage in bitproof's own processes."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""The number of new objects before Python collects garbage. With the default of 700, a step would spend 3 to 5 % of its
time on that, and a search for a cause more: both keep many objects until their end, none of them garbage."""


def look_seldom() -> None:
    """Make Python collect garbage rarely from now on, in this process and its forks."""
    gc.set_threshold(_NEW_OBJECTS)
