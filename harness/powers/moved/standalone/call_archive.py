"""The archive of calls: `calls.json`, and `values.bin` with the bytes that it points into.

Nothing in it is a program: operators are names, arguments are tagged JSON (`call_values`), tensors are bytes. Reading
checks every size before memory is taken. A digest over each block shows damage; it does not show who wrote it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from .call_values import ALIGNMENT, DTYPES, RefusedArchiveError, decode, drawn, hold, memory, short_digest, strided

FORMAT = 1
MAX_JSON, MAX_CALLS, MAX_TENSORS, MAX_DIMS = 1 << 28, 100_000, 1 << 14, 32
MAX_CALL = 1 << 31
"""Bytes: the most that a call's inputs may take."""


class ValuesFile:
    """Appends blocks of bytes to `values.bin`. `put` returns where a block is: `[offset, size, digest]`."""

    def __init__(self, path: str, budget: int) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.left, self.size = budget, 0

    def put(self, content: bytes, *, always: bool = False) -> list[Any] | None:
        """Write a block; None if the budget is spent. A generator's state (5 KB) is `always` written."""
        if len(content) > self.left and not always:
            return None
        self.file.write(content)
        self.left -= len(content)
        self.size += len(content)
        return [self.size - len(content), len(content), short_digest(content)]


def write_json(path: str, values: dict[str, Any]) -> None:
    """Write an object with a digest over itself, in a single rename."""
    text = json.dumps(values | {"digest": short_digest(json.dumps(values, sort_keys=True).encode())})
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


