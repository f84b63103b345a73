"""Components that other installed packages register as entry points, loaded when they are first needed.

A component is imported on first use. If it cannot be imported or has the wrong type for its group, a one-line error names its
package; before the first use no error is raised.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from unsilent.basics.errors import UsageError, kind_and_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
RULES, DETECTORS, JUDGES = "unsilent.rules", "unsilent.detectors", "unsilent.judges"
FORMATS, KINDS = "unsilent.formats", "unsilent.kinds"


def installed_parts(group: str, own_names: Container[str] = ()) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted, without the names in ``own_names``; imports none of them."""
    from importlib.metadata import entry_points

    parts = {entry.name: entry for entry in entry_points(group=group) if entry.name not in own_names}
    return dict(sorted(parts.items()))


def load_part(noun: str, entry: EntryPoint) -> Any:
    """Load the object of an entry point; raises ``UsageError`` with ``noun`` if it cannot be imported."""
    try:
        return entry.load()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the {noun} {entry.name} ({entry.value}) of {package_of(entry)} cannot be imported: {kind_and_line(error)}; "
            "mend or remove this package"
        ) from error


def wrong_part_error(entry: EntryPoint, actual: str, expected: str) -> UsageError:
    """The error for an entry point whose object has the wrong type for its group."""
    return UsageError(
        f"the entry point {entry.name} of {entry.group} in {package_of(entry)} is {actual} ({entry.value}); expected "
        f"{expected}: change the entry point"
    )


def package_of(entry: EntryPoint) -> str:
    """The name of the package that registered an entry point, for errors and lists."""
    try:
        name = entry.dist.name if entry.dist is not None else None
    except Exception:  # a package without its METADATA
        name = None
    return f"package {name or entry.module.partition('.')[0]}"


class WithInstalled(Mapping[str, T]):
    """Mapping from names to component classes: this package's own first, then those of other packages.

    Args:
        noun: Noun of a component, for errors.
        group: Group of entry points.
        own_parts: Components of this package, whose names other packages cannot use.
    """

    def __init__(self, noun: str, group: str, own_parts: Mapping[str, T]) -> None:
        self._noun, self._group, self._own_parts = noun, group, own_parts

    def __getitem__(self, name: str) -> T:
        if name in self._own_parts:
            return self._own_parts[name]
        entry = installed_parts(self._group, self._own_parts)[name]
        part = load_part(self._noun, entry)
        if not callable(part):
            raise wrong_part_error(entry, f"a {type(part).__name__}", f"a class or function that makes a {self._noun}")
        return part  # type: ignore[no-any-return]  # the type of its result is checked when it is called

    def __contains__(self, name: object) -> bool:
        return name in self._own_parts or name in installed_parts(self._group, self._own_parts)

    def __iter__(self) -> Iterator[str]:
        yield from self._own_parts
        yield from installed_parts(self._group, self._own_parts)

    def __len__(self) -> int:
        return len(self._own_parts) + len(installed_parts(self._group, self._own_parts))
