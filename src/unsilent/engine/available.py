"""How much memory may be used for golden values when nobody said: a quarter of what is free."""

from __future__ import annotations

import torch

from unsilent.basics.free_memory import available_memory_bytes

UNKNOWN = 1 << 30
"""Bytes to be had where nothing can be found out."""
SHARE = 4


def default_budget(device: torch.device | str) -> int:
    """Bytes for golden values on ``device``: a quarter of the free memory, 1 GiB where that is not known."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0]) // SHARE
    if device.type != "cpu":
        return UNKNOWN
    free = available_memory_bytes()
    return UNKNOWN if free is None else free // SHARE
