"""Reads and writes an archive of calls: `calls.json`, and `values.bin` with the bytes of tensors.

An archive contains no code. Sizes are checked before memory is allocated. Digests reveal damage, but not a forgery.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .call_values import ALIGNMENT, DTYPES, RefusedArchiveError, decode, drawn, hold, memory, short_digest, strided

FORMAT = 1
MAX_JSON, MAX_CALLS, MAX_TENSORS, MAX_DIMS = 1 << 28, 100_000, 1 << 14, 32
MAX_CALL = 1 << 31
"""Most bytes of a call's inputs."""


class ValuesFile:
    """Appends blocks of bytes to the file `values.bin`, up to a budget."""

    def __init__(self, path: str, budget: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.left, self.size = budget, 0

    def put(self, content: bytes, *, always: bool = False) -> list[Any] | None:
        """Append a block. Return its place as `[offset, size, digest]`, or None if it exceeds the budget.

        `always` ignores the budget; it is used for a generator's state, which has 5 KB.
        """
        if len(content) > self.left and not always:
            return None
        self.file.write(content)
        self.left -= len(content)
        self.size += len(content)
        return [self.size - len(content), len(content), short_digest(content)]


def write_json(path: str, values: dict[str, Any]) -> None:
    """Write an object as JSON, with its digest under the key "digest". An existing file is replaced atomically."""
    text = json.dumps(values | {"digest": short_digest(json.dumps(values, sort_keys=True).encode())})
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


def read_json(path: str) -> dict[str, Any]:
    """Read an object that `write_json` wrote. Raises RefusedArchiveError if it is damaged."""
    try:
        # Opening a named pipe without a writer would wait forever.
        hold(os.path.isfile(path) or not os.path.exists(path), f"{path} is not a regular file")
        with open(path, "rb") as file:
            content = file.read(MAX_JSON + 1)
        hold(len(content) <= MAX_JSON, f"{path} is larger than {MAX_JSON} bytes")
        values = json.loads(content)
    except OSError as error:
        raise RefusedArchiveError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RefusedArchiveError(f"{path} is not JSON: {str(error)[:100]}") from error
    hold(type(values) is dict and type(values.get("digest")) is str, f"{path} has no digest")
    digest = values.pop("digest")
    try:
        own = short_digest(json.dumps(values, sort_keys=True).encode())
    except RecursionError as error:
        raise RefusedArchiveError(f"{path} is nested too deeply") from error
    hold(digest == own, f"{path} is damaged: its digest is another")
    return values


class Archive:
    """An archive of calls, read from a folder. All fields are checked. `calls` has a dict for each call."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "values.bin")
        self.head = read_json(os.path.join(folder, "calls.json"))
        # The head first, then calls, log and records: each check relies on the ones before it.
        hold(self.head.get("format") == FORMAT, f"format {str(self.head.get('format'))[:20]}, expected {FORMAT}")
        hold(os.path.isfile(self.path), f"{self.path} is missing or not a regular file")
        self.size = os.path.getsize(self.path)
        lists, objects = dict.fromkeys(("calls", "log", "records", "arguments"), LIST), {"program": TEXT}
        _hold_fields(self.head, "the archive", **lists, **objects, uncollected=OBJECT, environment=OBJECT)
        hold(_natural(self.head.get("steps"), 1 << 31), "a wrong number of steps")
        counts, facts = self.head["uncollected"], self.head["environment"]
        hold(all(_natural(each, 1 << 53) for each in counts.values()), "uncollected is damaged")
        hold(all(type(each) is str or _natural(each, 1 << 53) for each in facts.values()), "environment is damaged")
        self.calls: list[dict[str, Any]] = self.head["calls"]
        hold(len(self.calls) <= MAX_CALLS, f"more than {MAX_CALLS} calls")
        for index, call in enumerate(self.calls):
            try:
                self._check(call)
            except RefusedArchiveError as error:
                raise RefusedArchiveError(f"call {index}: {error}") from None
        hold(len({call["key"] for call in self.calls}) == len(self.calls), "two calls have one key")
        for row in self.head["log"]:
            fields = ("op", "key", "in", "out", "args")
            hold(type(row) is dict and all(type(row.get(name)) is str for name in fields), "the log is damaged")
        for row in self.head["records"]:
            shapes = [int, str, str, str, int]
            hold(type(row) is list and [type(each) for each in row] == shapes, "the records are damaged")

    def _check(self, call: Any) -> None:
        # Types before contents, and sizes before anything of that size is read.
        texts, lists = (
            dict.fromkeys(("op", "key"), TEXT),
            dict.fromkeys(("args", "tensors", "storages", "results"), LIST),
        )
        _hold_fields(call, "the call", **texts, **lists, kwargs=OBJECT, settings=OBJECT)
        storages, tensors, results = call["storages"], call["tensors"], call["results"]
        hold(max(map(len, (storages, tensors, results))) <= MAX_TENSORS, "too many tensors")
        for storage in storages:
            _hold_fields(storage, "a storage", size=_at_most(MAX_CALL), align=_at_most(ALIGNMENT - 1))
            if storage.get("block") is None:
                fields = {"dtype": _among(DTYPES), "seed": _at_most(1 << 32), "digest": TEXT, "drawn": OBJECT}
                _hold_fields(storage, "a storage that is drawn again", **fields)
                # A distribution of floating-point numbers has a mean, one of integers its bounds
                # (`call_values.measured`).
                names, kind = (("mean", "deviation"), float) if "mean" in storage["drawn"] else (("low", "high"), int)
                _hold_fields(storage["drawn"], "a distribution", **dict.fromkeys(names, _of(kind)))
            else:
                self._check_block(storage["block"], storage["size"])
        hold(sum(storage["size"] for storage in storages) <= MAX_CALL, f"inputs of more than {MAX_CALL} bytes")
        for tensor in tensors:
            place = {"storage": _at_most(len(storages) - 1), "offset": _at_most(MAX_CALL)}
            _hold_fields(tensor, "a tensor", dtype=_among(DTYPES), shape=_are_sizes, stride=_are_sizes, **place)
        for result in results:
            _hold_fields(result, "a result", digest=TEXT)
            if result.get("block") is not None:
                _hold_fields(result, "a result", dtype=_among(DTYPES), shape=_are_sizes)
                self._check_block(result["block"], math.prod(result["shape"]) * DTYPES[result["dtype"]].itemsize)
        if call.get("state") is not None:
            self._check_block(call["state"], None)
        flags = dict.fromkeys(("deterministic", "mkldnn"), _of(bool))
        precision = _among(("highest", "high", "medium"))
        _hold_fields(call["settings"], "settings", threads=_at_most(4096), float32_matmul_precision=precision, **flags)
        hold(call["settings"]["threads"] > 0, "settings without threads")

    def _check_block(self, block: Any, size: int | None) -> None:
        hold(type(block) is list and len(block) == 3 and type(block[2]) is str, "not a block")
        hold(_natural(block[0], self.size) and _natural(block[1], self.size), "a block outside of values.bin")
        hold(block[0] + block[1] <= self.size, "a block outside of values.bin")
        hold(size is None or block[1] == size, "a block of another size than its tensor")
        # Without a size of its own, the block is a generator's state, of some 5 KB.
        hold(size is not None or block[1] <= 1 << 16, "a generator's state is too large")

    def block(self, block: list[Any]) -> bytes:
        """Return the bytes of a block `[offset, size, digest]`. Raises RefusedArchiveError if they are damaged."""
        with open(self.path, "rb") as file:
            file.seek(block[0])
            content = file.read(block[1])
        hold(short_digest(content) == block[2], "values.bin is damaged: a block's digest is another")
        return content

    def bases(self, call: dict[str, Any]) -> list[bytes]:
        """Return the bytes of each storage that a call's tensors use, from the file or drawn from a recorded seed.

        Raises RefusedArchiveError if drawn bytes differ from those of the recording.
        """
        found = []
        for storage in call["storages"]:
            if storage.get("block") is not None:
                found.append(self.block(storage["block"]))
                continue
            dtype = DTYPES[storage["dtype"]]
            content = drawn(dtype, storage["size"] // dtype.itemsize, storage["seed"], storage["drawn"])
            hold(short_digest(content) == storage["digest"], "its inputs cannot be drawn again here")
            found.append(content)
        return found

    def state(self, call: dict[str, Any]) -> bytes | None:
        return None if call.get("state") is None else self.block(call["state"])

    def result(self, result: dict[str, Any]) -> Tensor | None:
        """Return a recorded result as a tensor; None if only its digest was stored."""
        if result.get("block") is None:
            return None
        base = memory(self.block(result["block"]), 0)
        return base.view(DTYPES[result["dtype"]]).reshape(result["shape"])


def is_drawn(call: dict[str, Any]) -> bool:
    """Return whether a call is replayed with random inputs, because its own inputs were too large for the archive."""
    return any(storage.get("block") is None for storage in call["storages"])


def _natural(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _at_most(most: int) -> Callable[[Any], bool]:
    return lambda value: _natural(value, most)


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _among(names: Iterable[str]) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in names


def _are_sizes(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_DIMS and all(_natural(size, 1 << 50) for size in value)


TEXT, LIST, OBJECT = _of(str), _of(list), _of(dict)


def _hold_fields(value: Any, what: str, **wanted: Callable[[Any], bool]) -> None:
    hold(type(value) is dict, f"{what} is not an object")
    for name, fits in wanted.items():
        hold(fits(value.get(name)), f"{what} has a wrong {name}, or none")


def arguments(
    call: dict[str, Any], bases: list[bytes], state: bytes | None, device: str = "cpu"
) -> tuple[list[Any], dict[str, Any]]:
    """Make a call's arguments (args, kwargs) in new memory on a device, with the recorded strides.

    On the CPU they also have the recorded alignment. `bases` has the bytes of each storage, and `state` the random
    generator's state. Raises RefusedArchiveError if the arguments are invalid.
    """
    hold(state is None or device == "cpu", "it draws from the CPU's generator")
    contents = zip(bases, call["storages"], strict=False)
    storages = [memory(content, storage["align"]).to(device) for content, storage in contents]
    tensors = [
        strided(storages[t["storage"]], DTYPES[t["dtype"]], t["offset"], t["shape"], t["stride"])
        for t in call["tensors"]
    ]
    generator = None
    if state is not None:
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        # A call without a generator argument draws from torch's global generator.
        torch.set_rng_state(generator.get_state())
    args = [decode(value, tensors, generator) for value in call["args"]]
    return args, {name: decode(value, tensors, generator) for name, value in call["kwargs"].items()}
