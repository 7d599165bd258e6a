"""A report in which no field is empty, and what a reader of each form must never get from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from bitproof.harness.powers.baselines import report as baselines
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.powers.proofs import report as proofs
from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
from bitproof.harness.powers.sensitivity.records import FormulaRow, Sensitivity, SensitivityRow, UnseenCall
from bitproof.harness.powers.sensitivity.report import finding_of
from bitproof.harness.records import (
    Artifact,
    CaseResult,
    CaseSeconds,
    Closeness,
    Code,
    Finding,
    InFloat64,
    Key,
    LayoutBounds,
    LayoutRow,
    Partition,
    PassReport,
    Placed,
    PlacedTensor,
    Report,
    Score,
    Sentence,
    Shard,
    Table,
    Throughput,
)
from bitproof.harness.report.status import exit_status

Path = tuple[str | int, ...]

HOSTILE = (
    "![i](http://evil.example/i.png)",
    "[c](javascript:alert(1)) [c][d]",
    "<img src=http://evil.example/x onerror=alert(1)><script>alert(1)</script>",
    "</summary></details></pre></td></title></style><b>",
    "http://evil.example www.evil.example a@evil.example @somebody #12 ftp://x",
    "| a | b |\n|---|---|\n| c | d |",
    "```\n# heading\n\n- item\n\n````\n<b>x</b>\n",
    "\n\n[d]: http://evil.example\n\n> quote\n\n    code",
    "**bold** _it_ ~~gone~~ `code` $x$ [^1] :x: \\| \\",
    "::error file=x::evil\n  ::stop-commands::x\n##[error]evil ##vso[task.setvariable variable=x]y ##teamcity[x]",
    "\x1b[31mred\x1b]8;;http://evil.example\x07link\x1b]0;title\x07\x9b2J\r\x08\x00\x7f\x85",
    "\u202eback\u2066 \u200bhidden\u2028line\ufeff \ud800 \ufffe",
    "\"'>{{ 7*7 }}{% raw %}${x}<!-- ]]> --><?x ?>",
    "]]><![CDATA[ &amp; &lt;b&gt; &#60;b&#62;",
    "[red]markup[/red] [link=http://evil.example]x[/link] :fire:",
)


def everything(localized: CaseResult, make_result: Any, closeness: Closeness, drift: Any) -> Report:
    """Cases that fill every field of a report between them."""
    divergence = localized.first_divergence
    assert divergence is not None and divergence.call is not None
    call = replace(divergence.call, node="mul_1")
    first = replace(divergence, pass_="chunk", between="reference against itself", holds="grad b", call=call)
    row = SensitivityRow(module="norm", direction="forward", calls=9, tried=7, seen=5, at_once=2, blind=1)
    sensitivity = Sensitivity(
        steps=1,
        ranks=2,
        rows=[row],
        unseen=[UnseenCall(operator="mul", module="norm", direction="forward", chunk=1, node="m", reason="rounded")],
        formulas=[FormulaRow(operator="mul", formula="other", tried=1, seen=1)],
        shown={"loss": 5},
        seconds=1.0,
    )
    unmeasured = Sensitivity(reason="nothing to replay")
    own = Finding(
        brief="more memory",
        objection="too much memory",
        unjudged="no memory",
        headline="memory grew",
        blocks=(Sentence("much"), Table("memory", ("side",), (("reference",),)), Code("log", "lines")),
        data={"growth": 0.5},
    )
    proof = ProofOutcome(
        otherwise=1,
        laid_out_otherwise=["gradient of w"],
        verdict=ProofVerdict.NOT_PROVED,
        proved=3,
        not_proved=1,
        reason="an operator",
        unproved=["grad w"],
        first=["mul against add"],
        assumptions=["kernels repeat"],
        seconds=1.0,
    )
    placed = Placed(
        source="solver", cost=1.0, bytes=8, bound=9, least=7, gap=0.0, nodes=1, edges=1, variables=1, constraints=1,
        seconds=0.1, sha256="ab", split=["layers.0"], beside={"by hand": [1.0, 2.0]},
        parameters=[PlacedTensor(name="w", copies=1, data="S0", tensor="R", cost=0.5, bytes=4)],
    )  # fmt: skip
    partition = Partition(
        by="min cut", nodes_joint=9, nodes_forward=5, nodes_backward=6, saved=1, saved_bytes=4, uncut=2, uncut_bytes=8,
        recomputed=1,
    )  # fmt: skip
    artifact = Artifact(
        fingerprint="ab", content="cd", case="bad", system="graph", ranks=8, nodes=1, groups=1, bytes=9, compiled="ef"
    )
    layouts = LayoutBounds(
        across=2, exact=1, regrouped=1, regrouped_from="backward", samples=3, confidence=0.99, beyond=1,
        rows=[LayoutRow(step=1, kind="grad", name="w", error=0.5, bound=0.25)],
        in_float64=InFloat64(
            beyond=1, narrow="aten.mul.Tensor (a.py:1)", less_accurate=9.5, failed="it raised",
            rows=[LayoutRow(step=1, kind="grad", name="w", error=0.5, bound=0.25)],
        ),
    )  # fmt: skip
    baseline = BaselineResult(
        status=BaselineStatus.DRIFTED, path="baselines/x", reasons=["it drifted"], compared=9, mismatched=4,
        tensors_drifted=1, drift=[drift], call=call,
    )  # fmt: skip
    seconds = CaseSeconds(
        trace=1.0, passes={"chunk": 0.5}, reference=1.0, candidate=1.0, compare=0.1, start_ranks={"reference": 1.0},
        record={"reference": 0.1}, closeness=0.1, control={"candidate": 1.0}, stress={"candidate": 1.0}, replay=1.0,
        total=9.0,
    )  # fmt: skip
    throughput = Throughput(
        steps=2, step_seconds=0.5, spread_seconds=0.1, tokens=9, flops=8, peak_flops=7.0, peak_source="a data sheet",
        peak_mib=6.0, peak_of="process",
    )  # fmt: skip
    passes = [
        PassReport(
            "chunk",
            seconds=0.5,
            nodes_before=10,
            nodes_after=20,
            settings={"dim": "batch", "of": [{"it": "x"}]},
            facts={"saved": 3, "buckets": [{"group": "fsdp"}]},
            changed={"cat": [0, 8]},
        )
    ]
    bad = replace(
        localized,
        first_divergence=first,
        checks={
            "sensitivity": finding_of(sensitivity),
            "own": own,
            "baseline": baselines.finding_of({"candidate": baseline}, {"candidate": "graph"}),
            "proof": proofs.finding_of("bad", proof, "bad: false"),
        },
        placed=placed,
        throughput={"candidate": throughput},
        layouts=layouts,
        partition=partition,
        artifact=artifact,
        seconds=seconds,
        passes=passes,
        remarks=("all gradients are zero",),
        options=("--steps", "3"),
        collectives="shared",
        sums_over_ranks={"reference": "in rank order by additions", "candidate": "in NCCL's own order"},
        kept_graph=True,
        stress={"reference": "EQUAL", "candidate": "EQUAL"},
    )
    broken = make_result("broken", "ERROR", error="rank 3 died", losses={"reference": [], "candidate": []})
    broken = replace(broken, checks={"sensitivity": finding_of(unmeasured)})
    beyond = replace(closeness, tensors_beyond=1, largest_error=0.5, first_beyond=Key(0, "grad", "w", 0))
    near = make_result("near", "CLOSE", expected="CLOSE")
    far = make_result("far", "DIFFERENT", expected="CLOSE", closeness=replace(beyond, first_beyond_error=0.5))
    cases = [bad, broken, near, far]
    away = replace(near.case, name="away", requires="cuda")
    score = Score(faults=3, killed=2, equivalents=1, places=(1, 2))
    return Report(
        run_id="20260102T030405Z-abcdef",
        exit_status=exit_status(cases, is_shard=True, faults=score),
        environment={"torch": "2.13.0", "packages": {"numpy": "2.0"}, "gpus": ["one"], "device": "cpu"},
        cases=cases,
        options=("--steps", "2"),
        not_run={"away": "it needs CUDA"},
        left_out=(away,),
        remarks=("the graph was not compiled",),
        faults=score,
        shard=Shard(index=1, count=2, selection=tuple([*(each.case for each in cases), away])),
    )


TABLES = {"environment", "packages", "not_run", "memory", "grad", "settings", "facts", "changed", "shown", "beside"} | {
    *("passes", "start_ranks", "histogram", "control", "losses", "data", "differing", "sums_over_ranks"),
}
"""Objects that are tables: their fields' names are texts of others, too."""


