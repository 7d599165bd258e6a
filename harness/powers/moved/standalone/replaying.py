"""Replays each call of an archive three times in this environment, and measures how much its results changed."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch
from torch import Tensor

from .allowed_calls import MissingError, operator_named, outcome
from .call_archive import Archive, arguments, is_drawn
from .call_values import RefusedArchiveError, digest_of
from .watched_program import FailedProgramError

TIMES = 3


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the facts on which a kernel's bits depend: torch, Python, processor, instruction set, threads, and device.

    For the CPU, the key "device" is missing.
    """
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if device != "cpu":
        found["device"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return found


def _release(package: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package)} if package else {}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


class SignatureError(Exception):
    """The operator exists in this torch, but takes other arguments."""


def run_call(archive: Archive, call: dict[str, Any], threads: int | None = None) -> list[Any]:
    """Run an archived call here. Return its results, followed by the arguments that it wrote.

    Raises RefusedArchiveError, MissingError, SignatureError, or the RuntimeError of the operator.
    """
    return run_loaded(call, archive.bases(call), archive.state(call), threads)


def run_loaded(
    call: dict[str, Any], bases: list[bytes], state: bytes | None, threads: int | None = None, device: str = "cpu"
) -> list[Any]:
    """Run a call on new storages with the bytes `bases`. Return its results, followed by the arguments that it wrote.

    `threads` replaces the recorded number of threads, unless it is None.
    """
    operator = operator_named(call["op"])
    args, kwargs = arguments(call, bases, state, device)
    if device != "cpu":
        args, kwargs = _moved_to(args, device), _moved_to(kwargs, device)
    known = {each.name for each in operator._schema.arguments}
    if len(args) > len(operator._schema.arguments) or not known >= kwargs.keys():
        raise SignatureError(f"{operator._schema}")
    _apply_settings(call["settings"], threads)
    try:
        with torch.no_grad():
            found = outcome(operator, operator(*args, **kwargs), args, kwargs)
            # Recorded results are on the CPU, and are compared there.
            return [value.cpu() if isinstance(value, Tensor) else value for value in found]
    except (TypeError, RuntimeError) as error:
        # torch has no error class of its own for a wrong argument, only these texts.
        text = str(error)
        if "schema" in text.lower() or "expected at most" in text or "Expected a value of type" in text:
            raise SignatureError(text[:300]) from error
        raise


def _moved_to(value: Any, device: str) -> Any:
    # Calls such as `full` have a device as an argument.
    if isinstance(value, list):
        return [_moved_to(each, device) for each in value]
    if isinstance(value, dict):
        return {name: _moved_to(each, device) for name, each in value.items()}
    return torch.device(device) if isinstance(value, torch.device) else value


# The settings that the last replayed call has set: most calls have the same ones.
_current: dict[str, Any] = {}


def _apply_settings(asked: dict[str, Any], threads: int | None) -> None:
    asked = asked | {"threads": threads or asked["threads"]}
    if asked == _current:
        return
    torch.set_num_threads(asked["threads"])
    torch.use_deterministic_algorithms(asked["deterministic"], warn_only=True)
    torch.set_float32_matmul_precision(asked["float32_matmul_precision"])
    torch._C._set_mkldnn_enabled(asked["mkldnn"])
    _current.clear()
    _current.update(asked)


