"""Find buffers that only one of two systems registers, and decide their effect on the verdict.

- A constant buffer, such as `positions`, is only another way to write a number. It leads to a remark, and the other
  tensors decide the verdict.
- A buffer that steps change is state. If only one system has it, nothing shows that its values are right.

    candidate alone   positions   the same bits at every step     EQUAL is EQUAL, with a remark
    candidate alone   count       other bits at a later step      EQUAL and CLOSE are UNVERIFIED

In three cases the records of such a buffer count as missing, as records of any other kind would:

- The other system does not record all of its buffers (no `shows_every_buffer` in its manifest).
- Each system has buffers that the other lacks. They may be the same buffers under two names.
- The other system has the buffer on some rank or at some step.

Settings and attributes of an optimizer have records (`@changed`) only at the steps that change them. If only one system
has such a record, EQUAL and CLOSE become UNVERIFIED. If the other system never records such changes, they lead only to
a remark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bitproof.harness.records import ROLES, Key, Record, Recording, Role

_NUM_NAMED = 5


@dataclass(kw_only=True)
class OneSided:
    """Buffers that only one system has, and optimizer settings that only one system's steps change.

    - `side`: the system with the buffers, None if there are none.
    - `names`: the names of these buffers.
    - `changed`: the names of those buffers that steps change.
    - `settings`: for each system, the settings that only its steps change.
    - `compared`: the systems whose `settings` count against the verdict, because the other system would have recorded
      such changes.
    """

    side: Role | None = None
    names: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    settings: dict[Role, list[str]] = field(default_factory=dict)
    compared: frozenset[Role] = frozenset()

    def covers(self, key: Key) -> bool:
        is_setting = key.is_changed_setting and any(bare(key.name) in names for names in self.settings.values())
        return is_setting or (key.kind == "buffer" and bare(key.name) in self.names)

    def remarks(self) -> Iterator[str]:
        """Yield sentences for the report that name the buffers and settings that only one system has."""
        if self.side is not None:
            what = "it stays the same" if len(self.names) == 1 else "they stay the same"
            held = f"; {what} in all steps, and what it changes is compared" if not self.changed else ""
            yield f"only the {self.side} has buffer {_first_few(self.names)}{held}"
        for role, names in self.settings.items():
            yield f"only the {role}'s steps change {_first_few(names)} of its optimizer"

    def unshown(self) -> Iterator[str]:
        """Yield a sentence for each reason why the systems may differ although all other tensors agree."""
        if self.changed:
            which = "it" if len(self.changed) == 1 else "them"
            yield f"only the {self.side} has buffer {_first_few(self.changed)}, and steps change {which}"
        for role, names in self.settings.items():
            if role in self.compared:
                yield f"only the {role}'s steps change {_first_few(names)} of its optimizer"


def one_sided(
    sides: Sequence[Recording], unpaired: Mapping[Role, Iterable[tuple[Key, Record]]], num_steps: int
) -> OneSided:
    """Return the buffers and changed settings that only one of two recordings has.

    `unpaired` has, by role, the records of buffers and changed settings that have no partner.
    """
    if sides[0].manifest.system == sides[1].manifest.system:
        return OneSided()  # two runs of the same system register the same
    # A system that records all its buffers also records changed settings, so the other's changes have no counterpart.
    changing = {
        role: [*dict.fromkeys(bare(k.name) for k, _ in unpaired[role] if k.kind == "optimizer")] for role in ROLES
    }
    settings = {role: names for role, names in changing.items() if names}
    compared = frozenset(role for role in settings if sides[1 - ROLES.index(role)].manifest.shows_every_buffer)
    only_settings = OneSided(settings=settings, compared=compared)
    # By role and bare name, then by rank and moment (the record's full name): the digest at each step.
    found: dict[Role, dict[str, dict[tuple[int, str], dict[int, str]]]] = {role: {} for role in ROLES}
    for role in ROLES:
        for key, record in unpaired[role]:
            if key.kind == "buffer":
                moment = (key.rank, key.name)
                found[role].setdefault(bare(key.name), {}).setdefault(moment, {})[key.step] = record.digest
    # If both sides have unpaired buffers, they may be the same buffers under two names.
    having = [role for role in ROLES if found[role]]
    if len(having) != 1:
        return only_settings
    (role,) = having
    other = sides[1 - ROLES.index(role)]
    if not other.manifest.shows_every_buffer:
        return only_settings
    # Buffers that the other system has on some rank or at some step: their missing records are gaps.
    paired = {bare(key.name) for key in _buffers_of(other)}
    names = {name: moments for name, moments in found[role].items() if name not in paired}
    changed = [name for name, moments in names.items() if _changes(moments, num_steps)]
    return replace(only_settings, side=role if names else None, names=[*names], changed=changed)


def _changes(moments: Mapping[tuple[int, str], Mapping[int, str]], num_steps: int) -> bool:
    # Over all moments of a step: a buffer that forward changes and the optimizer changes back is no constant.
    # `moments` has (rank, record name) -> step -> digest.
    by_rank: dict[int, set[str]] = {}
    for (rank, _), steps in moments.items():
        by_rank.setdefault(rank, set()).update(steps.values())
    is_at_all = all(len(steps) == num_steps for steps in moments.values())
    return not is_at_all or any(len(values) > 1 for values in by_rank.values())


def _buffers_of(recording: Recording) -> Iterator[Key]:
    for rank in recording.ranks:
        yield from (key for key in recording.records_of(rank) if key.kind == "buffer")


def bare(name: str) -> str:
    """Return the name of a buffer or setting without a suffix such as `@after_optimizer` or `@changed`."""
    return name.rpartition("@")[0] or name


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
