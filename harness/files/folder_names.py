"""Turn any text into a name of a file or folder, with no two texts alike on any file system.

- A short text of lowercase letters, digits and underscores stays unchanged.
- Any other text becomes its last 60 characters, with `-` for unsafe characters, and a digest of the whole text:
  `sub/t.py:make` becomes `sub-t.py-make-06e9681bfb5f`.

So texts may have any length, and may differ only in case. No result ends in a dot and a word, so an ending such as
`.control` can be added to any of them.
"""

from __future__ import annotations

import hashlib
import re

_MOST = 60
_PLAIN = re.compile(rf"[a-z0-9_]{{1,{_MOST}}}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]+")


def file_name(name: str) -> str:
    """Return a safe name of a file or folder for any text, such as `sub-t.py-make-06e9681bfb5f` for `sub/t.py:make`."""
    if _PLAIN.fullmatch(name):
        return name
    # The end of a path says more than its beginning.
    readable = _UNSAFE.sub("-", name)[-_MOST:].strip("-.")
    return f"{readable or 'name'}-{_digest(name)}"


def longer_name(name: str, ending: str, most: int) -> str:
    """Return `name + ending`. If that is longer than `most` characters, replace its end by a digest of the whole."""
    whole = name + ending
    return whole if len(whole) <= most else f"{whole[: most - 13]}_{_digest(whole)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
