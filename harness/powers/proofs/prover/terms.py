"""A table of unique terms: two values are proved equal if the rules rewrite their terms to the same final form.

`Table.make` adds a term if it is new, and returns the index of its final form. This is the term to which the rules
rewrite it, or the term itself if no rule applies. The operands of a term are always final forms.

The table is also the record of the proof. Each step is a term with the rule that rewrote it, and depends only on
earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bitproof.harness.powers.proofs.prover.proof_data import ProofStep, Term, terms_in
from bitproof.harness.powers.proofs.prover.windows import Window, whole, window

Hint = tuple[object, ...]

Rule = Callable[["Table", Term], int | None]
"""Rewrites a term: returns the index of an equal term, or None if the rule does not apply."""


class Table:
    """The terms of a proof, in the order in which they were added.

    - `rules`: the rules for each kind of term.
    - `steps`: each term, with the rule that rewrote it.
    - `joins`: a cache for the rules. It maps two terms and a dim to the term of their concatenation; None if they do
      not form a single window.
    - `hint`: an intermediate result that a rule may set for the checker.
    """

    def __init__(self, rules: dict[str, list[Rule]]) -> None:
        self.rules = rules
        self.steps: list[ProofStep] = []
        self.joins: dict[tuple[int, int, int], int | None] = {}
        self.hint: Hint = ()
        self._places: dict[Term, int] = {}
        self._shapes: dict[int, tuple[int, ...] | None] = {}

    def __getitem__(self, place: int) -> Term:
        return self.steps[place].term

    def make(self, term: Term) -> int:
        """Return the index of the term to which the rules rewrite `term`, or of `term` itself if no rule applies.

        A new term is added to the table, with the rule that rewrote it.
        """
        if term in self._places:
            return self.steps[self._places[term]].equals
        # The first rule that applies decides; its result is built by `make`, so it is in final form already.
        for rule in self.rules.get(term[0], ()):
            found = rule(self, term)
            if found is not None:
                hint, self.hint = self.hint, ()
                return self._put(term, rule.__name__, found, hint)
        return self._put(term, "", None, ())

    def _put(self, term: Term, rule: str, equals: int | None, hint: Hint) -> int:
        place = len(self.steps)
        self._places[term] = place
        self.steps.append(ProofStep(term, rule, place if equals is None else equals, hint))
        return self.steps[place].equals

    def used(self) -> set[str]:
        """Return the names of the rules that rewrote any term."""
        return {step.rule for step in self.steps if step.rule}

    def shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of term `place`. No size may depend on data."""
        found = self.open_shape(place)
        assert found is not None
        return found

    def open_shape(self, place: int) -> tuple[int, ...] | None:
        """Return the shape of term `place`; None if a size depends on data."""
        if place not in self._shapes:
            self._shapes[place] = self._shape_of(self[place])
        return self._shapes[place]

    def _shape_of(self, term: Term) -> tuple[int, ...] | None:
        match term:
            case ("view", _, shape, _, _):
                return tuple(shape)
            case ("number", _, _):
                return ()
            case ("cat", places, dim):
                parts = [self.shape(place) for place in places]
                return (*parts[0][:dim], sum(part[dim] for part in parts), *parts[0][dim + 1 :])
            case ("exact", _, _, _, places):
                return self.open_shape(places[0])
            case ("gather", place, ranks):
                return (len(ranks[0]), *self.shape(place))
            case ("reduce", place, _, _):
                return self.shape(place)[1:]
            # Other terms that are tensors end in their shape, e.g. ("input", name, dtype, shape).
            case (*_, shape) if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
                return shape
        return None

    def view(self, place: int, w: Window) -> int:
        """Return the term of a window on the term `place`."""
        # In canonical form, so that equal windows are equal terms.
        return self.make(("view", place, *window(*w)))

    def as_window(self, place: int) -> tuple[int, Window]:
        """Return a term as (base, window on the base). For a term that is no view, the window selects all of it."""
        match self[place]:
            case ("view", base, shape, strides, offset):
                return base, Window(shape, strides, offset)
        return place, whole(self.shape(place))

    def dtype(self, place: int) -> str:
        """Return the dtype of term `place`, which must be a tensor."""
        match self[place]:
            case ("view" | "gather" | "reduce", below, *_) | ("cat", (below, *_), _):
                return self.dtype(below)
            case ("exact", _, dtype, *_) | ("number", dtype, _):
                return str(dtype)
            case (*_, dtype, _):
                return str(dtype)
        raise AssertionError(f"{self[place]} has no dtype")

    def number(self, place: int) -> float | None:
        """Return the number that all elements of a term equal; None if it is neither a number nor a view of one."""
        term = self[self[place][1]] if self[place][0] == "view" else self[place]
        return float.fromhex(term[2]) if term[0] == "number" else None

    def filled(self, shape: tuple[int, ...], dtype: str, number: float) -> int:
        """Return the term of a tensor filled with a number: a scalar, or a view that repeats it."""
        place = self.make(("number", dtype, number.hex()))
        return self.view(place, Window(shape, (0,) * len(shape), 0)) if shape else place

    def reachable(self, roots: Iterable[int]) -> set[int]:
        """Return the terms `roots` and every term that they depend on."""
        seen, stack = set(), list(roots)
        while stack:
            place = stack.pop()
            if place not in seen:
                seen.add(place)
                stack.extend(terms_in(self[place]))
        return seen
