"""Names of sites as texts, and their parts: kind, layer, short label.

    param:fc.weight                               a parameter or buffer
    op:layer1.0.conv1#convolution.0/fwd/out       an operation of a module, its phase and the operand that is corrupted
    op:layer1.0.conv1#convolution.0/grad_wt/out   the gradient that it hands back for its second operand
    op:fc.weight#addcdiv.0/optim/out              an operation of the update of a parameter
    input:input_ids                               a tensor of the batch
    kv:3/key                                      an entry of the key/value cache
    saved:layer1.0.conv1#convolution.0/first      an operand that is kept from the forward to the backward pass
    optim:fc.weight/exp_avg                       state of the optimizer
    gradient:fc.weight                            the gradient of a parameter, before the update
    comm:allreduce.0/in                           the payload of a collective, before (in) or after it (out)
    file:model/fc.weight                          a tensor in a checkpoint file, by section and name

``grad_in`` computes the gradient of the first operand from the gradient of the output (its ``first``) and the operation's second
operand (its ``second``). ``grad_wt`` computes the gradient of the second operand from the operation's first operand and the
gradient of the output. Further outputs are ``out.1``, ``out.2`` …; in ``grad_wt`` they are the gradients of the third and later
operands.

All kinds except ``param``, ``optim`` and ``file`` are *transient*: they exist in one evaluation of one batch, or in one step.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from unsilent.basics.errors import UsageError

KINDS = ("param", "op", "input", "kv", "saved", "optim", "gradient", "comm", "file")
PHASES = ("fwd", "grad_in", "grad_wt", "optim")
OPERANDS = ("out", "first", "second", "third")
CACHED = ("key", "value")
SIDES = ("in", "out")
CAST = "_to_copy"
"""Operation that copies a tensor to another dtype. Autocast adds such operations to a module's call; the module's name alone
never selects them."""
ROOT = "(root)"
"""Name of the model itself, outside all its submodules."""


class SiteName(NamedTuple):
    """The parsed name of a site.

    ``phase`` is empty except for operations, ``operand`` except for operations and cache entries.
    """

    kind: str
    name: str
    phase: str = ""
    operand: str = ""

    @property
    def layer(self) -> str:
        """The layer that the site belongs to: the module of a parameter or operation, an input, a layer of the cache."""
        if self.kind == "param":
            return self.name.rpartition(".")[0] or ROOT
        return self.name.partition("#")[0] if self.kind in ("op", "saved") else f"{self.kind}:{self.name}"

    @property
    def label(self) -> str:
        """A short name that is unique within a campaign."""
        if self.kind == "op":
            return self.name if self.operand == "out" else f"{self.name}/{self.phase}/{self.operand}"
        return self.name if self.kind == "param" else self.text

    @property
    def text(self) -> str:
        """The canonical text; ``parse_site(site.text) == site``."""
        return f"{self.kind}:" + "/".join(part for part in self[1:] if part)


def is_cast(operation: str) -> bool:
    """Whether ``MODULE#OP.k`` copies a tensor to another dtype."""
    return operation.rpartition("#")[2].rpartition(".")[0] == CAST


def kind_of(text: str) -> str:
    """The kind in an address or site; ``param`` if the text has none."""
    kind, colon, _ = text.strip().partition(":")
    return kind if colon and kind in KINDS else "param"


def is_transient(text: str) -> bool:
    """Whether an address or site names a value of one evaluation, not persistent memory."""
    return kind_of(text) not in ("param", "optim", "file")


def parse_site(text: str) -> SiteName:
    """Parse the canonical text of a site; raises ``UsageError`` for any other text."""
    kind = kind_of(text)
    name = text.removeprefix(f"{kind}:")
    match = _FORMS[kind].fullmatch(name) if kind in _FORMS else None
    if match:
        result = match.groupdict()
        return SiteName(kind, result["name"], result.get("phase", ""), result.get("operand", ""))
    if kind in _FORMS:
        raise UsageError(f"cannot read site {text!r}; expected {_EXAMPLES[kind]}")
    return SiteName(kind, name)


def site_in_file(site: str) -> str:
    """The checkpoint site of a tensor in memory: ``file:model/fc.weight`` for ``param:fc.weight``.

    Raises ``UsageError`` for a value that no checkpoint holds.
    """
    kind, name = kind_of(site), site.partition(":")[2]
    if kind == "file":
        return site
    if kind not in _SECTIONS:
        raise UsageError(
            f"{site!r} is in no checkpoint file; expected a site like param:fc.weight or optim:fc.weight/exp_avg"
        )
    return f"file:{_SECTIONS[kind]}/{name or site}"


def site_in_memory(site: str) -> str:
    """The site in memory of a tensor in a checkpoint: ``param:fc.weight`` for ``file:model/fc.weight``.

    Raises ``UsageError`` for a section that is neither the model nor its optimizer.
    """
    if kind_of(site) != "file":
        return site
    section, _, name = site.removeprefix("file:").partition("/")
    kind = next((kind for kind, known in _SECTIONS.items() if known == section), None)
    if kind is None or not name:
        raise UsageError(f"{site!r} is in no model or optimizer; expected a site like file:model/fc.weight")
    return f"{kind}:{name}"


_SECTIONS = {"param": "model", "optim": "optimizer"}
_OPERAND = rf"(?P<operand>{'|'.join(OPERANDS)}|out\.[1-9]\d?)"
_FORMS = {
    "op": re.compile(rf"(?P<name>[^#/]+(?:#[^#/]+)?)/(?P<phase>{'|'.join(PHASES)})/{_OPERAND}"),
    "kv": re.compile(rf"(?P<name>\d+)/(?P<operand>{'|'.join(CACHED)})"),
    "saved": re.compile(rf"(?P<name>[^#/]+(?:#[^#/]+)?)/{_OPERAND}"),
    "optim": re.compile(r"(?P<name>[^/]+)/(?P<operand>[^/]+)"),
    "comm": re.compile(rf"(?P<name>[^/]+\.\d+)/(?P<operand>{'|'.join(SIDES)})"),
}
_EXAMPLES = {
    "op": "op:MODULE#OP.k/fwd/out (or grad_in, grad_wt, optim; first, second, third, out.1)",
    "kv": "kv:LAYER/key or kv:LAYER/value",
    "saved": "saved:MODULE#OP.k/first (or second, third, out)",
    "optim": "optim:PARAMETER/STATE, like optim:fc.weight/exp_avg",
    "comm": "comm:OP.k/in or comm:OP.k/out, like comm:allreduce.0/in",
}
