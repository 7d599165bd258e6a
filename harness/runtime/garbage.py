"""How often Python's garbage collector runs in bitproof's own processes."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""The number of new objects after which garbage is collected.

With Python's default of 700, a step would spend 3 to 5 % of its time on that, and a search for a cause more. Both keep
many objects until their end, and none of them is garbage.
"""


def collect_rarely() -> None:
    gc.set_threshold(_NEW_OBJECTS)
