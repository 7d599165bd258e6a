"""Messages between stages: which group carries them, and whether ranks could wait for each other for ever.

NCCL knows no tags: in a group, messages from one rank to another arrive in the order in which they were sent. A send
may end only once its receive has begun, and a rank's messages in one group may pass one after the other. So two ranks
that first send to each other in one group, as 1F1B's neighbours do, may wait for ever. Hence there are two groups: one
for messages to ranks of higher index, one for those to lower ones. In each of them messages flow one way.

`refuse_waiting` tries a schedule under these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged.actions import Action


class Message(NamedTuple):
    """A rank's end of what an action sends, or of what it reads from another: `sender` is the action that sends it."""

    sender: Action
    is_sent: bool
    peer: int


Queue = deque[Message]
Queues = dict[tuple[int, bool], Queue]
"""By rank and by whether messages go up: each in the order in which the rank sends and receives them."""


def goes_up(sender: int, receiver: int) -> bool:
    """Which of the two groups carries a message, by the indices of its ranks."""
    return sender < receiver


def refuse_waiting(actions: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Raise PassError if ranks with these actions could wait for each other for ever, or read another's message.

    An action runs once what it reads has arrived. A message arrives if it is the next one in its group on both of its
    ranks, and its sender has run.
    """
    queues = _queues(actions, num_stages)
    waiting = [deque(own) for own in actions]
    ran, arrived = set[Action](), set[Action]()
    has_changed = True
    while has_changed:
        has_changed = False
        for rank, own in enumerate(waiting):
            while own and ((sender := _read_by(own[0], num_stages, len(actions))) is None or sender in arrived):
                ran.add(own.popleft())
                has_changed = True
            for up in (True, False):
                while (message := _passing(queues, rank, up, ran)) is not None:
                    arrived.add(message.sender)
                    has_changed = True
    if stuck := [str(own[0]) for own in waiting if own]:
        raise PassError(
            "ranks of the pipeline could wait for each other for ever",
            expected="actions whose messages, in each direction, are received in the order in which they are sent",
            found=f"{len(stuck)} of {len(actions)} ranks wait before " + ", ".join(stuck[:2]),
            fix="choose another schedule",
        )


def _queues(actions: Sequence[Sequence[Action]], num_stages: int) -> Queues:
    queues: Queues = {(rank, up): deque() for rank in range(len(actions)) for up in (True, False)}
    for rank, own in enumerate(actions):
        for message in (x for action in own for x in _messages_of(action, num_stages, len(actions))):
            ends = (rank, message.peer) if message.is_sent else (message.peer, rank)
            queues[rank, goes_up(*ends)].append(message)
    return queues


def _messages_of(action: Action, num_stages: int, ranks: int) -> Iterator[Message]:
    if (sender := _read_by(action, num_stages, ranks)) is not None:
        yield Message(sender, False, sender.stage % ranks)
    to = action.stage + (1 if action.half == "forward" else -1)
    if ranks > 1 and 0 <= to < num_stages:
        yield Message(action, True, to % ranks)


def _read_by(action: Action, num_stages: int, ranks: int) -> Action | None:
    """The action on another rank whose message an action reads."""
    stage = action.stage + (-1 if action.half == "forward" else 1)
    return action._replace(stage=stage) if ranks > 1 and 0 <= stage < num_stages else None


def _passing(queues: Queues, rank: int, up: bool, ran: set[Action]) -> Message | None:
    """Take the next message that a rank receives in a group off both queues; None if it cannot pass yet."""
    own = queues[rank, up]
    if not own or own[0].is_sent or own[0].sender not in ran:
        return None
    others = queues[own[0].peer, up]
    if others[0] != Message(own[0].sender, True, rank):
        return None
    others.popleft()
    return own.popleft()
