"""Connects torchrun's ranks: each rank other than 0 connects to rank 0, and sends its versions and code there."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitproof.harness.capture.rank_fingerprint import describe_ranks, differences
from bitproof.harness.errors import BitproofError, CaseError, RankError
from bitproof.harness.execute.failures import Problem
from bitproof.harness.execute.requests import RankFingerprint
from bitproof.harness.powers.torchrun.connections import Connection
from bitproof.harness.powers.torchrun.messages import Farewell, Hello, Welcome, read_message
from bitproof.harness.powers.torchrun.peers import Peers
from bitproof.harness.powers.torchrun.seats import Seat, Whereabouts, assign_seats
from bitproof.harness.powers.torchrun.store import Store
from bitproof.harness.processes import framing

WORD_SECONDS = 4.0
"""Seconds of silence before rank 0 prints which ranks are missing."""
_CHANGED_SECONDS = 1.0
"""Seconds before rank 0 prints the list again if more ranks have connected."""
_LAST_SECONDS = 8.0
"""Seconds for which a rank that has to end still tries to connect to rank 0. torchrun kills the rank after 30 s."""
_HOST_MARGIN = 15.0
"""Seconds after the deadline in which a host may still report its versions and code."""

AskMadeOf = Callable[[Callable[[], bool]], RankFingerprint | None]
"""Returns this rank's versions, code and GPUs from its host; None as soon as its argument returns True."""


