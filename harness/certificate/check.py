"""The checker: replays a certificate, and believes nothing but its assumptions and that its graphs are the steps'.

1. Both graphs are walked call by call. A call's steps of rewriting come first, each checked by its rule, on terms that
   earlier steps left in their last form; then the term that the call computes is derived anew, and must have a step.
2. Every answer is held against both walks: PROVED is one term on both sides, which reads a parameter and an input. No
   output may be without an answer, and no step without a reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from harness.certificate.calls import Walk
from harness.certificate.data import Certificate, reads_of, terms_in
from harness.certificate.rules import RejectedError, Terms, require

VERDICTS = ("PROVED", "NOT PROVED", "REFUSED")
KINDS = ("parameter ", "input ")


def check(certificate: Certificate) -> Counter[str]:
    """Count the answers by verdict. Raises RejectedError, saying what is wrong, for a certificate that proves less."""
    with rejecting():
        replay = Replay(certificate)
        replay.run()
        unread = set(range(len(replay.terms.terms))) - replay.needed()
        require(not unread, f"nothing needs step {min(unread, default=-1)}")
    return Counter(answer.verdict for answer in certificate.answers)


@contextmanager
def rejecting() -> Iterator[None]:
    """Whatever goes wrong within is what is wrong with a certificate."""
    try:
        yield
    except KeyError as error:
        raise RejectedError(f"no step has {error}") from error
    except (AttributeError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError, StopIteration) as error:
        raise RejectedError(f"{type(error).__name__}: {error}") from error


class Replay:
    """A certificate as it is checked: the terms that have steps so far, and how far both graphs were walked."""

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.terms = Terms()
        self.reference = Walk(self.terms, certificate.reference, "reference")
        self.candidate = Walk(self.terms, certificate.candidate, "candidate")

    def run(self) -> None:
        """All that is left: call after call, then the answers."""
        while self.take():
            pass
        _check_answers(self.certificate, self.reference, self.candidate)

    def take(self) -> bool:
        """Check the next call, the reference's first; whether there was one."""
        place = len(self.reference.values) + len(self.candidate.values)
        for walk in (self.reference, self.candidate):
            if len(walk.values) < len(walk.graph.calls):
                walk.take(self.certificate.steps[place])
                return True
        require(place == len(self.certificate.steps), "there are steps of no call")
        return False

    def needed(self) -> set[int]:
        """The steps without which this could not be checked: terms that were looked up, and all below them."""
        found, stack = set(), list(self.terms.used)
        while stack:
            top = stack.pop()
            if top not in found:
                found.add(top)
                stack += terms_in(self.terms.terms[top])
        return found


def _outputs(walk: Walk) -> tuple[dict[str, int], dict[str, int]]:
    """The calls that give each output, an input that was written being one; and all inputs as if they were written."""
    inputs = [(index, call) for index, call in enumerate(walk.graph.calls) if call.op == "input"]
    found, held = dict(walk.graph.outputs), {f"written {call.name}": index for index, call in inputs}
    require(len(found) == len(walk.graph.outputs) and len(held) == len(inputs), "a name stands for two things")
    for index, call in inputs:
        start = walk.terms.places["input", call.name, call.value.dtype, call.value.shape]
        if index in walk.stale or walk.values[index] != start:
            found[f"written {call.name}"] = index
    return found, held


def _check_answers(certificate: Certificate, reference: Walk, candidate: Walk) -> None:
    (one, one_held), (two, two_held) = _outputs(reference), _outputs(candidate)
    proved = {}
    answered = [answer.output for answer in certificate.answers]
    require(sorted(answered) == sorted(one.keys() | two.keys()), "outputs and answers are not the same")
    for answer in certificate.answers:
        require(answer.verdict in VERDICTS, f"{answer.verdict} is no verdict")
        if answer.verdict != "PROVED":
            continue
        place = _final(reference, one.get(answer.output, one_held.get(answer.output, -1)))
        other = _final(candidate, two.get(answer.output, two_held.get(answer.output, -1)))
        require(place == other, f"the sides of {answer.output} are two terms")
        require(answer.terms == (place, place), f"{answer.output} is said to be another term")
        proved[answer.output] = place
    reads = reads_of(reference.terms.terms, KINDS)
    for output, place in proved.items():
        for bit, kind in enumerate(KINDS):
            require(reads[place] >> bit & 1 == 1, f"{output} reads no {kind}of the step")


def _final(walk: Walk, index: int) -> int:
    """The term of an output when all has run."""
    is_there = index in range(len(walk.values)) and index not in walk.flying and index not in walk.stale
    require(is_there and isinstance(walk.values[index], int), "what is said to be proved is refused, or no tensor")
    return int(walk.values[index])
