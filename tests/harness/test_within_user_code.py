"""What our code refuses inside user code reaches the verdict, whatever the user's code does with the exception."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest

import bitproof
from bitproof.harness.within_user_code import refusals_raised, refused, refusing, theirs
from tests.harness import swallowing_trainers
from tests.harness.swallowing_trainers import WAYS

ROOT = Path(__file__).parents[2]
FILE = swallowing_trainers.__file__


@refusing()
def refuse() -> None:
    raise ValueError("no")


def test_a_refusal_that_was_swallowed_is_raised_when_user_code_ends():
    with pytest.raises(ValueError, match="no"), refusals_raised(), contextlib.suppress(Exception):
        refuse()


def test_it_is_reported_before_user_code_sees_it():
    lines: list[str] = []
    with pytest.raises(ValueError, match="no"), refusals_raised(lambda error: lines.append(str(error))):
        try:
            refuse()
        except ValueError:
            lines.append("swallowed")
    assert lines == ["no", "swallowed"]


def test_it_replaces_what_user_code_raises_after_it():
    with pytest.raises(ValueError, match="no") as raised, refusals_raised():
        try:
            refuse()
        except ValueError:
            raise KeyError("something else") from None
    assert raised.value.__cause__ is None


def test_the_first_of_several_is_raised():
    with pytest.raises(ValueError, match="first"), refusals_raised():
        for text in ("first", "second"):
            with contextlib.suppress(ValueError):
                raise refused(ValueError(text))


def test_user_code_within_user_code_ends_with_its_own_refusal():
    with pytest.raises(ValueError, match="no"), refusals_raised(), contextlib.suppress(ValueError), refusals_raised():
        refuse()


def test_an_exception_of_the_users_own_is_no_refusal():
    def fails() -> None:
        raise KeyError("theirs")

    with refusals_raised():
        with contextlib.suppress(KeyError), refusing():
            theirs(fails)
        with contextlib.suppress(KeyError):
            fails()


def test_outside_of_user_code_a_refusal_is_an_exception_like_any_other():
    with contextlib.suppress(ValueError):
        refuse()
    with refusals_raised():
        pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_second_optimizer_step_is_refused_however_the_trainer_loses_the_refusal(way, tmp_path):
    run = judged("twice", tmp_path, way)
    assert run.verdict == "ERROR" and "RankError: rank 1 of" in run.result.error
    assert "showed grad '0.weight' twice in step 0" in run.result.error
    assert "swallowing_trainers.py" in run.result.error  # the trainer's line, which the exception may never leave


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_so_it_is_in_a_loop_of_two_optimizers(way, tmp_path):
    run = judged("twice", tmp_path, way, reference="plain_loop", loop=True)
    assert run.verdict == "ERROR"
    assert "took two steps in step 0, before others" in run.result.error


@pytest.mark.parametrize(
    ("candidate", "found"),
    [
        ("shows_twice", "showed param '0.weight' twice"),
        ("watches_nothing", "watch was given an optimizer that is none"),
        ("unlike_sums", "takes sums only"),
    ],
)
@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_so_are_a_value_shown_twice_a_call_of_watch_and_a_collective_of_ours(candidate, found, tmp_path):
    run = judged(candidate, tmp_path, "suppressed")
    assert run.verdict == "ERROR" and found in run.result.error


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_an_exception_of_the_trainers_own_may_be_swallowed(tmp_path):
    assert judged("loses_their_own", tmp_path, "suppressed").verdict == "EQUAL"


def judged(candidate: str, folder: Path, way: str, reference: str = "plain", **options: object) -> bitproof.Run:
    case = bitproof.Case(
        name="swallowed",
        family="own",
        reference=f"{FILE}:{reference}",
        candidate=f"{FILE}:{candidate}",
        steps=2,
        parallelism=bitproof.Parallelism(world_size=2),
        options={"way": way, **options},
    )
    return bitproof.run(case, control="never", timeout=60.0, report_dir=folder)


NO_USER_CODE = {
    "harness/torch_compat.py": "what is called back is guarded where it is given",
    "harness/torch_compile.py": "what is called back is guarded where it is given",
    "harness/torch_distributed.py": "what is called back is guarded where it is given",
    "harness/torch_operators.py": "what is called back is guarded where it is given; operations are counted in ours",
    "harness/torch_inductor.py": "compiles our own graphs",
    "harness/torch_tracing.py": "traces our own models",
    "harness/graph/origin.py": "traces our own models",
    "harness/graph/observation.py": "traces our own models",
    "harness/powers/proofs/prover/programs/one_by_one.py": "traces our own models",
    "reference/chunking.py": "runs our own models",
    "reference/observed_activations.py": "runs our own models",
    "harness/powers/sensitivity/update.py": "runs our own update",
    "harness/powers/moved/standalone/call_events.py": "runs without bitproof, and keeps its errors to the end itself",
    "harness/powers/moved/standalone/watched_program.py": "runs without bitproof, and raises these errors at the end",
    "harness/powers/doctor/checks.py": "runs our own calls",
    "harness/disturb/tamper.py": "a fault: what it raises is what the wrong program raises",
    "harness/disturb/faults/loops.py": "a fault: what it raises is what the wrong program raises",
    "harness/powers/shrink/standalone/simple_watch.py": "runs without bitproof, and raises nothing in a hook",
    "harness/localize/call_sites.py": "refuses nothing: it says where a call belongs",
}


def test_every_file_that_registers_hooks_patches_or_modes_guards_them_or_says_why_not():
    registering = {
        str(path.relative_to(ROOT))
        for folder in ("harness", "reference", "bitproof")
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "bitproof" / "harness") and registers(path)
    }
    guarded = {name for name in registering if "bitproof.harness.within_user_code" in (ROOT / name).read_text()}
    assert registering - guarded == set(NO_USER_CODE)


def registers(path: Path) -> bool:
    """Whether a file's code registers a hook, replaces a function, or derives a dispatch mode."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            of_mock = name == "object" and "patch" in ast.unparse(node.func)
            if of_mock or (name.startswith("register_") and name.endswith("hook")):
                return True
        if isinstance(node, ast.ClassDef) and "TorchDispatchMode" in map(ast.unparse, node.bases):
            return True
    return False
