"""Connections between the processes of a run: each has one to process 0, and lines of JSON go over it."""

import json
import os
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from kairostep.ranks import rank, sum_over_ranks, world_size
from kairostep.training.run_errors import RunError

SECONDS_TO_CONNECT = 30.0
SECONDS_TO_SEND = 1.0  # messages are small: a connection that takes none for so long is of no use
LONGEST_LINE = 10_000  # bytes


@dataclass
class Link:
    """A connection to one other process.

    Args:
        socket: The connected socket.
        rank: Which process it leads to, None until that has said so.
        name: Process id and machine of that process, for messages.
    """

    socket: socket.socket
    rank: int | None = None
    name: str = ""
    heard: float = field(default_factory=time.monotonic)  # when the last message came
    busy: str | None = None  # the work during which that process may be silent for long
    busy_seconds: float = 0.0
    step_seconds: float = 0.0  # that it has been at its present training step
    acknowledged: bool = False  # whether it has read the last words of this process
    received: bytes = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it if the other process cannot take it: its silence or its end is noticed."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, None at the end of the connection. Call it when there is input."""
        try:
            arrived = self.socket.recv(65536)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not arrived:
            return None
        self.heard = time.monotonic()
        *lines, self.received = (self.received + arrived).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None  # not one of ours
        whole = all(isinstance(message, dict) for message in messages) and len(self.received) < LONGEST_LINE
        return messages if whole else None


class Links:
    """The connections of this process: of process 0 to all others, of the others to process 0.

    Args:
        token: A number that all processes of the run know, and no stranger.
        listener: Where the others connect, in process 0.
        link: The connection to process 0, in the others.
    """

    def __init__(self, token: int, listener: socket.socket | None, link: Link | None) -> None:
        self.token, self.listener = token, listener
        self.known = [link] if link else []
        self.absent = set() if link else set(range(1, world_size()))  # have not connected yet
        self.awake, self.waker = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        for end in (self.awake, self.waker):
            end.setblocking(False)
        for source in (self.awake, *([listener] if listener else ())):
            self.selector.register(source, selectors.EVENT_READ)
        if link is not None:
            self.selector.register(link.socket, selectors.EVENT_READ, link)

    def wait(self, seconds: float) -> tuple[list[tuple[Link, dict[str, Any] | None]], bytes]:
        """Wait for messages. Return them, None for the end of a link, and the signals that came (0: `wake`)."""
        messages: list[tuple[Link, dict[str, Any] | None]] = []
        signals = b""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.awake:
                signals += self.awake.recv(4096)
            elif key.data is None:
                self._accept()
            else:
                messages += self._read(key.data)
        return messages, signals

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to all."""
        for link in self.known:
            link.send(message)

    def wake(self) -> None:
        """Let `wait` of another thread return now."""
        with suppress(BlockingIOError):
            self.waker.send(b"\0")

    def forget(self, link: Link) -> None:
        """Expect no more from a process: it has said that it ends."""
        if link in self.known:
            self.known.remove(link)

    def close(self) -> None:
        """Close all connections."""
        for key in tuple(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.waker.close()
        self.selector.close()

    def _accept(self) -> None:
        assert self.listener is not None
        with suppress(OSError):
            connected, _ = self.listener.accept()
            connected.settimeout(SECONDS_TO_SEND)
            self.selector.register(connected, selectors.EVENT_READ, Link(connected))

    def _read(self, link: Link) -> list[tuple[Link, dict[str, Any] | None]]:
        messages = link.receive()
        if messages and link.rank is None:
            messages = self._introduce(link, *messages)
        if messages is not None:
            return [(link, message) for message in messages]
        self.selector.unregister(link.socket)
        link.socket.close()
        expected = link in self.known
        self.forget(link)
        return [(link, None)] if expected else []

    def _introduce(self, link: Link, first: dict[str, Any], *others: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return what follows the first message, which must show the token; None if a stranger sent it."""
        if first.get("token") != self.token or first.get("rank") not in self.absent:
            return None
        link.rank, link.name = first["rank"], str(first["name"])
        self.absent.remove(first["rank"])
        self.known.append(link)
        link.send({"name": own_name()})
        return list(others)


def own_name() -> str:
    """Return process id and machine, as messages show them."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def meet(device: torch.device) -> Links:
    """Connect every process with process 0. All processes call it at once: it has one sum over them."""
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size())
    listener = _listen(on_one_machine) if rank() == 0 else None
    own = [listener.getsockname()[1], secrets.randbits(48)] if listener else [0, 0]
    port, token = (int(number) for number in sum_over_ranks(torch.tensor(own, device=device)).tolist())
    if listener is not None:
        return Links(token, listener, None)
    host = "127.0.0.1" if on_one_machine else os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        connected = socket.create_connection((host, port), SECONDS_TO_CONNECT)
    except OSError as error:
        raise RunError(
            f"processes must reach each other, but process {rank()} cannot reach process 0 at {host}:{port}: {error}; "
            "let MASTER_ADDR name its machine and open its ports, or pass --rank_timeout=0 to train without a watch"
        ) from error
    connected.settimeout(SECONDS_TO_SEND)
    link = Link(connected, 0)
    link.send({"token": token, "rank": rank(), "name": own_name()})
    return Links(token, None, link)


def _listen(on_one_machine: bool) -> socket.socket:
    if on_one_machine:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
