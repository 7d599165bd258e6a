"""Complete names in a shell: cases, systems and faults. `bitproof --install-completion` switches it on.

    bitproof run moe<TAB>                    moe_batch  moe_seq  ...
    bitproof run -k moe_seq --inject fl<TAB> flip-bit

The shell runs bitproof to get the names. If that fails, for example because of a mistake in a case, the shell shows no
names. Running the command itself reports the mistake.
"""

from __future__ import annotations

from collections.abc import Callable


def names_of_cases(incomplete: str) -> list[str]:
    """Return the built-in cases whose names begin with `incomplete`, for completion in a shell.

    In an expression such as `moe or tra`, only the last word is completed, and each result begins with `moe or `.
    """
    from bitproof.builtin_cases import all_cases

    before, _, word = incomplete.rpartition(" ")
    return [f"{before} {case.name}".lstrip() for case in all_cases() if case.name.startswith(word)]


def names_of_systems(incomplete: str) -> list[str]:
    """Return the systems whose names begin with `incomplete`, of bitproof and of installed packages."""
    from bitproof.harness.systems.registry import NAMED, registered

    return [name for name in (*NAMED, *registered()) if name.startswith(incomplete)]


def names_of_faults(incomplete: str) -> list[str]:
    """Return the faults whose names begin with `incomplete`: faults of the catalogue, and faults with arguments such as
    `flip-bit`."""
    from bitproof.harness.disturb.entry import catalogue
    from bitproof.harness.disturb.faults import FAULTS

    return [name for name in (*FAULTS, *catalogue()) if name.startswith(incomplete)]


def names_in_catalogue(incomplete: str) -> list[str]:
    """Return the faults of the catalogue whose names begin with `incomplete`."""
    from bitproof.harness.disturb.entry import catalogue

    return [name for name in catalogue() if name.startswith(incomplete)]


COMPLETED: dict[str, Callable[[str], list[str]]] = {
    "candidate": names_of_systems,
    "reference": names_of_systems,
    "inject": names_of_faults,
}
"""Maps the keyword of a setting to the function that completes the setting's values in a shell."""
