"""Files of copies in memory on nodes that do not train: spare ones, which are in no process group.

A node that trained until its run got smaller has files of the newest copy that nobody else may have. Its first process
serves them over HTTP while it waits, and says in torch's store where. Without the token that it leaves there nobody
gets a file; what is read is checked by its hash.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch.distributed as dist

_SECONDS = 60.0
"""Seconds for which a transfer may stand still."""


@dataclass(frozen=True)
class SpareNode:
    """Address of a spare node's files.

    Attributes:
        copies: sizes in bytes of the files of each copy, by name.
    """

    host: str
    port: int
    token: str
    copies: dict[str, dict[str, int]]

    def fetch(self, copy: str, file: str, to: Path) -> None:
        """Write one of the node's files to ``to``.

        Raises:
            OSError: it does not come, or not all of it.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_SECONDS)
        try:
            connection.request("GET", f"/{self.token}/{copy}/{file}")
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise OSError(f"{self.host}: {copy}/{file}: {answer.status}")
            with to.open("wb") as out:
                shutil.copyfileobj(answer, out, 1 << 20)
            if out_of := int(answer.headers["Content-Length"]) - to.stat().st_size:
                raise OSError(f"{self.host}: {copy}/{file}: {out_of} bytes have not come")
        except http.client.HTTPException as error:
            raise OSError(f"{self.host}: {copy}/{file}: {type(error).__name__}") from error
        finally:
            connection.close()


@contextmanager
def serving(root: Path, store: dist.Store, rank: int, towards: str) -> Iterator[None]:
    """Context in which the other nodes can fetch the files of the copies in ``root``.

    Args:
        rank: of the first process of this node.
        towards: a host that the others are reached by, as ``MASTER_ADDR``.
    """
    family, address = _own_address(towards)
    token = secrets.token_hex(16)
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    copies = {folder.name: {path.name: path.stat().st_size for path in folder.iterdir()} for folder in folders}

    class Handler(BaseHTTPRequestHandler):
        timeout = _SECONDS  # of a client that asks for nothing

        def do_GET(self) -> None:
            given, copy, file = (*self.path.strip("/").split("/"), "", "")[:3]
            # compare_digest takes equally long for any wrong token. Only listed names are served,
            # never a path.
            # Bytes: it takes no other characters than ASCII in text.
            if not secrets.compare_digest(given.encode(), token.encode()) or file not in copies.get(copy, ()):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            with (root / copy / file).open("rb") as data:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Length", str(os.fstat(data.fileno()).st_size))
                self.end_headers()
                shutil.copyfileobj(data, self.wfile, 1 << 20)

        # The base class would print a line for every request.
        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = family

    # Port 0: the system chooses a free one.
    with Server((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        node = SpareNode(address, server.server_address[1], token, copies)
        store.set(_key(rank), json.dumps(asdict(node)))
        try:
            yield
        finally:
            server.shutdown()


def spare_nodes(store: dist.Store, ranks: Sequence[int], timeout: timedelta) -> list[SpareNode]:
    """The spare nodes, once each has published itself; ``ranks`` are those of their first processes.

    Raises:
        RuntimeError: one says nothing.
    """
    if ranks:
        store.wait([_key(rank) for rank in ranks], timeout)
    return [SpareNode(**json.loads(store.get(_key(rank)))) for rank in ranks]


def _key(rank: int) -> str:
    return f"smp/spare/{rank}"


def _own_address(towards: str) -> tuple[socket.AddressFamily, str]:
    """This machine's address on the route to a host. No packet is sent: connecting a UDP socket only chooses the
    route."""
    family, _, _, _, there = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return family, str(probe.getsockname()[0])
