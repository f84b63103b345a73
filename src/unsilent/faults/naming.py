"""Names of sites as texts, and what they say: kind, layer, short label.

    param:fc.weight                          a parameter or buffer
    op:layer1.0.conv1#convolution.0/fwd/out  an operation of a module, its phase and the operand that is struck
    input:input_ids                          a tensor of the batch
    kv:3/key                                 an entry of the key/value cache

All but ``param`` are *transient*: they live in one evaluation of one batch.
"""

from __future__ import annotations

from typing import NamedTuple

from unsilent.errors import UsageError

KINDS = ("param", "op", "input", "kv")
PHASES = ("fwd",)
OPERANDS = ("out", "first", "second")
CACHED = ("key", "value")
ROOT = "(root)"
"""The model itself, outside of all its children."""


class SiteName(NamedTuple):
    """A site taken apart; ``phase`` is empty but for operations, ``operand`` but for operations and cache entries."""

    kind: str
    name: str
    phase: str = ""
    operand: str = ""

    @property
    def layer(self) -> str:
        """What it belongs to: the module of a parameter or operation, an input, a layer of the cache."""
        if self.kind == "param":
            return self.name.rpartition(".")[0] or ROOT
        return self.name.rpartition("#")[0] if self.kind == "op" else f"{self.kind}:{self.name}"

    @property
    def label(self) -> str:
        """A short name that tells it from all others of a campaign."""
        if self.kind == "op":
            return self.name if self.operand == "out" else f"{self.name}/{self.phase}/{self.operand}"
        if self.kind == "kv":
            return f"kv:{self.name}/{self.operand}"
        return self.name if self.kind == "param" else f"input:{self.name}"

    @property
    def text(self) -> str:
        """The canonical text; ``parse_site(site.text) == site``."""
        return f"{self.kind}:" + "/".join(part for part in self[1:] if part)


def kind_of(text: str) -> str:
    """The kind an address or site names; ``param`` where it names none."""
    kind, colon, _ = text.strip().partition(":")
    return kind if colon and kind in KINDS else "param"


def is_transient(text: str) -> bool:
    """Whether an address or site means values of one evaluation rather than memory that stays."""
    return kind_of(text) != "param"


def parse_site(text: str) -> SiteName:
    """Take the canonical text of a site apart; raises ``UsageError`` where it is none."""
    kind = kind_of(text)
    name = text.removeprefix(f"{kind}:")
    if kind == "op":
        module, mark, rest = name.rpartition("#")
        operation, *suffix = rest.split("/")
        if mark and module and len(suffix) == 2 and suffix[0] in PHASES and suffix[1] in OPERANDS:
            return SiteName(kind, f"{module}#{operation}", *suffix)
        raise UsageError(f"cannot read site {text!r}; expected op:MODULE#OP.k/fwd/out (or first, second)")
    if kind == "kv":
        layer, _, entry = name.partition("/")
        if layer.isdecimal() and entry in CACHED:
            return SiteName(kind, layer, "", entry)
        raise UsageError(f"cannot read site {text!r}; expected kv:LAYER/key or kv:LAYER/value")
    return SiteName(kind, name)