def read_json(path: str) -> dict[str, Any]:
    """Read an object that `write_json` wrote. Raises RefusedArchiveError."""
    try:
        with open(path, "rb") as file:
            hold(os.path.isfile(path), f"{path} is not a regular file")
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
    """An archive that was read and checked. `calls` has a dict per call."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "values.bin")
        self.head = read_json(os.path.join(folder, "calls.json"))
        hold(self.head.get("format") == FORMAT, f"format {str(self.head.get('format'))[:20]}, expected {FORMAT}")
        hold(os.path.isfile(self.path), f"{self.path} is missing or not a regular file")
        self.size = os.path.getsize(self.path)
        lists: dict[str, type] = {"calls": list, "log": list, "records": list, "environment": dict}
        lists |= {"program": str, "arguments": list, "steps": int, "uncollected": dict}
        for name, kind in lists.items():
            hold(type(self.head.get(name)) is kind, f"{name} is missing")
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
        hold(type(call) is dict, "not an object")
        kinds: dict[str, type] = {
            "op": str,
            "key": str,
            "args": list,
            "kwargs": dict,
            "storages": list,
            "tensors": list,
        }
        kinds |= {"settings": dict, "results": list}
        for name, kind in kinds.items():
            hold(type(call.get(name)) is kind, f"{name} is missing")
        hold(max(len(call["tensors"]), len(call["storages"]), len(call["results"])) <= MAX_TENSORS, "too many tensors")
        total = 0
        for storage in call["storages"]:
            hold(type(storage) is dict and _natural(storage.get("size"), MAX_CALL), "a storage without a size")
            hold(_natural(storage.get("align"), ALIGNMENT - 1), "a storage without an alignment")
            total += storage["size"]
            if storage.get("block") is None:
                self._check_drawn(storage)
            else:
                self._check_block(storage["block"], storage["size"])
        hold(total <= MAX_CALL, f"inputs of more than {MAX_CALL} bytes")
        for tensor in call["tensors"]:
            hold(type(tensor) is dict and tensor.get("dtype") in [*DTYPES], "a tensor of unknown dtype")
            hold(_natural(tensor.get("storage"), len(call["storages"]) - 1), "a tensor without its storage")
            hold(_natural(tensor.get("offset"), MAX_CALL), "a tensor without its offset")
            for name in ("shape", "stride"):
                sizes = tensor.get(name)
                hold(type(sizes) is list and len(sizes) <= MAX_DIMS, f"a tensor without its {name}")
                hold(all(_natural(each, 1 << 50) for each in sizes), f"a tensor with a wrong {name}")
        for result in call["results"]:
            hold(type(result) is dict and type(result.get("digest")) is str, "a result without its digest")
            if result.get("block") is not None:
                hold(result.get("dtype") in [*DTYPES] and type(result.get("shape")) is list, "a result without a dtype")
                hold(len(result["shape"]) <= MAX_DIMS, "a result with too many dims")
                hold(all(_natural(each, 1 << 50) for each in result["shape"]), "a result with a wrong shape")
                count = 1
                for each in result["shape"]:
                    count *= each
                size = torch.empty(0, dtype=DTYPES[result["dtype"]]).element_size()
                self._check_block(result["block"], count * size)
        if call.get("state") is not None:
            self._check_block(call["state"], None)
        for name, kind in {"threads": int, "deterministic": bool, "mkldnn": bool}.items():
            hold(type(call["settings"].get(name)) is kind, f"settings without {name}")
        hold(1 <= call["settings"]["threads"] <= 4096, "a wrong number of threads")
        precision = call["settings"].get("float32_matmul_precision")
        hold(precision in ("highest", "high", "medium"), "settings without float32_matmul_precision")

    def _check_drawn(self, storage: dict[str, Any]) -> None:
        told: Any = storage.get("drawn")
        hold(type(told) is dict and storage.get("dtype") in [*DTYPES], "a storage without bytes and distribution")
        hold(_natural(storage.get("seed"), 1 << 32) and type(storage.get("digest")) is str, "a draw without a seed")
        names, kind = (("mean", "deviation"), float) if "mean" in told else (("low", "high"), int)
        hold(all(type(told.get(name)) is kind for name in names), "not a distribution")

    def _check_block(self, block: Any, size: int | None) -> None:
        hold(type(block) is list and len(block) == 3 and type(block[2]) is str, "not a block")
        hold(_natural(block[0], self.size) and _natural(block[1], self.size), "a block outside of values.bin")
        hold(block[0] + block[1] <= self.size, "a block outside of values.bin")
        hold(size is None or block[1] == size, "a block of another size than its tensor")
        hold(size is not None or block[1] <= 1 << 16, "a generator's state is too large")

    def block(self, block: list[Any]) -> bytes:
        """A block's bytes. Raises RefusedArchiveError if they are damaged."""
        with open(self.path, "rb") as file:
            file.seek(block[0])
            content = file.read(block[1])
        hold(short_digest(content) == block[2], "values.bin is damaged: a block's digest is another")
        return content

    def bases(self, call: dict[str, Any]) -> list[bytes]:
        """The bytes of a call's storages, read or drawn again. Raises RefusedArchiveError."""
        found = []
        for storage in call["storages"]:
            if storage.get("block") is not None:
                found.append(self.block(storage["block"]))
                continue
            dtype = DTYPES[storage["dtype"]]
            width = torch.empty(0, dtype=dtype).element_size()
            content = drawn(dtype, storage["size"] // width, storage["seed"], storage["drawn"])
            hold(short_digest(content) == storage["digest"], "its inputs cannot be drawn again here")
            found.append(content)
        return found

    def state(self, call: dict[str, Any]) -> bytes | None:
        """The state of the generator that a call draws from."""
        return None if call.get("state") is None else self.block(call["state"])

    def result(self, result: dict[str, Any]) -> Tensor | None:
        """A recorded result; None if only its digest was kept."""
        if result.get("block") is None:
            return None
        base = memory(self.block(result["block"]), 0)
        return base.view(DTYPES[result["dtype"]]).reshape(result["shape"])


def _natural(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def arguments(call: dict[str, Any], bases: list[bytes], state: bytes | None) -> tuple[list[Any], dict[str, Any]]:
    """Fresh arguments of a call, laid out and aligned as recorded. Raises RefusedArchiveError."""
    storages = [memory(content, storage["align"]) for content, storage in zip(bases, call["storages"], strict=False)]
    tensors = [
        strided(storages[t["storage"]], DTYPES[t["dtype"]], t["offset"], t["shape"], t["stride"])
        for t in call["tensors"]
    ]
    generator = None
    if state is not None:
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        torch.set_rng_state(generator.get_state())
    args = [decode(value, tensors, generator) for value in call["args"]]
    return args, {name: decode(value, tensors, generator) for name, value in call["kwargs"].items()}
