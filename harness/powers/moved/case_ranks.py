"""Runs a system on each rank of `bitproof record`, and watches its operator calls for `bitproof moved`.

A request states which results to record or replace. The environment variable REQUEST has the path of its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bitproof.harness.case import GRAPH, Case
from bitproof.harness.errors import UsageError
from bitproof.harness.powers.moved.program_runs import REQUEST
from bitproof.harness.powers.moved.standalone import exchanging, recording_calls
from bitproof.harness.powers.moved.standalone.call_archive import read_json
from bitproof.harness.powers.moved.standalone.call_events import name_unreplayed
from bitproof.harness.systems.registry import BUILT_IN, load_factory
from bitproof.harness.systems.user_system import UserSystem
from bitproof.harness.systems.user_system import make as made_by
from bitproof.harness.torch_compat import disable_current_modes
from bitproof.reference.parallel.mesh import Mesh, ranks_in

Observe = Callable[[Any, str, torch.Tensor], None]


def make(case: Case, mesh: Mesh) -> WatchedRank:
    """Make the system that a request of `bitproof moved` names, for this rank, and watch its operator calls."""
    request = json.loads(Path(os.environ[REQUEST]).read_text())
    return WatchedRank(request, case, mesh)


class WatchedRank:
    """Runs the steps of another system, `inner`, and watches the operator calls of these steps."""

    def __init__(self, request: Mapping[str, Any], case: Case, mesh: Mesh) -> None:
        self.request, self.case, self.rank = request, case, mesh.rank
        self.folder = os.path.join(request["folder"], str(mesh.rank))
        self.session = self._begin(request["what"], **request["asked"])
        # A program of several ranks also has collectives, which the standalone part does not know.
        self.session.events.name_unreplayed = _name_unread
        # Before calls are watched: tracing calls operators, too.
        program = _program(request["system"], case, mesh)
        with self.session.events:
            self.inner = _inner_system(request["system"], case, mesh, program)
        if hasattr(self.inner, "manifest"):
            self.manifest = self.inner.manifest

    def step(self, index: int, observe: Observe) -> None:
        """Run a step of the watched system. After the last step, write the answer to the request."""

        def shown(kind: Any, name: str, tensor: torch.Tensor) -> None:
            with disable_current_modes():  # calls of the recorder are not the system's calls
                observe(kind, name, tensor)

        with self.session.events:
            self.inner.step(index, shown)
        # The system may have caught the error of a listener, so it is raised here.
        if self.session.events.errors:
            raise self.session.events.errors[0]
        # A rank that fails earlier leaves no answer, so the run counts as incomplete.
        if index == self.case.steps - 1:
            answer = Path(self.request["answers"], f"rank{self.rank}.json")
            answer.write_text(json.dumps(self._end()))

    def _begin(self, what: str, **asked: Any) -> Any:
        if what == "record":
            # Each rank has an equal part of the budget.
            return recording_calls.RecordingSession(self.folder, asked["budget"] // self.case.parallelism.world_size)
        results = os.path.join(self.folder, "results")
        if what == "exchange":
            return exchanging.ExchangeSession(results if asked["keys"] else None, set(asked["keys"]))
        budget = asked["budget"] // self.case.parallelism.world_size
        return recording_calls.KeepingSession(results, set(asked["keys"]), set(asked["inputs"]), budget)

    def _end(self) -> dict[str, Any]:
        what, session = self.request["what"], self.session
        if what == "record":
            found: dict[str, Any] = session.end([], self.case.name, [], self.case.steps)
        elif what == "exchange":
            found = session.end(read_json(os.path.join(self.folder, "calls.json"))["log"])
        else:
            found = session.end()
        return found


def _program(name: str, case: Case, mesh: Mesh) -> Any:
    if name != GRAPH:
        return None
    from bitproof.harness.execute.host.programs import prepare_program
    from bitproof.harness.graph.graph_options import GraphOptions

    return prepare_program(case, mesh.device, GraphOptions())


def _inner_system(name: str, case: Case, mesh: Mesh, program: Any) -> Any:
    if name == GRAPH:
        from bitproof.harness.systems.graph_program import make_graph_system

        # The last argument would let a fault change gradients; here nothing does.
        return make_graph_system(case, mesh, mesh.device, program, lambda gradients: gradients)
    if name in BUILT_IN:
        from bitproof.reference.step import make_eager

        return make_eager(case, mesh, mesh.device, name == "eager_chunked", lambda gradients: gradients)
    factory = load_factory(name)
    made = made_by(factory.make, case, mesh)
    if hasattr(made, "take_steps"):
        raise UsageError(
            f"system {name} loops over its steps itself, so its calls cannot be watched",
            expected="a system with step(index, observe)",
            fix="give its script instead: bitproof moved train.py",
        )
    return UserSystem(name, made, names={}, origin=factory.origin)


def _name_unread(operator: Any, args: Any) -> str:
    if "c10d" not in getattr(operator, "namespace", ""):
        return name_unreplayed(operator, args)
    if "wait_tensor" in str(operator):
        # The launch was counted already.
        return ""
    groups = [ranks for each in args if (ranks := _ranks(each)) is not None]
    text = f"ranks {', '.join(map(str, groups[0]))}" if groups else "a group"
    return f"{operator} over {text}: a collective, which is not replayed alone"


def _ranks(argument: Any) -> tuple[int, ...] | None:
    if isinstance(argument, str):
        return ranks_in(argument)
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    except (RuntimeError, ValueError, TypeError):
        return None
