"""Artificial nodes on one computer: network namespaces behind one bridge, each with one link whose rate `tc` limits.

Processes of one node speak over its loopback; what leaves or enters a node passes its link, which they share, as they would
share a NIC. Everything disappears with the processes that hold the namespaces. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time

CLONE_NEWNET = 0x40000000


class SlowNetwork:
    """``nodes`` nodes with the addresses 10.0.0.1, 10.0.0.2 … on their interface ``eth0``."""

    def __init__(self, nodes: int) -> None:
        self._holders = [subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for _ in range(nodes + 1)]
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while any(os.readlink(f"/proc/{holder.pid}/ns/net") == own for holder in self._holders):
            if time.monotonic() > deadline or any(holder.poll() is not None for holder in self._holders):
                self.close()
                raise SystemExit("network namespaces are not permitted here; run this benchmark as root")
            time.sleep(0.01)
        self._switch, self._nodes = self._holders[0].pid, [holder.pid for holder in self._holders[1:]]
        _inside(self._switch, "ip link add name br0 type bridge", "ip link set br0 up")
        for number, node in enumerate(self._nodes):
            port = f"port{number}"
            _inside(
                self._switch,
                f"ip link add name {port} type veth peer name eth0 netns {node}",
                f"ip link set {port} master br0 up",
            )
            _inside(node, f"ip addr add 10.0.0.{number + 1}/24 dev eth0", "ip link set eth0 up", "ip link set lo up")

    def limit(self, megabits: float | None) -> None:
        """Limits every link to this rate in each direction; None: no limit."""
        if megabits is None:
            change = "tc qdisc del dev {} root"
        else:
            change = f"tc qdisc replace dev {{}} root tbf rate {megabits}mbit burst 20kb limit 20mb"
        for number, node in enumerate(self._nodes):
            _inside(node, change.format("eth0"), check=megabits is not None)
            _inside(self._switch, change.format(f"port{number}"), check=megabits is not None)

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


def _inside(pid: int, *commands: str, check: bool = True) -> None:
    for command in commands:
        words = ["nsenter", "-t", str(pid), "-n", *command.split()]
        subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL)
