"""Read and run a Python file that a user names on the command line."""

from __future__ import annotations

import ast
import hashlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bitproof.harness.errors import UsageError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.user_code.own_files import package_of
from bitproof.harness.user_code.whose import check_own_modules

_loading: list[str] = []


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Context in which a user's code is loaded, and `is_loading` returns True.

    If the code calls bitproof while a rank loads it, because a `__main__` guard is missing, the call can be refused.
    """
    _loading.append(source)
    try:
        yield
    finally:
        _loading.pop()


def is_loading() -> bool:
    return bool(_loading)


def run_file(path: Path) -> tuple[types.ModuleType, str]:
    """Run a Python file as a new module. Return a pair: the module, and the sha256 of its text.

    The module stays in `sys.modules`. It can import the modules beside the file, or of the file's package. Errors of
    the file are raised unchanged.
    """
    # Not an import, which might run cached code of another text.
    code = read_plain(path)
    sha256 = hashlib.sha256(code).hexdigest()
    module = types.ModuleType(f"{path.stem}_{sha256[:8]}")
    module.__file__ = str(path)
    root, module.__package__ = package_of(path.resolve())
    find_beside(root)
    check_own_modules(path, root)
    # dataclasses and torch.compile look the module up by its name.
    sys.modules[module.__name__] = module
    with loading(str(path)):
        # Do not inherit this file's `from __future__` flags.
        exec(compile(code, str(path), "exec", dont_inherit=True), module.__dict__)
    return module, sha256


def find_beside(root: Path) -> None:
    """Search the folder `root` first, in all imports from now on."""
    sys.path[:] = [str(root), *(folder for folder in sys.path if folder != str(root))]


def names_in(path: Path, what: str) -> set[str] | None:
    """Return the names that a Python file defines or imports, without running it; None if they cannot be known.

    `what` states the purpose of the file, for errors. Raises UsageError if the file cannot be read or is not Python.
    """
    try:
        tree = ast.parse(read_plain(path), str(path))
    except OSError as error:
        raise UsageError(
            f"the file of {what} cannot be read", expected="a Python file", found=f"{path}: {error.strerror or error}"
        ) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"the file of {what} is not Python", found=str(error), where=str(path)) from error
    return _bound_in(tree)


def check_signature(path: Path, name: str, what: str, counts: Sequence[int], given: str) -> None:
    """Raise UsageError if a function in a file can be called with none of the `counts` of positional arguments.

    `what` is the purpose of the file, and `given` are the arguments, for the error. The file is parsed, not run. A
    function that is decorated, or defined more than once, is not checked.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    first, *rest = name.split(".")
    # If several statements bind the name, its value is unknown until the file runs.
    bound = [node for node in ast.walk(tree) if first in _names_of(node)]
    for node in tree.body if len(bound) == 1 else ():
        if isinstance(node, ast.Assign) and node.targets == bound and isinstance(node.value, _LITERALS):
            raise UsageError(
                f"{first} of {what} is no function",
                expected=f"def {first}({given})",
                found=ast.unparse(node)[:200],
                where=f"{path}:{node.lineno}",
            )
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef) or bound[0].decorator_list:
        return
    where = f"{path}:{bound[0].lineno}"
    if rest and not any(isinstance(node, ast.Attribute) and node.attr == rest[0] for node in ast.walk(tree)):
        raise UsageError(
            f"the function {first} of {what} has no attribute {rest[0]}", expected=first, found=name, where=where
        )
    takes = bound[0].args
    most = len(takes.posonlyargs) + len(takes.args)
    # In Python's syntax tree, the defaults are those of the last positional parameters.
    required = most - len(takes.defaults)
    # In the syntax tree, a required keyword parameter has None as its default.
    named = [arg.arg for arg, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default is None]
    if not rest and (named or not any(required <= count and (takes.vararg or count <= most) for count in counts)):
        raise UsageError(
            f"the function {first} of {what} cannot be called with {given}",
            expected=f"def {first}({given})",
            found=f"def {first}({ast.unparse(takes)})",
            where=where,
        )


_LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict)


def _names_of(node: ast.AST) -> tuple[str | None, ...]:
    if isinstance(node, ast.Name):
        return (node.id,) if isinstance(node.ctx, ast.Store) else ()
    # Definitions have a `name`. An import has a `name` and may have an `asname`.
    return (getattr(node, "name", None), getattr(node, "asname", None))


def _bound_in(tree: ast.Module) -> set[str] | None:
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        match node:
            # Such a module may make names while it runs.
            case ast.FunctionDef(name="__getattr__") | ast.alias(name="*") | ast.Name(id="globals" | "setattr"):
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue  # its inner names are its own
            case ast.alias():
                names.add(node.asname or node.name.partition(".")[0])
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names
