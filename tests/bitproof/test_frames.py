"""What one run compared is tested where one runs, in test_runs.py."""

from __future__ import annotations

import pytest

from bitproof.frames import frame_of_run
from bitproof.harness.errors import RecordingError
from tests.harness.reports import case, result


def test_a_run_without_recordings_has_no_frame(tmp_path):
    with pytest.raises(RecordingError, match="the run left no recording of eager"):
        frame_of_run(result(case()), tmp_path)
