"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

import unsilent

SOURCE = Path(unsilent.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed
