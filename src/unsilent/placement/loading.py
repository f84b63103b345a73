"""Loads the description of a machine: a known one by name, one from a file, or this computer."""

from __future__ import annotations

import os
from dataclasses import replace

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.plainfiles import read_plain
from unsilent.placement.measure import fitted_system, load_sweep
from unsilent.placement.system import MOST_BYTES, PRESETS, System, checked_system, parse_system
from unsilent.placement.topology import parse_topology, this_machine


def load_system(which: str) -> System:
    """Load a machine by name or from a file, or detect this computer.

    Args:
        which: ``a100``, ``v100`` or ``h100-nvl``, with ``:N`` for N nodes; ``here`` for this machine; a ``.toml`` file;
            a ``.json`` file of ``unsilent placement measure``; or a ``.txt`` file with the output of ``nvidia-smi topo -m``.

    Raises:
        UsageError: There is no such machine, or its description is wrong.
    """
    if which == "here":
        return this_machine()
    if which.endswith(".toml"):
        return parse_system(read_plain(which, MOST_BYTES, f"the system {which!r}"), which)
    if which.endswith(".json"):
        return fitted_system(load_sweep(which), which)
    if which.endswith(".txt"):
        return parse_topology(read_plain(which, MOST_BYTES, f"the topology {which!r}").decode(errors="replace"), which)
    name, colon, nodes = which.partition(":")
    if name not in PRESETS:
        if os.sep in which or os.path.exists(which):
            raise UsageError(
                f"{which} does not end in .toml, .json or .txt; expected a description of a system in such a file"
            )
        raise unknown_name_error("system", which[:60], [*PRESETS, "here", "FILE.toml", "FILE.json", "FILE.txt"])
    if not colon:
        return PRESETS[name]
    if not nodes.isascii() or not nodes.isdigit() or not 1 <= len(nodes) <= 5 or int(nodes) < 1:
        raise UsageError(f"{which!r} asks for {nodes!r} nodes; expected a whole number of 1 or more, like {name}:4")
    outer, *inner = PRESETS[name].levels
    return checked_system(replace(PRESETS[name], name=which, levels=(replace(outer, count=int(nodes)), *inner)))
