import inspect

from harness import errors
from harness.errors import BitproofError, ChunkError, RankError


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
