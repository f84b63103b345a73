"""Memory that runs out: which exceptions say so, and giving back what is only kept for later."""

from __future__ import annotations

import gc

import torch

_TEXTS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that memory ran out, of a device or of the host; torch has a type of its own only for some."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def free_memory() -> None:
    """Give unreachable objects back, and what torch keeps of a device's memory for later."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
