"""The search path on which bitproof's own processes find a user's modules."""

from __future__ import annotations

import os
import sys


def search_path() -> list[str]:
    """The search path of the host process and its ranks: the working directory first, except in Python's safe mode."""
    here = [] if sys.flags.safe_path else [""]
    return list(dict.fromkeys(folder or os.getcwd() for folder in (*here, *sys.path)))
