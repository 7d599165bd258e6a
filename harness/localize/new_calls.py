"""The place to report for a call that a pass added, which has no place of its own (rule 6 of `blame`)."""

from __future__ import annotations

from collections import Counter

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.packing import CONSTANTS, name_of


def replaced_by(log: CandidateLog, call: Call) -> Call | None:
    """The call of the reference that a new call replaces: the first that reads the new call's inputs and is missing.

    For example, a new `addmm(b, x, w)` replaces `linear(x, w, b)`. None if there is no such call.
    """
    made = Counter((mine.operator, mine.place) for mine in log.log)
    due = Counter((known.operator, known.place) for known in log.reference.log)
    for index, known in enumerate(log.reference.log):
        kind = known.operator, known.place
        reads_it = bool(call.inputs) and set(call.inputs) <= set(known.inputs)
        if reads_it and not known.view and made[kind] < due[kind] and log.lacks(index):
            return known
    return None


def put_between(log: CandidateLog, index: int, mine: int) -> int | None:
    """The new or extra call that the candidate inserted between a value and the call `mine`.

    In the reference, the counterpart `index` of `mine` reads the value itself. Inserted calls that change nothing, such
    as a product with 1, do not count. None if there is no such call.
    """
    wanted = set(log.reference.log[index].inputs)
    given = [number for number in log.log[mine].producers if number is not None]
    reads_it = [number for number in given if wanted & set(log.log[number].inputs)]
    new = (number for number in reads_it if log.is_new(number) or log.is_extra(number))
    return next((number for number in new if not log.changes_nothing(number)), None)


def constant_of(log: CandidateLog, index: int) -> int | None:
    """The new call that makes a constant from an input of the reference's call `index`, or from a view of it.

    For example, `zeros_like g` for an all-reduce of g. None if there is none.
    """
    wanted, views = set(log.reference.log[index].inputs), set[int]()
    for number, call in enumerate(log.log):
        if wanted.isdisjoint(call.inputs) and views.isdisjoint(log.givers(number)):
            continue
        if call.view:
            views.add(number)
        elif name_of(call) in CONSTANTS and (log.is_new(number) or log.is_extra(number)):
            return number
    return None


def put_before(log: CandidateLog, index: int) -> Call | None:
    """The reader before which a new call was inserted; None if it was inserted after another call.

    Example: layer 3 alone reads `mul h 2`, and layer 4 reads h itself, so the call was inserted before layer 3. A call
    inserted after the producer of h, or writing in place, changes the value for all readers.
    """
    # All later readers read a value that was written in place.
    if name_of(log.log[index]).endswith("_"):
        return None
    # Find the readers that the reference has, too. New calls among the readers are followed to their own readers.
    value, made, readers = set(log.log[index].inputs), {index}, list[int]()
    for number in range(index + 1, len(log.log)):
        if made.isdisjoint(log.log[number].producers):
            continue
        if log.is_new(number) or log.is_extra(number):
            made.add(number)
        else:
            readers.append(number)
    if len({log.log[number].place.module for number in readers}) != 1:
        return None
    # Of the new call's inputs, `value` keeps those that the reader's counterpart reads. Another right call that reads
    # the same value unchanged shows that the new call was not inserted after the value's producer.
    call = log.log[readers[0]]
    due = log.reference.of_turn(call, log.turn(readers[0]))
    value &= set(log.reference.log[due].inputs) if due is not None else set()
    read = {each for each in _read_by(log.log[index]) if each[0] in value}
    as_it_is = (each for i, each in enumerate(log.log) if i != index and read & _read_by(each))
    return call if any(not each.view and log.reference.knows(each) for each in as_it_is) else None


def _read_by(call: Call) -> set[tuple[str, int | None]]:
    """Each input of a call, with its producer. A digest alone is ambiguous: a product with ones has its input's."""
    return set(zip(call.inputs, (*call.producers, *[None] * len(call.inputs)), strict=False))
