"""A folder with the user's loops, and which line is which."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

LOOPS = Path(__file__).with_name("user_loops.py")


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``user_loops.py`` in the current folder, beside a folder of data; nothing of our environment decides."""
    shutil.copy(LOOPS, tmp_path)
    (tmp_path / "data").mkdir()
    for i in range(5):
        (tmp_path / "data" / f"{i}.txt").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return "user_loops.py"


@pytest.fixture
def line() -> Callable[[str], str]:
    """``file:line`` of the line that is marked ``# HERE word``."""
    text = LOOPS.read_text().splitlines()
    return lambda word: f"user_loops.py:{next(i for i, t in enumerate(text, 1) if t.endswith(f'# HERE {word}'))}"
