from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case, Chunking, Model
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from bitproof.harness.compare.outcome import result_of_error
from bitproof.harness.errors import UsageError
from bitproof.harness.options import Stress
from bitproof.harness.powers.doctor.command import Torch
from bitproof.harness.records import CaseResult, Report, Verdict
from bitproof.harness.report.text import replay_command
from bitproof.harness.report.write import prepare_run_dir, write_run
from bitproof.harness.runtime.disk_cache import default_folder
from tests.distributions import install

ROOT = Path(__file__).parents[2]


class Calls(list):
    """Calls of run_and_report, and beside them their shards."""

    shards: list


@pytest.fixture
def called(monkeypatch) -> list:
    """What `bitproof run` would have run."""
    calls, shards = Calls(), []
    calls.shards = shards

    def record(cases, options, report_dir, replay, not_run, shard, left_out=()):
        shards.append(shard)
        calls.append((cases, options, report_dir, replay, not_run))
        return 1

    monkeypatch.setattr("bitproof.harness.cli.run.run_and_report", record)
    return calls


def test_list_shows_every_case_and_json_the_promised_fields(capsys):
    assert main(["list"]) == 0
    assert "moe_seq" in capsys.readouterr().out
    assert main(["list", "-k", "moe_seq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "moe_seq",
            "family": "chunking",
            "expected": "EQUAL",
            "reference": "eager_chunked",
            "candidate": "graph",
            "world_size": 8,
            "steps": 20,
        }
    ]


def test_list_has_a_heading_a_family_and_a_line_a_case_at_80_columns(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0] == "chunking, ranks x steps:" and len(heads) == len({case.family for case in CASES.values()})
    assert sorted(line.split()[0] for line in lines if line.startswith(" ")) == sorted(CASES)


def test_the_version_is_reported(capsys):
    from bitproof.harness import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bitproof {__version__}\n"


