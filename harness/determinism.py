"""The switches that make a rank's run repeat itself, bit for bit."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# Set before torch loads: thread pools and cuBLAS read them once.
ENVIRONMENT = {
    **dict.fromkeys(THREAD_COUNTS, "1"),
    "OMP_WAIT_POLICY": "PASSIVE",  # a stressed run's second thread would spin on a core that another rank needs
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not make a CUDA context: ranks are forked
}


def set_determinism(seed: int, *, fill_uninitialized: bool = True, num_threads: int = 1) -> dict[str, Any]:
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


def read_determinism() -> dict[str, Any]:
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
