"""The fuzzer of files starts from valid ones: a file that is refused as it stands would show nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.fuzz_readers import in_a_process, targets


@pytest.mark.ranks
def test_each_kind_of_file_is_read_as_it_stands_and_stays_so_after_its_turn(tmp_path: Path) -> None:
    for target in targets(tmp_path):
        for _ in range(2):
            target.read()
            found = in_a_process(target, 5, 0)
            assert found is not None and found["refused"] and found.total() == 5, target.name
