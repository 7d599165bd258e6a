"""One archive of a program's calls, recorded once."""

import pytest
import torch

from bitproof.harness.powers.moved.standalone.recording_calls import record
from tests.harness.powers.moved.plants import PROGRAM


@pytest.fixture(scope="session")
def archive_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moved")
    (folder / "planted_program.py").write_text(PROGRAM)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record(str(folder / "calls"), f"{folder}/planted_program.py:calls", [], 1, 1 << 26)
    torch.set_num_threads(threads)
    return folder / "calls"
