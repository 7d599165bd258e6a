import inspect

from bitproof.harness import errors
from bitproof.harness.errors import (
    MAX_FACT,
    MAX_TRACEBACK,
    BitproofError,
    CaseError,
    ChunkError,
    RankError,
    UsageError,
    bounded,
)


def test_an_error_answers_what_expected_found_where_fix_and_replay_in_that_order():
    error = ChunkError(
        "cannot split", expected="two", found="seven", where="here", fix="choose two", replay="bitproof run"
    )
    assert str(error) == (
        "ChunkError: cannot split\n"
        "  expected: two\n"
        "  found: seven\n"
        "  came from: here\n"
        "  fix: choose two\n"
        "  replay: bitproof run"
    )


def test_what_is_not_known_is_left_out():
    assert str(BitproofError("no")) == "BitproofError: no"


def test_a_rank_error_keeps_its_rank_and_traceback_apart_from_its_text():
    error = RankError("rank 3 died", rank=3, traceback="Traceback ...", found="SIGKILL")
    assert (error.rank, error.traceback) == (3, "Traceback ...")
    assert str(error) == "RankError: rank 3 died\n  found: SIGKILL"


def test_every_error_stands_in_the_tree_at_the_top_of_the_file():
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, BitproofError):
            assert name in (errors.__doc__ or "")


def test_a_long_text_keeps_its_beginning_and_its_end_and_says_what_was_left_out():
    assert bounded("x" * 8, 8) == "x" * 8
    assert bounded("aabbbbbbbcccccc", 8, "a log has them") == (
        "aa\n... 7 characters left out; a log has them ...\ncccccc"
    )
    assert bounded("aabbbbbbbcccccc", 8) == "aa\n... 7 characters left out ...\ncccccc"


def test_no_part_of_an_error_is_longer_than_a_report_takes():
    long = "x" * 10_000_000
    error = RankError(long, found=long, where=long, traceback=long)
    assert len(str(error)) < 3 * (MAX_FACT + 100)
    assert len(error.traceback) < MAX_TRACEBACK + 100


def test_an_error_about_a_case_quotes_little_of_it_however_long_its_values_are():
    assert len(str(CaseError("a name", found=repr("x" * 100_000)))) < 1_100
    assert len(str(UsageError("a selection", found="x" * 100_000))) < 4_100
