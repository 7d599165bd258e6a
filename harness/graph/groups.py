"""The passes' table of process groups: for each name, its process-group object and its ranks.

Passes run without process groups. They use this table, and add to it the groups that ranks must make before they run
the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitproof.harness.errors import PassError

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """A process group, which has one or more instances with separate ranks.

    - `partition`: the ranks of each instance. For example, over 4 ranks the group `tp` of size 2 has the instances (0,
      1) and (2, 3).
    - `object`: the name of the process-group object. Two groups with the same object are two names of a single process
      group, so their collectives wait for each other.
    """

    object: str
    partition: Partition
    high_priority: bool = False


@dataclass
class GroupTable:
    """Every group by name. `derived` are the groups that passes added, in the order in which ranks must make them."""

    groups: dict[str, Group] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Group:
        """Return the group with this name. Raises PassError if the table has none."""
        if name not in self.groups:
            raise PassError(
                f"the graph names an unknown process group: {name}",
                expected="one of " + (", ".join(self.groups) or "none: the pass was given no groups"),
                found=name,
                fix="list the group in the context's table of groups",
            )
        return self.groups[name]

    def derive(self, source: str, purpose: str, *, high_priority: bool = False) -> str:
        """Return the name of a separate group over the ranks of `source` for a `purpose`, such as EXPERT_ONLY.

        Adds the group to the table if it is not there yet.
        """
        name = derived_name(source, purpose)
        if name not in self.groups:
            self.groups[name] = Group(name, self[source].partition, high_priority)
            # Ranks make the groups in this order, which all passes determine alike on every rank.
            self.derived.append(name)
        return name

    def partitions(self) -> dict[str, Partition]:
        """Return the ranks of every instance of each group, by name."""
        return {name: group.partition for name, group in self.groups.items()}

    def made(self) -> Mapping[str, Group]:
        """Return the groups that ranks must make, by name, in the order in which ranks must make them."""
        return {name: self.groups[name] for name in self.derived}


def derived_name(source: str, purpose: str) -> str:
    """Return the name of a new group over the ranks of `source`, the same on every rank: ep.expert_only."""
    return f"{source}.{purpose}"


EXPERT_ONLY = "expert_only"
"""The purpose of a group for expert all-to-alls only."""

GATHERS = "gathers"
"""The purpose of a group for parameters' all-gathers only."""
