"""Which files and which code a stored campaign may use when it is run again: those alone that the user names once more.

A store is a file from anywhere, and names what it likes: a script, a device, somebody's private file.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from unsilent.campaigns.spec import Spec
from unsilent.errors import UsageError
from unsilent.printable import clean

S = TypeVar("S", bound=Spec)


def named_again(
    spec: S,
    given: Mapping[str, str | None],
    builtin: Mapping[str, Collection[str]],
    options: Collection[tuple[str, str]] = (),
) -> S:
    """The spec with what the user names in place of what the store names.

    Args:
        given: option (``workload``, ``data``, ``weights``, ``accelerator``) -> what the user named, None where nothing.
        builtin: option -> names that are part of this package, which need not be named again.
        options: of the workload, as the user names them; those of a built-in workload need not be named.

    Raises ``UsageError`` with the options to add, or for one that the campaign did not have.
    """
    stored = {key: getattr(spec, key, None) for key in given}
    surplus = [f"--{key}" for key, value in given.items() if value is not None and stored[key] is None]
    if surplus:
        raise UsageError(f"the trial was run without {' and '.join(surplus)}; leave it out")
    missing = [
        f"--{key} {shlex.quote(clean(value))}"
        for key, value in stored.items()
        if value is not None and given[key] is None and value not in builtin.get(key, ())
    ]
    if spec.workload not in builtin.get("workload", ()):
        named = {key for key, _ in options}
        pairs = [clean(f"{key}={value}") for key, value in spec.options if key not in named]
        missing += [f"--with {shlex.quote(pair)}" for pair in pairs]
    if missing:
        raise UsageError(f"a store runs no code and opens no file by itself; to run it again add {' '.join(missing)}")
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes["options"] = tuple(sorted({**dict(spec.options), **dict(options)}.items()))
    return replace(cast(Any, spec), **changes)  # type: ignore[no-any-return]
