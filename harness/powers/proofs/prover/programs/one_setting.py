"""Refuses a program that changes a process-wide switch between its operators, such as the number of threads.

    torch.set_num_threads(1); y = x.sum(); torch.set_num_threads(4)        refused at `aten.sum`

A graph does not record switches. Some switches are exempt, because they only decide which operators are called:
autocast, grad mode, the default dtype, and the choice of an attention kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from bitproof.harness.machine.determinism import read_switches
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.torch_compat import TorchDispatchMode
from bitproof.harness.within_user_code import refused

_TRACED = {
    *("grad_enabled", "inference_mode", "autocast_cpu", "default_device", "default_dtype", "autograd_multithreading"),
    *("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp", "sdp_priority", "math_sdp_in_half"),
}
"""Switches that only decide which operators are called. So a trace shows their effect."""


class _OneSetting(TorchDispatchMode):
    # Otherwise torch refuses higher-order operators under this mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._switches = _kernels_switches()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        now = _kernels_switches()
        if changed := [name for name, was in self._switches.items() if now[name] != was]:
            what = f"it sets {changed[0]} to {now[changed[0]]} for some of its operators (`{func}`)"
            raise refused(RefusedError(what, where="the program"))
        return func(*args, **dict(kwargs or {}))


def _kernels_switches() -> dict[str, Any]:
    return {name: value for name, value in read_switches().items() if name not in _TRACED}


def under_one_setting() -> AbstractContextManager[Any]:
    """Return a context in which all operators must run under the switches that are set when the context is created.

    The first operator that runs under other switches raises RefusedError.
    """
    return _OneSetting()