def test_an_expression_that_is_nearly_a_case_is_answered_with_it(capsys):
    assert main(["list", "-k", "moe_sec"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("\n  expected: moe_seq or moe_batch\n  found: -k 'moe_sec'\n  fix: did you mean moe_seq?\n")


@pytest.mark.parametrize(("word", "meant"), [("prov", "prove"), ("sensitivty", "sensitivity"), ("lst", "list")])
def test_a_misspelled_command_is_answered_with_the_command_of_a_power_too(capsys, word, meant):
    assert main([word]) == 2
    assert f"No such command '{word}'. Did you mean '{meant}'?" in capsys.readouterr().err


def test_list_shows_the_systems_that_have_a_name_of_their_own(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "mine", "[bitproof.systems]\nmy_loop = mine.loop:make\n")
    assert main(["list", "--systems", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "eager", "source": "built in"},
        {"name": "eager_chunked", "source": "built in"},
        {"name": "graph", "source": "built in"},
        {"name": "joint", "source": "built in"},
        {"name": "autoplace", "source": "built in"},
        {"name": "precompiled", "source": "built in"},
        {"name": "compiled", "source": "built in"},
        {"name": "my_loop", "source": "mine.loop:make of mine 1.0"},
    ]
    assert main(["list", "--systems"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "my_loop        mine.loop:make of mine 1.0"


def test_a_wrong_command_ends_with_2_and_its_text_on_stderr(capsys):
    assert main(["no_such_command"]) == 2
    out, err = capsys.readouterr()
    assert ("No such command" in err, out) == (True, "")


DEFAULT_OPTIONS = {
    "device": "auto",
    "collectives": "auto",
    "timeout": 600.0,
    "explain_timeout": 600.0,
    "control": "always",
    "inject": None,
    "extra_passes": (),
    "dump_graphs": False,
    "verbose": False,
    "stress": None,
    "names": {},
    "values": (),
    "profile": False,
    "every_call": False,
    "checks": (),
    "active": (),
    "share_gpus": False,
    "kept_graphs": default_folder(),
    "precompiled": None,
    "trust_compiled": False,
    "jobs": 1,
    "verify": True,
}
"""How cases run where nothing is said of it."""


def test_run_hands_its_options_to_the_launcher_and_to_the_replay(called, tmp_path):
    data = tmp_path / "text.txt"
    data.write_text("text")
    names = tmp_path / "names.json"
    names.write_text('{"model.*": "*"}')
    line = (
        f"--candidate mine --reference eager --steps 3 --world-size 4 --device cpu --no-control --collectives gloo "
        f"--early-grad-accumulation --inject flip-bit --report-dir {tmp_path} --timeout 30 --data {data} -v "
        f"--extra-pass a.b:c --extra-pass d:e@before=chunk --dump-graphs --stress --names {names} -j auto"
    )
    assert main(["run", "-k", "moe_seq", *line.split()]) == 1
    [(cases, options, report_dir, replay, not_run)] = called
    assert ([case.name for case in cases], not_run) == (["moe_seq"], {})
    assert (cases[0].candidate, cases[0].reference, cases[0].steps) == ("mine", "eager", 3)
    assert vars(options) == DEFAULT_OPTIONS | {
        "device": "cpu",
        "collectives": "gloo",
        "timeout": 30.0,
        "control": "never",
        "inject": "flip-bit",
        "extra_passes": ("a.b:c", "d:e@before=chunk"),
        "dump_graphs": True,
        "verbose": True,
        "stress": Stress(),
        "names": {"model.*": "*"},
        "jobs": "auto",
    }
    assert report_dir == tmp_path
    assert (
        replay
        == (
            f"--candidate mine --reference eager --steps 3 --world-size 4 --data {data} --early-grad-accumulation "
            "--inject flip-bit --extra-pass a.b:c --extra-pass d:e@before=chunk --dump-graphs --device cpu "
            f"--collectives gloo --no-control --stress --names {names} --timeout 30.0 --verbose"
        ).split()
    )


def test_a_run_against_baselines_is_replayed_against_them(called, tmp_path):
    for arguments, folder in (([], "baselines"), (["--baseline-dir", "b"], "b")):
        assert main(["run", "-k", "moe_seq", "--baseline", *arguments]) == 1
        [(_, options, _, replay, _)] = called
        [check] = options.active
        assert check.options.baseline_dir == Path(folder)
        assert replay == ["--baseline", "--baseline-dir", str(Path(folder).absolute())]
        called.clear()


@pytest.mark.parametrize(
    ("given", "control", "repeated"),
    [
        ([], "always", []),
        (["--control", "always"], "always", []),
        (["--control", "when-different"], "when_different", ["--control", "when-different"]),
        (["--no-control"], "never", ["--no-control"]),
        (["--stress", "--stress-threads", "3"], "always", ["--stress", "--stress-threads", "3"]),
    ],
)
def test_when_systems_run_twice_is_handed_on_and_repeated_where_it_is_not_the_default(called, given, control, repeated):
    assert main(["run", "-k", "moe_seq", *given]) == 1
    [(_, options, _, replay, _)] = called
    assert (options.control, replay) == (control, repeated)
    assert (options.stress is not None and options.stress.num_threads == 3) == ("--stress" in given)


@pytest.mark.parametrize("flag", ["--every-call", "--deep"])
def test_every_call_has_another_name_and_is_replayed_by_its_own(called, flag):
    assert main(["run", "-k", "moe_seq", flag]) == 1
    [(_, options, _, replay, _)] = called
    assert options.every_call and replay == ["--every-call"]


@pytest.mark.ranks
def test_an_extra_pass_that_is_not_there_ends_with_2_and_no_report(tmp_path):
    value = "cases/examples/extra_passes.py:drop"
    command = [sys.executable, "-m", "bitproof", "run", "-k", "moe_seq", "--extra-pass", value]
    done = subprocess.run([*command, "--report-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "\n  expected: wait_late, add_gradients_in_bfloat16" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_run_without_options_takes_every_case_as_it_is(called):
    assert main(["run", "-k", "chunking"]) == 1
    [(cases, options, report_dir, replay, not_run)] = called
    names = ["transformer_batch", "moe_batch", "moe_seq", "unchunked"]
    names += ["blocks_batch_sight", "experts_batch_sight", "experts_seq_sight"]
    assert [case.name for case in cases] == names
    assert not_run == {}, "who selects by name gets every case that is named"
    assert vars(options) == DEFAULT_OPTIONS
    assert (report_dir, replay) == (Path("reports"), [])


def test_a_precompiled_step_is_handed_on_and_named_again_in_a_replay(called):
    assert main(["run", "-k", "moe_seq", "--precompiled", "step"]) == 1
    [(_, options, _, replay, _)] = called
    assert (options.precompiled, replay) == (Path("step"), ["--precompiled", str(Path("step").absolute())])
    assert main(["run", "-k", "moe_seq", "--precompiled", "step", "--trust-compiled"]) == 1
    _, options, _, replay, _ = called[-1]
    assert options.trust_compiled and replay == ["--precompiled", str(Path("step").absolute()), "--trust-compiled"]


def test_a_shard_runs_its_part_of_the_changed_cases(called):
    for index in ("1", "2"):
        assert main(["run", "-k", "moe_seq or moe_batch", "--steps", "3", "--shard", f"{index}/2"]) == 1
    assert [[case.name for case in call[0]] for call in called] == [["moe_batch"], ["moe_seq"]]
    assert [str(shard) for shard in called.shards] == ["1/2", "2/2"]
    for shard in called.shards:
        assert [(case.name, case.steps) for case in shard.selection] == [("moe_batch", 3), ("moe_seq", 3)]
    assert called[0][3] == ["--steps", "3"], "a replay selects its case by name"


def test_machines_that_can_judge_other_cases_split_them_the_same_way(called):
    parts = [("--device", "cpu", "--shard", f"{index}/3") for index in (1, 2, 3)]
    for part in parts:
        assert main(["run", *part]) == 1
    names = [case.name for call in called for case in call[0]] + [name for call in called for name in call[4]]
    assert sorted(names) == sorted(case.name for case in called.shards[0].selection)


def test_run_takes_a_case_from_a_file_and_its_replay_does_too(called, tmp_path, capsys):
    case = replace(CASES["moe_seq"], model=Model(layers=1, dense_layers=0))
    file = tmp_path / "case.json"
    file.write_text(case_text(case))
    assert main(["run", "--case", str(file), "--steps", "3"]) == 1
    [(cases, _, _, replay, _)] = called
    assert cases == [replace(case, steps=3)]
    assert replay == ["--steps", "3", "--case", str(file)]
    report = Report(run_id="r", exit_status=0, environment={}, cases=[], options=tuple(replay))
    result = result_of_error(case, UsageError("x"), device="cpu", backend="gloo")
    assert replay_command(report, result) == f"bitproof run --steps 3 --case {file}"


def test_run_takes_several_files_and_selects_among_them(called, tmp_path, capsys):
    files = [tmp_path / f"{name}.json" for name in ("moe_seq", "moe_batch", "again")]
    for file in files:
        file.write_text(case_text(CASES["moe_seq" if file.stem == "again" else file.stem]))
    both = ["--case", str(files[0]), "--case", str(files[1])]
    assert main(["run", *both]) == main(["run", *both, "-k", "batch"]) == 1
    [all_of_them, one] = called
    assert [case.name for case in all_of_them[0]] == ["moe_seq", "moe_batch"] and all_of_them[3] == both
    assert [case.name for case in one[0]] == ["moe_batch"]
    report = Report(run_id="r", exit_status=0, environment={}, cases=[], options=tuple(both))
    result = result_of_error(CASES["moe_batch"], UsageError("x"), device="cpu", backend="gloo")
    assert replay_command(report, result) == " ".join(["bitproof run -k moe_batch", *both])
    assert main(["run", *both, "--case", str(files[2])]) == 2
    assert "2 of the files given by --case hold a case moe_seq" in capsys.readouterr().err
    assert main(["run", *both, "-k", "nothing_such"]) == 2


def test_list_takes_files(tmp_path, capsys):
    file = tmp_path / "mine.json"
    file.write_text('{"like": "moe_seq", "steps": 2, "parallelism": {"world_size": 4}}')
    assert main(["list", "--case", str(file), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["steps"], row["world_size"], row["reference"]) == ("mine", 2, 4, "eager_chunked")


def test_a_case_that_needs_a_gpu_is_left_out_with_its_reason_unless_it_is_named(called):
    assert main(["run", "--device", "cpu"]) == 1
    assert main(["run", "--device", "cpu", "-k", "regional_inductor"]) == 1
    everything, named = called
    names = [case.name for case in everything[0]]
    assert "regional_inductor" not in names and "inductor_moe" in names
    assert everything[4]["regional_inductor"].startswith("it needs CUDA; its 8 ranks run on the CPU here (")
    assert ([case.name for case in named[0]], named[4]) == (["regional_inductor"], {})


def test_our_own_bug_ends_with_3_and_a_traceback(called, monkeypatch, capsys):
    monkeypatch.setattr("bitproof.harness.cli.run.run_and_report", lambda *arguments, **named: 1 // 0)
    assert main(["run"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_report_is_printed_again_in_every_form(tmp_path, capsys):
    case = Case(name="moe_seq", family="x", chunking=Chunking(dim="seq", modules="*"))
    result = CaseResult(
        case=case, verdict=Verdict.ERROR, error="no", steps=20, world_size=8, device="cpu", backend="gloo"
    )
    run_dir = prepare_run_dir(tmp_path)
    write_run(Report(run_id=run_dir.name, exit_status=3, environment={}, cases=[result]), run_dir)
    for form, name in {"md": "report.md", "html": "report.html", "junit": "junit.xml", "json": "report.json"}.items():
        assert main(["report", str(run_dir), "--format", form]) == 0
        assert capsys.readouterr().out == (run_dir / name).read_text()
    (run_dir / "report.json").write_text("{")
    assert main(["report", str(run_dir)]) == 3
    assert "RecordingError: a report is not JSON" in capsys.readouterr().err


def test_doctor_ends_with_0_when_the_main_cases_can_run_and_3_otherwise(monkeypatch, capsys, tmp_path):
    able = Torch(version="2.13.0+cpu", gloo=True, nccl=False, gpus=[])
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.available_gib", lambda: 24.0)
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.probe_torch", lambda: able)
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.run_trial", lambda: [])
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.trace_as_two_ranks", lambda: None)
    assert main(["doctor", "--report-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("ok  main cases: transformer_batch, moe_batch, moe_seq can run\n")
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.probe_torch", lambda: replace(able, version="2.10.1"))
    assert main(["doctor", "--report-dir", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    tested = "2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0"
    assert f"no  torch: 2.10.1, none of the tested {tested}; supported: 2.11 or later; fix: install a" in out
    assert out.endswith("no  main cases: transformer_batch, moe_batch, moe_seq cannot run, because of: torch\n")
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.probe_torch", lambda: able)
    monkeypatch.setattr("bitproof.harness.powers.doctor.command.run_trial", lambda: "RankError: the host ended")
    assert main(["doctor", "--report-dir", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    assert f"no  trial: RankError: the host ended; fix: install a tested torch: {tested}\n" in out
    assert out.endswith("cannot run, because of: trial\n")


@pytest.mark.ranks
def test_listing_loads_neither_torch_nor_pandas():
    code = (
        "import sys; from bitproof.harness.cli import main; status = main(['list']); "
        "assert not {'torch', 'pandas', 'numpy', 'pyarrow'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ranks
def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "bitproof", "list", "-k", "nope"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("UsageError: no case matches")


@pytest.mark.ranks
def test_a_case_that_contradicts_itself_ends_with_2_and_its_error(tmp_path):
    install(tmp_path, "mine", "[bitproof.cases]\nmine = my_cases:cases\n")
    (tmp_path / "my_cases.py").write_text(
        "def cases():\n    from bitproof.harness.case import Batch, Case, Chunking\n"
        "    chunking = Chunking(dim='batch', modules='layers.*')\n"
        "    Case(name='odd', family='t', chunking=chunking, batch=Batch(sequences=3))\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "bitproof", "list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert run.returncode == 2
    assert run.stderr == (
        "CaseError: case odd cannot be split in two along batch\n"
        "  expected: an even batch.sequences\n"
        "  found: batch.sequences=3\n"
        "  fix: choose 4\n"
    )


@pytest.mark.parametrize(
    "words", [["history"], ["history", "add", "reports/latest"], ["history", "show", "--plot", "x"]]
)
def test_a_command_that_was_removed_is_refused_with_what_to_use_instead(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "UsageError: `bitproof history` was removed\n"
        "  fix: keep each run's report.json, for instance as an artifact of CI, and compare two runs with "
        "`bitproof report RUN_DIR --format comment --against EARLIER_RUN_DIR`\n"
    )
