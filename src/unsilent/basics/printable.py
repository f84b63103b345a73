"""Text from outside (names in models and files, error messages) made safe for files, terminals and pages.

The names of a model's modules and tensors are escaped on input (`unsilent.sites.modules`), so that addresses, stores,
exports and reports all have the same text. Reports escape the text of a store again, because stores are not trusted.
"""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def escape_unprintable(text: object) -> str:
    r"""The text in one line, with control, format and lone surrogate characters escaped.

    >>> escape_unprintable("a" + chr(27) + "[31m")
    'a\\x1b[31m'
    """
    result = str(text)
    return result if result.isprintable() else "".join(_escape(c) for c in result)


def _escape(c: str) -> str:
    if unicodedata.category(c) in _HIDDEN:
        return c.encode("ascii", "backslashreplace").decode() if ord(c) > 127 else f"\\x{ord(c):02x}"
    return c


def short_repr(value: object, most: int = 40) -> str:
    """The value as one short line of ASCII."""
    text = ascii(value)
    return text if len(text) <= most else text[: most - 3] + "..."