def replay(
    archive: Archive,
    threads: int | None = None,
    only: set[str] | None = None,
    device: str = "cpu",
    package: str = "",
) -> dict[str, Any]:
    """Replay an archive's calls, and compare their results with the recorded results.

    `only` has the keys of the calls to replay; None for all calls. `package` is a package whose version is added to
    "environment". Returns a dict:

    - "rows": key of a call -> facts about it, with its "state" ("equal", "moved", ...). For a moved call, also how much
      its results changed.
    - "environment": facts about this environment.
    - "recorded": facts about the recorded run.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise FailedProgramError(f"this torch cannot use {device}: {error}") from error
    rows = {}
    for call in archive.calls:
        if only is None or call["key"] in only:
            rows[call["key"]] = {
                "op": call["op"],
                "shapes": [tensor["shape"] for tensor in call["tensors"]],
                "dtypes": sorted({tensor["dtype"] for tensor in call["tensors"]}),
                "drawn": is_drawn(call),
                **_replayed(archive, call, threads, device),
            }
    recorded = {name: archive.head[name] for name in ("environment", "program", "steps", "uncollected")}
    return {"environment": environment(device) | _release(package), "rows": rows, "recorded": recorded}


def _replayed(archive: Archive, call: dict[str, Any], threads: int | None, device: str) -> dict[str, Any]:
    expected = [result["digest"] for result in call["results"]]
    found: list[list[str]] = []
    values: list[Any] = []
    try:
        bases, state = archive.bases(call), archive.state(call)
        for _ in range(TIMES):
            values = run_loaded(call, bases, state, threads, device)
            found.append([digest_of(value) for value in values])
    except MissingError as error:
        return {"state": "missing", "detail": str(error)}
    except SignatureError as error:
        return {"state": "signature", "detail": str(error)}
    except RefusedArchiveError as error:
        return {"state": "not replayed", "detail": str(error)}
    except Exception as error:  # of any operator, on values that may be forged
        return {"state": "failed", "detail": f"{type(error).__name__}: {str(error)[:300]}"}
    if any(each != found[0] for each in found):
        return {"state": "nondeterministic", "detail": f"{len({*map(str, found)})} results in {TIMES} runs"}
    if found[0] == expected:
        return {"state": "equal"}
    if len(expected) != len(found[0]):
        return {"state": "signature", "detail": f"{len(found[0])} results, were {len(expected)}"}
    # Only the first result that changed is measured.
    at = next(index for index, (a, b) in enumerate(zip(expected, found[0], strict=False)) if a != b)
    return {"state": "moved", "result": at} | _measured(archive.result(call["results"][at]), values[at])


def _measured(old: Tensor | None, new: Any) -> dict[str, Any]:
    if old is None or not isinstance(new, Tensor):
        return {"detail": "only the digest of the old result was kept"}
    if old.dtype != new.dtype or old.shape != new.shape:
        return {"detail": f"{new.dtype} {[*new.shape]}, was {old.dtype} {[*old.shape]}"}
    a, b = old.contiguous().reshape(-1), new.detach().contiguous().reshape(-1)
    # As integers, so that NaNs with equal bits agree; a complex element differs if either part does.
    differ = (ordered(a) != ordered(b)).reshape(a.numel(), -1).any(1)
    places = differ.nonzero().flatten()
    far = _ulps(a[places], b[places])
    return {
        "elements": int(places.numel()),
        "total": int(a.numel()),
        "ulps": far,
        "where": _place_in_words(differ.reshape(old.shape)),
        "first": [[int(i), _shown(a[i]), _shown(b[i])] for i in places[:3]],
        "dtype": str(old.dtype).removeprefix("torch."),
        "shape": [*old.shape],
    }


def ordered(values: Tensor) -> Tensor:
    """Convert floating-point values to integers in the same order.

    Adjacent values have the distance 1, and so have -0 and 0. Integers are returned unchanged.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return values
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]
    bits = values.view(width).long()
    low = torch.iinfo(width).min
    # As integers, the bits of negative floats descend: they are mirrored, and -0 becomes -1.
    return torch.where(bits >= 0, bits, low - bits - 1)


def _ulps(a: Tensor, b: Tensor) -> int | None:
    if not (a.is_floating_point() or a.is_complex()) or bool((a.isnan() != b.isnan()).any()):
        return None
    # In Python's integers, as a distance between int64 may overflow; so only for the first 65,536 elements.
    distances = [
        abs(x - y)
        for x, y in zip(ordered(a).flatten()[: 1 << 16].tolist(), ordered(b).flatten().tolist(), strict=False)
    ]
    return max(distances, default=0)


def _place_in_words(differ: Tensor) -> str:
    if bool(differ.all()):
        return "all elements"
    places = differ.nonzero()
    # The last dim first, as vector lanes lie along it. A dim of size 1 or 2 shows no pattern.
    for dim in reversed(range(differ.dim())):
        size, used = differ.shape[dim], places[:, dim].unique().tolist()
        if len(used) == size or size < 3:
            continue
        if len(used) == 1:
            return f"index {used[0]} of dim {dim}"
        if used == [*range(size - len(used), size)] and len(used) * 2 < size:
            return f"the last {len(used)} of dim {dim}"
        if used == [*range(len(used))] and len(used) * 2 < size:
            return f"the first {len(used)} of dim {dim}"
        for lanes in (32, 16, 8, 4):
            lane = {each % lanes for each in used}
            if size >= 2 * lanes and len(lane) == 1:
                return f"lane {lane.pop()} of {lanes} in dim {dim}"
    return f"spread, {100 * len(places) / differ.numel():.2g} % of elements"


def _shown(value: Tensor) -> str:
    return repr(value.item())
