"""Confirmation by the user of the files and code that a stored campaign names, before it runs again.

A store may come from anyone, and may name anything: a script, a device, somebody's private file.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.campaigns.spec import S
from unsilent.faults.fault_texts import function_file


def with_confirmed_files(
    spec: S,
    confirmed: Mapping[str, str | None],
    builtin: Mapping[str, Collection[str]],
    options: Collection[tuple[str, str]] = (),
) -> S:
    """The spec with the files that the user confirmed in place of the files that the store names.

    Args:
        confirmed: Values given by the user, by option (``workload``, ``data``, ``weights``, ``accelerator``, ``fault``);
            ``None`` if not given. A ``fault`` is only checked if it is a function in a file.
        builtin: Names that are part of this package, by option. They need not be given again.
        options: Options of the workload as given by the user; those of a built-in workload need not be given.

    Raises ``UsageError`` with the options to add, or if an option was not part of the campaign.
    """
    confirmed = {"fault": None, **confirmed}  # a function is code, even if the caller knows it
    known = {
        entry.name for entry in fields(cast(Any, spec))
    }  # an option without a field is not a setting of the campaign
    stored = {key: getattr(spec, key) if key in known else None for key in confirmed}
    if not isinstance(stored["fault"], str) or function_file(stored["fault"]) is None:
        stored["fault"] = None
    surplus = [f"--{key}" for key, value in confirmed.items() if value is not None and stored[key] is None]
    surplus += ["--with"] if options and "options" not in known else []
    if surplus:
        raise UsageError(f"the stored trial did not use {' and '.join(surplus)}; leave out {' and '.join(surplus)}")
    missing = [
        f"--{key} {shlex.quote(escape_unprintable(value))}"
        for key, value in stored.items()
        if value is not None and confirmed[key] is None and value not in builtin.get(key, ())
    ]
    if spec.workload not in builtin.get("workload", ()):
        named = {key for key, _ in options}
        pairs = [escape_unprintable(f"{key}={value}") for key, value in spec.options if key not in named]
        missing += [f"--with {shlex.quote(pair)}" for pair in pairs]
    if missing:
        raise UsageError(
            f"code and files that a store names are used only if the command names them too; add {' '.join(missing)}"
        )
    changes: dict[str, Any] = {key: value for key, value in confirmed.items() if value is not None}
    if "options" in known:
        changes["options"] = tuple(sorted({**dict(spec.options), **dict(options)}.items()))
    return replace(cast(Any, spec), **changes)  # type: ignore[no-any-return]
