from __future__ import annotations

import io
import re

from bitproof.harness.records import BlamedCall, Divergence
from bitproof.harness.report import terminal


def printed(report) -> str:
    stream = io.StringIO()
    terminal.print_report(report, stream)
    return stream.getvalue()


def test_every_case_has_a_row_and_only_unexpected_ones_a_paragraph(report):
    text = printed(report)
    for name in ("good", "bad", "meant", "broken", "lost"):
        assert f"\n  {name} " in text
    assert "bad: DIFFERENT (grad, param), expected EQUAL\n  first divergence: step 0, rank 3, grad" in text
    assert "  replay: bitproof run -k bad --steps 2" in text
    assert "good: " not in text
    assert "meant: " not in text


def test_an_error_is_reported_in_full(report):
    assert "lost: UNVERIFIED, expected EQUAL\n  the candidate recording is empty\n" in printed(report)


def test_brackets_in_an_error_are_not_taken_for_markup(make_report, make_result):
    result = make_result(verdict="ERROR", error="expected float32[4, 8] [red]not[/red]")
    assert "expected float32[4, 8] [red]not[/red]" in printed(make_report(result))


def test_a_blamed_call_is_reported_with_its_place_and_line(make_report, make_result):
    first = Divergence(
        step=0,
        rank=3,
        kind="grad",
        name="w",
        call=BlamedCall(
            operator="mul",
            how="has the same inputs and a different output",
            module="layers.1.moe",
            direction="forward",
            chunk=1,
            source="layers/moe.py:68",
            rank=2,
        ),
    )
    assert (
        "  to blame: mul of layers.1.moe (forward, chunk 1) on rank 2 has the same inputs and a different output "
        "(layers/moe.py:68)\n"
    ) in printed(make_report(make_result("bad", "DIFFERENT", first_divergence=first)))


def test_a_call_that_no_module_owns_and_that_runs_once_is_reported_too(make_report, make_result):
    call = BlamedCall(operator="add", how="is odd", direction="update", rank=0)
    first = Divergence(step=0, rank=0, kind="loss", name="loss", call=call)
    text = printed(make_report(make_result("bad", "DIFFERENT", first_divergence=first)))
    assert "  to blame: add of the step itself (update) on rank 0 is odd\n" in text


def test_a_terminal_of_80_columns_breaks_no_word_of_the_table(make_report, make_result, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    name = "autoplace_deepseek_fsdp2_tp2_ep2"
    stream = Terminal()
    terminal.print_report(make_report(make_result(name, "NONDETERMINISTIC"), make_result("x", "DIFFERENT")), stream)
    table = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).partition("1 DIFFERENT")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert {name, "NONDETERMINISTIC", "DIFFERENT", "expected", "seconds"} <= set(table.split())
