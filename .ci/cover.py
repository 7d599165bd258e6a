"""Print the cases that every submission runs beside those of `make run`: few, and yet each value that any case gives
to a setting is in one of them.

    $ python .ci/cover.py
    adamw_foreach adamw_fused captured_experts_tp ...

All cases take too long for each submission, and most differ from a neighbour in one setting. `make nightly` runs all.
"""

import dataclasses
from collections.abc import Iterator

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case

MAIN = ("transformer_batch", "moe_batch", "moe_seq", "sight")  # `make run`
LONG = ("debug", "joint_llama3_inductor", "flex_marked", "autoplace_llama3_inductor")  # `make long-cases`
NOT_SETTINGS = {"name", "steps"}


def settings(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each setting below `value`, by its path, with its value: ("parallelism.tp", "2")."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if path or field.name not in NOT_SETTINGS:
                yield from settings(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from settings(item, (*path, name))
    else:
        yield ".".join(path), repr(value)


def cover(cases: list[Case]) -> list[Case]:
    """Greedy: the case with the most values that none before it has, and of those the one with the fewest ranks."""
    values = {case: {*settings(case)} for case in cases}
    missing = set().union(*values.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(values[case] & missing), -case.parallelism.world_size * case.steps))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen, key=cases.index)


if __name__ == "__main__":
    short = [case for case in CASES.values() if not any(part in case.name for part in (*MAIN, *LONG))]
    print(*(case.name for case in cover([case for case in short if case.requires != "cuda"])))
