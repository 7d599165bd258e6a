"""Messages between pipeline stages: the groups that carry them, and whether ranks could wait for each other forever.

NCCL has no tags: in a group, messages from a rank to another arrive in the order in which they were sent. A send may
end only after its receive has begun, and a rank's messages in a group may run in sequence.

For example, under 1F1B two neighbours may both send to each other before they receive. In a single group, they might
wait for each other forever. So there are two groups: the first for messages to higher ranks, the second for messages to
lower ranks.

`refuse_waiting` simulates a schedule under these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged.actions import Action


class Message(NamedTuple):
    """A message, from the view of one of its two ranks.

    - `sender`: the action that sends it.
    - `is_sent`: True if this rank sends it, False if this rank receives it.
    - `peer`: the other rank.
    """

    sender: Action
    is_sent: bool
    peer: int


Queue = deque[Message]
Queues = dict[tuple[int, bool], Queue]
"""The messages of each rank in each direction, in the order in which the rank sends or receives them.

A key has a rank, and whether the messages go to higher ranks.
"""


def goes_up(sender: int, receiver: int) -> bool:
    """Return whether a message between these ranks uses the group for messages to higher ranks."""
    return sender < receiver


def refuse_waiting(actions: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Raise PassError if ranks with these actions could deadlock, or could receive messages in another order than sent.

    `actions` has each rank's actions in order. The rules for messages are at the top of this file.
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
                while (message := _take_next(queues, rank, up, ran)) is not None:
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
        # An action receives before it runs, and sends afterwards.
        yield Message(sender, False, sender.stage % ranks)
    to = action.stage + (1 if action.half == "forward" else -1)
    if ranks > 1 and 0 <= to < num_stages and action.part != "weights":
        yield Message(action, True, to % ranks)


def _read_by(action: Action, num_stages: int, ranks: int) -> Action | None:
    """Return the action in a neighbouring stage whose message `action` reads; None if it reads no message."""
    stage = action.stage + (-1 if action.half == "forward" else 1)
    # The weights of a divided backward read what its first part received.
    reads = ranks > 1 and 0 <= stage < num_stages and action.part != "weights"
    return action._replace(stage=stage) if reads else None


def _take_next(queues: Queues, rank: int, up: bool, ran: set[Action]) -> Message | None:
    """Receive a rank's next message in a group if it has arrived, and return it; otherwise return None.

    `up` chooses the group for messages to higher ranks. `ran` has the actions that have run.
    """
    own = queues[rank, up]
    if not own or own[0].is_sent or own[0].sender not in ran:
        return None
    # The message must also be the next on the sending rank: earlier sends in the group hold it up.
    others = queues[own[0].peer, up]
    if others[0] != Message(own[0].sender, True, rank):
        return None
    others.popleft()
    return own.popleft()
