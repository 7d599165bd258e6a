"""Works of collectives that write their caller's tensors, as a log or stress hands them on in place of the backend's.

1. No dispatch mode sees a caller wait; a work of ours knows that it was asked for.
2. A log waits for each collective as it is launched, since gloo does part of its own work where it is waited for, with
   operators that are none of the system's calls. What is sent to one rank, or received from one, is waited for where
   the caller does: the peer may do its part later.
3. Under stress what a collective gives arrives when it is asked for, and not before: who reads it unasked reads what
   was there before.
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
"""The namespace of collectives that write the caller's tensors, as FSDP2 calls them; functional ones return others."""

TO_ONE_RANK = ("send", "recv_", "recv_any_source_")


class Works:
    """The works of one log, by the index of the call that launched each."""

    def __init__(self) -> None:
        self._made: list[tuple[HeldWork, int]] = []

    def held(
        self, function: Any, result: Any, written: Sequence[Tensor], index: int, arrived: Callable[[], None]
    ) -> Any:
        """What a collective returned, with works of ours, done but for what goes to one rank or comes from one.

        Of that `arrived` is called once the caller has waited for it.
        """

        def hold(work: Any) -> Any:
            def arrive() -> None:
                with disable_current_modes():  # what gloo and the log call is none of the system's calls
                    theirs(work.wait)
                    arrived()

            if name_of(function) in TO_ONE_RANK:
                ours = HeldWork(written, arrive)
            else:
                theirs(work.wait)
                ours = HeldWork(written)
            self._made.append((ours, index))
            return Work.boxed(ours)

        return tree_map_only(torch.ScriptObject, hold, result)

    def abandoned(self) -> list[int]:
        """The calls whose works were not waited for yet."""
        return [index for work, index in self._made if not work.is_asked]


def late(function: Any, args: Any, kwargs: Any, made: list[HeldWork]) -> Any:
    """Run a collective, and let what it writes arrive when its work is asked for; `made` keeps our works alive."""
    if name_of(function) in TO_ONE_RANK:
        return theirs(function, *args, **kwargs)
    written = [leaf for leaf in tree_leaves(written_by(function, args, kwargs)) if isinstance(leaf, Tensor)]
    before = [tensor.clone() for tensor in written]
    result = theirs(function, *args, **kwargs)

    def hold(work: Any) -> Any:
        theirs(work.wait)
        values = [tensor.clone() for tensor in written]
        _copy(before, written)
        made.append(HeldWork(written, lambda: _copy(values, written)))
        return Work.boxed(made[-1])

    return tree_map_only(torch.ScriptObject, hold, result)


def _copy(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Into the tensors' memory, as a backend does: autograd knows nothing of it."""
    for tensor, value in zip(tensors, values, strict=True):
        with torch.no_grad(), unsafe_preserve_version_counter(tensor):
            tensor.copy_(value)


def written_by(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a collective of c10d writes."""
    names = (argument.name for argument in schema_of(function).arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in in_place_results(function)]


@functools.cache
def in_place_results(function: Any) -> tuple[str, ...]:
    """What a collective of c10d writes; its schema does not say so, only its arguments' names do."""
    if getattr(function, "namespace", None) != IN_PLACE_COLLECTIVES or name_of(function) == "send":
        return ()
    names = [argument.name for argument in schema_of(function).arguments]
    return tuple(name for name in names if name == "tensors" or (name.startswith("output") and "split" not in name))


class HeldWork(Work):
    """Work that has written `results` once it was asked for; C++ may hold it too, as DistributedDataParallel's reducer.

    A call of any of its methods counts as a wait. `arrive` is called once, at the first of these calls. C++ keeps only
    its own part, and would wait forever without this one, so the caller must keep the work alive.
    """

    def __init__(self, results: Sequence[Tensor], arrive: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.is_asked = False
        self._results = [weakref.ref(tensor) for tensor in results]
        self._arrive = arrive

    def wait(self, timeout: Any = None) -> bool:
        """Until it has arrived."""
        self.is_asked = True
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            with refusing():
                arrive()
        return True

    def synchronize(self) -> None:
        """Until it has arrived."""
        self.wait()

    def is_completed(self) -> bool:
        """It is, now."""
        return self.wait()

    def is_success(self) -> bool:
        """It was one."""
        return self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that the collective wrote."""
        self.wait()
        return [tensor for known in self._results if (tensor := known()) is not None]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that has come."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future
