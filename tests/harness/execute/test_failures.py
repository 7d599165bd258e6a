from pathlib import Path

import pytest

from bitproof.harness import errors
from bitproof.harness.errors import MAX_TRACEBACK, CaseError, ChunkError
from bitproof.harness.execute.failures import Failure, blame, failure_of_exception, failure_of_exit, traceback_of


def failed(rank, time, secondary=False):
    return Failure(rank=rank, time=time, what="raised", secondary=secondary)


def test_the_first_rank_that_failed_is_blamed():
    assert blame([failed(0, 2.0), failed(1, 1.0), failed(2, 3.0)]).rank == 1


def test_a_rank_that_lost_its_peers_is_not_blamed_though_it_failed_first():
    assert blame([failed(0, 1.0, secondary=True), failed(1, 2.0)]).rank == 1


def test_when_all_lost_their_peers_the_first_is_blamed():
    assert blame([failed(0, 2.0, secondary=True), failed(1, 1.0, secondary=True)]).rank == 1


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2342",
        "[/x/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 2720ms for send operation to complete",
        "Connection reset by peer",
        "rank 3 has ended while others waited for it",
        "Timed out waiting 100ms for ranks [0, 1]",
    ],
)
def test_a_connection_lost_is_secondary(text):
    assert failure_of_exception(0, RuntimeError(text)).secondary


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("gloo")])
def test_an_error_of_the_ranks_own_is_not_secondary(error):
    assert not failure_of_exception(0, error).secondary


def test_a_failure_shows_class_and_all_lines_of_a_users_text_and_of_ours_the_first_as_facts_stand_below():
    failure = failure_of_exception(3, ValueError("which\nwhy\n"))
    assert (failure.rank, failure.what, failure.found) == (3, "raised", "ValueError: which\nwhy")
    assert failure.details == "ValueError: which\nwhy"
    assert failure_of_exception(0, ChunkError("no", expected="yes")).found == "ChunkError: no"


def raise_far_down(depth, text):
    """Two functions call each other: Python counts the frames of one that calls itself, and shows three."""

    def go_on(depth):
        if depth:
            raise_far_down(depth - 1, text)
        raise ValueError(text)

    go_on(depth)


def test_a_case_that_does_not_fit_is_reported_in_full_and_without_a_traceback():
    error = CaseError("too many heads", expected="2", fix="choose 2")
    failure = failure_of_exception(3, error)
    assert (failure.found, failure.details) == ("CaseError: too many heads", str(error))


def test_a_message_of_megabytes_is_shortened_and_every_frame_stays():
    with pytest.raises(ValueError, match="first") as caught:
        raise_far_down(50, "first" + "x" * 4_000_000 + "last")
    text = traceback_of(caught.value)
    assert text.count(", in raise_far_down") == text.count(", in go_on") == 51
    assert "ValueError: first" in text and text.endswith("last") and "characters left out" in text
    assert len(text) < MAX_TRACEBACK
    failure = failure_of_exception(0, caught.value)
    assert (len(failure.found) < 600, failure.details) == (True, text)


def test_an_exception_whose_text_cannot_be_made_is_reported_all_the_same():
    class Odd(Exception):  # noqa: N818 (a user's own)
        def __str__(self):
            raise ZeroDivisionError

    assert failure_of_exception(0, Odd()).found == "Odd: its text cannot be made: ZeroDivisionError"


@pytest.mark.parametrize(
    ("status", "what"),
    [
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-40, "was killed by signal 40"),
        (0, "exited with status 0 before it finished"),
        (7, "exited with status 7 before it finished"),
    ],
)
def test_an_exit_shows_how(status, what, tmp_path):
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(30)))
    failure = failure_of_exit(0, status, tmp_path / "log")
    assert failure.what == what
    assert failure.details.splitlines() == [f"line {i}" for i in range(10)] + ["..."] + [
        f"line {i}" for i in range(20, 30)
    ]
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(20)))
    assert "..." not in failure_of_exit(0, status, tmp_path / "log").details
    assert failure_of_exit(0, status, Path("absent")).details == ""


def test_an_error_of_ours_has_a_traceback_only_if_a_line_of_the_users_raised_it():
    error = ChunkError("too small", fix="choose 2")
    ours = compile("raise error", errors.__file__, "exec")
    with pytest.raises(ChunkError) as caught:
        exec(ours, {"error": error})
    assert failure_of_exception(0, error).details.startswith("Traceback")  # through this file, as through a user's
    error.__traceback__ = caught.value.__traceback__.tb_next
    while error.__traceback__.tb_frame.f_code.co_filename != errors.__file__:
        error.__traceback__ = error.__traceback__.tb_next
    assert failure_of_exception(0, error).details == str(error)
    error.__cause__ = ValueError("of another library")
    assert failure_of_exception(0, error).details.startswith("ValueError: of another library")
