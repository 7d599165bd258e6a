"""The search path of our processes for a user's modules."""

from __future__ import annotations

import os
import sys


def search_path() -> list[str]:
    """The search path of the host and its ranks: the working directory first, unless Python's safe path is on."""
    here = [] if sys.flags.safe_path else [""]
    return list(dict.fromkeys(folder or os.getcwd() for folder in (*here, *sys.path)))
