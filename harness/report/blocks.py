"""Print the blocks (sentences, tables, texts) of a check's finding in each form of a report.

A form prints the blocks of any check, and needs no code for a particular check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bitproof.harness.records import Block, Code, Finding, Sentence, Table
from bitproof.harness.report.markdown_text import code_block, inline, strong, table_of

MAX_CHARS = 16_000
MAX_ROWS = 200
"""The most characters of a text and rows of a table on a page; report.json has everything."""


def markdown(blocks: Iterable[Block], reasons: Iterable[str] = ()) -> Iterator[str]:
    """Yield the reasons of a finding, in bold, and its blocks as Markdown."""
    yield from map(strong, reasons)
    for block in map(shortened, blocks):
        match block:
            case Sentence(text=text):
                yield inline(text)
            case Table(title=title, headers=headers, rows=rows):
                yield from [f"{inline(title)}:"] if title else []
                yield table_of(headers, rows)
            case Code(title=title, text=text):
                yield from [f"{inline(title)}:"] if title else []
                yield code_block(text)


def reasons_of(finding: Finding) -> list[str]:
    return [reason for reason in (finding.objection, finding.unjudged) if reason]


def lines(finding: Finding) -> Iterator[str]:
    """Yield the whole finding as lines for a terminal."""
    yield from reasons_of(finding)
    for block in finding.blocks:
        match shortened(block):
            case Sentence(text=text):
                yield text
            case Table(title=title, headers=headers, rows=rows):
                # Numbers stay as the check wrote them: tabulate would align and round them.
                from tabulate import tabulate

                yield from ("", f"{title}:", *tabulate(rows, headers, disable_numparse=True).splitlines())
            case Code(title=title, text=text):
                yield from ("", f"{title}:", *text.splitlines())


def brief_lines(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding that a run prints at its end.

    These are all lines if the check raised an objection or could not judge, otherwise only the finding's sentences.
    """
    if finding.objection or finding.unjudged:
        yield from lines(finding)
    else:
        yield from (block.text for block in finding.blocks if isinstance(block, Sentence))


def shortened(block: Block) -> Block:
    """Return the block, cut to at most MAX_ROWS rows or MAX_CHARS characters.

    For example, a table of 300 rows ends after 200 rows, and a last row states that 100 more are in report.json.
    """
    if isinstance(block, Table):
        more = len(block.rows) - MAX_ROWS
        # The last row needs as many cells as the others.
        last = (f"... {more} more, in report.json", *[""] * (len(block.headers) - 1))
        return block if more <= 0 else Table(block.title, block.headers, (*block.rows[:MAX_ROWS], last))
    if len(block.text) <= MAX_CHARS:
        return block
    text = f"{block.text[:MAX_CHARS]} ... (report.json has the rest)"
    return Sentence(text) if isinstance(block, Sentence) else Code(block.title, text)
