"""Coloured output: rich's console, changed to print untrusted text without interpreting it.

Each piece of text is filtered by the rule of `runtime/output`. Markup and emoji names have no effect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style

from bitproof.harness.report.source_lines import LINE, file_of
from bitproof.harness.runtime.output import shown, styled

PIPE_WIDTH = 200


class SafeConsole(Console):
    """A console that writes to a stream. Output to a pipe is 200 columns wide, and text lines are not wrapped."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        # A log is read in an editor or a browser, which can scroll.
        width = None if stream.isatty() else PIPE_WIDTH
        super().__init__(file=styled(stream), width=width, highlight=False, markup=False, emoji=False)

    def print(self, *objects: Any, **facts: Any) -> None:
        """Print as rich does, but without wrapping lines of text."""
        super().print(*objects, **{"soft_wrap": all(isinstance(each, str) for each in objects)} | facts)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render text without unsafe characters. Only source files on this machine are linked."""
        # Filtered here, since the filter of `runtime/output` would remove the escape sequences that rich writes.
        # Control segments are rich's own, such as those that move the cursor for a progress bar.
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                # A link in untrusted text could lead anywhere, so only our own links remain.
                style = segment.style.update_link(None) if segment.style and segment.style.link else segment.style
                yield from (
                    _linked(shown(segment.text), style) if self.is_terminal else [Segment(shown(segment.text), style)]
                )


def _linked(text: str, style: Style | None) -> Iterator[Segment]:
    """Split a text into segments, so that each source line in it, such as `train.py:14`, links to its file (OSC 8)."""
    # Only files that exist on this machine become links: the text is untrusted.
    at = 0
    for found in LINE.finditer(text):
        if (file := file_of(found["path"])) is not None:
            yield Segment(text[at : found.start()], style)
            yield Segment(found[0], (style or Style()).update_link(file.as_uri()))
            at = found.end()
    yield Segment(text[at:], style)
