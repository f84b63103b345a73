"""Facts about a GPU: identity, errors of its memory, errors in its driver's log. What cannot be read is left out."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

QUERIED = {
    "uuid": "uuid",
    "pci": "pci.bus_id",
    "serial": "serial",
    "driver": "driver_version",
    "ecc mode": "ecc.mode.current",
    "ecc corrected": "ecc.errors.corrected.volatile.total",
    "ecc uncorrected": "ecc.errors.uncorrected.volatile.total",
    "ecc corrected, all time": "ecc.errors.corrected.aggregate.total",
    "ecc uncorrected, all time": "ecc.errors.uncorrected.aggregate.total",
    "retired pages": "retired_pages.double_bit.count",
}
"""Names of facts, and of nvidia-smi."""
SECONDS = 10.0
MOST_XIDS = 10
XID = "NVRM: Xid ("


def gpu_facts(uuid: str) -> dict[str, str]:
    """Facts on a GPU by name; ``xid``: the last errors of its driver in the log of the kernel, where that may be read.

    Args:
        uuid: Identity as nvidia-smi has it: ``GPU-…``.
    """
    query = f"--query-gpu={','.join(QUERIED.values())}"
    line = _output(["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"]).strip()
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(QUERIED):
        return {"uuid": uuid}
    facts = {name: cell for name, cell in zip(QUERIED, cells, strict=True) if cell and not cell.startswith("[")}
    return facts | _xids(_output(["dmesg"]).splitlines(), facts.get("pci", ""))


def _xids(lines: Sequence[str], pci: str) -> dict[str, str]:
    """The last errors of a device; nvidia-smi writes its address as 00000000:3B:00.0, the kernel as 0000:3b:00."""
    place = pci.lower().rpartition(".")[0][-len("0000:3b:00") :]
    wanted = f"{XID}PCI:{place}".lower()
    messages = [line[line.lower().index(wanted) :].strip() for line in lines if place and wanted in line.lower()]
    return {"xid": "; ".join(messages[-MOST_XIDS:])} if messages else {}


def _output(command: Sequence[str]) -> str:
    """Output of a program; empty where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, errors="replace", check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
