"""Messages between pipeline stages: the groups that carry them, and whether ranks could wait for each other forever.

NCCL has no tags: in a group, messages from a rank to another arrive in the order in which they were sent. A send may
end only after its receive has begun, and a rank's messages in a group may run in sequence.

So each direction and each half has a group of its own, four in all:

- Under 1F1B two neighbours may both send to each other before they receive. In a single group, they might wait for each
  other forever.
- In a V, a rank gets activations and gradients from the same neighbour. It reads them in its own order of actions,
  which is not the order in which the neighbour sent them.

`refuse_waiting` simulates a schedule under these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bitproof.harness.case import StageMap
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
Queues = dict[tuple[int, int], Queue]
"""The messages of each rank in each group, in the order in which the rank sends or receives them.

A key has a rank and the number of a group.
"""

NUM_GROUPS = 4


def group_of(sender: Action, stage_map: StageMap) -> int:
    """Return the number of the group that carries a message of the action `sender`."""
    is_up = stage_map.rank_of(sender.stage) < stage_map.rank_of(sender.receiver)
    return 2 * (sender.half == "backward") + is_up


def refuse_waiting(actions: Sequence[Sequence[Action]], stage_map: StageMap) -> None:
    """Raise PassError if ranks with these actions could deadlock, or could receive messages in another order than sent.

    `actions` has each rank's actions in order. The rules for messages are at the top of this file.
    """
    queues = _queues(actions, stage_map)
    waiting = [deque(own) for own in actions]
    ran, arrived = set[Action](), set[Action]()
    # Simulate until nothing changes: an action that is left then waits forever.
    has_changed = True
    while has_changed:
        has_changed = False
        for rank, own in enumerate(waiting):
            while own and _is_ready(own[0], stage_map, ran, arrived):
                ran.add(own.popleft())
                has_changed = True
            for group in range(NUM_GROUPS):
                while (message := _take_next(queues, rank, group, ran)) is not None:
                    arrived.add(message.sender)
                    has_changed = True
    if stuck := [str(own[0]) for own in waiting if own]:
        raise PassError(
            "ranks of the pipeline could wait for each other forever",
            expected="actions whose messages, in each direction, are received in the order in which they are sent",
            found=f"{len(stuck)} of {len(actions)} ranks wait before " + ", ".join(stuck[:2]),
            fix="choose another schedule",
        )


def _queues(actions: Sequence[Sequence[Action]], stage_map: StageMap) -> Queues:
    queues: Queues = {(rank, group): deque() for rank in range(len(actions)) for group in range(NUM_GROUPS)}
    for rank, own in enumerate(actions):
        for message in (x for action in own for x in _messages_of(action, stage_map)):
            queues[rank, group_of(message.sender, stage_map)].append(message)
    return queues


def _messages_of(action: Action, stage_map: StageMap) -> Iterator[Message]:
    if action.part == "weights":  # reads what its backward's first part received, and sends nothing
        return
    own, stages = stage_map.rank_of(action.stage), range(stage_map.num_stages)
    sender, receiver = action.sender, action.receiver
    # An action receives before it runs, and sends afterwards. Neighbouring stages on one rank send no messages.
    if sender.stage in stages and (peer := stage_map.rank_of(sender.stage)) != own:
        yield Message(sender, False, peer)
    if receiver in stages and (peer := stage_map.rank_of(receiver)) != own:
        yield Message(action, True, peer)


def _is_ready(action: Action, stage_map: StageMap, ran: set[Action], arrived: set[Action]) -> bool:
    """Return whether the value that `action` reads from a neighbouring stage is on its rank, if it reads one."""
    sender = action.sender
    if action.part == "weights" or sender.stage not in range(stage_map.num_stages):
        return True
    is_here = stage_map.rank_of(sender.stage) == stage_map.rank_of(action.stage)
    return sender in (ran if is_here else arrived)


def _take_next(queues: Queues, rank: int, group: int, ran: set[Action]) -> Message | None:
    """Receive a rank's next message in a group if it has arrived, and return it; otherwise return None.

    `ran` has the actions that have run.
    """
    own = queues[rank, group]
    if not own or own[0].is_sent or own[0].sender not in ran:
        return None
    # The message must also be the next on the sending rank: earlier sends in the group hold it up.
    others = queues[own[0].peer, group]
    if others[0] != Message(own[0].sender, True, rank):
        return None
    others.popleft()
    return own.popleft()
