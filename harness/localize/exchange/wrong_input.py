"""Whether a blamed call can be the cause at all: its inputs must be right, and its output wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import READS_OUT, producer_of, returns_only_inputs
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import GATHERS, PACKING, keeps_order, name_of


def wrong_input(culprit: Culprit, logs: Sequence[CandidateLog]) -> str:
    """Return the reason why the blamed call cannot be the cause; "" if there is no such reason.

    The reasons are:
    - The call reads a wrong value, so an earlier call is wrong.
    - Only the reference makes the call, and it reads a value that the candidate does not have.
    - Only the candidate makes the call, but its output is a value that the reference also has, and that a reader needs.
    - The call's output is in another tensor's place, but it reads a bucket that only the candidate joins. The bucket
      may have exchanged the values.
    """
    log = logs[culprit.rank]
    if culprit.candidate is None:
        call = log.reference.log[culprit.index]
        is_there = culprit.how != "lacks" or _has_inputs(log, culprit.index)
        return "" if is_there else f"the candidate does not have what {call} reads"
    mine = log.log[culprit.candidate]
    if text := _wrong_number(culprit, log):
        return text
    # A view in place of another takes another part of the same tensor, which may be right elsewhere.
    takes_another_part = mine.view and culprit.instead_of is not None
    is_right = log.makes_right_values(culprit.candidate) and not _is_wrong_for_readers(log, culprit.candidate)
    if culprit.how == "adds" and not takes_another_part and is_right:
        return f"what {mine} gives is right: the reference has it, too"
    theirs = log.reference.log[culprit.reference].inputs if culprit.reference is not None else ()
    if mine.collective and (text := _wrong_peer(culprit, logs)):
        return text
    # A cause must read right values only. An input that the matching call has as well, or that is from before the step,
    # is not due to an earlier call.
    for position, (value, producer) in enumerate(
        zip(mine.inputs, log.input_producers(culprit.candidate), strict=False)
    ):
        is_as_due = theirs[position : position + 1] == (value,) and culprit.how != "misplaces"
        if producer is None or is_as_due:
            continue
        maker = producer_of(log.log, log.input_producers, culprit.candidate, position)
        if maker is None or (log.log[maker].view and not log.producers(maker)):
            continue  # it was there before the step
        if culprit.how == "misplaces" and _is_of_a_bucket(log, maker):
            return f"it reads what {log.log[maker]} gives, which the reference does not compute"
        if culprit.how == "reads":  # a view of the whole computes nothing, so what it is a view of counts
            while keeps_order(log.log[producer]) and (behind := log.input_producers(producer)[0]) is not None:
                producer, value = behind, log.log[producer].inputs[0]
        own = log.read_behind(producer) if culprit.how == "reads" else set()
        if own and log.reference.values.issuperset(own):
            continue  # the value of an extra call that computes it of right values: this call should read another one
        if value not in log.reference.values and not (
            culprit.how == "adds" and _only_moves(logs, culprit.rank, producer)
        ):
            return f"it reads what {log.log[producer]} gives, which the reference does not have"
        if log.matching_call(producer) is not None and not log.is_as_matched(producer, value):
            return f"it reads what {log.log[producer]} gives, which differs from what its matching call gives"
    return ""


def extra_before(culprit: Culprit, logs: Sequence[CandidateLog]) -> list[Culprit]:
    """Return the extra calls whose outputs an extra call reads: the first wrong call may be among them.

    For example, only the candidate transposes a value, and then copies it.
    """
    log = logs[culprit.rank]
    makers = log.producers(culprit.candidate) if culprit.how == "adds" and culprit.candidate is not None else ()
    extra = [index for index in dict.fromkeys(makers) if log.matching_call(index) is None and log.differs(index)]
    return [replace(culprit, call=log.log[index], candidate=index, instead_of="", chain=()) for index in extra]


def _is_of_a_bucket(log: CandidateLog, index: int) -> bool:
    """Whether extra calls have joined the values that a call returns: they may have exchanged them."""
    pending, seen = [index], set[int]()
    while pending:
        if (current := pending.pop()) not in seen and log.matching_call(current) is None:
            if name_of(log.log[current]) in PACKING and not log.log[current].view:
                return True
            seen.add(current)
            pending += log.producers(current)
    return False


def _is_wrong_for_readers(log: CandidateLog, index: int) -> bool:
    """Whether all readers of a call with a match need another value in place of each output of it that they read.

    For example, a reduction needs the value before an extra cast to bfloat16, which the reference also makes elsewhere.
    False without such readers, and for a call that only copies or joins: its reader reads the wrong tensor.
    """
    if returns_only_inputs(log.log[index]) or name_of(log.log[index]) in PACKING:
        return False
    outputs, due = set(log.log[index].outputs), list[tuple[str, str]]()
    for reader, position in log.readers(index):
        other = log.matching_call(reader)
        wanted = log.reference.log[other].inputs if other is not None else ()
        if len(wanted) == len(log.log[reader].inputs):
            due.append((log.log[reader].inputs[position], wanted[position]))
    return bool(due) and all(found in outputs and found != wanted for found, wanted in due)


def _only_moves(logs: Sequence[CandidateLog], rank: int, index: int) -> bool:
    """Whether a call that only the candidate makes just selects, copies or gathers right values, such as an element of
    a tensor. `index` is the call's in the log of `rank`.

    If so, its output is right. False if the candidate lacks a selection that the reference makes: the call may be a
    wrong version of that selection.
    """
    log, call = logs[rank], logs[rank].log[index]
    if log.matching_call(index) is not None:
        return False
    if name_of(call) in GATHERS:
        joined = JoinedLogs([each.log for each in logs])
        return all(_reads_moved(logs, *site) for site in joined.together((rank, index)))
    moves = call.view or log.packs(index) or name_of(call) == "copy_"
    return (
        moves
        and not _may_replace_part(log, {value for value, _ in _moved(log, index)})
        and _reads_moved(logs, rank, index)
    )


def _moved(log: CandidateLog, index: int) -> list[tuple[str, int | None]]:
    """Return the inputs that a call may return, each with its producer: all but what `copy_` overwrites."""
    sides = [*zip(log.log[index].inputs, log.input_producers(index), strict=False)]
    return sides[1:] if name_of(log.log[index]) == "copy_" else sides


def _reads_moved(logs: Sequence[CandidateLog], rank: int, index: int) -> bool:
    """Whether a call reads only right values, or outputs of calls that just move such values."""
    log = logs[rank]
    return all(
        value in log.reference.values or (by is not None and _only_moves(logs, rank, by))
        for value, by in _moved(log, index)
    )


def _may_replace_part(log: CandidateLog, values: set[str]) -> bool:
    """Whether the reference takes a part of these values with a call that the candidate does not make."""
    return any(
        call.view and not values.isdisjoint(call.inputs) and log.matching_here(index) is None
        for index, call in enumerate(log.reference.log)
    )


def _has_inputs(log: CandidateLog, index: int) -> bool:
    """Whether the candidate has all inputs of a call of the reference.

    Also true if missing calls compute an input from values that the candidate has.
    """
    for value, producer in zip(log.reference.log[index].inputs, log.reference.input_producers(index), strict=False):
        if value in log.values or producer is None:
            continue
        if log.matching_here(producer) is not None or not _has_inputs(log, producer):
            return False
    return True


def _wrong_peer(culprit: Culprit, logs: Sequence[CandidateLog]) -> str:
    """Return the reason why a collective is not to blame: another rank passes a wrong value to it.

    Returns "" if no other rank does.
    """
    assert culprit.candidate is not None
    joined = JoinedLogs([log.log for log in logs])
    for rank, index in joined.together((culprit.rank, culprit.candidate)):
        other = logs[rank].matching_call(index)
        if rank != culprit.rank and other is not None:
            given, due = logs[rank].log[index], logs[rank].reference.log[other]
            # On a rank on which the call is blamed as well, other right inputs are the defect itself.
            is_blamed = rank in culprit.ranks and logs[rank].reads_right_values(index)
            if given.inputs != due.inputs and not is_blamed:
                return f"it brings what {given} on rank {rank} gives to it, and its matching call gives another value"
    return ""


def _wrong_number(culprit: Culprit, log: CandidateLog) -> str:
    """Return the reason why a call is not to blame: its number argument was read out of a tensor that is already wrong.

    `item()` reads such numbers. Returns "" if there is no such argument, as for a number from the program's own code.
    """
    if culprit.candidate is None or culprit.reference is None:
        return ""
    known = dict(log.reference.log[culprit.reference].scalars)
    numbers = {f"number {value}" for name, value in log.log[culprit.candidate].scalars if known.get(name) != value}
    for index, call in enumerate(log.log[: culprit.candidate] if numbers else ()):
        # Dynamo makes a tensor of a number in the code, which no call computes, and reads it out.
        is_computed = call.operator == READS_OUT and any(
            producer is not None for producer in log.input_producers(index)
        )
        if is_computed and numbers.intersection(call.outputs) - log.reference.values:
            return f"it is given a number that {call} reads out of a tensor, and that the reference does not have"
    return ""
