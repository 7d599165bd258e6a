"""The fuzzer of files starts from valid ones: a file that is refused as it stands would show nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.benchmarks import fuzz_readers
from tests.benchmarks.fuzz_readers import Target, in_a_process, targets


@pytest.mark.ranks
def test_each_kind_of_file_is_read_as_it_stands_and_stays_so_after_its_turn(tmp_path: Path) -> None:
    for target in targets(tmp_path):
        for _ in range(2):
            target.read()
            found = in_a_process(target, 5, 0)
            assert found is not None and found["refused"] and found.total() == 5, target.name


@pytest.mark.ranks
def test_a_readers_time_is_that_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_readers, "SECONDS", 0.3)
    monkeypatch.setattr(fuzz_readers.signal, "alarm", lambda seconds: None)
    file = tmp_path / "file"
    file.write_bytes(b"content")

    def spin() -> None:
        while True:
            pass

    assert in_a_process(Target("waits", file, lambda: time.sleep(0.5), 1), 2, 0) is not None
    assert in_a_process(Target("spins", file, spin, 1), 2, 0) is None
