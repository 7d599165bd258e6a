"""Messages between stages: the groups that carry them, and whether ranks could wait for each other forever.

NCCL has no tags: in a group, messages from a rank to another arrive in the order in which they were sent. A send may
end only once its receive has begun, and a rank's messages in a group may be serialized. So two ranks that first send to
each other in the same group, like 1F1B's neighbours, may deadlock. Hence there are two groups: messages to higher ranks
use the first, messages to lower ranks the second. In each of them messages flow in a single direction.

`refuse_waiting` simulates a schedule under these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged.actions import Action


class Message(NamedTuple):
    """One rank's side of a message, which it sends or receives: `sender` is the action that sends it."""

    sender: Action
    is_sent: bool
    peer: int


Queue = deque[Message]
Queues = dict[tuple[int, bool], Queue]
"""By rank and direction (whether messages go up): messages in the order in which the rank sends and receives them."""


def goes_up(sender: int, receiver: int) -> bool:
    """Whether a message uses the group for higher receivers, by the indices of its ranks."""
    return sender < receiver


def refuse_waiting(actions: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Raise PassError if ranks with these actions could deadlock, or read another message than intended.

    An action runs once its messages have arrived. A message arrives if it is the next message of its group on both of
    its ranks, and its sender has run.
    """
    queues = _queues(actions, num_stages)
    waiting = [deque(own) for own in actions]
    ran, arrived = set[Action](), set[Action]()
    # Simulate until nothing changes: an action that is left then waits forever.
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
            "ranks of the pipeline could wait for each other forever",
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
    """Remove the next message that a rank receives in a group from both ranks' queues, and return it.

    None if the message cannot arrive yet.
    """
    own = queues[rank, up]
    if not own or own[0].is_sent or own[0].sender not in ran:
        return None
    others = queues[own[0].peer, up]
    if others[0] != Message(own[0].sender, True, rank):
        return None
    others.popleft()
    return own.popleft()
