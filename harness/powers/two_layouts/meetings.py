"""Collects the sums and exchanges between ranks in a step: the participating ranks, and the phase of the step.

The sums decide which tensors of two layouts must be equal. Over two ranks, a + b is b + a, so the bits must be equal.
Over more ranks the order matters: (a + b) + c may differ from a + (b + c). Backward adds up gradients in place; these
additions are counted. Scaling by a number that is not a power of two rounds the result, so scaling before or after a
sum is recorded, too. A dispatch mode below autograd observes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import frexp
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from bitproof.harness.capture.digest import plain
from bitproof.harness.graph.operators import row_of
from bitproof.harness.operators import Operator
from bitproof.harness.records import Meeting
from bitproof.harness.torch_compat import TorchDispatchMode, tree_leaves
from bitproof.harness.torch_distributed import averages, group_named, group_of
from bitproof.harness.torch_operators import backward_number
from bitproof.harness.within_user_code import refusing

PARTS, SCALE = "parts", "scale"
ADDS = "aten.add"
COPIES_INTO = "aten.copy_"
_SumKey = tuple[str, str, str, str, int]
"""Key of a sum or exchange: (phase, kind, ranks, operator, number of elements in a call)."""


class Sums:
    """Collects the sums and exchanges between a rank and others. After the last step, `meetings` returns them."""

    def __init__(self) -> None:
        # `_in_step` maps each sum of the current step to the backward passes in which it ran; `_found` has the largest
        # number of passes over all steps.
        self._found: dict[_SumKey, int] = {}
        self._in_step: dict[_SumKey, set[int]] = {}
        self._num_backwards = 0
        self._backwards: set[int] = set()
        self._last_backward = -1
        self._shows_gradients = False
        # `_added` counts in-place additions by tensor. At a step's first gradient, `_parts` gets the numbers of parts
        # by address; `_numbers` has those that occurred.
        self._added: Any = WeakTensorKeyDictionary()
        self._parts: dict[int, int] = {}
        self._numbers: set[int] = set()
        self._scaled: dict[StorageWeakRef, str] = {}
        self._summed: dict[StorageWeakRef, tuple[str, str]] = {}

    def begin_step(self) -> None:
        # Steps may differ in their number of backward passes: keep the largest of any step.
        for met, backwards in self._in_step.items():
            self._found[met] = max(len(backwards), self._found.get(met, 0))
        self._num_backwards = max(len(self._backwards), self._num_backwards)
        self._in_step, self._backwards = {}, set()
        self._last_backward, self._shows_gradients = -1, False
        self._added, self._scaled, self._summed = WeakTensorKeyDictionary(), {}, {}

    def noticing(self, observe: Callable[..., None]) -> Callable[..., None]:
        """Wrap `observe` so that this object notices when gradients are recorded.

        The first gradient of a step marks the end of clipping: later sums in the step belong to the update.
        """

        def noticed(kind: str, name: str, tensor: torch.Tensor) -> None:
            if kind == "grad":
                if not self._shows_gradients:  # tensors that live at the same time have memory of their own
                    self._parts = {into.data_ptr(): 1 + count for into, count in self._added.items()}
                self._numbers.add(self._parts.get(plain(tensor).data_ptr(), 1))
            self._shows_gradients |= kind == "grad"
            observe(kind, name, tensor)

        return noticed

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """The sums and exchanges of all steps, without duplicates, in this order:

        1. An entry with the largest number of backward passes in a step.
        2. For each number of parts from which a gradient was added up, an entry.
        3. The sums and exchanges, each with the number of backward passes that ran it.
        """
        # Adds the last step's counts to the totals.
        self.begin_step()
        own = Meeting(phase="forward", what="backward", ranks="", operator="", backwards=self._num_backwards)
        parts = (Meeting(phase="forward", what=PARTS, ranks="", operator="", backwards=n) for n in self._numbers)
        return (
            own,
            *parts,
            *(
                Meeting(phase=phase, what=what, ranks=ranks, operator=name, backwards=count, elements=elements)
                for (phase, what, ranks, name, elements), count in self._found.items()
            ),
        )

    @contextmanager
    def at_work(self) -> Iterator[None]:
        from torch.distributed.tensor import DTensor

        # In the class below `self` is the mode.
        note, sums = self._note, self

        class Watching(TorchDispatchMode):
            supports_higher_order_operators = True

            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if DTensor in types:
                    return NotImplemented  # its calls on local tensors are seen instead
                with refusing():
                    row = row_of(function)
                    if row.in_place_of == ADDS:
                        sums.note_part(args[0])
                    note(row, [*args, *(kwargs or {}).values()] if row.sums_ranks or row.exchanges else [])
                result = function(*args, **kwargs or {})
                with refusing():
                    if row.scales is not None:
                        is_in_place = row.name.endswith("_")
                        sums.note_scale(row.scales, args[0] if is_in_place else result, *args[1:2])
                    elif row.name.replace("_foreach_", "") == COPIES_INTO:
                        sums.note_copy(tree_leaves(args[1:]), tree_leaves(args[0]))
                    elif row.copies is not None or row.packs:
                        sums.note_copy(tree_leaves(args), tree_leaves(result))
                return result

        with Watching():  # type: ignore[no-untyped-call]
            yield

    def note_part(self, total: torch.Tensor) -> None:
        self._added[total] = self._added.get(total, 0) + 1

    def note_scale(self, sign: str, into: torch.Tensor, factor: Any = None) -> None:
        """Record that the tensor `into` was multiplied (`sign` is "*") or divided ("/") by a number.

        The number's power of two is left out: a mean over 3 or 6 ranks is recorded as "/1.5", and a mean over 4 is not
        recorded.
        """
        # frexp returns a fraction from 0.5 up to 1, and an exponent. For a power of two the fraction is 0.5.
        share = frexp(factor)[0] if isinstance(factor, int | float) else 0.5
        if share == 0.5:
            return
        phase, factor_text, memory = self._phase(backward_number()), f"{sign}{2 * share:.17g}", _memory(into)
        if memory is None:
            return
        self._scaled[memory] = factor_text
        # A factor that follows a sum in the same phase rounds that sum.
        when, ranks = self._summed.get(memory, ("", ""))
        if when == phase:
            self._in_step.setdefault((phase, SCALE, ranks, f"after {factor_text}", 0), set()).add(-1)

    def note_copy(self, sources: list[Any], into: list[Any]) -> None:
        """Mark the memory of `into` as scaled if it was copied from `sources` and any of these was scaled."""
        factors = [self._scaled[where] for where in _memories(sources) if where in self._scaled]
        # A concatenation may have sources with several factors: one is enough, as any factor rounds.
        self._scaled |= dict.fromkeys(_memories(into), factors[0]) if factors else {}

    def _note(self, row: Operator, args: list[Any]) -> None:
        backward = backward_number()
        self._last_backward = max(backward, self._last_backward)
        if backward >= 0:
            self._backwards.add(backward)
        ranks = next((ranks for arg in args if (ranks := _ranks_of(arg))), "")
        # A group of a single rank adds nothing.
        if not ranks.count(","):
            return
        phase, num_ranks = self._phase(backward), 1 + ranks.count(",")
        what, name = "sum" if row.sums_ranks else "exchange", row.name.partition(".")[2]
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)] if row.sums_ranks else []
        # Two terms have only one order, so the size does not matter there.
        elements = sum(x.numel() for x in tensors) if num_ranks > 2 else 0
        self._in_step.setdefault((phase, what, ranks, name, elements), set()).add(backward)
        memory = _memories(tensors)
        scales = {f"before {self._scaled[where]}" for where in memory if where in self._scaled}
        # An average divides the sum by the number of ranks.
        if tensors and any(map(averages, args)) and (share := frexp(num_ranks)[0]) != 0.5:
            scales.add(f"after /{2 * share:.17g}")
        for scale in scales:
            # Scaling belongs to no backward pass: -1 stands for one occurrence in the step.
            self._in_step.setdefault((phase, SCALE, ranks, scale, 0), set()).add(-1)
        self._summed |= dict.fromkeys(memory, (phase, ranks))

    def _phase(self, backward: int) -> str:
        if backward >= 0:
            return "backward"
        if self._last_backward < 0:
            return "forward"
        # Gradients are recorded between clipping and the optimizer's update.
        return "update" if self._shows_gradients else "clip"


def _memory(tensor: torch.Tensor) -> StorageWeakRef | None:
    # A weak reference: memory that is allocated later at the same address gets another key. Sparse tensors have no
    # storage.
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None


def _memories(found: list[Any]) -> list[StorageWeakRef]:
    return [where for x in found if isinstance(x, torch.Tensor) and (where := _memory(x)) is not None]


def _ranks_of(arg: Any) -> str:
    try:
        is_group = isinstance(arg, dist.ProcessGroup)
        group = group_named(arg) if isinstance(arg, str) else arg if is_group else group_of(arg)
    except (RuntimeError, TypeError, ValueError):
        return ""
    try:
        return ",".join(map(str, dist.get_process_group_ranks(group)))
    except (RuntimeError, KeyError, ValueError):
        # torch does not know the group's ranks by now. A question mark for each keeps their number.
        return ",".join("?" * group.size())
