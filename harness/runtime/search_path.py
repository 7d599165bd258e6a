"""The folders in which bitproof's own processes search for a user's modules."""

from __future__ import annotations

import os
import sys


def search_path() -> list[str]:
    """Return the search path of ranks and of the process that forks them.

    The working directory comes first, except in Python's safe mode.
    """
    here = [] if sys.flags.safe_path else [""]
    return list(dict.fromkeys(folder or os.getcwd() for folder in (*here, *sys.path)))
