"""Artificial nodes on one computer: network namespaces behind bridges, each with one link whose rate `tc` limits.

Processes of one node speak over its loopback; what leaves or enters a node passes its link, which they share, as they would
share a NIC. Racks are bridges of their own: what leaves or enters a rack passes its one uplink, which its nodes share and which
has half the rate of a node's link. Everything disappears with the processes that hold the namespaces. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time

CLONE_NEWNET = 0x40000000
UPLINK = 0.5
"""Rate of a rack's uplink as a share of that of a node's link."""


class SlowNetwork:
    """Racks of ``nodes`` nodes each, with the addresses 10.0.0.1, 10.0.0.2 … on their interface ``eth0``."""

    def __init__(self, nodes: int, racks: int = 1) -> None:
        self._racks, nodes = racks, nodes * racks
        self._holders = [subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for _ in range(nodes + 1)]
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while any(os.readlink(f"/proc/{holder.pid}/ns/net") == own for holder in self._holders):
            if time.monotonic() > deadline or any(holder.poll() is not None for holder in self._holders):
                self.close()
                raise SystemExit("network namespaces are not permitted here; run this benchmark as root")
            time.sleep(0.01)
        self._switch, self._nodes = self._holders[0].pid, [holder.pid for holder in self._holders[1:]]
        _inside(self._switch, "ip link add name core type bridge", "ip link set core up")
        for rack in range(racks):
            _inside(
                self._switch,
                f"ip link add name rack{rack} type bridge",
                f"ip link set rack{rack} up",
                f"ip link add name up{rack} type veth peer name down{rack}",
                f"ip link set up{rack} master rack{rack} up",
                f"ip link set down{rack} master core up",
            )
        for number, node in enumerate(self._nodes):
            port = f"port{number}"
            _inside(
                self._switch,
                f"ip link add name {port} type veth peer name eth0 netns {node}",
                f"ip link set {port} master rack{number * racks // nodes} up",
            )
            _inside(node, f"ip addr add 10.0.0.{number + 1}/24 dev eth0", "ip link set eth0 up", "ip link set lo up")

    def limit(self, megabits: float | None) -> None:
        """Limits every node's link to this rate in each direction, and every uplink to half of it; None: no limit."""
        for number, node in enumerate(self._nodes):
            _limit(node, "eth0", megabits)
            _limit(self._switch, f"port{number}", megabits)
        for rack in range(self._racks):
            for end in (f"up{rack}", f"down{rack}"):
                _limit(self._switch, end, None if megabits is None else UPLINK * megabits)

    def enter(self, node: int) -> None:
        """Moves this process (which must have one thread) into a node."""
        with open(f"/proc/{self._nodes[node]}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def close(self) -> None:
        """Ends the processes that hold the namespaces, and with them the network."""
        for holder in self._holders:
            holder.kill()
            holder.wait()


def _limit(pid: int, link: str, megabits: float | None) -> None:
    """The rate at which packets leave through one end of a link."""
    change = (
        f"replace dev {link} root tbf rate {megabits}mbit burst 20kb limit 20mb" if megabits else f"del dev {link} root"
    )
    _inside(pid, f"tc qdisc {change}", check=megabits is not None)


def _inside(pid: int, *commands: str, check: bool = True) -> None:
    for command in commands:
        words = ["nsenter", "-t", str(pid), "-n", *command.split()]
        subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL)
