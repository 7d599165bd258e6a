"""Names that a shell completes: cases, systems and faults. `bitproof --install-completion` switches it on.

    bitproof run moe<TAB>                    moe_batch  moe_seq  ...
    bitproof run -k moe_seq --inject fl<TAB> flip-bit

A shell asks by running the command, and shows nothing if that fails. So does each of these: a mistake of an installed
package or in a case is reported by the command itself.
"""

from __future__ import annotations

from collections.abc import Callable


def names_of_cases(incomplete: str) -> list[str]:
    """The built-in cases whose names begin so; within an expression, after its last word: `moe or tra`."""
    from bitproof.builtin_cases import all_cases

    before, _, word = incomplete.rpartition(" ")
    return [f"{before} {case.name}".lstrip() for case in all_cases() if case.name.startswith(word)]


def names_of_systems(incomplete: str) -> list[str]:
    """The systems whose names begin so: the built-in ones, and those of installed packages."""
    from bitproof.harness.systems.registry import NAMED, registered

    return [name for name in (*NAMED, *registered()) if name.startswith(incomplete)]


def names_of_faults(incomplete: str) -> list[str]:
    """The faults whose names begin so: those of the catalogue, and kinds that take arguments, such as `flip-bit`."""
    from bitproof.harness.disturb.entry import catalogue
    from bitproof.harness.disturb.faults import FAULTS

    return [name for name in (*FAULTS, *catalogue()) if name.startswith(incomplete)]


COMPLETED: dict[str, Callable[[str], list[str]]] = {
    "candidate": names_of_systems,
    "reference": names_of_systems,
    "inject": names_of_faults,
}
"""How values of the settings are completed, by keyword."""
