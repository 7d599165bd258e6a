"""Select cases by pytest's `-k` expressions: and, or, not, parentheses, and names as substrings.

    expression: and_expr ("or" and_expr)*
    and_expr:   not_expr ("and" not_expr)*
    not_expr:   "not" not_expr | "(" expression ")" | name

A name matches if it is a substring of the case's name or family; upper and lower case are equal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError, cut

DEEPEST = 50
"""The deepest nesting of parentheses: the parser calls itself for each."""

_SHOWN = 200

Predicate = Callable[[str], bool]
Node = Callable[[Predicate], bool]


def select(cases: Sequence[Case], expression: str | None) -> list[Case]:
    """Return the cases that match the expression, in order; all cases if it is None or blank.

    Raises UsageError if the expression is invalid or no case matches.
    """
    if expression is None or not expression.strip():
        return list(cases)
    evaluate = compile_expression(expression)
    selected = [case for case in cases if evaluate(partial(_matches, case))]
    if not selected:
        close = difflib.get_close_matches(expression.strip(), [case.name for case in cases], n=3)
        raise UsageError(
            "no case matches the expression",
            expected=" or ".join(close) if close else "parts of names or families that `bitproof list` shows",
            found=f"-k {cut(repr(expression), _SHOWN)}",
            fix=f"did you mean {close[0]}?" if close else None,
        )
    return selected


def asks_for(expression: str | None) -> bool:
    """Whether an expression names the cases that it selects: True for `moe_seq`, False for `not moe_seq` or None."""
    # If no name matches, only `not` can make an expression true.
    return bool(expression and expression.strip()) and not compile_expression(str(expression))(lambda name: False)


def compile_expression(expression: str) -> Node:
    """Convert an expression to a function that evaluates it. The argument of this function decides whether a single
    name matches.

    Raises UsageError, which shows the column of the mistake.
    """
    return _Parser(expression).parse()


def _matches(case: Case, name: str) -> bool:
    return any(name.lower() in text.lower() for text in (case.name, case.family))


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


# A name has the characters that pytest allows in names.
_TOKENS = re.compile(
    r"(?P<space>[ \t]+)|(?P<paren>[()])|(?P<name>(?:\w|:|\+|-|\.|\[|\]|\\|/)+)|(?P<other>.)", re.DOTALL
)


class _Parser:
    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.at = self.depth = 0
        self.tokens = [_token(match) for match in _TOKENS.finditer(expression) if match.lastgroup != "space"]
        # A last token of its own, so that `_next` exists at every position.
        self.tokens.append(_Token("end of input", "", len(expression) + 1))

    def parse(self) -> Node:
        # `or` binds least, so an expression begins with it.
        node = self._or()
        if self._next.kind != "end of input":
            raise self._refuse(self._next, "and, or, or the end of the expression")
        return node

    def _or(self) -> Node:
        terms = [self._and()]
        while self._accept("or"):
            terms.append(self._and())
        return terms[0] if len(terms) == 1 else lambda matches: any(term(matches) for term in terms)

    def _and(self) -> Node:
        terms = [self._not()]
        while self._accept("and"):
            terms.append(self._not())
        return terms[0] if len(terms) == 1 else lambda matches: all(term(matches) for term in terms)

    def _not(self) -> Node:
        is_wanted = True
        while self._accept("not"):
            is_wanted = not is_wanted
        inner = self._name_or_group()
        return inner if is_wanted else lambda matches: not inner(matches)

    def _name_or_group(self) -> Node:
        if token := self._accept("name"):
            return lambda matches: matches(token.text)
        if not self._accept("("):
            raise self._refuse(self._next, "not, an opening parenthesis or a name")
        self.depth += 1
        # Checked before the parser calls itself again, since Python limits the depth of calls.
        if self.depth > DEEPEST:
            raise self._refuse(self._next, f"at most {DEEPEST} parentheses within each other")
        inner = self._or()
        if not self._accept(")"):
            raise self._refuse(self._next, "a closing parenthesis")
        self.depth -= 1
        return inner

    @property
    def _next(self) -> _Token:
        return self.tokens[self.at]

    def _accept(self, kind: str) -> _Token | None:
        if (token := self._next).kind != kind:
            return None
        self.at += 1
        return token

    def _refuse(self, token: _Token, expected: str) -> UsageError:
        found = cut(repr(token.text), _SHOWN) if token.text else token.kind
        # A long expression is cut around the mistake, and the pointer moves with it.
        first = max(0, token.column - 1 - _SHOWN)
        pointer = f"  {self.expression[first : first + 2 * _SHOWN]}\n  {' ' * (token.column - 1 - first)}^"
        return UsageError(
            f"the -k expression is wrong at column {token.column}\n{pointer}", expected=expected, found=found
        )


def _token(match: re.Match[str]) -> _Token:
    text = match.group()
    # Parentheses and keywords are their own kind; every other token has the name of its group.
    is_fixed = match.lastgroup == "paren" or text in ("and", "or", "not")
    return _Token(text if is_fixed else str(match.lastgroup), text, match.start() + 1)
