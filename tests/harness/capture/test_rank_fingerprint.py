"""What ranks are made of: everything that can change a bit, compared, and ranks that differ are named."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from bitproof.harness.capture import rank_fingerprint
from bitproof.harness.capture.rank_fingerprint import (
    describe_ranks,
    differences,
    facts_of_process,
    facts_of_rank,
    loaded_files,
)
from bitproof.harness.errors import CaseError
from bitproof.harness.runtime import sources

FACTS = {"commit": "a", "cpu_capability": "AVX512", "environment ATEN_CPU_CAPABILITY": "avx512"}


def test_ranks_that_are_made_of_the_same_are_not_refused() -> None:
    differences([FACTS, dict(FACTS), FACTS], must_all_have=True).refuse()


def test_every_rank_that_differs_is_named_with_what_differs() -> None:
    other = FACTS | {"cpu_capability": "DEFAULT"}
    del other["environment ATEN_CPU_CAPABILITY"]
    found = differences([FACTS, other, FACTS, other, other, FACTS | {"commit": "b-dirty"}], must_all_have=True)
    with pytest.raises(CaseError) as error:
        found.refuse()
    assert str(error.value) == (
        "CaseError: ranks 1, 3 to 5 are not made of what the others are\n"
        "  expected: one release, one installation and one environment on every rank\n"
        "  found: commit: a on ranks 0 to 4; b-dirty on rank 5\n"
        "    cpu_capability: AVX512 on ranks 0, 2, 5; DEFAULT on ranks 1, 3, 4\n"
        "    environment ATEN_CPU_CAPABILITY: avx512 on ranks 0, 2, 5; nothing on ranks 1, 3, 4\n"
        "  fix: bring all machines to one commit, one installation and one environment"
    )


def test_what_only_some_ranks_load_is_no_difference_and_what_they_have_otherwise_is() -> None:
    """Trainers import a logger on rank 0 alone."""
    logging, plain = {"module a": "1", "module logger": "2"}, {"module a": "1"}
    assert differences([logging, plain], must_all_have=False).ranks == []
    found = differences([{"module a": "1"}, {"module b": "1"}, {"module b": "2"}], must_all_have=False)
    assert (found.ranks, found.lines) == ([2], ["module b: 1 on rank 1; 2 on rank 2"])


def test_a_process_shows_sources_commit_build_and_capability() -> None:
    facts = facts_of_process()
    reported = {"bitproof's sources", "commit", "build of torch", "files of torch", "libc", "cpu_capability", "python"}
    assert reported <= facts.keys()
    assert facts == facts_of_process()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ATEN_CPU_CAPABILITY", True),
        ("MKL_CBWR", True),
        ("NCCL_ALGO", True),
        ("LD_PRELOAD", True),
        ("GLIBC_TUNABLES", True),
        ("OPENBLAS_CORETYPE", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("TORCH_OF_A_LATER_RELEASE", True),
        ("OMP_NUM_THREADS", True),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", True),
        ("GLOO_SOCKET_IFNAME", False),
        ("NCCL_SOCKET_IFNAME", False),
        ("NCCL_IB_HCA", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("NCCL_DEBUG", False),
        ("TORCH_HOME", False),
        ("TORCHELASTIC_RESTART_COUNT", False),
    ],
)
def test_variables_count_that_can_change_a_bit_and_not_those_of_one_machine(
    name: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "odd")
    assert (f"environment {name}" in facts_of_process()) == counts


def test_a_module_that_a_user_brought_is_reported_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "helper_of_a_user.py"
    monkeypatch.setitem(sys.modules, "helper_of_a_user", types.ModuleType("helper_of_a_user"))
    sys.modules["helper_of_a_user"].__file__ = str(file)
    seen = []
    for text in ("lr = 1", "lr = 2"):
        file.write_text(text)
        sources.digest_of_file.cache_clear()
        seen.append(loaded_files()["module helper_of_a_user"])
    assert seen[0] != seen[1]
    sources.digest_of_file.cache_clear()


def test_a_library_that_is_no_module_is_reported_by_its_content_or_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libmine.so"
    library.write_bytes(b"code")
    monkeypatch.setattr(
        rank_fingerprint, "mapped_files", lambda: {str(library), "/usr/lib/libc.so.6", os.path.realpath(sys.executable)}
    )
    known = {name: reported for name, reported in loaded_files().items() if name.startswith("library ")}
    assert known == {"library libmine.so": f"sha256 {hashlib.sha256(b'code').hexdigest()[:16]}"}
    monkeypatch.setattr(rank_fingerprint, "MAX_HASHED", 3)
    assert loaded_files()["library libmine.so"] == "4 bytes"


def test_our_own_modules_and_torchs_are_reported_elsewhere_and_trainers_among_our_cases_are_not() -> None:
    importlib.import_module("bitproof.builtin_cases.examples.mesh_loop")
    names = {name.removeprefix("module ") for name in loaded_files()}
    assert not any(f"{name}.".startswith(("bitproof.harness.", "bitproof.reference.")) for name in names)
    assert not {name.partition(".")[0] for name in names} & {"torch", "json"}
    assert {"numpy", "bitproof.builtin_cases.examples.mesh_loop"} <= names


def test_a_rank_shows_its_cpu_or_its_gpu_and_not_how_gpus_are_joined() -> None:
    assert "cpu" in facts_of_rank(None)
    gpu = {"gpu": "H200", "driver": "1", "gpu_topology": ["x"], "cublas": None}
    assert facts_of_rank(gpu, with_code=False) == {"gpu": "H200", "driver": "1"}


def test_ranks_are_reported_in_words() -> None:
    assert [describe_ranks(ranks) for ranks in ([3], [0, 1], [1, 2, 3, 7, 9, 10])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 1 to 3, 7, 9, 10",
    ]
