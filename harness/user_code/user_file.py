"""A Python file that a user names on the command line."""

from __future__ import annotations

import ast
import hashlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bitproof.harness.errors import UsageError

_loading: list[str] = []


@contextmanager
def loading(source: str) -> Iterator[None]:
    """While a user's code is loaded: what it calls then, as a script without a guard does, is known by `is_loading`."""
    _loading.append(source)
    try:
        yield
    finally:
        _loading.pop()


def is_loading() -> bool:
    """Whether a user's code is being loaded."""
    return bool(_loading)


def run_file(path: Path) -> tuple[types.ModuleType, str]:
    """Run a file as a module of its own; also returns the sha256 of the bytes that ran: an import may run cached ones.

    It finds the modules beside it, as with `python FILE.py`; in a package, those of its package, by either name.
    The module stays in sys.modules, where dataclasses and torch.compile look for it. What it raises is raised.
    """
    code = path.read_bytes()
    sha256 = hashlib.sha256(code).hexdigest()
    module = types.ModuleType(f"{path.stem}_{sha256[:8]}")
    module.__file__ = str(path)
    root, module.__package__ = package_of(path.resolve())
    sys.path[:] = [str(root), *(folder for folder in sys.path if folder != str(root))]
    sys.modules[module.__name__] = module
    with loading(str(path)):
        exec(compile(code, str(path), "exec", dont_inherit=True), module.__dict__)  # no future of ours is theirs
    return module, sha256


def package_of(path: Path) -> tuple[Path, str]:
    """The folder that a file's modules are found in, and the name of its package there, empty outside of any."""
    folder, names = path.parent, []
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def names_in(path: Path, what: str) -> set[str] | None:
    """Every name that a module in this file has, read without running it; None if only running it can show them.

    Raises UsageError, naming `what` the file is of, when it cannot be read or is not Python.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(
            f"the file of {what} cannot be read", expected="a Python file", found=f"{path}: {error.strerror or error}"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the file of {what} is not Python", found=str(error), where=str(path)) from error
    return _bound_in(tree)


def check_signature(path: Path, name: str, what: str, counts: Sequence[int], given: str) -> None:
    """Refuse a function of a file that cannot be called with any of these numbers of positional arguments.

    `what` is what the file is of, and `given` the arguments in words. Nothing is run: a name that is bound in another
    way than by one plain `def` is not checked. Raises UsageError.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    first, *rest = name.split(".")
    bound = [node for node in ast.walk(tree) if first in _names_of(node)]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef) or bound[0].decorator_list:
        return
    where = f"{path}:{bound[0].lineno}"
    if rest and not any(isinstance(node, ast.Attribute) and node.attr == rest[0] for node in ast.walk(tree)):
        raise UsageError(
            f"the function {first} of {what} has no attribute {rest[0]}", expected=first, found=name, where=where
        )
    takes = bound[0].args
    most = len(takes.posonlyargs) + len(takes.args)
    required = most - len(takes.defaults)
    named = [arg.arg for arg, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default is None]
    if not rest and (named or not any(required <= count and (takes.vararg or count <= most) for count in counts)):
        raise UsageError(
            f"the function {first} of {what} cannot be called with {given}",
            expected=f"def {first}({given})",
            found=f"def {first}({ast.unparse(takes)})",
            where=where,
        )


def _names_of(node: ast.AST) -> tuple[str | None, ...]:
    """The names that a definition, an import or an assignment binds."""
    if isinstance(node, ast.Name):
        return (node.id,) if isinstance(node.ctx, ast.Store) else ()
    return (getattr(node, "name", None), getattr(node, "asname", None))


def _bound_in(tree: ast.Module) -> set[str] | None:
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name="__getattr__") | ast.alias(name="*") | ast.Name(id="globals" | "setattr"):
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue  # what it binds is its own
            case ast.alias():
                names.add(node.asname or node.name.partition(".")[0])
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names
