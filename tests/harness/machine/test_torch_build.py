import os

import pytest
import torch

from bitproof.harness.errors import MachineError
from bitproof.harness.machine import torch_build

pytestmark = pytest.mark.ranks


@pytest.fixture
def for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA, in a process that has not used a GPU; what is asked of torch is answered with who is asked."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.__config__, "show", lambda: str(os.getpid()))
    torch_build.read_elsewhere.cache_clear()


def test_a_build_for_cuda_is_asked_in_another_process_and_once(for_cuda: None) -> None:
    found = torch_build.torch_build()
    assert found.settings.isdigit() and found.settings != str(os.getpid())
    assert torch_build.torch_build() == found
    assert found.parts()[:2] == (torch.__version__, torch.version.git_version)


def test_a_process_that_uses_a_gpu_and_a_build_for_the_cpu_are_asked_themselves(
    for_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert torch_build.torch_build().settings == str(os.getpid())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert torch_build.torch_build().settings == str(os.getpid())


def test_a_process_that_ends_without_an_answer_is_an_error(for_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__config__, "show", lambda: os._exit(3))
    with pytest.raises(MachineError, match="torch does not say what it was built with"):
        torch_build.torch_build()