class Rendezvous:
    """Connects the ranks: rank 0 with all others, and each of the others with rank 0, within `timeout` seconds."""

    def __init__(self, peers: Peers, timeout: float, ask_made_of: AskMadeOf) -> None:
        self._peers = peers
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._ask_fingerprint = ask_made_of
        self._store: Store | None = None  # rank 0 serves it until the end, since its ranks meet there
        self._printed_at, self._printed = time.monotonic(), ""

    def wait_for_ranks(self, own: Hello) -> list[Seat]:
        """Wait for all ranks, and compare versions and code. Only on rank 0. Returns each rank's local rank and GPU.

        Raises RankError, which names missing ranks, or CaseError if ranks have other versions or other code.
        """
        deadline = self._deadline
        # A new secret for each attempt, so that ranks of an earlier one are not taken for this run's.
        self._peers.token = secrets.token_hex(16)
        arrived: dict[int, Hello] = {0: own}
        if self._peers.world_size > 1:
            port = self._peers.links.listen(os.environ["MASTER_ADDR"])
            # A name may resolve on some machines only, so ranks try both.
            addresses = [os.environ["MASTER_ADDR"], socket.gethostname()]
            word = json.dumps({"addresses": addresses, "port": port, "token": self._peers.token})
            self._store = store = Store(True, deadline, self._peers.launcher)
            # The word that the store had when it was last read.
            there: str | None = None
            # torchrun's store keeps the message of an earlier attempt. Replace it, unless the rank 0 that left it
            # still answers.
            while (there := store.put(word, instead_of=there)) != word:
                if there is None:
                    self._wait_for(store.where, deadline, arrived)
                else:
                    self._refuse_second(there)
        while len(arrived) < self._peers.world_size:
            for connection, said in self._peers.links.newcomers():
                self._admit(connection, said, arrived)
            if len(arrived) < self._peers.world_size:
                self._peers.listen()
                self._peers.refuse_lost("before all had come")
                self._print_missing(arrived)
                self._wait_for("", deadline, arrived)
        self._peers.meet_latecomer = lambda connection, said: self._admit(connection, said, arrived)
        # Hosts load torch while ranks still connect, so versions and code follow in a message of their own.
        self._peers.fingerprint[0] = self._ask_fingerprint(self._peers.has_lost) or RankFingerprint(facts={})
        while len(self._peers.fingerprint) < self._peers.world_size:
            self._peers.listen()
            self._peers.refuse_lost("before it had said what it is made of")
            self._wait_for("not all said what they are made of", deadline + _HOST_MARGIN, self._peers.fingerprint)
        fingerprint = [self._peers.fingerprint[rank] for rank in range(self._peers.world_size)]
        differences([each.facts for each in fingerprint], must_all_have=True).refuse()
        hellos = [arrived[rank] for rank in range(self._peers.world_size)]
        # All ranks of an agent log into the folder of the agent's first rank.
        folders: dict[tuple[str, str], Path] = {}
        for hello in hellos:
            folders.setdefault((hello.machine, hello.node), Path(hello.run_dir))
        seats = assign_seats(
            [
                Whereabouts(machine=hello.machine, node=hello.node, local_rank=hello.local_rank, gpus=each.gpus)
                for hello, each in zip(hellos, fingerprint, strict=True)
            ]
        )
        for rank, connection in self._peers.connections.items():
            own_dir = folders[hellos[rank].machine, hellos[rank].node]
            self._peers.links.send(connection, Welcome(run_dir=Path(own.run_dir), own_dir=own_dir, seat=seats[rank]))
        return seats

    def _admit(self, connection: Connection, said: dict[str, Any], arrived: dict[int, Hello]) -> None:
        # In constant time, so that the token cannot be guessed byte by byte.
        if not hmac.compare_digest(str(said.get("token")).encode(), self._peers.token.encode()):
            self._peers.links.disconnect(connection, "it is of another run")
            return
        try:
            hello = self._checked_hello(said, arrived)
        except CaseError as problem:
            self._peers.links.send(connection, Farewell(problem=Problem.of(problem, "rank 0")))
            self._peers.links.disconnect(connection, "it is none of us")
            if len(arrived) < self._peers.world_size:
                raise
            print(problem, file=sys.stderr, flush=True)  # the run has all its ranks and continues
            return
        self._peers.links.welcome(connection, f"rank {hello.rank}")
        self._peers.connections[hello.rank] = connection
        arrived[hello.rank] = hello

    def _checked_hello(self, said: dict[str, Any], arrived: Mapping[int, Hello]) -> Hello:
        try:
            hello: Hello = framing.read(json.dumps(said), Hello)
            is_of_size = 0 < hello.rank < self._peers.world_size == hello.world_size
            is_one_of_us = is_of_size and hello.rank not in self._peers.connections
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CaseError(
                f"rank {said.get('rank')} speaks otherwise than rank 0",
                expected="one release of bitproof on every rank",
                found=str(error),
                fix="bring all machines to one commit",
            ) from error
        if not is_one_of_us:
            there = f"; rank {hello.rank} came from {arrived[hello.rank].node}" if hello.rank in arrived else ""
            raise CaseError(
                "a rank came that cannot be one of this run",
                expected=f"each of {describe_ranks(range(1, self._peers.world_size))} once, "
                f"of {self._peers.world_size}",
                found=f"rank {hello.rank} of {hello.world_size}, on {hello.node}{there}",
                fix="give every process a RANK of its own, and all one WORLD_SIZE",
            )
        return hello

    def _refuse_second(self, word: str) -> None:
        """Raise CaseError if another process also runs as rank 0 and accepts a connection. Only on rank 0.

        `word` is the other process's message in torchrun's store. The message has the address of that process.
        """
        with suppress(ValueError, KeyError, TypeError, OSError):
            found = json.loads(word)
            connection = self._connect(found["addresses"], found["port"])
            # The other process lives and listens, so the two compete for one place.
            self._peers.links.disconnect(connection, "it is rank 0, too")
            raise CaseError(
                "this run has a rank 0 already",
                expected="each rank once",
                found=f"RANK=0 on {socket.gethostname()}, and on {found['addresses'][-1]}",
                fix="give every process a RANK of its own: every torchrun another --node-rank",
            )

    def connect_to_rank_0(self, hello: Hello) -> Welcome:
        """Connect to rank 0, and return the answer that it sends once all ranks have connected. Only on other ranks.

        Raises the error that rank 0 sends instead.
        """
        while True:
            connection = self._reach(hello, self._deadline)
            self._send_facts(connection)
            while connection.gone is None or connection.inbox:
                said = self._peers.links.take(connection)
                if said is None:  # rank 0 lives, and keeps the deadline for the others
                    self._wait_for("", float("inf"), None)
                    continue
                answer: Welcome | Farewell = read_message(said[0], Welcome, Farewell)
                if isinstance(answer, Farewell):
                    self._peers.has_outcome = True
                    raise (answer.problem or Problem.of(RuntimeError("it ended"), "rank 0")).error()
                return answer
            del self._peers.connections[0]  # another run's, or a rank 0 that restarted with all its ranks
            self._wait_for(f"rank 0 left: {connection.gone}", self._deadline, None)

    def connect_before_exit(self, hello: Hello) -> None:
        """For some seconds, try to connect to rank 0, to report why this rank ends early. Only on other ranks."""
        if 0 not in self._peers.connections:
            with suppress(BitproofError):
                self._reach(hello, time.monotonic() + _LAST_SECONDS)

    def _reach(self, hello: Hello, deadline: float) -> Connection:
        store = Store(False, deadline, self._peers.launcher)
        while True:
            word = store.get()
            if word is None:
                self._wait_for(store.where, deadline, None)
                continue
            try:
                found = json.loads(word)
                connection = self._connect(found["addresses"], found["port"])
                self._peers.token = str(found["token"])
            except (ValueError, KeyError, TypeError, OSError):  # perhaps the word of an older run
                self._wait_for("rank 0 does not listen where torchrun's store says", deadline, None)
                continue
            self._peers.links.send(connection, replace(hello, token=self._peers.token))
            self._peers.connections[0] = connection
            return connection

    def _send_facts(self, connection: Connection) -> None:
        try:
            fingerprint = self._ask_fingerprint(
                lambda: connection.gone is not None or self._peers.launcher.ended() is not None
            )
        except BitproofError as error:
            self._peers.links.send(connection, Farewell(problem=Problem.of(error, f"rank {self._peers.rank}")))
            raise
        if fingerprint is not None:
            self._peers.links.send(connection, fingerprint)

    def _connect(self, addresses: Sequence[str], port: int) -> Connection:
        problem: OSError = OSError("rank 0 gave no address")
        for address in dict.fromkeys(addresses):
            try:
                return self._peers.links.connect(str(address), int(port), "rank 0")
            except OSError as error:
                problem = error
        raise problem

    def _print_missing(self, arrived: Mapping[int, Hello]) -> None:
        # By machine, as a whole machine is often missing: "ranks 0-7 came from a; ranks 8-15 came from b".
        # This is the only sign of a rank that died before it connected.
        missing = [rank for rank in range(self._peers.world_size) if rank not in arrived]
        nodes: dict[str, list[int]] = {}
        for rank in sorted(arrived):
            nodes.setdefault(arrived[rank].node, []).append(rank)
        came = "; ".join(f"{describe_ranks(ranks)} came from {node}" for node, ranks in nodes.items())
        word = f"bitproof: waiting for {describe_ranks(missing)} of {self._peers.world_size}: {came}"
        silence = _CHANGED_SECONDS if self._printed else WORD_SECONDS
        if word != self._printed and time.monotonic() - self._printed_at > silence:
            self._printed_at, self._printed = time.monotonic(), word
            print(word, file=sys.stderr, flush=True)

    def _wait_for(self, what: str, deadline: float, arrived: Collection[int] | None) -> None:
        self._peers.links.wait(0.2)
        if (ended := self._peers.launcher.ended()) is not None:
            raise ended
        if time.monotonic() < deadline:
            return
        missing = [0] if arrived is None else [rank for rank in range(self._peers.world_size) if rank not in arrived]
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        came = None if arrived is None else describe_ranks(sorted(arrived))
        raise RankError(
            f"{describe_ranks(missing)} of {self._peers.world_size} did not come within {self._timeout:g} s",
            rank=missing[0] if len(missing) == 1 else None,
            expected=f"{self._peers.world_size} ranks that meet at {where}",
            found="; ".join(part for part in (came, what) if part) or "no rank",
            fix="start every rank, with one WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give a longer --timeout",
        )
