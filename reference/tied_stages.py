"""Adds the gradients of a parameter that two pipeline stages share.

Each stage has a copy of the parameter, and its own gradient. Once a step, the two stages exchange their gradients and
add them, so that the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError
from bitproof.reference.parallel.mesh import PIPELINE, Mesh, pipeline_group
from bitproof.reference.pipeline_stages import stage_of

Join = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Takes parameter name -> gradient, and returns the same dict with the summed gradient for each shared parameter."""

EMBEDDINGS, PROJECTION = "tok_embeddings.weight", "output.weight"


def pair_of(case: Case, name: str) -> tuple[str, str] | None:
    """Return the pair of a shared parameter's names in its two stages, the earlier stage first.

    None if `name` is not shared.
    """
    if (schedule := case.schedule) is None:
        return None
    if schedule.tied and name in (EMBEDDINGS, PROJECTION):
        return EMBEDDINGS, PROJECTION
    first, second = schedule.shared or ("", "")
    for module in (first, second):
        if module and name.startswith(f"{module}."):
            path = name.removeprefix(module)
            return first + path, second + path
    return None


def copies_of(case: Case, names: Iterable[str]) -> dict[str, str]:
    """Return name -> name of the earlier stage's copy, for each of `names` that is a shared parameter's later copy."""
    pairs = {name: pair_of(case, name) for name in names}
    return {name: pair[0] for name, pair in pairs.items() if pair is not None and name == pair[1]}


def share_parameters(model: nn.Module, case: Case) -> None:
    """Change `model` in place: the second of the case's two shared modules uses the parameters of the first.

    Raises CaseError if a module is missing or in the wrong stage, or if the modules' parameters differ in name or
    shape.
    """
    if case.schedule is None or case.schedule.shared is None:
        return
    modules, each = dict(model.named_modules()), case.schedule.shared
    if missing := [name for name in each if not name or name not in modules]:
        raise _sharing_error(case, "names a shared module that the model does not have", ", ".join(missing))
    forms = [{name: tuple(x.shape) for name, x in modules[name].named_parameters()} for name in each]
    if forms[0] != forms[1] or not forms[0]:
        raise _sharing_error(case, "shares the parameters of modules of another form", " and ".join(map(str, forms)))
    stages = [stage_of(name, model.num_layers, case.stages) for name in each]  # type: ignore[arg-type]
    if stages[0] >= stages[1]:
        raise _sharing_error(
            case, "shares parameters that lie in no two stages, one after the other", f"stages {stages}"
        )
    for path in forms[0]:
        owner, _, name = path.rpartition(".")
        own, other = (modules[at].get_submodule(owner) for at in each)
        other.register_parameter(name, own.get_parameter(name))


def _sharing_error(case: Case, what: str, found: str) -> CaseError:
    return CaseError(
        f"case {case.name} {what}",
        expected="schedule.shared: two modules with the same parameters, the first in an earlier stage than the second",
        found=found,
    )


class _Copies(NamedTuple):
    """The names of a shared parameter in its two stages, and the pipeline coordinates of the ranks
    with these stages.
    """

    names: tuple[str, str]
    coordinates: tuple[int, int]


class JoinTied:
    """Adds the gradients of both copies of each shared parameter. All ranks must construct it together.

    - `names`: the names of this rank's parameters.
    - `is_cut`: True if a rank has only the layers of its own stages.
    """

    def __init__(self, case: Case, mesh: Mesh, names: Iterable[str], num_layers: int, is_cut: bool) -> None:
        schedule = case.schedule
        self._coordinate = mesh.coordinate(PIPELINE)
        pairs = {pair for name in names if (pair := pair_of(case, name)) is not None}
        rank_of = case.stage_map.rank_of
        coordinates = {name: rank_of(stage_of(name, num_layers, case.stages)) for pair in pairs for name in pair}
        # Sorted, since both ranks of a pair must exchange gradients in the same order.
        self._copies = [_Copies(pair, (coordinates[pair[0]], coordinates[pair[1]])) for pair in sorted(pairs)]
        is_tied = schedule is not None and (schedule.tied or schedule.shared is not None)
        # Every rank makes the group, even if it has no copy: making a group is a collective call.
        self._group = pipeline_group(mesh) if is_cut and is_tied else None

    def __call__(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(gradients)
        for copies in self._copies:
            own = {name: gradients[name] for name in copies.names if name in gradients}
            if not own:
                continue
            # A rank may have both stages, and so both copies; `own` has them in the order of `names`.
            first, second = own.values() if len(own) == 2 else self._exchange(copies, next(iter(own.values())))
            found |= {name: first + second for name in own}
        return found

    def _exchange(self, copies: _Copies, own: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange a gradient with the other stage. Returns both gradients, the earlier stage's first."""
        own = own.contiguous()
        other = torch.empty_like(own)
        first, last = copies.coordinates
        # Only the rank of the first copy sends first: two ranks that both send first could wait for each other.
        if self._coordinate == first:
            dist.send(own, group=self._group, group_dst=last)
            dist.recv(other, group=self._group, group_src=last)
            return own, other
        dist.recv(other, group=self._group, group_src=first)
        dist.send(own, group=self._group, group_dst=first)
        return other, own
