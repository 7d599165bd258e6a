from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.capture.selection import name_value
from bitproof.harness.capture.values import open_values_of
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.cli import main
from bitproof.harness.commands.record import Target, diff, record
from bitproof.harness.errors import RankError, RecordingError, UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Key
from bitproof.harness.report.diff import _about_the_cause
from tests.harness.forging import at, flip_lowest_bit, make_recording
from tests.hosts import one_host

pytestmark = pytest.mark.ranks

CPU = RunOptions(device="cpu", timeout=60.0)
CASE = Case(name="toy", family="test", reference="eager", steps=2, parallelism=Parallelism(world_size=2, ep=1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Recordings of a system that repeats itself: once, with values, again, without, and for longer."""
    folder = tmp_path_factory.mktemp("recordings")
    steady = "tests.harness.toy_systems:steady"
    options = replace(CPU, values=("1/param/*", "*/grad/*"))
    with one_host():
        record(CASE, steady, options, Target(out=folder / "first"), folder / "reports")
        record(CASE, steady, CPU, Target(out=folder / "again"), folder / "reports")
        record(replace(CASE, steps=3), steady, CPU, Target(out=folder / "longer"), folder / "reports")
    return folder


TOY = "tests.harness.toy_systems:steady"
HANDMADE = replace(CASE, reference="a:b", candidate="c:d")


def described(first, second):
    lines: list[str] = []
    return diff(first, second, lines.append), lines


def test_two_recordings_of_one_system_are_equal(folders):
    status, lines = described(folders / "first", folders / "again")
    assert status == 0
    assert lines[0] == f"EQUAL: {folders / 'first'} against {folders / 'again'}"
    assert lines[-1] == "the manifests agree"


def test_recordings_of_other_lengths_are_not_comparable_and_say_why(folders):
    status, lines = described(folders / "first", folders / "longer")
    assert status == 3
    assert lines[0].startswith("UNVERIFIED: ")
    assert "the second was recorded with case.steps=3, the case says 2" in "\n".join(lines)


def test_one_changed_digest_is_named_with_what_the_manifests_say(folders, tmp_path):
    from bitproof.harness.capture.recording_files import read_recording, write_recording

    recording = read_recording(folders / "first")
    key = next(key for key in recording.records if (key.step, key.rank, key.kind) == (1, 1, "grad"))
    recording.records[key] = recording.records[key]._replace(digest="0" * 32)
    manifest = replace(recording.manifest, machine=recording.manifest.machine | {"torch": "2.14.0"})
    write_recording(tmp_path / "changed", manifest, recording.records.items())
    status, lines = described(folders / "first", tmp_path / "changed")
    assert status == 1
    assert f"first divergence: step 1, rank 1, grad {key.name}" in lines
    assert "  cause: backward of this step: its losses agree" in lines
    assert f"    bitproof run {CASE.name} --baseline" in lines
    torch = json.dumps(recording.manifest.machine["torch"])
    assert lines[-2:] == ["the manifests differ:", f'  machine.torch: {torch} against "2.14.0"']


def test_a_recording_with_another_kind_of_digests_is_not_comparable_and_says_why(folders, tmp_path):
    from bitproof.harness.capture.digest import ALGORITHM
    from bitproof.harness.capture.recording_files import read_recording, write_recording

    recording = read_recording(folders / "again")
    assert recording.manifest.digest == ALGORITHM
    write_recording(tmp_path / "other", replace(recording.manifest, digest="md5"), recording.records.items())
    status, lines = described(folders / "first", tmp_path / "other")
    assert status == 3
    assert lines[:2] == [
        f"UNVERIFIED: {folders / 'first'} against {tmp_path / 'other'}",
        "the recordings are not comparable\n"
        f"  the first has digests of kind {ALGORITHM}, the second of kind md5: record both again",
    ]
    assert lines[-1] == f'  digest: "{ALGORITHM}" against "md5"'


def test_a_folder_that_is_there_already_is_not_overwritten(folders):
    with pytest.raises(UsageError) as error:
        record(CASE, "eager", CPU, Target(out=folders / "first"), folders / "reports")
    assert str(error.value) == (
        "UsageError: the recording would overwrite something\n"
        "  expected: a folder that does not exist\n"
        f"  found: {folders / 'first'}"
    )


def test_the_command_line_ends_with_2_for_a_case_or_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["record", "no_such_case", "--system", "eager", "--out", str(tmp_path / "out")]) == 2
    assert "no such case" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "there is no such recording" in capsys.readouterr().err


def test_a_damaged_recording_is_not_judged(folders, tmp_path, capsys):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    assert main(["diff", str(folders / "first"), str(tmp_path / "damaged")]) == 3
    assert "RecordingError" in capsys.readouterr().err


def test_two_recordings_that_keep_a_value_show_how_far_apart_it_is(tmp_path):
    first = make_recording(tmp_path / "first", HANDMADE)
    second = make_recording(tmp_path / "second", HANDMADE, at(Key(1, "grad", "w", 1), flip_lowest_bit))
    status, lines = described(first, second)
    assert status == 1
    assert lines[6] == "first divergence: step 1, rank 1, grad w"
    assert " ".join(map(str.strip, lines[7:9])) == (
        "grad w: 1 record, first at step 1, rank 1; 1 of 8 elements, by at most 1 ULP (elements by ULPs: 1: 1); "
        "0x3f80 in the first, 0x3f81 in the second"
    )
    assert max(map(len, lines[7:9])) <= 80


def test_recordings_without_values_name_the_tensors_that_differ(tmp_path):
    first = make_recording(tmp_path / "first", HANDMADE)
    second = make_recording(tmp_path / "second", HANDMADE, at(Key(0, "grad", "w", 0), flip_lowest_bit), patterns=())
    assert "  grad w: 1 record, first at step 0, rank 0; no values kept" in described(first, second)[1]
    other = make_recording(tmp_path / "other", HANDMADE, lambda key, tensor: flip_lowest_bit(tensor), patterns=())
    lines = described(first, other)[1]
    assert [line for line in lines if line.startswith("  grad w: ") and line.endswith(", first at step 0, rank 0")]
    assert len([line for line in lines if "no values kept" in line]) == 1


def test_damaged_values_are_refused_where_they_are_needed(tmp_path):
    first = make_recording(tmp_path / "first", HANDMADE)
    second = make_recording(tmp_path / "second", HANDMADE, at(Key(0, "grad", "w", 0), flip_lowest_bit))
    (second / "values" / "rank0.safetensors").write_bytes(b"")
    with pytest.raises(RecordingError, match=r"rank0.safetensors is damaged, or not the one"):
        described(first, second)


def test_systems_that_read_other_data_are_not_comparable(tmp_path):
    ranks = [{"data_sha256": "a"}, {"data_sha256": "b"}], [{"data_sha256": "a"}, {"data_sha256": "c"}]
    change = at(Key(0, "grad", "w", 0), flip_lowest_bit)
    first = make_recording(tmp_path / "first", HANDMADE, ranks=ranks[0])
    status, lines = described(first, make_recording(tmp_path / "second", HANDMADE, change, ranks=ranks[1]))
    assert status == 3
    assert lines[:2] == [
        f"UNVERIFIED: {first} against {tmp_path / 'second'}",
        "the recordings are not comparable\n"
        "  they read other data, first on rank 1: sha256 b in the first, c in the second",
    ]
    assert described(first, make_recording(tmp_path / "third", HANDMADE, change, ranks=ranks[0]))[0] == 1


def test_systems_that_chunked_other_modules_are_not_comparable_whatever_their_bits(tmp_path):
    def recording(name, **about):
        return make_recording(tmp_path / name, HANDMADE, system="eager_chunked", **about)

    first = recording("first", chunked={"layers.0": 1})
    status, lines = described(first, recording("second", chunked={"layers.0": 1, "layers.1": 1}))
    assert status == 3
    assert lines[:2] == [
        f"UNVERIFIED: {first} against {tmp_path / 'second'}",
        "the recordings are not comparable\n"
        "  the first ran in chunks, in calls a step, layers.1 0, the second layers.1 1",
    ]
    assert described(first, recording("third", chunked={"layers.0": 1}))[0] == 0
    status, lines = described(first, recording("from_before"))
    assert (status, lines[1]) == (
        3,
        "the recordings are not comparable\n  the second does not say which modules ran in chunks: record it again",
    )


# Values and baselines, on the command line.


def command(tmp_path, *arguments):
    line = ["record", "unchunked", "--system", TOY, "--steps", "2", "--world-size", "2", "--device", "cpu"]
    return main([*line, "--report-dir", str(tmp_path / "reports"), *arguments])


@pytest.fixture
def handmade(monkeypatch):
    """Recordings without ranks: what a command does with one is the same."""

    def record_system(case, system, options, out, run_dir, *listeners):
        return make_recording(out, case, patterns=options.values, system=system)

    monkeypatch.setattr("bitproof.harness.commands.record.record_system", record_system)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "none"),
        (["--out", "o", "--baseline"], "both"),
        (["--out", "o", "--force"], "--force without --baseline"),
    ],
)
def test_a_recording_goes_to_one_place(tmp_path, monkeypatch, capsys, arguments, found):
    monkeypatch.chdir(tmp_path)
    assert command(tmp_path, *arguments) == 2
    assert capsys.readouterr().err == (
        "UsageError: record needs exactly one of --out DIR and --baseline\n"
        "  expected: --out DIR, or --baseline with or without --force\n"
        f"  found: {found}\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_baseline_folder_without_baseline_is_a_wrong_call(tmp_path, capsys):
    for arguments in (["record", "unchunked", "--system", TOY, "--out", "o"], ["run", "-k", "unchunked"]):
        assert main([*arguments, "--baseline-dir", str(tmp_path)]) == 2
        assert "\n  fix: add --baseline\n" in capsys.readouterr().err


def test_chosen_values_are_kept_and_all_of_them_have_their_digest(folders):
    recording = read_recording(folders / "first")
    assert recording.manifest.values == ["1/param/*", "*/grad/*"]
    for rank in range(2):
        with open_values_of(folders / "first", recording, rank) as values:
            assert values.names == {"0/grad/weight", "1/grad/weight", "1/param/weight"}
            for key in (key for key in recording.records if name_value(key) in values.names and key.rank == rank):
                values.read_recorded(key, recording.records[key])
    assert not list(folders.glob(".*"))
    assert not (folders / "again" / "values").exists()


def test_a_pattern_that_chose_nothing_is_an_error_and_leaves_no_recording(tmp_path, capsys, handmade):
    assert command(tmp_path, "--values", "grad", "--values", "*/grad/wieght", "--out", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err == (
        "UsageError: --values chose no tensor\n"
        "  expected: a pattern that fits step/kind/name of some tensor, such as 0/loss/loss\n"
        "  found: */grad/wieght\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["reports"]


def test_a_second_baseline_is_refused_and_force_replaces_it(tmp_path, capsys, handmade):
    folder = str(tmp_path / "baselines")
    assert command(tmp_path, "--baseline", "--baseline-dir", folder) == 0
    [made] = (tmp_path / "baselines").glob("*/*/*")
    assert made.parent.parent.name == "unchunked" and made.name.startswith("cpu-torch2.")
    assert read_recording(made).manifest.values == ["0/*", "1/*"]
    assert capsys.readouterr().out.splitlines()[-1] == f"baseline: {made}"
    before = made.stat().st_ino
    assert command(tmp_path, "--baseline", "--baseline-dir", folder) == 2
    assert f"  found: {made}, which has the same bits" in capsys.readouterr().err
    assert made.stat().st_ino == before
    assert command(tmp_path, "--baseline", "--baseline-dir", folder, "--force") == 0
    assert made.stat().st_ino != before
    assert [path.name for path in (tmp_path / "baselines").iterdir()] == ["unchunked"]


def test_a_system_that_fails_leaves_nothing_where_its_recording_would_be(tmp_path, capsys, monkeypatch):
    def record_system(case, system, options, out, run_dir, *listeners):
        make_recording(out, case)
        raise RankError("rank 0 died")

    monkeypatch.setattr("bitproof.harness.commands.record.record_system", record_system)
    for arguments in (["--baseline", "--baseline-dir", str(tmp_path / "b")], ["--out", str(tmp_path / "out")]):
        assert command(tmp_path, *arguments) == 3
        assert "rank 0 died" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "reports"]
    assert list((tmp_path / "b").iterdir()) == []


def test_differences_of_manifests_stand_in_the_order_of_their_files(tmp_path):
    first = make_recording(tmp_path / "first", HANDMADE, device="cuda", backend="nccl", arm="first")
    second = make_recording(tmp_path / "second", HANDMADE, device="cpu", backend="gloo", arm="control")
    _, lines = described(first, second)
    assert lines[-3:] == ["the manifests differ:", '  backend: "nccl" against "gloo"', '  device: "cuda" against "cpu"']


def test_long_values_of_manifests_are_cut_and_two_systems_get_the_command_that_runs_both(tmp_path):
    first = make_recording(tmp_path / "first", HANDMADE, commit="a" * 99)
    second = make_recording(tmp_path / "second", HANDMADE, commit=None)
    _, lines = described(first, second)
    assert lines[-1] == '  commit: "' + "a" * 26 + "... against null" and len(lines[-1]) <= 80
    command = list(_about_the_cause("loss", ("a:b", "c d.py"), "case"))[-1]
    assert command == "    bitproof run case --reference a:b --candidate 'c d.py'"
