"""A table of terms, in which two values are proved equal if the rules rewrite their terms to the same term.

`Table.make` adds a term and returns the index of the term to which the rules rewrite it. For example, `make` of
`neg(neg(x))` returns the index of `x`. The table keeps each term with its rule, so the table is also the record of the
proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bitproof.harness.powers.proofs.prover.proof_data import ProofStep, Term, terms_in
from bitproof.harness.powers.proofs.prover.windows import Window, whole, window

Hint = tuple[object, ...]

Rule = Callable[["Table", Term], int | None]
"""A function that rewrites a term: it returns the index of an equal term, or None if the rule does not apply."""


class Table:
    """The terms of a proof, in the order in which they were added.

    - `rules`: for each kind of term, such as "view", the rules that may rewrite it.
    - `steps`: each term, with the rule that rewrote it. A step refers only to earlier steps.
    - `joins`: a cache for the rules: (one term, next term, dim) -> the term of their concatenation along this dim. None
      if the two terms are not adjacent parts of a term.
    - `hint`: an intermediate result that a rule stores for the checker.
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
        """Return the index of the term to which the rules rewrite `term`.

        If no rule applies, this is the index of `term`. A term that is not yet in the table is added, with the rule
        that rewrote it.
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
        return {step.rule for step in self.steps if step.rule}

    def shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of the term with index `place`. No size of the term may depend on data."""
        found = self.open_shape(place)
        assert found is not None
        return found

    def open_shape(self, place: int) -> tuple[int, ...] | None:
        """Return the shape of the term with index `place`; None if a size depends on data."""
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
        """Return the index of the term that selects the elements of window `w` from the term with index `place`."""
        # In canonical form, so that equal windows are equal terms.
        return self.make(("view", place, *window(*w)))

    def as_window(self, place: int) -> tuple[int, Window]:
        """Return the term with index `place` as (index of a term, window on this term).

        For a view, these are the view's base and window. Any other term is returned with a window on all of its
        elements.
        """
        match self[place]:
            case ("view", base, shape, strides, offset):
                return base, Window(shape, strides, offset)
        return place, whole(self.shape(place))

    def dtype(self, place: int) -> str:
        """Return the dtype of the term with index `place`, which must be a tensor."""
        match self[place]:
            case ("view" | "gather" | "reduce", below, *_) | ("cat", (below, *_), _):
                return self.dtype(below)
            case ("exact", _, dtype, *_) | ("number", dtype, _):
                return str(dtype)
            case (*_, dtype, _):
                return str(dtype)
        raise AssertionError(f"{self[place]} has no dtype")

    def number(self, place: int) -> float | None:
        """Return the number to which all elements of a term are equal.

        None if the term is neither a number nor a number repeated by a view.
        """
        term = self[self[place][1]] if self[place][0] == "view" else self[place]
        return float.fromhex(term[2]) if term[0] == "number" else None

    def filled(self, shape: tuple[int, ...], dtype: str, number: float) -> int:
        """Return the index of the term of a tensor whose elements all have the value `number`."""
        place = self.make(("number", dtype, number.hex()))
        return self.view(place, Window(shape, (0,) * len(shape), 0)) if shape else place

    def reachable(self, roots: Iterable[int]) -> set[int]:
        """Return the indices `roots` and the indices of all terms on which these depend."""
        seen, stack = set(), list(roots)
        while stack:
            place = stack.pop()
            if place not in seen:
                seen.add(place)
                stack.extend(terms_in(self[place]))
        return seen
