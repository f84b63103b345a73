"""Writes the flight recorder of this process to a file, with the members of its process groups.

Without the members, it is unknown whether a rank that entered no collective of a group should have entered one. torch does not
record them for gloo.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from unsilent.basics.plainfiles import replace_file


def write_dump(folder: str | Path) -> None:
    """Write the flight recorder of this rank to the file ``dump_RANK``.

    Call it in a thread while the job hangs.

    Args:
        folder: Folder for the file, which is created if it does not exist.
    """
    recorder: Any = torch._C._distributed_c10d
    content = pickle.loads(recorder._dump_fr_trace())  # noqa: S301 - of this process
    world = distributed.distributed_c10d._world
    groups = {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}
    content["pg_config"] = {name: {"name": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    path = Path(folder, f"dump_{distributed.get_rank()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, pickle.dumps(content, 2))