def texts_in(values: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Every text among JSON values with its path; a name in a table has the path of its value and "KEY"."""
    if isinstance(values, dict):
        for name, value in values.items():
            if TABLES & set(path[-1:]):
                yield (*path, name, "KEY"), name
            yield from texts_in(value, (*path, name))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from texts_in(value, (*path, index))
    elif isinstance(values, str):
        yield path, values


def put(values: Any, path: Path, text: str) -> None:
    """Put a text where another was."""
    *parents, last = path
    for name in parents:
        values = values[name]
    values[last] = text


def renamed(values: Any, path: Path, text: str) -> None:
    """Give a field of an object another name, at its place."""
    *parents, name, _ = path
    for parent in parents:
        values = values[parent]
    items = [(text if key == name else key, value) for key, value in values.items()]
    values.clear()
    values.update(items)


_NUMBERS = re.compile(r"(int|float|bool|Count|Cost|Verdict|Kind)( \| None)?")


def empty_fields(value: Any) -> set[str]:
    """Fields of records that may hold texts, wherever they lie, and hold none in any of their values."""
    found: dict[str, bool] = {}
    for owner, name, item in _fields_in(value):
        found[f"{owner}.{name}"] = found.get(f"{owner}.{name}", False) or item not in (None, [], {}, (), "")
    return {name for name, is_filled in found.items() if not is_filled}


def _fields_in(value: Any) -> Iterator[tuple[str, str, Any]]:
    if is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            if type(value).__module__.startswith("bitproof.harness.records") and not _NUMBERS.fullmatch(str(item.type)):
                yield type(value).__name__, item.name, getattr(value, item.name)
            yield from _fields_in(getattr(value, item.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _fields_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _fields_in(item)


CI_COMMANDS = re.compile(r"^\s*::|##\w*\[", re.MULTILINE)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_shown(text: str) -> None:
    """No character that a reader obeys, line ends and tabs apart."""
    assert {c for c in text if not c.isprintable()} <= {"\n", "\t"}


def check_markdown(text: str) -> None:
    """What Markdown makes of a report has our elements and no others, and nothing that GitHub makes a link of."""
    from markdown_it import MarkdownIt

    check_shown(text)
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert {token.type.removesuffix("_open").removesuffix("_close") for token in tokens} <= {
        *("heading", "paragraph", "inline", "table", "thead", "tbody", "tr", "th", "td", "fence", "html_block"),
        *("bullet_list", "list_item"),
    }
    assert {child.type for child in inline} <= {
        *("text", "text_special", "strong_open", "strong_close", "html_inline", "softbreak"),
    }
    assert {child.content for child in inline if child.type == "html_inline"} <= {"<span>", "</span>"}
    for token in tokens:
        if token.type == "html_block":
            known = re.sub(r"</?(details|summary|span)>", "", token.content)
            assert "<" not in known and ">" not in known, known
        if token.type == "heading_open":
            assert token.tag in ("h1", "h2", "h3")
    written = "\n".join(token.content for token in tokens if token.type in ("inline", "html_block"))
    assert not re.search(r"://|www\.|(?<![\w`])[@#]\w|\w@\w|(?<!\\)\$|(?<!\\)\[\^|(?<!\\)\]\(", written, re.IGNORECASE)


def check_terminal(text: str) -> None:
    """Nothing but colours moves a terminal, and no line is a command to a CI system."""
    plain = COLOURS.sub("", text)
    check_shown(plain)
    assert not CI_COMMANDS.search(plain)
