"""Prints a certificate as lines for a terminal, or as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from bitproof.harness.powers.moved.records import MOVED, MovedCertificate, MovedRow
from bitproof.harness.printable import one_line

MOST_ROWS = 40


def lines_of(certificate: MovedCertificate) -> Iterator[str]:
    c = certificate
    moved, others = len(c.moved), len(c.rows) - len(c.moved)
    more = f", {others} not judged as equal or moved" if others else ""
    yield (
        f"{c.calls} distinct calls of {c.operators} operators of {one_line(c.program)}, replayed on "
        f"{environment_text(c.new)}{_releases(c)}: {c.equal} equal, {moved} moved{more}"
    )
    for row in c.rows[:MOST_ROWS]:
        yield f"  {call_text(row)}   {amount_text(row)}"
        yield from (f"    {name}: {one_line(text)}" for name, text in facts_of(row) if text)
    if len(c.rows) > MOST_ROWS:
        yield f"  and {len(c.rows) - MOST_ROWS} more: see the certificate"
    yield from verified_lines(c)
    if c.uncollected:
        count = sum(c.uncollected.values())
        yield f"not replayed: {count} calls, such as {one_line(next(iter(c.uncollected)))}"


def call_text(row: MovedRow) -> str:
    """Return a row's operator with the dtypes and shapes of its inputs: `aten.mm.default float32 [4, 8] [8, 4]`."""
    return one_line(f"{row.operator} {', '.join(row.dtypes)} {' '.join(map(str, row.shapes))}")


def amount_text(row: MovedRow) -> str:
    """Describe how much a call's result changed, such as "2 ULP in 5 of 16 elements: index 3 of dim 1".

    For a call that has not moved, return its state, such as "failed", and the reason.
    """
    if row.state != MOVED or not row.total:
        return one_line(f"{row.state}: {row.detail}" if row.detail else row.state)
    far = "" if row.ulps is None else f"{row.ulps} ULP in "
    return f"{far}{row.elements} of {row.total} elements: {one_line(row.where)}"


def facts_of(row: MovedRow) -> list[tuple[str, str]]:
    if row.state != MOVED:
        return []
    why = "; ".join(row.causes) or "unknown"
    first = "; ".join(f"element {at}: {new}, was {old}" for at, old, new in row.first[:1])
    return [
        ("first", first),
        ("smallest shape tried at which it shows", row.smallest),
        ("cause", why),
        ("the old bits return with", row.switch),
        ("alone, it changes first", row.alone),
        ("inputs", "drawn again from their distribution, as they are above the budget" if row.is_drawn else ""),
    ]


def verified_lines(c: MovedCertificate) -> Iterator[str]:
    found = c.verified
    if found.plain == "not run":
        yield "the program was not run in the new environment: nothing shows whether these calls are all that changed"
    elif found.plain == "EQUAL":
        yield f"the program: all {found.records} records are EQUAL"
    elif found.plain == "NONDETERMINISTIC":
        yield "the program: NONDETERMINISTIC, it differs from itself in one environment"
        if found.remainder:
            yield f"  {one_line(found.remainder)}"
            return
    else:
        yield f"the program: DIFFERENT, first in {one_line(found.first)}"
    if c.explains_all:
        calls = f"the {len(c.moved)} moved calls" if len(c.moved) > 1 else "the moved call"
        yield f"  with the old results of {calls}, all {found.records} records are EQUAL:"
        yield "  these calls account for the whole difference"
    elif found.remainder:
        yield f"  the moved calls do not account for the whole difference. The rest is {one_line(found.remainder)}"


def environment_text(environment: dict[str, str | int]) -> str:
    """Describe an environment: "torch 2.13.0 (AVX2)"."""
    return one_line(f"torch {environment.get('torch')} ({environment.get('capability')})")


def _releases(c: MovedCertificate) -> str:
    known = {*c.old, "device"}
    return "".join(one_line(f", {name} {value}") for name, value in c.new.items() if name not in known)


def markdown_of(certificate: MovedCertificate) -> str:
    c = certificate
    rows = ["| | old | new |", "|---|---|---|"]
    facts = [(name, c.old.get(name, ""), c.new.get(name, "")) for name in {**c.old, **c.new}]
    for fact in (*facts, *((name, "", value) for name, value in c.variables.items())):
        rows.append("| " + " | ".join(map(_cell, fact)) + " |")
    verdict = "these calls account for the whole difference" if c.explains_all else c.verified.plain
    page = ["# What moved", "", f"`{_cell(c.program)}`, {c.steps} steps: **{_cell(verdict)}**", "", *rows, ""]
    page += [f"{c.calls} distinct calls of {c.operators} operators: {c.equal} equal, {len(c.moved)} moved.", ""]
    if c.rows:
        page += ["| call | how much | cause | old bits return with | alone changes |", "|---|---|---|---|---|"]
        for row in c.rows:
            cells = (call_text(row), amount_text(row), "; ".join(row.causes) or "unknown", row.switch, row.alone)
            page.append("| " + " | ".join(map(_cell, cells)) + " |")
    # Two spaces at the end of a line are a line break in Markdown.
    return "\n".join([*page, "", *(f"{_cell(line.strip())}  " for line in verified_lines(c))]) + "\n"


def _cell(text: object) -> str:
    # The text is untrusted: it must not add markup, a column or a line break.
    kept = one_line(str(text))
    return "".join("\\" + c if c in "\\`*_[]<>|~#!&" else c for c in kept)
