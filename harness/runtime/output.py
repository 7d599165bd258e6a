"""Standard output and standard error that cannot make a command fail, and never contain terminal or CI commands.

- If a pipe's reader ends, or a disk is full, the rest of the output is dropped and the run continues. The command
  reports the failure at its end, which may change its exit status.
- Text from others cannot move a terminal's cursor, or act as a command to a CI system that stores the log. GitHub, for
  example, runs lines that begin with `::`.
- Only bitproof's own escape sequences, for a table's colours, are written unchanged, by `styled`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from bitproof.harness.printable import printable

# A line that begins with `::` is a command to GitHub; `##[...]` and `##vso[...]` are commands to Azure Pipelines.
_LEADING_COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
_BRACKETED_COMMAND = re.compile(r"##(?=\w*\[)")


def shown(text: str) -> str:
    r"""Make a text safe for a terminal and for the log of a CI system: `::error` becomes `\x3a:error`.

    If the text is JSON, its meaning stays the same.
    """
    return _BRACKETED_COMMAND.sub(r"#\\u0023", _LEADING_COMMAND.sub(r"\1\\x3a", printable(text)))


class SafeStream:
    """A text stream whose `write` and `flush` never fail, and which escapes terminal and CI commands.

    `lost` is the first failure; None if there was none. That a pipe's reader has ended is no failure.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115 (lives as long)
        self.lost = OSError(errno.EBADF, "it is closed") if stream is None else None

    def write(self, text: str) -> int:
        """Write `text` with terminal and CI commands escaped. Returns the length of `text` before that."""
        self.write_as_it_is(shown(text))
        return len(text)

    def write_as_it_is(self, text: str) -> int:
        """Write a text with its escape sequences unchanged, such as those for colours. Returns its length."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            # Escapes are ASCII, so this call cannot fail for the same reason.
            return self.write_as_it_is(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        # A reader may end early, as `head` does.
        if error.errno != errno.EPIPE:
            self.lost = self.lost or error
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._stream.fileno()
            # Otherwise Python would fail once more when it flushes the buffer at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class _Styled:
    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self.write = stream.write_as_it_is

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def styled(stream: TextIO) -> TextIO:
    """Return a view of `stream` whose `write` leaves escape sequences for colours unchanged.

    Callers must escape text from others themselves.
    """
    return cast(TextIO, _Styled(stream)) if isinstance(stream, SafeStream) else stream


@contextlib.contextmanager
def safe_output() -> Iterator[SafeStream]:
    """Context in which standard output and standard error are SafeStreams. Yields standard output."""
    streams = sys.stdout, sys.stderr
    out, err = (SafeStream(stream) for stream in streams)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        # Flushed here, where a failure is noted in `lost` and does not raise.
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = streams


def fill_closed_descriptors() -> None:
    """Open /dev/null as standard input, output or error, if that descriptor is closed.

    Otherwise the next log or pipe that is opened would get its number, and prints would go there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor: this one
