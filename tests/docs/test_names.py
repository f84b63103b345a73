"""Every name of this package that the documentation writes exists, also in code that is not run.

Looked at are inline code and blocks of code: what begins with ``unsilent``, with one of our modules or classes, or with a
variable that stands for an object of one of our classes on all pages.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unsilent

ROOT = Path(__file__).parents[2]
SOURCE = Path(unsilent.__file__).parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
VARIABLES = {
    "guard": ("guard.guard:Guard",),
    "guarded": ("protection.protect:ProtectedModel",),
    "monitor": ("monitor.monitor:Monitor",),
    "store": ("campaigns.store:Store", "replicas.kind:ReplicaStore"),
    "workload": ("workloads.base:Workload", "workloads.trainings.loop:Training"),
}
"""Variables that stand for an object of one of some classes on all pages."""
FILES = ("csv", "h5", "html", "json", "jsonl", "md", "npz", "pt", "pt2", "py", "sqlite", "toml", "txt", "yaml")
_DOTTED = re.compile(r"(?<![\w./@-])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
_CODE = re.compile(r"^ *```(?:python|console)[^\n]*\n(.*?)^ *```$|(?<!`)`([^`\n]+)`(?!`)", re.MULTILINE | re.DOTALL)


def _modules() -> dict[str, str]:
    """The full name of each module by each ending of its name that no other has and that is no common word."""
    paths = [path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py")]
    full = [".".join(p.parts).removesuffix(".__init__") for p in paths]
    ends = [(".".join(name.split(".")[at:]), name) for name in full for at in range(name.count(".") + 1)]
    count = {end: sum(other == end for other, _ in ends) for end, _ in ends}
    return {end: name for end, name in ends if count[end] == 1 and re.search(r"[._]|^unsilent$", end)}


def _classes() -> dict[str, tuple[str]]:
    """``module:Class`` of each public class whose name no other has."""
    seen: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text("utf-8"), re.MULTILINE):
            seen.setdefault(name, []).append(f"{module}:{name}")
    return {name: (places[0],) for name, places in seen.items() if len(places) == 1}


MODULES, CLASSES = _modules(), _classes()
LOGGERS = {
    name
    for path in SOURCE.rglob("*.py")
    for name in re.findall(r'^LOGGER = "([\w.]+)"', path.read_text("utf-8"), re.MULTILINE)
}


def _object(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module if module.startswith("unsilent") else f"unsilent.{module}"), name)


def _has(owner: Any, name: str) -> bool:
    """Whether a module, a class or an object of this class has an attribute."""
    if hasattr(owner, name):
        return True
    if inspect.ismodule(owner):
        return f"{owner.__name__}.{name}" in MODULES.values()
    sources = [inspect.getsource(cls) for cls in inspect.getmro(owner) if cls.__module__.startswith("unsilent")]
    return any(re.search(rf"\bself\.{name}\b[^=\n]*=|^    {name}: ", source, re.MULTILINE) for source in sources)


def missing(dotted: str) -> bool:
    """Whether a dotted name begins with something of ours and then names what that does not have."""
    parts = dotted.split(".")
    if parts[-1] in FILES or dotted in LOGGERS:
        return False
    if places := VARIABLES.get(parts[0]) or CLASSES.get(parts[0], ()):
        return not any(_has(_object(place), parts[1]) for place in places)
    for end in range(len(parts), 0, -1):
        if module := MODULES.get(".".join(parts[:end])):
            try:
                owner: Any = importlib.import_module(module)
            except ModuleNotFoundError as error:  # of a framework that is not installed here
                return str(error.name).startswith("unsilent")
            for name in parts[end:]:
                if not (inspect.ismodule(owner) or inspect.isclass(owner)):
                    return False
                if not _has(owner, name):
                    return True
                owner = getattr(owner, name, None)
            return False
    return False


def code(text: str) -> Iterator[tuple[int, str]]:
    """Each piece of code of a page with its line."""
    for found in _CODE.finditer(text):
        yield text[: found.start()].count("\n") + 1, found[1] or found[2] or ""


def unknown_keywords(piece: str) -> Iterator[str]:
    """Keywords that calls of functions and classes of ours do not have: ``unsilent.pvf(w, trails=3)``."""
    for text in (piece.replace("…", "..."), *re.findall(r"unsilent\.\w+\(.*\)", piece.replace("…", "..."))):
        try:
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        except SyntaxError:
            continue
        for call in calls:
            name = ast.unparse(call.func)
            if not re.fullmatch(r"unsilent(\.\w+)+", name) or missing(name):
                continue
            module, _, attribute = name.rpartition(".")
            known = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in known):
                names = {p.name for p in known}
                yield from (f"{name}({k.arg}=)" for k in call.keywords if k.arg and k.arg not in names)
        return


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = [
        f"{page}:{line}: {name}"
        for line, piece in code(text)
        for name in [*(n for n in _DOTTED.findall(piece) if missing(n)), *unknown_keywords(piece)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("unsilent.decide", True),
        ("unsilent.guard.Guard", False),
        ("unsilent.monitor.Gard", True),
        ("unsilent.faults.codecs.CODECS", False),
        ("guard.alarms", False),
        ("guard.overhead", False),
        ("guard.spent", True),
        ("Placement.grid", False),
        ("Placement.gird", True),
        ("statistics.planning.sample_size", False),
        ("statistics.planning.sample_sise", True),
        ("torch.nothing", False),
        ("unsilent.toml", False),
    ],
)
def test_a_name_that_does_not_exist_is_found(name, lacking):
    assert missing(name) is lacking


def test_a_keyword_that_does_not_exist_is_found():
    assert [*unknown_keywords("unsilent.Workload(…, clean=…, labeled=True)")] == ["unsilent.Workload(labeled=)"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_system_is_named_where_readers_begin(page):
    """By the first word of its commands; what shows and lists things is no system."""
    from unsilent.cli.table import COMMANDS, load_command
    from unsilent.command import AFTER_ALARM, EXPLAIN, MEASURE, WATCH

    named = set(re.findall(r"`unsilent[ .](\w+)", (ROOT / page).read_text(encoding="utf-8")))
    groups = {name: load_command(name).group for name in COMMANDS}
    systems = {re.split(r"[ -]", name)[0] for name in groups if groups[name] in (MEASURE, WATCH, AFTER_ALARM, EXPLAIN)}
    systems = systems - {"profile"} | {"protect"}  # a profile is what protect needs
    assert systems <= named
