"""Functions that `shrink` calls in another process, because they load models and trace."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bitproof.harness.case import Case
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.machine.determinism import set_determinism

if TYPE_CHECKING:
    from bitproof.harness.graph.groups import Partition


def model_sizes(case: Case) -> dict[str, int]:
    from bitproof.reference.models import model_config
    from bitproof.reference.models.sizes import sizes_of

    return sizes_of(model_config(case.model))


def write_file(case: Case, extra_passes: list[str], step: int, head: str) -> dict[str, Any]:
    """Write and run a standalone file that shows the difference between the case's two systems.

    Returns a dict with the fields of `Written`.

    - `extra_passes`: passes that are added to the candidate's.
    - `step`: the step whose inputs the file uses.
    - `head`: docstring of the file.

    Raises NoFileError if no file shows a difference.
    """
    import torch

    from bitproof.harness.powers.shrink.standalone import Scene, Side, write_standalone
    from bitproof.harness.systems.step_graphs import rank_order_group_source, read_inputs, step_graph

    # Both sides read the same inputs: the file shows a difference of code, not of data.
    tokens = read_inputs(case, step)
    sides: dict[str, Side] = {}
    partitions: dict[str, Partition] = {}
    for role, passes in (("reference", ()), ("candidate", tuple(extra_passes))):
        # For each side again, so that both start from the same seed and switches.
        set_determinism(case.seed)
        options = GraphOptions(extra_passes=passes)
        graph, groups = step_graph(case, getattr(case, role), torch.device("cpu"), options)
        sides[role] = Side.of(graph, list(tokens[0]))
        partitions |= groups.partitions()
    scene = Scene(sides, case.parallelism.world_size, partitions, tokens, head, rank_order_group_source())
    return asdict(write_standalone(scene))
