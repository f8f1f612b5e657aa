"""Which keepers are there: each holds a connection to that of rank 0, whose end says that it is gone. Imports no torch.

A process that is lost is replaced by its keeper. Where that is lost, too, such as with its node, nobody comes in its
place, and torchrun does not tell the others of a node that is gone: they would wait for it as long as they may.
"""

from __future__ import annotations

import re
import secrets
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any

from smp.training.inprocess.connections import bound_connection

WHERE, GONE = "smp/inprocess/keepers", "smp/inprocess/gone"
"""Keys of the store: where keepers connect to, and a rank whose keeper is gone."""
_HELLO = re.compile(rb"(\d+) (\d+)\n")
_LONGEST = 100
"""Bytes of the message with which a keeper begins."""


class Presence:
    """Hears of keepers, on that of rank 0.

    Args:
        store: of the start; told when one is gone.
        patience: seconds without an answer of another machine after which its keeper counts as gone.
    """

    def __init__(self, store: Any, patience: float) -> None:
        self._store, self._patience = store, patience
        # Digits only: they travel among a worker's signs of life, which are letters.
        self._token = str(secrets.randbits(128))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        store.set(WHERE, f"{self._server.getsockname()[1]} {self._token}")
        threading.Thread(target=self._listen, name="keepers", daemon=True).start()

    def _listen(self) -> None:
        ranks: dict[socket.socket, str] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._server:
                        with suppress(OSError):  # it is gone already
                            one, _ = self._server.accept()
                            bound_connection(one, self._patience)
                            selector.register(one, selectors.EVENT_READ)
                        continue
                    one = key.fileobj  # type: ignore[assignment]
                    if (rank := self._heard(one)) is not None:
                        ranks[one] = rank
                        continue
                    selector.unregister(one)
                    one.close()
                    if one in ranks:
                        with suppress(RuntimeError):
                            self._store.set(GONE, ranks.pop(one))

    def _heard(self, one: socket.socket) -> str | None:
        """The rank that a keeper gives; None: it is gone, or a stranger."""
        try:
            hello = _HELLO.fullmatch(one.recv(_LONGEST))
        except OSError:
            return None
        if hello is None or not secrets.compare_digest(hello[1], self._token.encode()):
            return None
        return hello[2].decode()


def be_present(host: str, where: str, rank: int, patience: float) -> socket.socket | None:
    """Connect to the keeper of rank 0; the connection has to be held. None: it cannot be reached.

    Args:
        where: what the store has of it.
    """
    port, token = where.split()
    try:
        one = socket.create_connection((host, int(port)), timeout=10)
        one.sendall(f"{token} {rank}\n".encode())
    except OSError:
        return None
    bound_connection(one, patience)
    return one
