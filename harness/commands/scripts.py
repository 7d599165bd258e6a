"""Make a case that compares two scripts, two revisions of a script, or a script with two sets of arguments.

bitproof run train.py --reference git:HEAD~1           the same file in another revision
bitproof run new/train.py --reference old/train.py     another file
bitproof run train.py --candidate-args=--fused         the same file with other arguments
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.bounds import LONGEST_NAME
from bitproof.harness.case.case import Script, script_of
from bitproof.harness.errors import UsageError
from bitproof.harness.systems.registry import NAMED, registered
from bitproof.harness.systems.revisions import resolve
from bitproof.harness.user_code.user_file import names_in

STEPS = 5
"""Default number of optimizer steps of a script: the first differing step is seldom later."""


def is_script(name: object) -> bool:
    """Whether `name` names a system that is a script, by the script's command line or by a git revision of the
    script.
    """
    return isinstance(name, str) and (script_of(name) is not None or name.startswith("git:"))


def script_sides(
    candidate: str,
    reference: str | None,
    args: Sequence[str] = (),
    reference_args: str = "",
    candidate_args: str = "",
) -> tuple[str, str]:
    """Return a pair: the names of the reference's and of the candidate's system, for a comparison of scripts.

    - `reference`: a script or another system. `git:REF` is the candidate's file in that revision. None is the
      candidate's file itself.
    - `args`: arguments of both scripts.

    Raises UsageError if the candidate is no script.
    """
    new = _script_named(candidate)
    if new is None:
        raise UsageError("the candidate is no script", expected="a file such as train.py", found=repr(candidate))
    if not new.revision:
        names_in(Path(new.file), f"script {new.file}")
    old: Script | None = new
    if reference is not None and (match := re.fullmatch(r"git:([^:]+)", reference)):
        old = new._replace(revision=match[1])
    elif reference is not None:
        old = _script_named(reference)
        # A reference that is no script is another system, and takes no arguments.
        if old is None:
            _refuse_revision(new, reference)
            return reference, _system_of(new, args, candidate_args)
    assert old is not None
    return _system_of(old, args, reference_args), _system_of(new, args, candidate_args)


def script_case(reference: str, candidate: str) -> Case:
    """Return a case that compares two systems, at least one of them a script, on a single rank."""
    script = script_of(candidate) or script_of(reference)
    assert script is not None
    # The name of a case has only lower-case letters, digits and underscores.
    stem = re.sub("[^a-z0-9]+", "_", Path(script.file).stem.lower()).strip("_")
    return Case(
        name=f"script_{stem}"[:LONGEST_NAME].rstrip("_"),
        family="scripts",
        reference=reference,
        candidate=candidate,
        steps=STEPS,
        parallelism=Parallelism(world_size=1, ep=1),
    )


def _refuse_revision(script: Script, reference: str) -> None:
    """Raise UsageError if the reference is not a system but only the name of a git revision that has the script:
    `HEAD~1`.
    """
    if ":" in reference or reference in NAMED or reference in registered():
        return
    try:
        resolve(script._replace(revision=reference))
    except UsageError:
        return
    raise UsageError(
        f"{reference} is a revision of git, and no system",
        expected="git:REF, a script or a system",
        found=reference,
        fix=f"give --reference git:{reference}",
    )


def _script_named(name: str) -> Script | None:
    # The file first: `script_of` would split a path with spaces into words.
    return Script(name) if name.endswith(".py") and os.path.isfile(name) else script_of(name)


def _system_of(script: Script, args: Sequence[str], own: str) -> str:
    return str(resolve(script._replace(args=(*script.args, *args, *shlex.split(own)))))
