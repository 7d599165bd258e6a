"""What came of each case, night after night: `store` keeps it, `trends` sums it up, `show` and `plot` tell it."""

from __future__ import annotations
