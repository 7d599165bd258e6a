"""Convert names to names of files and folders, without collisions on any file system.

- A short name of lowercase letters, digits and underscores stays unchanged.
- Any other name becomes its last 60 characters, with `-` for unsafe characters, and a digest of the whole name. So
  `sub/t.py:make` becomes `sub-t.py-make-06e9681bfb5f`.
- Names may have any length, and two names may differ only in case.

No result ends in a dot and a word, so an ending such as `.control` can be added to any of them.
"""

from __future__ import annotations

import hashlib
import re

_MOST = 60
_PLAIN = re.compile(rf"[a-z0-9_]{{1,{_MOST}}}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]+")


def file_name(name: str) -> str:
    """A safe name of a file or folder for any name, in the form that the top of this file describes."""
    if _PLAIN.fullmatch(name):
        return name
    # The end of a path says more than its beginning.
    readable = _UNSAFE.sub("-", name)[-_MOST:].strip("-.")
    return f"{readable or 'name'}-{_digest(name)}"


def longer_name(name: str, ending: str, most: int) -> str:
    """A name followed by an ending. If this has more than `most` characters, a digest replaces the last characters."""
    whole = name + ending
    return whole if len(whole) <= most else f"{whole[: most - 13]}_{_digest(whole)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
