"""Finds all-to-alls that send rows to experts or back, and the waits for them."""

from __future__ import annotations

from torch.fx import Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.symbols import source_of


def is_exchange(node: Node) -> bool:
    is_all_to_all = operators.is_collective(node) and operators.operator_name(node) == "all_to_all_single"
    # Dispatch sends rows to their experts, combine sends them back. Other code may use all-to-alls, too.
    return is_all_to_all and origin_of(node).part in ("dispatch", "combine")


def only_wait(launch: Node) -> Node:
    """Return the only wait for the collective `launch`.

    Raises PassError if there are several waits or none, or if any other call reads the result, except for its size.
    """
    waits = [user for user in launch.users if operators.is_wait(user)]
    others = [user.name for user in launch.users if user not in waits and operators.operator_name(user) != "sym_size"]
    if len(waits) != 1 or others:
        kind = "all-to-all" if is_exchange(launch) else "collective"
        raise PassError(
            f"cannot determine when the {kind} `{launch.name}` must have arrived",
            expected="one wait, and no other reader but of its size",
            found=f"waits: {len(waits)}; other readers: {', '.join(others) or 'none'}",
            where=source_of(launch),
        )
    return waits[0]
