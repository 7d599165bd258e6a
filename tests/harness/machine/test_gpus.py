"""CUDA is played by stand-ins: this machine may have none, and what is told must not need one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bitproof.harness import torch_compat
from bitproof.harness.machine import gpus
from bitproof.harness.machine.gpus import agreed_facts, driver_version, num_gpus, read_gpu_environment, read_nccl_conf


@pytest.fixture
def cuda_build(monkeypatch):
    """A build for CUDA whose own counting would start CUDA."""

    def start_cuda():
        raise AssertionError("CUDA was started in a process that is forked from")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", start_cuda)
    return monkeypatch


@pytest.fixture
def elsewhere(monkeypatch):
    """What another process counts, as its output; the commands that were run."""
    ran = []

    def answer(output, status=0):
        def run(command, **options):
            ran.append(command)
            return SimpleNamespace(returncode=status, stdout=output, stderr="")

        monkeypatch.setattr(subprocess, "run", run)
        return ran

    return answer


def test_the_driver_counts_without_starting_cuda(cuda_build, elsewhere):
    ran = elsewhere("5")
    cuda_build.setattr(torch.cuda, "_device_count_nvml", lambda: 8)
    assert (num_gpus(), ran) == (8, [])


def test_where_the_driver_does_not_report_another_process_counts(cuda_build, elsewhere):
    ran = elsewhere("a warning\n3\n")
    cuda_build.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    assert num_gpus() == 3
    assert [command[0] for command in ran] == [sys.executable]


@pytest.mark.parametrize(("output", "status"), [("", 1), ("", 0), ("no number", 0)])
def test_another_process_that_fails_counts_no_gpu(cuda_build, elsewhere, output, status):
    elsewhere(output, status)
    cuda_build.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    assert num_gpus() == 0


def test_a_driver_library_that_raises_does_not_report(monkeypatch):
    def fail():
        raise RuntimeError("NVML")

    monkeypatch.setattr(torch.cuda, "_device_count_nvml", fail)
    assert torch_compat.count_gpus_by_driver() is None


def test_a_build_for_the_cpu_has_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert num_gpus() == 0


def test_a_cpu_has_no_facts_of_cuda():
    assert gpus.read_gpu_facts(torch.device("cpu")) is None
    assert agreed_facts([None, None]) == agreed_facts([]) == {}


def test_a_rank_shows_the_versions_of_what_it_has_loaded(monkeypatch):
    card = SimpleNamespace(name="H200", multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(gpus, "gpu_topology", lambda: ["GPU0 GPU1", "GPU0 X NV18"])
    facts = gpus.read_gpu_facts(torch.device("cuda", 0))
    assert (facts["nccl"], facts["cudnn"]) == ("2.27.5", 91002)
    assert facts["gpu"] == "H200, 132 multiprocessors, compute capability 9.0"
    assert facts["gpu_topology"] == ["GPU0 GPU1", "GPU0 X NV18"]
    assert {"cublas", "driver", "nccl_conf"} <= facts.keys()
    assert gpus.read_gpu_facts(torch.device("cuda", 3))["gpu_topology"] is None


def test_ranks_that_say_one_thing_say_it_once_and_others_are_distinguished():
    ranks = [{"nccl": "2.27.5", "gpu_topology": ["X"]}, {"nccl": "2.27.5", "gpu_topology": None}]
    assert agreed_facts(ranks) == {"nccl": "2.27.5", "gpu_topology": ["X"]}
    ranks[1]["nccl"] = "2.27.6"
    assert agreed_facts(ranks)["nccl"] == ["rank 0: 2.27.5", "rank 1: 2.27.6"]


def test_the_drivers_version_is_read_from_its_file(tmp_path):
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version:  gcc 12.2.0\n")
    assert driver_version(file) == "550.54.15"


def test_settings_of_nccl_are_read_from_its_files_in_its_order(tmp_path):
    etc, home = tmp_path / "etc", tmp_path / "home"
    for folder in (etc, home):
        folder.mkdir()
    assert read_nccl_conf({}, etc, home) == []
    (etc / "nccl.conf").write_text("# a comment\nNCCL_ALGO=Ring\n\n")
    (home / ".nccl.conf").write_text(" NCCL_PROTO=Simple \n")
    assert read_nccl_conf({}, etc, home) == ["NCCL_ALGO=Ring", "NCCL_PROTO=Simple"]
    (tmp_path / "own").write_text("NCCL_NVLS_ENABLE=0\n")
    assert read_nccl_conf({"NCCL_CONF_FILE": str(tmp_path / "own")}, etc, home) == [
        "NCCL_ALGO=Ring",
        "NCCL_NVLS_ENABLE=0",
    ]


def test_variables_that_cudas_libraries_alone_read_are_reported():
    read = {"CUBLASLT_X": "1", "CUDNN_X": "1", "NCCL_ALGO": "Ring", "NVIDIA_TF32_OVERRIDE": "0"}
    assert read_gpu_environment(read | {"NVIDIA_VISIBLE_DEVICES": "all", "NCCL_HOSTID": "rank0"}) == read


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, ("GPU-a1", "GPU-b2", "GPU-c3")),
        ("2", ("GPU-c3",)),
        ("2,0", ("GPU-c3", "GPU-a1")),
        ("GPU-b", ("GPU-b2",)),
        ("", ()),
    ],
)
def test_visible_gpus_have_their_uuids_as_names(cuda_build, variable, names):
    cuda_build.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        cuda_build.setenv("CUDA_VISIBLE_DEVICES", variable)
    cuda_build.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 3)
    cuda_build.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: ["GPU-a1", "GPU-b2", "GPU-c3"])
    assert gpus.visible_gpus() == names


@pytest.mark.parametrize(
    ("variable", "names"), [(None, ("0", "1")), ("5,3", ("5", "3")), ("MIG-x,MIG-y", ("MIG-x", "MIG-y"))]
)
def test_where_the_driver_does_not_report_gpus_are_called_as_the_variable_calls_them(
    cuda_build, elsewhere, variable, names
):
    elsewhere("2")
    cuda_build.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        cuda_build.setenv("CUDA_VISIBLE_DEVICES", variable)
    cuda_build.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    cuda_build.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: None)
    assert gpus.visible_gpus() == names
