"""Scheduling stress: changes the timing and the uninitialized memory of a system's run. Imports no torch before use.

A correct system synchronizes its accesses to shared memory, and writes memory before it reads it. Then its bits stay
the same under three changes:

1. A rank sleeps for a random time before every collective and every wait, so ranks arrive in another order. On CUDA the
   stream sleeps instead of the host. The copy stream sleeps before copies to and from host memory.
2. Memory that the system allocates holds zeros. In a plain run it holds NaN, or the largest integer. Memory that
   kernels allocate is left uninitialized.
3. On a CPU, a c10d collective writes its results when the system waits for them. If nothing waits, the results are
   never written.

On request, operators also run on several threads. This may change bits of correct kernels, for example in a float32 sum
of a million elements.

Sleeps are drawn from a seed and the rank, so a replay of a stressed run sleeps in the same way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bitproof.harness.options import Stress
from bitproof.harness.within_user_code import refusing, theirs

if TYPE_CHECKING:
    import torch

CYCLES_A_SECOND = 1_500_000_000
"""Approximate clock rate of a GPU. It need not be precise: sleeps only have to vary."""


@contextmanager
def stressed(stress: Stress | None, rank: int, device: torch.device | None = None) -> Iterator[None]:
    """Context in which this thread's run on `device` is stressed. No effect if `stress` is None."""
    if stress is None:
        yield
        return
    # Imported here, since these modules import torch.
    from bitproof.harness.disturb.deferred_work import IN_PLACE_COLLECTIVES, DeferredWork, defer
    from bitproof.harness.graph.offload_operators import COPIES
    from bitproof.harness.graph.operators import COLLECTIVE_NAMESPACES, row_of
    from bitproof.harness.operators import Uninitialized
    from bitproof.harness.torch_compat import TorchDispatchMode

    on_cuda = device is not None and device.type == "cuda"
    held: list[DeferredWork] = []
    # Seeded by text, so that each rank sleeps differently, and in a replay as in the stressed run.
    chance, longest = random.Random(f"{stress.seed}/{rank}"), stress.longest_sleep

    class Disturbance(TorchDispatchMode):
        # By default, torch refuses higher-order operators, such as FlexAttention, under a mode.
        supports_higher_order_operators = True

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with refusing():
                if getattr(function, "namespace", None) in COLLECTIVE_NAMESPACES:
                    _sleep(chance.uniform(0.0, longest), device)
                    # On CUDA the sleep is on the stream, and results are written by the stream, too.
                    if function.namespace == IN_PLACE_COLLECTIVES and not on_cuda:
                        return defer(function, args, kwargs or {}, held)
                elif on_cuda and function in COPIES:
                    _delay_copies(chance.uniform(0.0, longest), device)
                # Uninitialized memory: NaN in the plain run, zeros here.
                part = row_of(function).uninitialized
                # A resize leaves only the added elements uninitialized.
                if part is Uninitialized.GROWN:
                    return _zero_grown(function, args, kwargs or {})
                result = theirs(function, *args, **kwargs or {})
                return result.zero_() if part is Uninitialized.WHOLE else result

    with Disturbance():  # type: ignore[no-untyped-call]
        yield


def _zero_grown(function: Any, args: Any, kwargs: Any) -> Any:
    import torch

    # Read before the call, which may resize its argument in place.
    is_strided = args[0].layout is torch.strided
    held, room = args[0].nbytes if is_strided else 0, args[0].untyped_storage().nbytes() if is_strided else 0
    result = theirs(function, *args, **kwargs)
    if is_strided and isinstance(result, torch.Tensor):
        storage = result.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=result.device).set_(storage)
        # `resize_` in place keeps the whole old storage; a functional resize copies only the tensor's own bytes.
        whole[room if result is args[0] else held :].zero_()
    return result


def _sleep(seconds: float, device: torch.device | None) -> None:
    if device is None or device.type != "cuda":
        time.sleep(seconds)
        return
    from bitproof.harness.torch_compat import sleep_on_stream

    # A sleeping host would give the device time to finish its work, which would hide a missing wait.
    sleep_on_stream(int(seconds * CYCLES_A_SECOND))


def _delay_copies(seconds: float, device: torch.device | None) -> None:
    import torch

    from bitproof.harness.graph.offload_operators import copy_stream

    assert device is not None, "there are no such copies elsewhere"
    # A reader that does not wait for its copy then reads old values.
    with torch.cuda.stream(copy_stream(device)):
        _sleep(seconds, device)
