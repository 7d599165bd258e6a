"""Works of collectives that write their caller's tensors, as a log hands them on: done, and knowing who asked for them.

No dispatch mode sees a caller wait, so a log waits for each collective as it is launched. gloo does part of its own
work where it is waited for, with operators that are none of the system's calls; so its work is not handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from bitproof.harness.torch_compat import tree_map_only


class Works:
    """The works of one log, by the index of the call that launched each."""

    def __init__(self) -> None:
        self._made: list[tuple[DoneWork, int]] = []

    def done(self, result: Any, written: Sequence[Tensor], index: int) -> Any:
        """What a collective returned, waited for, with works that have written `written` in place of its own."""

        def finish(work: Any) -> Any:
            work.wait()
            self._made.append((DoneWork(written), index))
            return Work.boxed(self._made[-1][0])

        return tree_map_only(torch.ScriptObject, finish, result)

    def abandoned(self) -> list[int]:
        """The calls whose works nobody has asked for yet."""
        return [index for work, index in self._made if not work.is_asked]


class DoneWork(Work):
    """Work that is done and has written `results`; C++ may hold it too, as DistributedDataParallel's reducer does.

    Whoever calls any of its methods is taken to wait for it.
    """

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self.is_asked = False
        self._results = list(results)

    def wait(self, timeout: Any = None) -> bool:
        """At once."""
        self.is_asked = True
        return True

    def synchronize(self) -> None:
        """At once."""
        self.is_asked = True

    def is_completed(self) -> bool:
        """It is."""
        self.is_asked = True
        return True

    def is_success(self) -> bool:
        """It was one."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """What was written."""
        self.is_asked = True
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that has come."""
        self.is_asked = True
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future
