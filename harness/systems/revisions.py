"""Runs the script of a git revision in a new folder.

1. `resolve` replaces a name such as `HEAD~1` by the commit's id, so that a repeated run uses the same files.
2. `check_out` writes all files of that commit into a new folder. The repository and its work tree stay unchanged.
3. Untracked files of the work tree, such as ignored data, are linked into the new folder.
4. The script runs in the new folder, so `open("config.py")` reads the revision's file.
"""

from __future__ import annotations

import os
from pathlib import Path

from bitproof.harness.case.case import Script, script_of
from bitproof.harness.errors import UsageError
from bitproof.harness.processes.command import CommandError, run_command

_SECONDS = 600.0
_NOT_LINKED = {".git", "__pycache__"}


def resolve(script: Script) -> Script:
    """Return the script with its revision replaced by a commit's id. A script without a revision is returned unchanged.

    Raises UsageError if there is no such commit, or if the commit does not contain the script's file.
    """
    if not script.revision:
        return script
    top = top_of(script)
    commit = _git(top, "rev-parse", "--verify", "--quiet", f"{script.revision}^{{commit}}", what=script).strip()
    _git(top, "cat-file", "-e", f"{commit}:{_inside(top, script)}", what=script)
    return script._replace(revision=commit[:12])


def check_out(system: str, folder: Path) -> None:
    """Write the revision of a system's script into a new folder below `folder`. Does nothing if that folder exists.

    Raises UsageError if git fails.
    """
    script = script_of(system)
    if script is None or not script.revision or (place := checkout_of(script, folder)).is_dir():
        return
    top, made = top_of(script), place.with_name(place.name + ".new")
    made.mkdir(parents=True)
    index = {"GIT_INDEX_FILE": str(made.with_name(made.name + ".index"))}  # not the repository's own
    _git(top, "read-tree", script.revision, what=script, environment=index)
    _git(top, "checkout-index", "--all", f"--prefix={made}/", what=script, environment=index)
    # With ignored files, such as data. A folder without tracked files is a single entry.
    for name in _git(top, "ls-files", "--others", "--directory", "-z", what=script).split("\0"):
        target = made / name.rstrip("/")
        # A file of the revision has precedence over an untracked file of the same name.
        if name and not _NOT_LINKED.intersection(Path(name).parts) and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(top / name.rstrip("/"))
    made.rename(place)  # only a finished checkout has its final name


def checkout_of(script: Script, folder: Path) -> Path:
    return folder / "revisions" / f"{top_of(script).name}-{script.revision}"


def place_in(checkout: Path, script: Script, folder: Path) -> Path:
    """Return the folder in the checkout that corresponds to `folder` in the repository.

    For example, `checkout/src` for `repository/src`. A folder outside the repository is returned unchanged.
    """
    top = top_of(script)
    return checkout / folder.relative_to(top) if folder.is_relative_to(top) else folder


def top_of(script: Script) -> Path:
    """Return the top folder of the git repository that contains a script. Raises UsageError if there is none."""
    path = Path(os.path.abspath(script.file))
    # A file or a folder: in a work tree of `git worktree`, `.git` is a file.
    for folder in path.parents:
        if (folder / ".git").exists():
            return folder
    raise UsageError(
        f"the file of {script} is in no repository of git", expected="a file below a folder with .git", found=str(path)
    )


def _inside(top: Path, script: Script) -> str:
    return Path(os.path.abspath(script.file)).relative_to(top).as_posix()


def _git(folder: Path, *words: str, what: Script, environment: dict[str, str] | None = None) -> str:
    try:
        ran = run_command(["git", "-C", str(folder), *words], _SECONDS, environment=os.environ | (environment or {}))
    except CommandError as error:
        raise UsageError(f"git cannot be run for {what}", found=str(error)) from error
    if ran.status:
        raise UsageError(
            f"git does not find {what}",
            expected=f"a revision of {folder} that has the file",
            found=f"git {' '.join(words)} ended with status {ran.status}" + (f": {ran.err.strip()}" if ran.err else ""),
            fix="name a commit, a branch or a tag; give a renamed file as --reference git:REF:PATH",
        )
    return ran.out
