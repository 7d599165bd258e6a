"""The switches that make a rank's run reproducible, bit for bit, such as torch's deterministic algorithms."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitproof.harness.errors import PassError
from bitproof.harness.records import Switch

if TYPE_CHECKING:
    import torch

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
    """Make this process deterministic, and return the switches with their values, for the manifest.

    With `fill_uninitialized`, torch fills new memory with NaN, so that a read of uninitialized memory changes bits.
    """
    import numpy
    import torch

    os.environ.update(ENVIRONMENT | dict.fromkeys(THREAD_COUNTS, str(num_threads)))
    torch.set_num_threads(num_threads)  # OpenMP and MKL read their variables long ago, so set the number here too
    # Several threads could accumulate gradients in a varying order.
    torch.autograd.set_multithreading_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=False)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill_uninitialized)  # noqa: B010 (a property)
    torch.backends.cudnn.deterministic = True
    # With `benchmark`, cuDNN chooses its algorithms by their measured speed, which varies.
    torch.backends.cudnn.benchmark = False
    # TF32 and reductions in 16 bits would round more often than the dtypes say.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return read_determinism() | {"seed": seed}


def settle_attention(device: torch.device) -> None:
    """Run torch's first attention call on a GPU, and undo the change of switches that this call makes."""
    import torch

    from bitproof.harness import torch_compat

    # On GPUs such as an H100, the first call makes torch prefer cuDNN's kernels, whatever was set before. Later calls
    # leave the preference unchanged.
    order, x = torch_compat.sdp_priority(), torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch_compat.set_sdp_priority(order)


def read_determinism() -> dict[str, Switch]:
    """Return the values of torch's main switches for determinism, by name. `read_switches` returns these and more."""
    import torch

    # torch warns about some of its own settings when they are read.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "fill_uninitialized_memory": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
            "num_threads": torch.get_num_threads(),
            "autograd_multithreading": torch.autograd.is_multithreading_enabled(),
            "float32_matmul_precision": _matmul_precision(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
            "cuda_matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "mkldnn": bool(torch.backends.mkldnn.is_available()),
        }


def _matmul_precision() -> str:
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # raised by torch if both its old and its new interface set a precision
        return "set by two interfaces"


