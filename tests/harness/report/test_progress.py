from __future__ import annotations

import io

from bitproof.harness.records import Event
from bitproof.harness.report.progress import LiveProgress, PlainProgress, describe_event, make_progress


def test_a_pipe_gets_one_line_an_event_with_steps_throttled(make_result):
    stream, now = io.StringIO(), [0.0]
    progress = PlainProgress(2, stream, clock=lambda: now[0])
    progress.on_event(Event(event="prepare", case="moe_seq", system="graph", arm="first"))
    for step in range(20):
        now[0] += 1.0
        progress.on_event(Event(event="step", case="moe_seq", system="graph", step=step, steps=20))
    progress.on_result(make_result())
    progress.on_result(make_result(verdict="ERROR", error="RankError: rank 3\x1b was killed\n  came from: x"))
    assert stream.getvalue().splitlines() == [
        "[   0.0 s] moe_seq graph: trace and rewrite the graph",
        "[   5.0 s] moe_seq graph: step 5 of 20",
        "[  10.0 s] moe_seq graph: step 10 of 20",
        "[  15.0 s] moe_seq graph: step 15 of 20",
        "[  20.0 s] moe_seq graph: step 20 of 20",
        "[  20.0 s] moe_seq: EQUAL in 3.8 s (1 of 2 cases)",
        "[  20.0 s] moe_seq: ERROR, expected EQUAL in 3.8 s (2 of 2 cases): RankError: rank 3\\x1b was killed",
    ]


def test_an_event_is_reported_as_a_phrase():
    control = Event(event="start", case="moe_seq", system="graph", arm="control")
    assert describe_event(control) == "moe_seq graph (control): start ranks"
    assert describe_event(Event(event="compare", case="moe_seq")) == "moe_seq: compare"


def test_a_terminal_gets_live_bars_and_finished_cases_stay(make_result):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = make_progress(1, stream)
    assert isinstance(progress, LiveProgress)
    assert isinstance(make_progress(1, io.StringIO()), PlainProgress)
    with progress:
        progress.on_event(Event(event="start", case="moe_seq", system="graph", arm="first"))
        progress.on_event(Event(event="step", case="moe_seq", system="graph", step=0, steps=2))
        progress.on_result(make_result())
    assert "moe_seq: EQUAL in 3.8 s" in stream.getvalue()
