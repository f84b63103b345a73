"""Reading of untrusted YAML."""

from __future__ import annotations

from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import short_repr

MOST_EVENTS = 20_000
"""Most values and brackets in a file."""


def load_yaml(content: bytes, name: str, deepest: int) -> Any:
    """The value of a YAML document; refuses aliases, Python tags, great length and nesting beyond ``deepest``.

    Raises ``UsageError``; ``name`` is the name of the document in the message.
    """
    try:
        import yaml
    except ImportError:
        raise UsageError("settings in YAML need an optional package; install it with: pip install pyyaml") from None
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(content, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > deepest or number > MOST_EVENTS:
                problem = "an alias, or more levels or values than settings have"
                raise UsageError(f"{name} has {problem}; expected one line for each setting")
        return yaml.safe_load(content)
    except UsageError:
        raise
    except Exception as error:  # a damaged scalar can raise anything
        reason = short_repr(" ".join(str(error).split()), 100)
        raise UsageError(
            f"{name} cannot be read as YAML ({reason}); expected a line for each setting, like injection_type: count"
        ) from None
