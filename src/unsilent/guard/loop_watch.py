"""Tracks the variables of a guarded loop: values kept with the states, and changes that cannot be undone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.guard.loop_record import Content, Length, LoopRecord, Opaque, Path, name_of, record_loop
from unsilent.guard.loop_state import LoopVariables, Variables, find_objects
from unsilent.guard.loop_tensors import LoopTensors, versions_of
from unsilent.recovery.ring import SnapshotRing
from unsilent.report.text import count_text

_OF_MODULES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OWN = f"{__name__.partition('.')[0]}."


def hooks_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, tuple[Any, ...]]:
    """The keys of all hooks by location, without hooks of this package; torch uses each key only once."""
    result = {}
    for kind, owner, hooks in _tables(model, optimizers):
        if hooks and (keys := tuple(key for key, hook in hooks.items() if not _is_own(hook))):
            result[f"{kind.strip('_')} of {owner}"] = keys
    return result


def hooks_changed(then: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Locations where the hooks differ between two moments."""
    return [place for place in dict.fromkeys((*then, *now)) if then.get(place) != now.get(place)]


def _tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str, Mapping[Any, Any] | None]]:
    """Yield each kind of hooks with its owner's name and the hooks by key."""
    for name, module in model.named_modules():
        for kind in _OF_MODULES:
            yield kind, name or "the model", vars(module).get(kind)
    for name, parameter in model.named_parameters():
        for kind in _OF_PARAMETERS:
            yield kind, name, getattr(parameter, kind)
    owners = [(f"optimizer {number}", vars(optimizer)) for number, optimizer in enumerate(optimizers)]
    shared = [(f"every {kind.__name__}", vars(sys.modules[kind.__module__])) for kind in (nn.Module, Optimizer)]
    for owner, parts in (*owners, *shared):
        for kind, hooks in parts.items():
            if kind.endswith("_hooks") and isinstance(hooks, Mapping):
                yield kind, owner, hooks


def _is_own(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OWN)


MOST_NAMES = 5
"""Largest number of names in one sentence."""


class KeptVariables(NamedTuple):
    """Record of the variables when a state was kept.

    ``versions``: versions of tensors that are not part of the state. ``hooks``: hooks of the model and its optimizers.
    """

    owner: Any
    record: LoopRecord
    versions: Mapping[str, tuple[Tensor, int]]
    hooks: Mapping[str, tuple[Any, ...]]


class LoopWatch:
    """Records a loop's variables with each kept state, and compares later values with them.

    Args:
        model, optimizers, ring: Their tensors and objects are restored anyway.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], ring: SnapshotRing) -> None:
        self._ring, self._model, self._optimizers = ring, model, optimizers
        state = [*model.modules(), *model.parameters(), *model.buffers(), *optimizers]
        self._restored = [*state, *(table for o in optimizers for table in (o.state, o.param_groups))]
        self._tensors = LoopTensors(sum(t.nbytes for t in ring.live_tensors()))
        self._fetching: list[Any] = []

    def start(self, batches: object) -> None:
        """Begin a loop; objects that produce its batches change with each batch, and are ignored."""
        self._fetching = []

        def is_wanted(value: Any) -> bool:
            self._fetching.append(value)
            return False  # but its elements are searched

        find_objects({"batches": batches}, is_wanted)

    def keep(self, variables: LoopVariables) -> KeptVariables:
        """Keep a state, and return the record of the variables."""
        record = self._record(variables.taken_over, variables.reachable)
        self._ring.further_tensors = self._tensors.choose([t for _, t in record.tensors], self._ring.newest)
        versions = versions_of(record.tensors, self._ring.keep().live)
        return KeptVariables(variables.owner, record, versions, hooks_of(self._model, self._optimizers))

    def changed_since(self, then: KeptVariables, variables: LoopVariables) -> list[str]:
        """Names of everything that has changed, except tensors in the kept state."""
        changed = map(name_of, then.record.changed(self._now(then, variables)))
        return [*dict.fromkeys((*changed, *_written(then), *self.hooks_changed(then)))]

    def hooks_changed(self, then: KeptVariables) -> list[str]:
        """Locations where hooks of the model or its optimizers changed since a state was kept."""
        return hooks_changed(then.hooks, hooks_of(self._model, self._optimizers))

    def not_restored(self, then: KeptVariables, variables: LoopVariables) -> tuple[list[str], list[Path]]:
        """Changes since a state was kept that restoring it does not undo: tensors by name, other values by path.

        A container that has grown is one of the values, even if it contains tensors.
        """
        now, before = self._now(then, variables), then.record.values

        def is_opaque(path: Path) -> bool:  # the position of an iterator is not known
            return isinstance(before.get(path), Opaque) and isinstance(now.values.get(path), Opaque)

        paths = [path for path in then.record.changed(now) if not is_opaque(path)]
        changed = [path for path in paths if not isinstance(before.get(path), Length)]
        tensors = {*then.record.tensors_at(changed), *now.tensors_at(changed)}
        names = [name_of(path) for path in changed if path in tensors]
        return [*dict.fromkeys([*names, *_written(then)])], [path for path in paths if path not in tensors]

    def contents(self, variables: LoopVariables) -> LoopRecord:
        """A record of the variables with fingerprints of tensors."""
        return record_loop(variables.reachable, self._left_out()).contents()

    def _now(self, then: KeptVariables, variables: LoopVariables) -> LoopRecord:
        """The present record of the variables; the old record if they belong to another function."""
        if variables.owner is not then.owner:
            return then.record
        return self._record(variables.taken_over, variables.reachable)

    def _record(self, variables: Variables, known: Variables) -> LoopRecord:
        return record_loop(variables, self._left_out() | {id(value) for value in self._fetching}, known)

    def _left_out(self) -> set[int]:
        return {id(value) for value in (*self._restored, *self._ring.stateful_objects, *self._ring.generators)}


def differing_values(
    first: LoopRecord, second: LoopRecord, third: LoopRecord, also: Sequence[Path] = ()
) -> tuple[list[str], list[str]]:
    """Names of tensors, and texts on other values, that differ after two repetitions of the same steps.

    Args:
        first: Record before the repetitions.
        also: Paths of further values that are known to have changed.
    """
    paths = second.changed(third)
    tensors = [name_of(path) for path in paths if isinstance(third.values.get(path), Content)]
    values = []
    for path in dict.fromkeys((*paths, *also)):
        now, then = third.values.get(path), first.values.get(path)
        if isinstance(now, Content):
            continue
        if isinstance(now, Length) and isinstance(then, Length) and now != then:
            values.append(f"{name_of(path)} has {count_text(now, 'element')} instead of {then:,}")
        elif type(now) in (int, float, bool) and now != then:
            values.append(f"{name_of(path)} was {now!r} instead of {then!r}")
        else:
            values.append(f"{name_of(path)} has changed")
    return tensors, values


def some_names(names: Sequence[str]) -> str:
    """The first few of some names, and the number of the others."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _written(then: KeptVariables) -> list[str]:
    """Names of tensors outside of the kept state that were written to since."""
    return [name for name, (tensor, version) in then.versions.items() if tensor._version != version]
