from __future__ import annotations

import subprocess

import pytest

from bitproof.harness.capture.manifest import build_manifest, commit
from bitproof.harness.case import Case
from bitproof.harness.machine.devices import Placement

CASE = Case(name="toy", family="x", reference="a:b", candidate="c:d")


@pytest.fixture(autouse=True)
def forget():
    commit.cache_clear()
    yield
    commit.cache_clear()


def git(*arguments):
    settings = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *settings, *arguments], check=True, capture_output=True)


def test_a_manifest_has_everything_that_can_change_a_bit():
    made = build_manifest(
        CASE,
        "eager",
        "first",
        Placement(),
        determinism={"num_threads": 1},
        graph=None,
        fault=None,
        systems=[{"data_sha256": "d"}],
        values=("0/*",),
        switches={"set": {"num_threads": 1}, "after_factory": {"num_threads": 2}},
    )
    assert made.switches == {"set": {"num_threads": 1}, "after_factory": {"num_threads": 2}}
    unknown = {name for name, value in made.to_dict().items() if value is None}
    sums = {"digests_sha256", "values_sha256", "manifest_sha256"}
    later = {"unshown", "calls", "accepted", "meetings", "shows_every_buffer"}
    assert unknown - {"commit"} == {"graph", "fault", "stress", "chunked", "compiled"} | sums | later
    assert (made.case, made.ranks, made.values) == (CASE.stated(), [{"data_sha256": "d"}], ["0/*"])
    named = {"torch", "numpy", "python", "cpu", "cpu_capability", "cuda", "gpus", "gpu_models", "libc", "architecture"}
    assert named <= made.machine.keys()


def test_the_commit_says_when_a_file_changed_since(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    git("tag", "v1")
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit() == head
    commit.cache_clear()
    (tmp_path / "file").write_text("2")
    assert commit() == f"{head}-dirty"


def test_no_commit_is_reported_outside_of_git_or_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    commit.cache_clear()

    def no_git(*args, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert commit() is None


def made_on(*gpus, environments=()):
    about = {"determinism": {}, "graph": None, "fault": None, "systems": []}
    return build_manifest(CASE, "eager", "first", Placement(), gpus=gpus, gpu_environments=environments, **about)


def test_what_ranks_say_of_cuda_is_reported_and_of_a_cpu_nothing_new():
    plain = made_on(None, None, environments=({}, {}))
    reported = made_on(*[{"nccl": "2.27.5", "cudnn": 91002}] * 2, environments=[{"NVIDIA_TF32_OVERRIDE": "0"}] * 2)
    assert reported.machine == plain.machine | {"nccl": "2.27.5", "cudnn": 91002}
    assert reported.environment == plain.environment | {"NVIDIA_TF32_OVERRIDE": "0"}
    assert "nccl" not in plain.machine


def test_ranks_with_other_variables_are_distinguished():
    reported = made_on(None, None, environments=[{"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}])
    assert reported.environment["NCCL_ALGO"] == "['rank 0: Ring', 'rank 1: Tree']"
