from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.harness.case import Case
from bitproof.harness.execute.folders import CaseFolders
from bitproof.harness.options import ROLES

ARMS = ("first", "control", "stress", "replay1", "across0")


def folders_of(reference: str, candidate: str) -> list[Path]:
    folders = CaseFolders(
        Case(name="toy", family="toy", reference=reference, candidate=candidate), Path("/r"), Path("/w")
    )
    recordings = [folders.recording(role, arm) for role in ROLES for arm in ARMS]
    return recordings + [folder(role) for role in ROLES for folder in (folders.logs, folders.profile)]


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        ("sub/t.py:make", "sub-t.py:make"),
        ("t.py:make", "t.py:make.control"),
        ("t.py:make", "t.py:make"),
        ("T.py:make", "t.py:make"),
        ("t.py:make", "t.py:make.candidate"),
        ("eager", "graph"),
        ("自" * 90 + "/t.py:make", "自" * 91 + "/t.py:make"),
    ],
)
def test_the_runs_of_two_systems_never_share_a_folder(reference, candidate) -> None:
    folders = folders_of(reference, candidate)
    assert len({str(folder).casefold() for folder in folders}) == len(folders)
    assert all(len(part.encode()) < 120 for folder in folders for part in folder.parts)


def test_a_system_of_ours_has_folders_of_its_name() -> None:
    assert folders_of("eager", "graph")[:2] == [
        Path("/r/recordings/toy/eager"),
        Path("/r/recordings/toy/eager.control"),
    ]
