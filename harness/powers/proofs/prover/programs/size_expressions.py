"""Reads sizes from a file without `eval`, such as `Add(Mul(Integer(2), Symbol('s77', integer=True)), Integer(1))`.

The size of an input must be a sum of products of symbols and numbers. Other sizes may be more complex: they are
checked, but not used, since the graph's calls compute them.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.powers.proofs.prover.programs.json_fields import Field
from bitproof.harness.torch_compat import assume

LONGEST = 2000
LARGEST_POWER = 8
LARGEST_SIZE = 1 << 48

_SYMBOL = re.compile(r"(s|u|z|zf|zuf)\d{1,9}", re.ASCII)
_SUMS = {"Add", "Mul", "Pow", "Integer", "Symbol"}
_OTHERS = {
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv"),
    *("LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt"),
    *("RoundToInt", "RoundDecimal", "ToFloat", "Identity", "IsNonOverlappingAndDenseIndicator", "Max", "Min", "Float"),
    *("Equality", "Unequality", "StrictLessThan", "StrictGreaterThan", "LessThan", "GreaterThan", "Eq", "Ne"),
    *("And", "Or", "Not", "Rational", "Abs", "floor", "ceiling"),
}


class ExpressionError(ValueError):
    """The text is not a size."""


def check_expression(text: str) -> None:
    """Raise ExpressionError unless a text consists of calls of known functions on symbols and numbers."""
    _check(_parsed(text), text)


class OpenSizesOfFile:
    """Converts sizes in a file to sizes of `shape_env`.

    Each symbol in the file becomes a new symbol, with the bounds that the file states in `ranges`.
    """

    def __init__(self, shape_env: ShapeEnv, ranges: Field) -> None:
        self._shape_env = shape_env
        self._ranges = dict(ranges.items())
        self._symbols: dict[str, Any] = {}
        for name, bounds in self._ranges.items():
            if not _SYMBOL.fullmatch(name):
                raise ExpressionError(f"a symbol is named {name[:80]!r}, so that it is no sum of products of symbols")
            self._bounds(bounds)

    def size(self, field: Field) -> Any:
        kind, content = field.one_of(("as_int", "as_expr"))
        if kind == "as_int":
            return content.integer()
        text = content.object(("expr_str",), ("hint",))["expr_str"].text()
        return self._value(_parsed(text), text)

    def _value(self, node: ast.expr, text: str) -> Any:
        name, args = _name_and_arguments(node, text, _SUMS)
        if name == "Symbol":
            return self._symbol(args[0], text)
        if name == "Integer":
            return args[0]
        values = [self._value(x, text) for x in args]
        if name == "Pow":
            # A power is written out as a product, so a large exponent would take forever.
            if len(values) != 2 or type(values[1]) is not int or not 1 <= values[1] <= LARGEST_POWER:
                raise _no_sum(text)
            return _product([values[0]] * values[1])
        return sum(values[1:], start=values[0]) if name == "Add" else _product(values)

    def _symbol(self, name: str, text: str) -> Any:
        if name not in self._symbols:
            own = self._symbols[name] = self._shape_env.create_unbacked_symint()
            bounds = self._ranges.get(name)
            least, most = (0, None) if bounds is None else self._bounds(bounds)
            assume(own >= max(least, 2))  # torch treats sizes 0 and 1 separately; a proof does not cover them
            assume(own <= (LARGEST_SIZE if most is None else most)) if most is not None else None
        return self._symbols[name]

    @staticmethod
    def _bounds(field: Field) -> tuple[int, int | None]:
        parts = field.object(("min_val", "max_val"))
        least, most = (None if x.value is None else x.integer() for x in (parts["min_val"], parts["max_val"]))
        if most is not None and (most < 2 or most < (least or 0)):
            raise field.wrong("a range with two sizes or more of at least 2")
        return max(least or 0, 0), most


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise _no_sum(text)
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_sum(text) from None


def _check(node: ast.expr, text: str) -> None:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "oo", "int_oo"):
        return
    name, args = _name_and_arguments(node, text, _SUMS | _OTHERS)
    # `_name_and_arguments` has checked the arguments of symbols and numbers.
    if name not in ("Symbol", "Integer", "Float", "Rational"):
        for x in args:
            _check(x, text)


def _name_and_arguments(node: ast.expr, text: str, known: set[str]) -> tuple[str, list[Any]]:
    """Return the name of the function that a syntax tree calls, and its arguments.

    - `known`: the accepted functions.
    - `text`: the whole expression, for the error.

    For a symbol, the argument is its name; for a number, its value. Raises ExpressionError if the tree is not such a
    call.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in known:
        raise _no_sum(text)
    name, args = node.func.id, node.args
    # Keywords such as `integer=True` are facts for sympy. They must be constants, and are not used.
    facts = {x.arg: x.value.value for x in node.keywords if isinstance(x.value, ast.Constant)}
    if len(facts) != len(node.keywords) or not args:
        raise _no_sum(text)
    if name in ("Symbol", "Integer", "Float", "Rational"):
        numbers = [_number(x) for x in args]
        is_number = name != "Symbol" and all(type(x) in ((int,) if name == "Integer" else (int, str)) for x in numbers)
        is_symbol = name == "Symbol" and isinstance(numbers[0], str) and _SYMBOL.fullmatch(numbers[0])
        if not (is_number or is_symbol) or len(numbers) > 2 or (len(numbers) > 1 and name in ("Symbol", "Integer")):
            raise _no_sum(text)
        if any(isinstance(x, int) and abs(x) > LARGEST_SIZE for x in numbers) and name == "Integer":
            raise _no_sum(text)
        return name, numbers
    if node.keywords:
        raise _no_sum(text)
    return name, args


def _number(node: ast.expr) -> Any:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return -value if type(value) is int else None
    return node.value if isinstance(node, ast.Constant) else None


def _product(values: list[Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = found * value
    return found


def _no_sum(text: str) -> ExpressionError:
    return ExpressionError(f"it has a size {text[:80]!r}, which is no sum of products of symbols")
