"""Define a shard: the cases of a selection that one machine runs, while other machines run the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bitproof.harness.case.case import Case


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a selection of cases that a machine ran: part `index` of `count` parts, counted from 1."""

    index: int
    count: int
    selection: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @staticmethod
    def parse(text: str, selection: Iterable[Case]) -> Shard | None:
        """Return the shard for a text such as `2/4`, part 2 of 4 of `selection`; None for any other text."""
        found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
        if found is None or int(found[1]) > int(found[2]):
            return None
        return Shard(index=int(found[1]), count=int(found[2]), selection=tuple(selection))
