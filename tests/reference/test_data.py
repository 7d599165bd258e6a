"""Real text, dealt to ranks, read in order."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from bitproof.harness.case import Batch
from bitproof.harness.errors import UsageError
from bitproof.reference.data import DOCUMENT_START, FILE_DOCUMENT_BYTES, TextStream, text_source

DOCUMENTS = [b"abcdef", b"ghijklm", b"nopq", b"rst"]
SMALL = Batch(sequences=2, seq_len=3)


def test_pydoc_is_real_text_and_the_same_each_time() -> None:
    documents, digest = text_source("pydoc")
    assert len(documents) > 50
    assert any(b"mutable" in document for document in documents)
    assert text_source("pydoc") == (documents, digest)


def test_pydoc_lines_are_the_same_text_in_short_documents() -> None:
    whole, _ = text_source("pydoc")
    lines, digest = text_source("pydoc_lines")
    assert lines == [line for document in whole for line in document.splitlines() if line.strip()]
    assert digest != text_source("pydoc")[1]
    starts_BS = TextStream(lines, Batch(), rank=0, world_size=8).step(0).tokens_BS == DOCUMENT_START
    assert starts_BS.sum(1).max() > 1 and starts_BS[:, 0].logical_not().any()  # several in a row, rows amid one


def test_pydoc_feeds_many_ranks() -> None:
    documents, _ = text_source("pydoc")
    for rank in range(16):
        step = TextStream(documents, Batch(sequences=4, seq_len=128), rank=rank, world_size=16).step(0)
        assert step.tokens_BS.shape == (4, 128)


def test_a_file_is_its_bytes_whatever_they_encode(tmp_path: Path) -> None:
    text = bytes(range(256)) * 5
    (tmp_path / "any.bin").write_bytes(text)
    documents, digest = text_source(str(tmp_path / "any.bin"))
    assert b"".join(documents) == text
    assert [len(document) for document in documents] == [FILE_DOCUMENT_BYTES, FILE_DOCUMENT_BYTES, 256]
    assert digest == hashlib.sha256(text).hexdigest()


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "absent.txt")
    with pytest.raises(UsageError) as refusal:
        text_source(path)
    assert str(refusal.value) == (
        f"UsageError: cannot read the data file {path!r}\n"
        "  expected: a readable file, or 'pydoc' for Python's own documentation\n"
        "  found: No such file or directory"
    )


@pytest.mark.parametrize("bad", ["", "a\0b"])
def test_a_folder_or_an_impossible_path_is_refused_too(bad: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the data file"):
        text_source(bad and str(tmp_path / bad))


def test_a_device_that_never_ends_and_a_pipe_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(
            UsageError,
            match=f"cannot read the data file '{path}'.*\n.*\n  found: it is a (device|pipe), not a regular file",
        ):
            text_source(path)


def test_labels_are_the_next_tokens_and_positions_count_from_zero_in_each_row() -> None:
    step = TextStream(DOCUMENTS, SMALL, rank=0, world_size=2).step(0)
    start = DOCUMENT_START
    assert step.tokens_BS.tolist() == [[start, *b"ab"], [*b"cde"]]
    assert step.labels_BS.tolist() == [[*b"abc"], [*b"def"]]
    assert step.positions_BS.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert {tensor.dtype for tensor in step} == {torch.int64}


def test_each_step_goes_on_where_the_last_ended_and_wraps_around() -> None:
    stream = TextStream(DOCUMENTS, SMALL, rank=0, world_size=2)
    start = DOCUMENT_START
    own = [start, *b"abcdef", start, *b"nopq"]
    assert stream.step(1).tokens_BS.flatten().tolist() == own[6:12]
    assert stream.step(1).labels_BS.flatten().tolist() == [*own[7:12], own[0]]
    assert torch.equal(stream.step(2).tokens_BS, stream.step(0).tokens_BS)


def test_ranks_read_documents_of_their_own() -> None:
    ranks = [TextStream(DOCUMENTS, SMALL, rank=rank, world_size=2).tokens_N.tolist() for rank in range(2)]
    start = DOCUMENT_START
    assert ranks == [[start, *b"abcdef", start, *b"nopq"], [start, *b"ghijklm", start, *b"rst"]]


def test_a_text_that_just_fills_one_step_is_read_and_one_token_less_is_refused() -> None:
    TextStream([b"abcdef"], SMALL, rank=0, world_size=1)
    with pytest.raises(UsageError) as refusal:
        TextStream([b"abcde"], SMALL, rank=0, world_size=1)
    assert str(refusal.value) == (
        "UsageError: the text is too small: rank 0 of 1 cannot fill one step\n"
        "  expected: at least 7 tokens for each rank (2 sequences of 3, and one more)\n"
        "  found: 6 tokens in 1 of 1 documents (5 bytes in all)\n"
        "  fix: choose a larger data file, fewer ranks or a smaller batch"
    )


def test_an_empty_file_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    documents, _ = text_source(str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="found: 0 tokens in 0 of 0 documents"):
        TextStream(documents, SMALL, rank=0, world_size=1)


def test_rows_of_adversarial_text_have_positions_of_their_own_that_begin_again_with_each_document():
    documents, digest = text_source("adversarial")
    assert text_source("adversarial") == (documents, digest) and digest[:16] == "d63705fe8c915636"
    step = TextStream(documents, Batch(sequences=16, seq_len=64, data="adversarial"), rank=0, world_size=6).step(0)
    is_start = step.tokens_BS == DOCUMENT_START
    assert torch.equal(is_start, step.positions_BS == 0)
    assert is_start.sum() > 8 and int(step.positions_BS.max()) < 512
    assert len(torch.unique(step.positions_BS, dim=0)) == 16, "no two rows have the same positions"
    plain = TextStream(documents, Batch(sequences=16, seq_len=64), rank=0, world_size=6).step(0)
    assert torch.equal(plain.tokens_BS, step.tokens_BS) and len(torch.unique(plain.positions_BS, dim=0)) == 1


def test_few_bytes_of_adversarial_text_are_frequent_and_most_are_rare():
    documents, _ = text_source("adversarial")
    counts = torch.bincount(torch.tensor([byte for document in documents for byte in document]), minlength=256)
    assert counts.max() > 20 * counts.float().median() and counts.min() > 0
    assert {len(document) for document in documents} > {1, 2, 3, 100}


def test_folded_tokens_are_the_rows_of_a_batch_one_after_another() -> None:
    rows, folded = (TextStream(DOCUMENTS, SMALL, rank=0, world_size=1, folded=each).step(1) for each in (False, True))
    for whole, flat in zip(rows[:2], folded[:2], strict=True):
        assert flat.shape == (6,) and torch.equal(flat, whole.flatten())


def test_folded_positions_start_at_0_in_every_document_and_in_every_sequence() -> None:
    batch = Batch(sequences=2, seq_len=6)
    step = TextStream([b"ab", b"cdefg", b"hijk"], batch, rank=0, world_size=1, folded=True).step(0)
    # A document of 3 tokens with its start, and one of 6 that goes on in the second sequence, before the third.
    starts = (step.tokens_BS == DOCUMENT_START).nonzero().flatten().tolist()
    assert starts == [0, 3, 9]
    assert step.positions_BS.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_no_folded_document_reaches_from_one_sequence_into_the_next() -> None:
    batch = Batch(sequences=4, seq_len=32, data="pydoc_lines")
    stream = TextStream(text_source("pydoc_lines")[0], batch, rank=0, world_size=8, folded=True)
    for step in range(5):
        offsets_T = torch.arange(128) - stream.step(step).positions_BS
        assert torch.equal(offsets_T // 32, torch.arange(128) // 32)
