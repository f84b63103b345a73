"""What the documentation names of a guard or a monitor, ``guard.alarms`` and the like, exists."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from unsilent.guard import Guard
from unsilent.monitor import Monitor

DOCS = Path(__file__).parents[2] / "docs"
_NAME = re.compile(r"\b(guard|monitor)\.([a-z_]\w*)\b")
_CODE = re.compile(r"```python.*?```|`[^`\n]+`", re.DOTALL)
_FILE = re.compile(r"(?:py|md|toml|npz|jsonl|pt)$")


def named():
    """Kind, attribute, and a page that names it; not names of files and packages (``unsilent.monitor``, ``unsilent.guard``)."""
    for page in DOCS.rglob("*.md"):
        for code in _CODE.findall(page.read_text(encoding="utf-8")):
            for match in _NAME.finditer(code):
                of_callback = match.groups() == ("guard", "guard")  # a GuardCallback, which has it
                if code[match.start() - 1] not in "./" and not _FILE.match(match[2]) and not of_callback:
                    yield match[1], match[2], page.relative_to(DOCS)


def test_attributes_of_a_guard_and_a_monitor_exist():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with contextlib.closing(Guard(model, optimizer)) as guard, contextlib.closing(Monitor(model, optimizer)) as monitor:
        there = {"guard": guard, "monitor": monitor}
        found = list(named())
        assert {kind for kind, _, _ in found} == set(there)
        missing = [f"{page}: {kind}.{name}" for kind, name, page in found if not hasattr(there[kind], name)]
        assert not missing
