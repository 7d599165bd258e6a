"""Replacements for the async handles (c10d `Work`) that a system gets from collectives.

They are used while calls are logged, and under scheduling stress (see `stress`):

1. Dispatch modes do not see a call of `Work.wait`. Our handles record it.
2. While calls are logged, a collective ends at its launch. Otherwise gloo would run operators later, inside `wait`. A
   message to one rank ends when the system waits for it, since the other rank may send it later.
3. Under stress, a collective's result is written only in `wait`. A system that reads the result earlier gets old
   values, so its bits differ.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from bitproof.harness.graph.operators import name_of
from bitproof.harness.torch_compat import (
    disable_current_modes,
    tree_leaves,
    tree_map_only,
    unsafe_preserve_version_counter,
)
from bitproof.harness.torch_operators import schema_of
from bitproof.harness.within_user_code import refusing, theirs

IN_PLACE_COLLECTIVES = "c10d"
"""The namespace of collectives that write into the caller's tensors, as FSDP2 calls them. Functional collectives return
new tensors instead."""

TO_ONE_RANK = ("send", "recv_", "recv_any_source_")


class HandleLog:
    """Makes async handles for a call log, and keeps them with the index of the call that launched each."""

    def __init__(self) -> None:
        self._made: list[tuple[DeferredWork, int]] = []

    def held(
        self, function: Any, result: Any, written: Sequence[Tensor], index: int, arrived: Callable[[], None]
    ) -> Any:
        """Return the result of a collective, with the backend's async handles replaced by our own.

        The collective has ended when this function returns. A message to one rank ends later, when the system waits for
        its handle; then `arrived` is called.

        - `written`: the tensors that the collective writes.
        - `index`: the index of the collective's call in the log.
        """

        def hold(work: Any) -> Any:
            def arrive() -> None:
                with disable_current_modes():  # calls by gloo and the log are not the system's
                    theirs(work.wait)
                    arrived()

            if name_of(function) in TO_ONE_RANK:
                ours = DeferredWork(written, arrive)
            else:
                theirs(work.wait)
                ours = DeferredWork(written)
            # The list also keeps the handle alive, as a caller's C++ code does not.
            self._made.append((ours, index))
            # torch's operators return a Work as a boxed C++ object.
            return Work.boxed(ours)

        return tree_map_only(torch.ScriptObject, hold, result)

    def abandoned(self) -> list[int]:
        """Return the indices of the calls whose handles the system never waited for."""
        return [index for work, index in self._made if not work.is_asked]


def defer(function: Any, args: Any, kwargs: Any, made: list[DeferredWork]) -> Any:
    """Run a c10d collective, but write its results only when the system waits for its handle.

    Return the call's result, with the backend's handles replaced by our own. Also add these to `made`, which keeps them
    alive. A message to one rank runs unchanged.
    """
    # Waiting at the launch could deadlock: the other rank may receive the message only later.
    if name_of(function) in TO_ONE_RANK:
        return theirs(function, *args, **kwargs)
    written = [leaf for leaf in tree_leaves(written_by(function, args, kwargs)) if isinstance(leaf, Tensor)]
    # Restored after the backend's wait, until the system waits for our handle.
    before = [tensor.clone() for tensor in written]
    result = theirs(function, *args, **kwargs)

    def hold(work: Any) -> Any:
        theirs(work.wait)
        # The results are taken away, and the old values put back, until the system waits.
        values = [tensor.clone() for tensor in written]
        _copy(before, written)
        made.append(DeferredWork(written, lambda: _copy(values, written)))
        return Work.boxed(made[-1])

    return tree_map_only(torch.ScriptObject, hold, result)


def _copy(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        # A backend's write does not change autograd's version counters either.
        with torch.no_grad(), unsafe_preserve_version_counter(tensor):
            tensor.copy_(value)


def written_by(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that a c10d collective writes: tensors, or lists of tensors."""
    names = (argument.name for argument in schema_of(function).arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in in_place_results(function)]


@functools.cache
def in_place_results(function: Any) -> tuple[str, ...]:
    """Return the names of the arguments that a c10d collective writes, such as `("output_tensors",)`.

    The schema does not mark these arguments as written. Returns () for other operators.
    """
    # A send only reads its tensors, although its argument has the name `tensors`, too.
    if getattr(function, "namespace", None) != IN_PLACE_COLLECTIVES or name_of(function) == "send":
        return ()
    # Results are `tensors` or begin with `output`; `output_split_sizes` are numbers.
    names = [argument.name for argument in schema_of(function).arguments]
    return tuple(name for name in names if name == "tensors" or (name.startswith("output") and "split" not in name))


class DeferredWork(Work):
    """An async handle whose work is completed when the system first calls one of its methods.

    - `results`: the tensors that the collective writes.
    - `arrive`: completes the work, such as by writing the results; called once. None if the work is complete.

    The creator must keep the handle alive.
    """

    def __init__(self, results: Sequence[Tensor], arrive: Callable[[], Any] | None = None) -> None:
        # A caller's C++ code, such as DistributedDataParallel, keeps only the C++ part of this object, and would wait
        # forever without the Python part.
        super().__init__()
        self.is_asked = False
        # Weak, so that a handle that a caller keeps does not keep the tensors' memory.
        self._results = [weakref.ref(tensor) for tensor in results]
        self._arrive = arrive

    def wait(self, timeout: Any = None) -> bool:
        self.is_asked = True
        # Only the first wait writes the results: the caller may have overwritten them since.
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            with refusing():
                arrive()
        return True

    def synchronize(self) -> None:
        self.wait()

    # Each method waits. So the collective is complete after it, and a failure raises an error.
    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return [tensor for known in self._results if (tensor := known()) is not None]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        # `result` waits, so the future is complete from the start.
        future.set_result(self.result())
        return future
