"""What is made of a case's graph: a rank's program, one with a fault in it, a file that shows what differs by itself.

Loads torch only where it is asked for something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bitproof.harness.case import GRAPH, PREPARED, Case
from bitproof.harness.disturb.faults import CATALOGUE, Fault, Named
from bitproof.harness.graph.options import GraphOptions
from bitproof.harness.machine.determinism import set_determinism

if TYPE_CHECKING:
    import torch

    from bitproof.harness.graph.groups import Partition
    from bitproof.harness.localize.standalone import Written


def needs_program(system: str) -> bool:
    """Whether a system runs a prepared graph."""
    return system in PREPARED


def prepare_program(
    case: Case,
    device: torch.device,
    options: GraphOptions,
    enter: Callable[[str], None] = lambda place: None,
    *,
    system: str = GRAPH,
) -> Any:
    """Trace the case's training step and run the graph passes over it. `enter` is told each place that is come to.

    Switches are set before: by them torch chooses kernels, and so operators, of attention above all.
    """
    import torch

    from bitproof.harness.systems.graph import prepare

    assert torch.are_deterministic_algorithms_enabled(), "a program is traced under determinism switches"
    assert device.type == "cpu" or device.index in (None, torch.cuda.current_device()), "and on the current device"

    return prepare(case, device, options, enter, system)


def options_of_rank(options: GraphOptions, rank: int) -> GraphOptions:
    """A rank's options where every rank prepares its own graph: they are all one, so rank 0 alone writes it down."""
    return options if rank == 0 else replace(options, dump_dir=None)


def struck(program: Any, fault: Fault | None, case: Case) -> Any:
    """The program with a fault of the catalogue in its graph, as a pass of its own; the program where it has none.

    Raises UsageError where the graph has nothing of the kind that the fault strikes.
    """
    entry = CATALOGUE[fault.name] if isinstance(fault, Named) else None
    if entry is None or entry.edit is None or program is None:
        return program
    from bitproof.harness.systems.graph import strike_program

    return strike_program(program, entry, case)


def write_standalone(case: Case, options: GraphOptions, step: int, head: str) -> Written:
    """A file that shows by itself what differs between the case's two systems; see `localize.standalone`.

    Options are the candidate's. Raises NoFileError where there can be none.
    """
    import torch

    from bitproof.harness.localize.standalone import Scene, Side, write_standalone
    from bitproof.harness.systems.graph import rank_order_group_source, read_inputs, step_graph

    tokens = read_inputs(case, step)
    sides: dict[str, Side] = {}
    partitions: dict[str, Partition] = {}
    for role, role_options in (("reference", GraphOptions()), ("candidate", options)):
        set_determinism(case.seed)
        graph, groups = step_graph(case, getattr(case, role), torch.device("cpu"), role_options)
        sides[role] = Side.of(graph, list(tokens[0]))
        partitions |= groups.partitions()
    scene = Scene(sides, case.parallelism.world_size, partitions, tokens, head, rank_order_group_source())
    return write_standalone(scene)
