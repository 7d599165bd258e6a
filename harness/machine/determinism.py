"""The switches that make a rank's run repeat itself, bit for bit."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping

from harness.records import Switch

THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# Set before torch loads: thread pools and cuBLAS read them once.
ENVIRONMENT = {
    **dict.fromkeys(THREAD_COUNTS, "1"),
    "OMP_WAIT_POLICY": "PASSIVE",  # a stressed run's second thread would spin on a core that another rank needs
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not make a CUDA context: ranks are forked
}


def set_determinism(seed: int, *, fill_uninitialized: bool = True, num_threads: int = 1) -> dict[str, Switch]:
    """Make this process deterministic, and return what was set, for the manifest.

    `fill_uninitialized` writes NaN into fresh memory, so a read of what nobody wrote shows at once.
    """
    import numpy
    import torch

    os.environ.update(ENVIRONMENT | dict.fromkeys(THREAD_COUNTS, str(num_threads)))
    torch.set_num_threads(num_threads)  # OpenMP and MKL, which have read their variables long ago, follow
    torch.autograd.set_multithreading_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=False)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill_uninitialized)  # noqa: B010 (a property)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return read_determinism() | {"seed": seed}


def read_determinism() -> dict[str, Switch]:
    """The switches as they stand."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "fill_uninitialized_memory": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
            "num_threads": torch.get_num_threads(),
            "autograd_multithreading": torch.autograd.is_multithreading_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
            "cuda_matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "mkldnn": bool(torch.backends.mkldnn.is_available()),
        }


def read_switches() -> dict[str, Switch]:
    """All switches as they stand that a system may change to other bits, or to bits that vary."""
    import torch

    return read_determinism() | {
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn_enabled": bool(torch.backends.mkldnn.enabled),
        "cudnn_enabled": torch.backends.cudnn.enabled,
        "cuda_matmul_allow_bf16_reduced_precision_reduction": (
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cuda_matmul_allow_fp16_reduced_precision_reduction": (
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


SET, AFTER_FACTORY, AFTER_STEPS = "set", "after_factory", "after_steps"
"""When a rank reads its switches, by the names in a manifest: when they are set, its system is made, and it ends."""

Readings = Mapping[str, Mapping[str, Switch]]


def tell_changes(readings: Readings) -> Iterator[str]:
    """Each switch that a system changed, and where: `mkldnn_enabled True -> False by its factory`."""
    pairs = ((SET, AFTER_FACTORY, "by its factory"), (AFTER_FACTORY, AFTER_STEPS, "in its steps"))
    for before, after, where in pairs:
        for name, was in readings.get(before, {}).items():
            if (now := readings[after].get(name)) != was:
                yield f"{name} {was} -> {now} {where}"


def first_changed(by_rank: list[Readings]) -> Readings:
    """The readings of the lowest rank whose system changed a switch; of rank 0 where none did."""
    return next((readings for readings in by_rank if any(tell_changes(readings))), by_rank[0])
