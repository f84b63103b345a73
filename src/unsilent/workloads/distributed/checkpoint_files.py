"""The file of a training's snapshot: its tensors have the names ``model/fc.weight`` and ``optimizer/fc.weight/exp_avg``.

One layout whatever the strategy, so that the same fault can be written into the checkpoint of each. A snapshot lists its
optimizers; in the file each has a key of its own, from which the tools for checkpoints see what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

OPTIMIZER = "optimizer"


def save_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write the file with ``torch.save``; it can be read with ``weights_only=True``."""
    parts = {key: value for key, value in snapshot.items() if key not in ("optimizers", "schedulers")}
    for number, optimizer in enumerate(snapshot["optimizers"]):
        parts[OPTIMIZER if number == 0 else f"{OPTIMIZER} {number + 1}"] = optimizer
    torch.save({**parts, "scheduler": snapshot["schedulers"]}, path)


def load_snapshot(path: Path) -> dict[str, Any]:
    """The snapshot of a file; raises whatever reading it raises, for it may be damaged."""
    parts = dict(torch.load(path, weights_only=True))
    optimizers = [parts.pop(key) for key in list(parts) if key.partition(" ")[0] == OPTIMIZER]
    schedulers = parts.pop("scheduler", [])
    return {**parts, "optimizers": optimizers, "schedulers": schedulers}
