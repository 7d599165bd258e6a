"""The passes' table of process groups. Passes run without process groups, so they refer to groups by name.

A pass may add a group, which ranks then make before they run the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitproof.harness.errors import PassError

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """A process group, which has one or more instances with separate ranks.

    - `object`: a name for the process-group object. Groups with the same object are several names of a single process
      group, so their collectives wait for each other.
    - `partition`: the ranks of each instance. For example, the group `tp` of size 2 over 4 ranks has the instances (0,
      1) and (2, 3).
    """

    object: str
    partition: Partition
    high_priority: bool = False


@dataclass
class GroupTable:
    """All process groups by name.

    `derived` lists the groups that passes have added, in the order in which ranks make them.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Group:
        """Return the group called `name`. Raises PassError if there is none."""
        if name not in self.groups:
            raise PassError(
                f"the graph names an unknown process group: {name}",
                expected="one of " + (", ".join(self.groups) or "none: the pass was given no groups"),
                found=name,
                fix="list the group in the context's table of groups",
            )
        return self.groups[name]

    def derive(self, source: str, purpose: str, *, high_priority: bool = False) -> str:
        """Return the name of a separate group over the ranks of `source`. Adds the group to the table if it is missing.

        `purpose` is the last part of the name, such as EXPERT_ONLY.
        """
        name = derived_name(source, purpose)
        if name not in self.groups:
            self.groups[name] = Group(name, self[source].partition, high_priority)
            # Ranks make the groups in this order, which all passes determine alike on every rank.
            self.derived.append(name)
        return name

    def partitions(self) -> dict[str, Partition]:
        return {name: group.partition for name, group in self.groups.items()}

    def made(self) -> Mapping[str, Group]:
        """Return name -> group for the groups that ranks must make, in the order in which they must make them."""
        return {name: self.groups[name] for name in self.derived}


def derived_name(source: str, purpose: str) -> str:
    """Return the name of a new group over the ranks of `source`, such as ep.expert_only.

    It is the same on every rank.
    """
    return f"{source}.{purpose}"


EXPERT_ONLY = "expert_only"
"""The purpose of a group that runs only the all-to-alls of experts."""

GATHERS = "gathers"
"""The purpose of a group that runs only all-gathers of parameters."""
