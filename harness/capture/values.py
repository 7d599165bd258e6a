"""Store the values of tensors that a rank keeps in a run, in a safetensors file, which cannot contain code.

A tensor's name there is `step/kind/name`. Reading compares each tensor with its recorded digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bitproof.harness.capture.digest import digest
from bitproof.harness.capture.dtypes import dtype_name
from bitproof.harness.capture.recording_files import checked_values_path
from bitproof.harness.capture.selection import name_value
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Record, Recording


def copy_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of a tensor in host memory. Later in-place updates of the tensor do not change the copy."""
    return tensor.resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write_values(path: Path, values: Mapping[Key, torch.Tensor]) -> None:
    """Write a rank's values to a file, which appears as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    save_file({name_value(key): tensor for key, tensor in values.items()}, partial)
    partial.chmod(0o644)  # readable by others, like the other files of a recording
    partial.replace(path)


class Values:
    """An open file of values. `names` are the names of its tensors, which are read one at a time."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self.names: frozenset[str] = frozenset(file.keys())
        self._file = file

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`. Raises RecordingError if it is missing or damaged."""
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise RecordingError(f"{self.path} lacks a value", expected=name, found=str(error)) from error
        return tensor

    def read_recorded(self, key: Key, record: Record) -> torch.Tensor:
        """Return the tensor of a record. Raises RecordingError if the tensor has another digest than the record."""
        tensor = self.read(name_value(key))
        if (found := digest(tensor)) != record.digest:
            raise RecordingError(
                f"{self.path} holds another value than was recorded",
                expected=f"{name_value(key)} with digest {record.digest}",
                found=f"{dtype_name(tensor.dtype)}{list(tensor.shape)} with digest {found}",
                fix="record the system again",
            )
        return tensor


@contextmanager
def open_values_of(folder: Path, recording: Recording, rank: int) -> Iterator[Values]:
    """Context with the open file of a rank's values in a recording.

    Raises RecordingError if there are no values, or if the file does not match the manifest or has a tensor that was
    not recorded.
    """
    with open_values(checked_values_path(folder, recording.manifest, rank)) as values:
        if extra := sorted(values.names - set(map(name_value, recording.records_of(rank)))):
            raise RecordingError(
                f"{values.path} holds a tensor that was not recorded",
                found=extra[0],
                fix="record the system again",
            )
        yield values


@contextmanager
def open_values(path: Path) -> Iterator[Values]:
    """Context with a rank's open file of values.

    Raises RecordingError, which names the file, if the file is missing, cut short or damaged.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield Values(path, file)
    except (SafetensorError, OSError) as error:
        raise RecordingError(
            f"{path} is missing or damaged",
            found=f"{type(error).__name__}: {error}",
            fix="record the system again",
        ) from error
