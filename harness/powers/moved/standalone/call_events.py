"""Watches a program's operator calls by a dispatch mode. It describes each call: operator, layouts, inputs, results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .allowed_calls import computes, draws, is_allowed, outcome, overwrites, written
from .call_values import ALIGNMENT, NAMES, RefusedArchiveError, digest_of, encode, joined, leaves, short_digest, span


class CallEvent:
    """An operator call.

    - `key`: equal for calls that differ only in values, such as an `mm` in each training step.
    - `inputs`: digest of all that the call reads, including the state of the random generator.
    - `values`, `outputs`: the results and their digest.
    """

    def __init__(self, index: int, operator: Any, args: Any, kwargs: Any) -> None:
        self.index, self.operator, self.name = index, operator, str(operator)
        self.tensors: list[Tensor] = []
        self.args = [encode(value, self.tensors) for value in args]
        self.kwargs = {name: encode(value, self.tensors) for name, value in kwargs.items()}
        self.state: bytes | None = None
        if draws(operator):
            # The state before the call: a replay must draw the same numbers.
            given = [leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, torch.Generator)]
            state = given[0].get_state() if given else torch.get_rng_state()
            self.state = bytes(state.tolist())
        self.settings = settings()
        self._layouts()
        text = json.dumps([self.name, self.args, self.kwargs, sorted(self.settings.items())])
        layout = [[NAMES[t.dtype], [*t.shape], [*t.stride()]] for t in self.tensors]
        # Calls with the same key differ at most in values, and are recorded once.
        self.key = short_digest(text.encode(), json.dumps([layout, self.places, self.aligned]).encode())
        # A call such as `copy_` overwrites tensors unread: their old values are no inputs.
        unread = {id(each) for each in written(operator, args, kwargs)} if overwrites(operator) else set()
        values = ["" if id(t) in unread else digest_of(t) for t in self.tensors]
        self.inputs = joined([text, json.dumps([layout, self.places]), *values, short_digest(self.state or b"")])
        self.outputs, self.values = "", []  # type: str, list[Any]

    def _layouts(self) -> None:
        """Number the storages of the call's tensors, and store where each tensor is.

        - `storages` becomes a list of (storage, first byte used, byte after the last byte used).
        - `places` becomes, for each tensor, [number of its storage, offset from the first byte used].
        """
        self.storages: list[tuple[Any, int, int]] = []
        self.places: list[list[int]] = []
        number: dict[int, int] = {}
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            first, last = span(tensor)
            at = number.setdefault(storage._cdata, len(self.storages))
            if at == len(self.storages):
                self.storages.append((storage, first, last))
            else:
                _, low, high = self.storages[at]
                self.storages[at] = (storage, min(low, first), max(high, last))
        # From a multiple of 16, so that an element's offset stays a whole number of elements of any dtype.
        self.storages = [(storage, low - low % 16, max(low, high)) for storage, low, high in self.storages]
        for tensor in self.tensors:
            at = number[tensor.untyped_storage()._cdata]
            self.places.append([at, span(tensor)[0] - self.storages[at][1]])
        self.aligned = [(storage.data_ptr() + low) % ALIGNMENT for storage, low, _ in self.storages]

    def row(self) -> dict[str, Any]:
        shown = ", ".join(_shown(each) for each in self.args)
        return {"op": self.name, "key": self.key, "in": self.inputs, "out": self.outputs, "args": shown[:160]}


def _shown(value: list[Any]) -> str:
    tag, inner = value
    if tag == "t":
        return "tensor"
    if tag == "f":
        return repr(float.fromhex(inner))
    return f"[{', '.join(map(_shown, inner))}]" if tag == "l" else "None" if tag == "n" else str(inner)


def settings() -> dict[str, Any]:
    # These influence the choice of kernels.
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
    }


def name_unreplayed(operator: Any, args: Any) -> str:
    """Describe an operator that cannot be replayed.

    Returns "" for a profiler's marks, which compute nothing and are not counted.
    """
    is_mark = getattr(operator, "namespace", "") == "profiler"
    return "" if is_mark else f"{operator}: not an operator that can be replayed from a file"


class Listener:
    """Base class of listeners: `Events` calls `before` and `after` for each operator call.

    `after` may write other values into the results, with which the program then continues.
    """

    def before(self, event: CallEvent) -> None:
        """Handle a call before its operator runs."""

    def after(self, event: CallEvent) -> None:
        """Handle a call after its operator ran. `event.values` has its results."""


class Events(TorchDispatchMode):
    """Dispatch mode that runs a program's calls unchanged, describes each call to `listener`, and adds it to `log`.

    - `uncollected`: reason -> number of calls that could not be described, for example on another device.
    - `errors`: errors of bitproof's own code. They are raised again at the end of the run, in case the program caught
      them.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener = listener or Listener()
        self.log: list[dict[str, Any]] = []
        self.uncollected: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self.name_unreplayed = name_unreplayed

    @contextmanager
    def remembering(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)
            raise

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(operator, torch._ops.OpOverload) or not is_allowed(operator):
            if name := self.name_unreplayed(operator, args):
                self.uncollected[name] += 1
            return operator(*args, **kwargs)
        # Views and allocations have no values of their own; the calls that read them are compared.
        if not computes(operator):
            return operator(*args, **kwargs)
        try:
            event = CallEvent(len(self.log), operator, args, kwargs)
        except RefusedArchiveError as error:
            self.uncollected[f"{operator}: {error}"] += 1
            return operator(*args, **kwargs)
        with self.remembering():
            self.listener.before(event)
        result = operator(*args, **kwargs)
        with self.remembering():
            event.values = outcome(operator, result, args, kwargs)
            self.listener.after(event)
            # After the listener, which may have written other values into the results.
            event.outputs = joined(digest_of(value) for value in event.values)
        self.log.append(event.row())
        return result
