"""Jobs whose nodes are network namespaces of their own around a switch: a node's link can be cut. Needs root and
iproute2; the machine's own network is not touched."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.training.elastic_lab import Job

SUBNET = "10.214.0."
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
open(sys.argv[2], "w").write(f"{store.port}\\n")
time.sleep(1e6)
"""
"""The rendezvous, which is on no node."""


class CutJob(Job):
    """A job whose nodes are namespaces.

    Attributes:
        free: numbers of those that the next nodes get.
        space: of each node, the number of its namespace.
    """

    def __init__(self, folder: Path, flags: str, least: int, most: int) -> None:
        super().__init__(folder, f"{flags} --cpu-collectives gloo", least, most)
        self.name, self.spaces = f"smp-{secrets.token_hex(3)}", most
        self.free, self.space = list(range(most)), list[int]()
        self.switch = f"{self.name}-sw"
        self._store: subprocess.Popen[bytes] | None = None
        self._ip("netns", "add", self.switch)
        self._ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", self.switch, "addr", "add", f"{SUBNET}254/24", "dev", "br0")
        for device in ("br0", "lo"):
            self._ip("-n", self.switch, "link", "set", device, "up")
        for n in range(most):
            space, port = f"{self.name}-n{n}", f"port{n}"
            self._ip("netns", "add", space)
            self._ip("-n", self.switch, *f"link add {port} type veth peer name eth0 netns {space}".split())
            self._ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
            self._ip("-n", space, "addr", "add", f"{SUBNET}{n + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                self._ip("-n", space, "link", "set", device, "up")
        port = folder / "store"
        words = ["ip", "netns", "exec", self.switch, sys.executable, "-c", STORE, f"{SUBNET}254", str(port)]
        self._store = subprocess.Popen(words)
        while not port.exists() or not port.read_text().endswith("\n"):
            time.sleep(0.1)
        self.endpoint = f"{SUBNET}254:{int(port.read_text())}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def where(self, number: int) -> tuple[Sequence[str], Sequence[str], dict[str, str]]:
        n = self.free.pop(0)
        self.space.append(n)
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "CUT": f"{self.switch} port{n}"}
        return ["ip", "netns", "exec", f"{self.name}-n{n}"], ["--local-addr", f"{SUBNET}{n + 1}"], environment

    def cut_off(self) -> int:
        """The node whose program has cut its link, once one has."""
        self.until((self.folder / "was-cut").exists)
        n = int((self.folder / "was-cut").read_text().removeprefix("port"))
        (self.folder / "was-cut").unlink()
        return max(node for node, space in enumerate(self.space) if space == n)

    def mend(self, node: int) -> None:
        """The link of a node that has ended works again, and the next node gets it."""
        self._ip("-n", self.switch, "link", "set", f"port{self.space[node]}", "up")
        self.free.append(self.space[node])

    def close(self) -> None:
        super().close()
        if self._store is not None:
            self._store.kill()
            self._store.wait()
        for space in (self.switch, *(f"{self.name}-n{n}" for n in range(self.spaces))):
            subprocess.run(["ip", "netns", "del", space], check=False)


CUT = """
def cut():
    import subprocess
    switch, port = os.environ["CUT"].split()
    subprocess.run(["ip", "-n", switch, "link", "set", port, "down"], check=True)
    Path(f"was-cut.{port}").write_text(port)
    os.rename(f"was-cut.{port}", "was-cut")
"""
"""Lines of a program: this node's link is cut."""
