"""Recordings made by hand, and changed on disk as somebody with intent would: with sums that fit what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import join_parts, read_recording, sha256_of_manifest, write_part
from bitproof.harness.capture.selection import ALL
from bitproof.harness.capture.values import open_values_of, write_values
from bitproof.harness.case import Case
from bitproof.harness.records import Key, Manifest

Change = Callable[[Key, torch.Tensor], torch.Tensor]


def vouch(folder: Path, **changes: Any) -> None:
    """Put `changes` into a manifest, and make its sums fit the folder's files."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["digests_sha256"] = sha256(folder / "digests.parquet")
    if "values_sha256" in manifest:
        files = [folder / "values" / f"rank{rank}.safetensors" for rank in range(len(manifest["values_sha256"]))]
        manifest["values_sha256"] = [sha256(file) if file.is_file() else "" for file in files]
    manifest |= changes
    manifest["manifest_sha256"] = sha256_of_manifest(manifest)
    path.write_text(json.dumps(manifest))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_recording(
    folder: Path, case: Case, change: Change = lambda key, tensor: tensor, patterns: tuple[str, ...] = ALL, **about: Any
) -> Path:
    """A recording of the same few tensors on every rank and step, which `change` may change."""
    recorders = [Recorder(rank, patterns=patterns) for rank in range(case.parallelism.world_size)]
    for recorder in recorders:
        for recorder.step in range(case.steps):
            for kind, name, tensor in (
                ("loss", "loss", torch.tensor(2.0)),
                ("grad", "w", torch.linspace(1, 2, 8, dtype=torch.bfloat16)),
                ("buffer", "counts@after_optimizer", torch.arange(4)),
                ("param", "w", torch.full((2, 2), 0.5)),
                ("optimizer", "w.exp_avg", torch.zeros(2, 2)),
            ):
                recorder.observe(kind, name, change(Key(recorder.step, kind, name, recorder.rank), tensor.clone()))
    manifest = {
        "case": case.to_dict(),
        "system": "toy",
        "world_size": case.parallelism.world_size,
        "steps": case.steps,
        "device": "cpu",
        "machine": {"torch": "2.13.0+cpu", "cpu": "Model T"},
        "values": list(patterns),
    }
    _write(folder, Manifest.of(manifest | about), recorders, with_values=bool(patterns))
    return folder


def rewrite_recording(folder: Path, change: Change = lambda key, tensor: tensor, **about: Any) -> None:
    """Make a recording that keeps all values say something else, with digests and sums that fit."""
    recording = read_recording(folder)
    recorders = [Recorder(rank, patterns=ALL) for rank in range(recording.manifest.world_size)]
    for recorder in recorders:
        with open_values_of(folder, recording, recorder.rank) as values:
            for key in (key for key in recording.records if key.rank == recorder.rank):
                recorder.step = key.step
                tensor = values.read_recorded(key, recording.records[key]).clone()
                recorder.observe(key.kind, key.name, change(key, tensor))
    _write(folder, replace(recording.manifest, **about), recorders, with_values=True)


def at(wanted: Key, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of one tensor."""
    return lambda key, tensor: make(tensor) if key == wanted else tensor


def flip_lowest_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its first element one ULP off."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    changed = tensor.clone()
    changed.view(integer).reshape(-1)[0] ^= 1
    return changed


def _write(folder: Path, manifest: dict[str, Any], recorders: list[Recorder], *, with_values: bool) -> None:
    with TemporaryDirectory() as temporary:
        parts = [Path(temporary) / f"{recorder.rank}.parquet" for recorder in recorders]
        files = [part.with_suffix(".safetensors") for part in parts] if with_values else []
        for part, recorder in zip(parts, recorders, strict=True):
            write_part(part, recorder.rows.items())
        for file, recorder in zip(files, recorders, strict=False):
            write_values(file, recorder.values)
        join_parts(folder, manifest, parts, files)
