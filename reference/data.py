"""Training data from real text, as bytes. Each rank reads its own documents in order, and begins again at the end.

B batch, S sequence, T tokens of a step (B * S), N tokens in a rank's stream
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitproof.harness.case import ADVERSARIAL, PYDOC, PYDOC_LINES, Batch
from bitproof.harness.errors import UsageError
from bitproof.harness.files.plain_files import read_plain

DOCUMENT_START = 256
"""The token before each document. Tokens 0 to 255 are bytes, so a vocabulary needs at least 257."""

FILE_DOCUMENT_BYTES = 512
LARGEST_TEXT = 1 << 32
"""The largest data file, in bytes. A file is cut into documents of FILE_DOCUMENT_BYTES."""


class Step(NamedTuple):
    """A rank's input for a step: int64 tensors of shape (B, S), or (T,) for a folded model.

    Each label is the next token.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor


def text_source(data: str) -> tuple[list[bytes], str]:
    """Return a pair: the documents of the text `data`, and the text's SHA-256 in hexadecimal. `data` is one of these:

    - "pydoc": the documentation of the Python language, with a document per topic. It depends on the Python version.
    - "pydoc_lines": the same text, with a document per line that is not blank.
    - "adversarial": the result of `adversarial_documents`.
    - Any other string: the path of a file. For a file named pydoc, pass ./pydoc.

    Raises UsageError if the file cannot be read.
    """
    if data == ADVERSARIAL:
        documents = adversarial_documents()
        return documents, hashlib.sha256(b"\0".join(documents)).hexdigest()
    if data in (PYDOC, PYDOC_LINES):
        from pydoc_data.topics import topics

        documents = [topics[topic].encode() for topic in sorted(topics)]
        if data == PYDOC_LINES:
            documents = [line for document in documents for line in document.splitlines() if line.strip()]
        return documents, hashlib.sha256(b"\0".join(documents)).hexdigest()
    try:
        text = read_plain(data, LARGEST_TEXT)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"cannot read the data file {data!r}",
            expected=f"a readable file, or {PYDOC!r} for Python's own documentation",
            found=reason,
        ) from error
    pieces = [text[start : start + FILE_DOCUMENT_BYTES] for start in range(0, len(text), FILE_DOCUMENT_BYTES)]
    return pieces, hashlib.sha256(text).hexdigest()


def adversarial_documents() -> list[bytes]:
    """Make documents of 1 to 200 bytes, most of them short. A few bytes are frequent, and most are rare.

    So an expert may get a single token or hundreds. All machines make the same documents.
    """
    chance = random.Random("bitproof adversarial")  # seeded by text: Python uses its sha512, not its randomized hash

    def document() -> bytes:
        # Powers of a uniform draw make short documents, and bytes with low numbers, frequent.
        length = 1 + int(200 * chance.random() ** 2)
        return bytes(int(256 * chance.random() ** 3) for _ in range(length))

    return [document() for _ in range(2000)]


class TextStream:
    """A rank's tokens: documents rank, rank + world_size, and so on, with a DOCUMENT_START before each document.

    - Step n reads the B * S tokens that follow those of step n - 1. At the end, the tokens begin again.
    - Each row of a batch continues the row before it.
    - Positions start at 0 in every row. In adversarial text they start at 0 in every document.
    - With `folded`, the rows of a batch become a single row of B * S tokens. Positions then start at 0 in every
      document, and after every S tokens.

    Raises UsageError if the rank's documents do not fill a step.
    """

    def __init__(
        self, documents: Sequence[bytes], batch: Batch, *, rank: int, world_size: int, folded: bool = False
    ) -> None:
        assert 0 <= rank < world_size
        self.batch = batch
        self.folded = folded
        own = documents[rank::world_size]
        # The last label needs one token more than the input; each document has a DOCUMENT_START.
        needed = batch.sequences * batch.seq_len + 1
        found = sum(len(document) + 1 for document in own)
        if found < needed:
            raise UsageError(
                f"the text is too small: rank {rank} of {world_size} cannot fill one step",
                expected=f"at least {needed} tokens for each rank ({batch.sequences} sequences of {batch.seq_len}, "
                "and one more)",
                found=f"{found} tokens in {len(own)} of {len(documents)} documents "
                f"({sum(map(len, documents))} bytes in all)",
                fix="choose a larger data file, fewer ranks or a smaller batch",
            )
        self.tokens_N = _tokens_of(own)
        self.positions_N = _positions_within(own) if batch.data == ADVERSARIAL else None

    def step(self, step: int) -> Step:
        """Return the rank's input at a step, counted from 0. The same step always has the same tensors."""
        rows, seq_len = self.batch.sequences, self.batch.seq_len
        size = rows * seq_len
        # One token more than the input has: each label is the next token.
        where = (step * size + torch.arange(size + 1)) % len(self.tokens_N)
        window = self.tokens_N[where]
        if self.folded:
            return Step(window[:-1], window[1:], _folded_positions(window[:-1], seq_len))
        positions_BS = torch.arange(seq_len).repeat(rows, 1)
        if self.positions_N is not None:
            positions_BS = self.positions_N[where[:-1]].view(rows, seq_len)
        return Step(window[:-1].view(rows, seq_len), window[1:].view(rows, seq_len), positions_BS)


def _tokens_of(documents: Sequence[bytes]) -> Tensor:
    # A zero byte before each document makes room for its DOCUMENT_START, which is no byte.
    tokens_N = torch.frombuffer(
        bytearray(b"".join(b"\0" + document for document in documents)), dtype=torch.uint8
    ).long()
    lengths = torch.tensor([0, *(len(document) + 1 for document in documents[:-1])])
    tokens_N[lengths.cumsum(0)] = DOCUMENT_START
    return tokens_N


def _folded_positions(tokens_T: Tensor, seq_len: int) -> Tensor:
    """Return the position of each folded token. It counts from the last DOCUMENT_START or start of a sequence."""
    index_T = torch.arange(len(tokens_T))
    is_first_T = (tokens_T == DOCUMENT_START) | (index_T % seq_len == 0)
    # `cummax` carries the index of the latest first token on to the tokens after it.
    return index_T - torch.where(is_first_T, index_T, 0).cummax(0).values


def _positions_within(documents: Sequence[bytes]) -> Tensor:
    # One more than the document's bytes, for its DOCUMENT_START.
    return torch.cat([torch.arange(len(document) + 1, dtype=torch.int64) for document in documents])
