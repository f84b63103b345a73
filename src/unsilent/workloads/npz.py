"""Reading ``.npz`` files of the user's own; arrays in them are never unpickled."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.errors import UsageError


def read_npz(path: str, expected: str, only: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays by name: all, or those of ``only`` that are there.

    ``expected`` says in one phrase what the file should hold. Raises ``UsageError`` when it cannot be read without
    unpickling.
    """
    try:
        # From memory: numpy leaves a file open when it turns out to be damaged.
        file = np.load(io.BytesIO(Path(path).expanduser().read_bytes()), allow_pickle=False)
        if isinstance(file, np.lib.npyio.NpzFile):
            with file:
                return {name: file[name] for name in file if only is None or name in only}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # a damaged header can raise anything
        raise UsageError(f"{path} is not a sound .npz file of plain arrays; expected a .npz with {expected}") from None
    raise UsageError(f"{path} holds one bare array; expected a .npz with {expected}")
