"""Supports programs that take optimizers as inputs.

The state tensors of such an optimizer are inputs and outputs of the program, like parameters:

    optimizer NAME.KEY              state tensor KEY of parameter NAME
    written optimizer NAME.KEY      its value after a step

Other state, and settings such as `lr`, are part of the program. If a step changes these, a proof only covers this
single step, not those after it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError

OPTIMIZER = "optimizer "


class HeldOptimizers:
    """The optimizers that a program takes as inputs. `names` maps the id of a parameter to its name.

    Raises RefusedError if an optimizer has a parameter that is not in `names`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self.optimizers = optimizers
        self._slots: dict[str, tuple[Optimizer, Tensor, str]] = {}
        self._names: dict[int, str] = {}
        for optimizer in optimizers:
            for parameter in (x for group in optimizer.param_groups for x in group["params"]):
                if id(parameter) not in names:
                    what = "an optimizer of a parameter that no module among the inputs has"
                    raise RefusedError(what, where="the inputs")
                name = self._names[id(parameter)] = names[id(parameter)]
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        self._slots[f"{OPTIMIZER}{name}.{key}"] = optimizer, parameter, key

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: optimizer.state[parameter][key] for name, (optimizer, parameter, key) in self._slots.items()}

    @contextmanager
    def swapped(self, given: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the optimizers use other tensors within a `with` block: `parameters` to update, and `given` as state.

        Both arguments map names to tensors. Afterwards, the optimizers have their own tensors again.
        """
        kept = [(x, [dict(group) for group in x.param_groups], x.state) for x in self.optimizers]
        try:
            # The original state is put back at the end, so it must stay unchanged: the new parameters get copies of its
            # dictionaries.
            for optimizer, _, state in kept:
                optimizer.state = copy.copy(state)
                optimizer.state.clear()
                for group in optimizer.param_groups:
                    old, group["params"] = group["params"], [parameters[self._names[id(x)]] for x in group["params"]]
                    pairs = zip(old, group["params"], strict=True)
                    optimizer.state.update({own: dict(state[x]) for x, own in pairs if x in state})
            for name, (optimizer, parameter, key) in self._slots.items():
                optimizer.state[parameters[self._names[id(parameter)]]][key] = given[name]
            yield
        finally:
            for optimizer, groups, state in kept:
                optimizer.state = state
                for group, own in zip(optimizer.param_groups, groups, strict=False):
                    group.clear()
                    group.update(own)
