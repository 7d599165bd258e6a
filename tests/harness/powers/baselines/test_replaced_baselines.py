"""A baseline is replaced in one step: concurrent writers do not fail, readers find a whole one, a kill loses none."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from bitproof.harness.capture import recording_files
from bitproof.harness.capture.recording_files import put_in_place, read_recording
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.errors import UsageError
from bitproof.harness.powers.baselines.baseline_folders import compare_with_baselines, store_baseline
from tests.harness.forging import make_recording

CASE = Case(name="toy", family="toy", reference="toy", steps=2, parallelism=Parallelism(world_size=2, ep=1))
WRITERS, WRITES = 8, 50


@pytest.fixture(params=["exchanged", "renamed twice"])
def way(request, monkeypatch) -> str:
    """How folders are replaced: as most file systems can, and as the others can."""
    if request.param == "renamed twice":

        def cannot(left: Path, right: Path) -> None:
            raise OSError(errno.EINVAL, "no such thing here")

        monkeypatch.setattr(recording_files, "exchange", cannot)
    return request.param


def forked(work) -> int:
    """The process id of a child that does this work, and exits with 0 if it raises nothing."""
    if pid := os.fork():
        return pid
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.ranks
def test_of_400_concurrent_writes_none_fails_and_a_reader_finds_a_whole_baseline_at_every_look(tmp_path, way) -> None:
    baselines, made = tmp_path / "baselines", make_recording(tmp_path / "made", CASE)
    here = shutil.copytree(made, tmp_path / "here")
    folder = store_baseline(shutil.copytree(made, tmp_path / "first"), baselines, CASE, "toy")

    def write(writer: int) -> None:
        for number in range(WRITES):
            new = shutil.copytree(made, folder.with_name(f".new-{writer}-{number}"))
            put_in_place(new, folder)

    pids = [forked(lambda writer=writer: write(writer)) for writer in range(WRITERS)]
    statuses, seen, looks = [], Counter(), 0
    while len(statuses) < WRITERS:
        if way == "exchanged":
            seen[read_recording(folder).manifest.system] += 1
            seen[compare_with_baselines(here, baselines, CASE, "toy", lambda *_: []).status] += 1
            looks += not folder.exists()
        while pids and (done := os.waitpid(pids[0], os.WNOHANG))[0]:
            statuses.append(done[1])
            pids.pop(0)
    assert statuses == [0] * WRITERS
    if way == "exchanged":
        assert looks == 0 and set(seen) == {"toy", "EQUAL"}, seen
    assert [child.name for child in folder.parent.iterdir()] == [folder.name]


@pytest.mark.ranks
@pytest.mark.parametrize("at", range(1, 5))
def test_a_kill_at_any_call_of_the_system_loses_no_baseline(tmp_path, way, at, monkeypatch) -> None:
    baselines, made = tmp_path / "baselines", make_recording(tmp_path / "made", CASE)
    store_baseline(shutil.copytree(made, tmp_path / "first"), baselines, CASE, "toy")
    new = shutil.copytree(made, tmp_path / "new")
    calls = iter(range(1, 100))

    def killed_after(function):
        def call(*arguments, **options):
            try:
                return function(*arguments, **options)
            finally:
                if next(calls) == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    def replace() -> None:
        monkeypatch.setattr(os, "rename", killed_after(os.rename))
        monkeypatch.setattr(recording_files, "exchange", killed_after(recording_files.exchange))
        monkeypatch.setattr(shutil, "rmtree", killed_after(shutil.rmtree))
        store_baseline(new, baselines, CASE, "toy", force=True)

    os.waitpid(forked(replace), 0)
    found = compare_with_baselines(made, baselines, CASE, "toy", lambda *_: [])
    assert found.status == "EQUAL"
    again = shutil.copytree(made, tmp_path / "again")
    folder = store_baseline(again, baselines, CASE, "toy", force=True)
    assert not folder.name.startswith(".")
    assert compare_with_baselines(made, baselines, CASE, "toy", lambda *_: []).path == str(folder)


@pytest.mark.ranks
def test_of_many_that_file_a_first_baseline_at_once_one_does(tmp_path, way) -> None:
    made = make_recording(tmp_path / "made", CASE)
    copies = [shutil.copytree(made, tmp_path / f"copy{number}") for number in range(8)]

    def file(copy: Path) -> None:
        try:
            store_baseline(copy, tmp_path / "baselines", CASE, "toy")
        except UsageError:
            os._exit(2)

    pids = [forked(lambda copy=copy: file(copy)) for copy in copies]
    statuses = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    assert statuses == [0] + [2] * 7


def test_what_is_in_the_way_and_is_not_to_be_replaced_stays(tmp_path) -> None:
    new, there = make_recording(tmp_path / "new", CASE), tmp_path / "there"
    there.mkdir()
    (there / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        put_in_place(new, there, replaces=False)
    assert (there / "thesis.txt").read_text() == "mine" and new.exists()
