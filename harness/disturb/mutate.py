"""Applies a fault's edit to a copy of a finished graph."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Graph, GraphModule

from bitproof.harness.case import Case
from bitproof.harness.disturb.entry import Entry, Site
from bitproof.harness.disturb.graph_editor import GraphEditor, NoPlaceError
from bitproof.harness.errors import BitproofError, PassError, UsageError
from bitproof.harness.graph.observation import insert_observers, remove_observers
from bitproof.harness.graph.verify import verify_order


class MutatedGraph(NamedTuple):
    """A graph with a fault, and the calls that a report may blame for it."""

    module: GraphModule
    sites: list[Site]


def mutate(entry: Entry, module: GraphModule, case: Case, rank: int = 0) -> MutatedGraph:
    """Apply the edit of a fault to a copy of a rank's finished graph.

    Returns the copy, and the calls that a report may blame. Raises UsageError if the fault finds no call to change, or
    if its edit fails.
    """
    assert entry.edit is not None, "only edits change graphs"
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    # `graph_copy` returns the output's arguments but copies no output node, and so no metadata of it.
    graph.output_node().meta.update(module.graph.output_node().meta)
    try:
        editor = GraphEditor(graph, case, rank)
        looking = remove_observers(graph)  # observations do not count as readers
        # An edit that leaves the text of the graph unchanged has changed nothing.
        before = str(graph)
        sites = entry.edit(editor)
        changed = str(graph) != before
        insert_observers(graph, editor.remaining_observations(looking))
        # The edit must leave a valid graph: otherwise the run would fail instead of computing wrong bits.
        verify_order(graph)
    except NoPlaceError as error:
        raise UsageError(
            f"fault {entry.name} never fired: {error.what}",
            expected=error.expected,
            fix="choose another case: see `bitproof faults --list`",
        ) from error
    # The edit left a graph that cannot run, such as a call before its input.
    except PassError as error:
        raise UsageError(
            f"fault {entry.name} cannot be struck into the graph of case {case.name}",
            expected="a graph in which the calls that it exchanges stand as our tracer records them",
            found=f"{error.what}: {error.found}",
            fix="choose another case: see `bitproof faults --list`",
        ) from error
    # An error of bitproof's own already states its cause.
    except BitproofError:
        raise
    except Exception as error:  # a mistake in the edit itself must not look like a fault that was detected
        raise UsageError(
            f"fault {entry.name} is broken: its edit raised {type(error).__name__}: {error}",
            fix="mend the edit of this fault in harness/disturb/faults",
        ) from error
    if not changed:
        raise UsageError(
            f"fault {entry.name} never fired: in the graph of case {case.name} it would change nothing",
            fix="choose another case: see `bitproof faults --list`",
        )
    return MutatedGraph(GraphModule(module, graph), sites)
