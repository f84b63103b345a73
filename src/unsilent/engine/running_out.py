"""Handling of exhausted memory, and of processes that can no longer be used."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unsilent.basics.errors import ProcessUnusable, UnsilentError, kind_and_line

_TEXTS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception means that the memory of a device or of the host is exhausted.

    Torch has a special exception type only for some of these cases.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def release_cached_memory() -> None:
    """Free unreachable objects, and the device memory that torch has cached."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def unusable_if_raised(reason: str = "", known: bool = False) -> Iterator[None]:
    """Context in which an unexpected exception is raised as ``ProcessUnusable``.

    Args:
        reason: Reason why the previous trial raised.
        known: Whether it is certain that this trial made the process unusable.
    """
    try:
        yield
    except ProcessUnusable as error:
        known = error.caused_by_trial or (known and not out_of_memory(error.__cause__))
        raise ProcessUnusable(reason or str(error), known, error.while_preparing_shortcuts) from error
    except (UnsilentError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise ProcessUnusable(reason or kind_and_line(error), known and not out_of_memory(error)) from error
