"""What is imported on first use."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from unsilent.basics.lazy_module import LazyFunction, lazy_names, load_named


@dataclass
class Scale:
    factor: int = 2


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = "lazily_imported"
    (tmp_path / f"{name}.py").write_text("def scaled(number, by):\n    return number * getattr(by, 'factor', by)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_function_is_imported_when_it_is_called(module):
    scaled = LazyFunction(f"{module}:scaled")
    assert (scaled.__module__, module in sys.modules) == (module, False)
    assert scaled(3, by=4) == 12
    assert module in sys.modules


def test_keyword_arguments_are_made_into_options(module):
    scaled = LazyFunction(f"{module}:scaled", Scale)
    assert (scaled(3), scaled(3, factor=5)) == (6, 15)
    with pytest.raises(TypeError, match="unexpected keyword argument 'by'"):
        scaled(3, by=4)


def test_names_of_a_package_are_imported_on_first_use(module):
    get, names = lazy_names("package", {module: ["scaled"]}, ["present"])
    assert names == ["present", "scaled"]
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'scale'; did you mean 'scaled'"):
        get("scale")
    assert module not in sys.modules
    assert get("scaled") is load_named(f"{module}:scaled")