def read_switches() -> dict[str, Switch]:
    """Return the values of all switches that can change bits, or let them vary from run to run, by name."""
    import torch

    from bitproof.harness import torch_compat

    cuda, onednn = torch.backends.cuda, torch.backends.mkldnn
    smallest = float("1e-310")  # zero on a thread that flushes denormals
    return read_determinism() | {
        "flush_denormal": smallest + 0.0 == 0.0,
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast_cpu": torch.is_autocast_enabled("cpu"),
        "default_device": str(torch.get_default_device()),
        # Not every supported torch has these: None stands for a missing switch.
        "mkldnn_deterministic": getattr(onednn, "deterministic", None),
        "mkldnn_matmul_precision": getattr(getattr(onednn, "matmul", None), "fp32_precision", None),
        "mkldnn_conv_precision": getattr(getattr(onednn, "conv", None), "fp32_precision", None),
        "mkldnn_rnn_precision": getattr(getattr(onednn, "rnn", None), "fp32_precision", None),
        "flash_sdp": cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
        "math_sdp": cuda.math_sdp_enabled(),
        "cudnn_sdp": cuda.cudnn_sdp_enabled(),
        "sdp_priority": str(torch_compat.sdp_priority()),
        "math_sdp_in_half": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "nnpack_enabled": torch_compat.nnpack_enabled(),
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


def _setters() -> dict[str, Callable[[Any], object]]:
    import torch

    from bitproof.harness import torch_compat

    cuda, cudnn, onednn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn

    def attribute(holder: object, name: str) -> Callable[[Any], object]:
        return lambda value: setattr(holder, name, value)

    return {
        # Switches that a process cannot restore are missing.
        "deterministic_algorithms": torch.use_deterministic_algorithms,
        # torch sets both switches in one call.
        "deterministic_warn_only": lambda value: torch.use_deterministic_algorithms(
            torch.are_deterministic_algorithms_enabled(), warn_only=value
        ),
        "fill_uninitialized_memory": attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        "num_threads": torch.set_num_threads,
        "autograd_multithreading": torch.autograd.set_multithreading_enabled,
        "float32_matmul_precision": torch.set_float32_matmul_precision,  # it also sets the next switch
        "mkldnn_matmul_precision": attribute(getattr(onednn, "matmul", None), "fp32_precision"),
        "mkldnn_conv_precision": attribute(getattr(onednn, "conv", None), "fp32_precision"),
        "mkldnn_rnn_precision": attribute(getattr(onednn, "rnn", None), "fp32_precision"),
        "cudnn_deterministic": attribute(cudnn, "deterministic"),
        "cudnn_benchmark": attribute(cudnn, "benchmark"),
        "cudnn_allow_tf32": attribute(cudnn, "allow_tf32"),
        "cudnn_enabled": attribute(cudnn, "enabled"),
        "cuda_matmul_allow_tf32": attribute(cuda.matmul, "allow_tf32"),
        **{
            f"cuda_matmul_{name}": attribute(cuda.matmul, name)
            for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
        },
        "mkldnn_enabled": torch_compat.set_mkldnn_enabled,
        "mkldnn_deterministic": attribute(onednn, "deterministic"),
        "default_dtype": lambda value: torch.set_default_dtype(getattr(torch, value)),
        "default_device": torch.set_default_device,
        "flush_denormal": torch.set_flush_denormal,
        "grad_enabled": torch.set_grad_enabled,
        "autocast_cpu": lambda value: torch.set_autocast_enabled("cpu", value),
        "flash_sdp": cuda.enable_flash_sdp,
        "mem_efficient_sdp": cuda.enable_mem_efficient_sdp,
        "math_sdp": cuda.enable_math_sdp,
        "cudnn_sdp": cuda.enable_cudnn_sdp,
        "sdp_priority": lambda value: torch_compat.set_sdp_priority(json.loads(value)),
        "math_sdp_in_half": cuda.allow_fp16_bf16_reduction_math_sdp,
        "nnpack_enabled": torch_compat.set_nnpack_enabled,
    }


@dataclass(frozen=True)
class Switches:
    """The state of this process that can change a bit.

    - `switches`: the values of switches by name, with kernels that a user has replaced, and active dispatch modes.
    - `generators`: the states of the random generators of torch, Python and NumPy.
    """

    switches: dict[str, Switch]
    generators: dict[str, Any]

    @classmethod
    def now(cls) -> Switches:
        import numpy
        import torch

        from bitproof.harness import torch_operators

        generators = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "Python": random.getstate(),
            "numpy": [x.tobytes() if isinstance(x, numpy.ndarray) else x for x in numpy.random.get_state()],
        }
        # Users' kernels and dispatch modes change bits like a switch, and may be left behind by a pass.
        replaced: dict[str, Switch] = {
            "kernels_in_python": ", ".join(torch_operators.replaced_kernels()),
            "modes": ", ".join(torch_operators.active_modes()),
            "autocast_dtype_cpu": str(torch.get_autocast_dtype("cpu")).removeprefix("torch."),
        }
        return cls(read_switches() | replaced, generators)

    def changes(self) -> list[str]:
        """Return a line for each change since this state was read, such as `mkldnn_enabled True -> False`."""
        now = Switches.now()
        changed = [
            f"{name} {was} -> {now.switches[name]}" for name, was in self.switches.items() if now.switches[name] != was
        ]
        drawn = [name for name, state in self.generators.items() if now.generators[name] != state]
        return [*changed, *(f"the state of {name}'s random number generator" for name in drawn)]

    def restore(self) -> None:
        import numpy
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, change in _setters().items():
                # Read again for each switch, since setting a switch may change another.
                if read_switches()[name] != self.switches[name]:
                    change(self.switches[name])
        torch.set_autocast_dtype("cpu", getattr(torch, str(self.switches["autocast_dtype_cpu"])))
        # A writable copy, since torch warns about read-only buffers.
        torch.set_rng_state(torch.frombuffer(bytearray(self.generators["torch"]), dtype=torch.uint8))
        random.setstate(self.generators["Python"])
        # `now` stored the array as bytes, so that states can be compared with `!=`.
        name, keys, *rest = self.generators["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextmanager
def keeping_switches(who: str) -> Iterator[None]:
    """Context for code that must not change switches or random generators. At the end, changes are undone.

    Raises PassError if there were changes. It lists them, and names the code as `who`. If the code itself raises an
    error, that error is raised instead.
    """
    before = Switches.now()
    try:
        yield
    except BaseException:
        # The code's own error is reported, and not its changes.
        before.restore()
        raise
    if changed := before.changes():
        before.restore()
        raise PassError(
            f"{who} changes what holds for the whole process, and a pass is to change its graph alone: "
            + "; ".join(changed),
            expected="switches and random number generators as they were: no graph says what they decide",
            fix="leave them, or set them back before it returns; what a case is to run with belongs into its systems",
        )


SET, AFTER_FACTORY, AFTER_STEPS = "set", "after_factory", "after_steps"
"""When a rank reads its switches: after setting them, after making its system, and after the last step. Manifests use
these names."""

Readings = Mapping[str, Mapping[str, Switch]]


def describe_changes(readings: Readings) -> Iterator[str]:
    """Yield each change of a switch by a system, with its time: `mkldnn_enabled True -> False by its factory`."""
    pairs = ((SET, AFTER_FACTORY, "by its factory"), (AFTER_FACTORY, AFTER_STEPS, "in its steps"))
    for before, after, where in pairs:
        for name, was in readings.get(before, {}).items():
            if (now := readings[after].get(name)) != was:
                yield f"{name} {was} -> {now} {where}"


def first_changed(by_rank: list[Readings]) -> Readings:
    """Return the readings of the first rank whose system changed a switch of determinism; else those of rank 0."""
    return next((readings for readings in by_rank if any(describe_changes(readings))), by_rank[0])
