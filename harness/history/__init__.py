"""The results of each case, night after night: `store` keeps them, `trends` summarizes them, `show` and `plot` present
them."""

from __future__ import annotations
