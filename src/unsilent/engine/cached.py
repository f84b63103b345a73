"""The engine with shortcuts: a trial costs what depends on its fault, and gives the bits that the plain engine gives.

A batch is put on a tape once; a trial re-executes the operations that read corrupted memory and what follows from them,
until nothing that is still needed differs from golden. Source of the idea: SCI-FI (Gavarini et al. 2023), which starts late
and drops faults at the borders of top-level layers; here it is done for every operation of any model.

A tape is trusted only after comparisons of raw bits: executing all of it gives the golden output; where something
came from nowhere, it gives what the plain run gives with every parameter shaken; and at each proof of a campaign a trial is
run both ways.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch

from unsilent.engine.clock import clock
from unsilent.engine.ledger import Ledger, Packing, class_of
from unsilent.engine.memory import default_budget, plan_memory
from unsilent.engine.plain import PlainEngine, TrialOutcome, acting_in, same_outputs
from unsilent.engine.recorder import record
from unsilent.engine.replay import Replayer
from unsilent.engine.starts import start_of
from unsilent.engine.tape import Node, Unrecordable
from unsilent.engine.values import Diverged, Holders, look
from unsilent.errors import UnsilentError
from unsilent.faults import Fault, Region, fault_model
from unsilent.faults.naming import is_transient
from unsilent.outcomes.base import Judge
from unsilent.sites import Parameters
from unsilent.sites.inputs import named_inputs
from unsilent.sites.memory import dtype_name
from unsilent.sites.striking import strikeable
from unsilent.workloads.base import InferenceWorkload

SHAKES = ("scale:factor=1.5,count=4", "bitflip:bits=0")
"""What every parameter suffers when a tape is tried: so strongly first that nothing hides; gently if the run then diverges."""

TIMED = 3
"""Plain runs of a batch that are timed; the median counts."""
PACK = 64
"""Trials that are given to the engine at a time."""
PACK_BYTES = 64 << 20
"""The largest value of a tape times the trials that go through it together stays below."""


class CachedEngine(PlainEngine):
    """Evaluates a workload under faults by running what the fault changes.

    Attributes:
        replayers: one a batch, None where it runs plainly; ``reasons`` says why, by batch.
        diverged: evaluations that were begun on a tape and had to be run plainly.
        setup_seconds: CPU time that recording and checking took.
    """

    def __init__(
        self,
        workload: InferenceWorkload,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        judge: Judge | None = None,
        memory: int | None = None,
        sharers: int = 1,
    ) -> None:
        super().__init__(workload, device=device, dtype=dtype, judge=judge)
        self.memory, self.sharers = memory, sharers
        self.diverged = 0
        self.replayers: list[Replayer | None] = []
        self.reasons: dict[int, str] = {}
        self.setup_seconds = 0.0
        self.ledger = Ledger()
        self._telling: dict[int, list[Fault]] = {}
        """The last trial that changed the output of each batch."""
        self.packing = Packing()
        self._ready: dict[int, Any] = {}
        self._plain_seconds: list[float] = []
        self.record()

    def record(self) -> None:
        """Put every batch on a tape, and check each before it is trusted."""
        start = time.process_time()
        self.replayers, self.reasons, self._telling, self.ledger = [], {}, {}, Ledger()
        self._plain_seconds = []
        scratch = {id(t) for t, _ in self._scratch}
        self._watched = [t for t, _ in self._writes() if id(t) not in scratch]
        self._versions = self._count_writes()
        for i, batch in enumerate(self.batches):
            self._plain_seconds.append(statistics.median(self._timed(batch) for _ in range(TIMED)))
            try:
                self.replayers.append(self._record(i))
            except Unrecordable as why:
                self.reasons[i] = str(why)
                self.replayers.append(None)
        self._hold()
        self.notes = tuple(self.explained())
        self.setup_seconds = time.process_time() - start

    def _timed(self, batch: Any) -> float:
        begun = time.process_time()
        self._run(batch)
        return time.process_time() - begun

    def _record(self, i: int) -> Replayer:
        """One batch on a tape that gives the golden output, with the cost of every operation and no value held."""
        try:
            tape = record(lambda: self._run(self.batches[i]), self.model, named_inputs(self.batches[i]))
        except Unrecordable:
            raise
        except Exception as error:  # it runs, but not under a dispatch mode
            raise Unrecordable(f"recording it raises {type(error).__name__}: {error}") from None
        replayer = Replayer(tape)
        with torch.no_grad():
            outputs = replayer.fill(lambda value: False, timer(clock(tape.device)))
            if not same_outputs(self.golden[i], assemble(replayer, outputs)):
                raise Unrecordable("executing its operations again gives other bits than the run itself")
        return replayer

    def _hold(self) -> None:
        """Hold the golden values that the budget allows, and try what can be tried with them."""
        able = [(i, r) for i, r in enumerate(self.replayers) if r is not None]
        device = able[0][1].tape.device if able else torch.device("cpu")
        budget = (default_budget(device) if self.memory is None else self.memory) // self.sharers
        self.plan = plan_memory([r.tape for _, r in able], budget)
        for (i, replayer), keep in zip(able, self.plan.keep, strict=True):
            with torch.no_grad():
                replayer.fill(keep.__contains__)
                replayer.try_blocks()
            try:
                if replayer.tape.unexplained:
                    self._shake(i, replayer)
                self._strike_unread(i, replayer)
            except Unrecordable as why:
                self.reasons[i] = str(why)
                self.replayers[i] = None

    def _shake(self, i: int, replayer: Replayer) -> None:
        """Corrupt every parameter and input at once: what the tape does not see (compiled code, say) would not follow."""
        for regions, text, mixed in self._shakes(i, replayer):
            model = fault_model(text)
            faults = [
                fault
                for region in regions
                if (room := model.capacity((region,)))
                for fault in model.with_count(min(4, room)).draw((region,), np.random.default_rng(0))
            ]
            with self._in_memory(faults):
                try:
                    expected = super()._evaluate(i, [*faults, *mixed])
                    (found,) = self._take(i, replayer, [[*faults, *mixed]], in_memory=True)
                except Exception:  # noqa: S112 - the run takes another way then, or fails
                    continue
                finally:
                    replayer.forget()
            if isinstance(found, Diverged):
                continue
            if not same_outputs(expected, found):
                raise Unrecordable(
                    "the output depends on parameters or inputs by something other than operations (compiled code?)"
                )
            return
        raise Unrecordable("numbers that no operation made come into it, and where from could not be found out")

    def _strike_unread(self, i: int, replayer: Replayer) -> None:
        """Parameters that no operation reads must not change a thing; else Python reads them behind our back."""
        unread = [
            site.region
            for site in self.parameters.sites.values()
            if site.memory.tensor.untyped_storage().data_ptr() not in replayer.tape.by_storage
        ]
        model = fault_model(SHAKES[0])
        faults = [f for r in unread if model.capacity((r,)) > 3 for f in model.draw((r,), np.random.default_rng(0))]
        if not faults:
            return
        with self._in_memory(faults):
            try:
                same = same_outputs(self.golden[i], self._run(self.batches[i]))
            except Exception:
                same = False
        if not same:
            raise Unrecordable("a parameter that no operation reads changes the output")

    def _shakes(self, i: int, replayer: Replayer) -> Iterator[tuple[Sequence[Region], str, list[Fault]]]:
        """What to corrupt: everything strongly, then gently, should the run take another way."""
        regions = self.parameters.select("param:*") if self.parameters.sites else ()
        mixed = mixed_inputs(self.batches[i], i)
        yield from ((regions, text, mixed) for text in SHAKES)

    @property
    def partial_kernels(self) -> bool | str:
        """Whether any operation is computed in blocks of outputs, or why none is."""
        able = [r for r in self.replayers if r is not None]
        return any(r.blocks for r in able) or "no operation gave the same bits in aligned blocks at less cost"

    @property
    def stacking(self) -> bool | str:
        """Whether trials can share calls, or why not."""
        able = [r for r in self.replayers if r is not None]
        return any(r.rows.sizes for r in able) or "no value lies sample by sample in its memory"

    def explained(self) -> list[str]:
        """What a report should say of the shortcuts: batches that run plainly, and why."""
        why = Counter(self.reasons.values())
        return [
            f"{n} of {len(self.batches)} batches run plainly, without shortcuts: {text}." for text, n in why.items()
        ]

    # -- trials ------------------------------------------------------------------------------------------------

    def trials(self, many: Sequence[Sequence[Fault]]) -> Iterator[TrialOutcome]:
        """As `PlainEngine.trials`; trials go through the tape together where that is cheaper."""
        transient = all(is_transient(f.site) for faults in many for f in faults)
        together = len(many) > 1 and (transient or (self._could_pack() and self.packing.next()))
        begun = time.process_time()
        ready = self._packed(many, transient) if together else {}
        for i, faults in enumerate(many):
            self._ready = ready.pop(i, {})
            try:
                outcome = self.trial(faults)
            finally:
                self._ready = {}
            yield outcome
        if not transient and len(many) > 1:
            self.packing.add(together, len(many), time.process_time() - begun)

    def pack(self, transient: bool) -> int:
        """How many trials it likes to be given at a time, as it may run them together."""
        able = any(r is not None and r.rows.sizes for r in self.replayers) if transient else self._could_pack()
        return PACK if able else 1

    def _could_pack(self) -> bool:
        """Whether packing parameter faults promises anything; measures what it then needs."""
        able = [r for r in self.replayers if r is not None and 2 * r.largest < PACK_BYTES and r.packs]
        for replayer in able:
            replayer.rows.measure(replayer)
        return bool(able)

    def _packed(self, many: Sequence[Sequence[Fault]], transient: bool) -> dict[int, dict[int, Any]]:
        """Outputs by trial and batch of the trials that could share calls."""
        found: dict[int, dict[int, Any]] = {}
        for batch, replayer in enumerate(self.replayers):
            sharing = [
                (i, acting)
                for i, faults in enumerate(many)
                if (acting := acting_in(batch, faults)) and not self.ledger.prefers_plain(class_of(batch, acting))
            ]
            size = PACK_BYTES // max(replayer.largest, 1) if replayer is not None else 0
            size = size if transient or (replayer is not None and replayer.packs) else 0
            for first in range(0, len(sharing), size) if size > 1 else ():
                found_now = self._pack(batch, sharing[first : first + size])
                for i, output in found_now.items():
                    found.setdefault(i, {})[batch] = output
        return found

    def _pack(self, batch: int, sharing: Sequence[tuple[int, Sequence[Fault]]]) -> dict[int, Any]:
        """The outputs of trials that share calls on one batch, those that did not go through left out."""
        replayer = self.replayers[batch]
        assert replayer is not None
        try:
            outputs = self._take(batch, replayer, [acting for _, acting in sharing])
        except Exception:  # one of them fails, and alone each says so for itself
            return {}
        finally:
            replayer.forget()
        return {i: out for (i, _), out in zip(sharing, outputs, strict=True) if not isinstance(out, Diverged)}

    def _evaluate(self, batch: int, faults: Sequence[Fault]) -> Any:
        if batch in self._ready:
            return self._ready.pop(batch)
        replayer, key = self.replayers[batch], class_of(batch, faults)
        if replayer is None or self.ledger.skips(key):
            return super()._evaluate(batch, faults)
        if any(is_transient(f.site) for f in faults):
            replayer.rows.measure(replayer)  # not this trial's cost
        begun = time.process_time()
        try:
            (found,) = self._take(batch, replayer, [faults], in_memory=True)
            if isinstance(found, Diverged):
                raise found
        except Exception:  # whatever happens on the tape, the plain run says what it means
            self.diverged += 1
            between = time.process_time()
            try:
                return super()._evaluate(batch, faults)
            finally:
                now = time.process_time()
                self.ledger.add(key, now - begun, now - between)
        finally:
            replayer.forget()
        self.ledger.add(key, time.process_time() - begun, self._plain_seconds[batch])
        if found is not self.golden[batch]:
            self._telling[batch] = list(faults)
        return found

    def _take(
        self, batch: int, replayer: Replayer, many: Sequence[Sequence[Fault]], *, in_memory: bool = False
    ) -> list[Any]:
        """The outputs of some trials, from the tape; golden itself where nothing differs; `Diverged` where it must be run.

        ``in_memory``: the faults of parameters are in place (of one trial, then).
        """
        with torch.no_grad():
            starts = [start_of(replayer.tape, self.parameters, faults) for faults in many]
            if not in_memory:
                for start, faults in zip(starts, many, strict=True):
                    start.memory = partial(self._in_memory, faults)
                    if start.dirty:
                        raise Diverged("a parameter is part of the output")
            return [
                dirty if isinstance(dirty, Diverged) else assemble(replayer, dirty) if dirty else self.golden[batch]
                for dirty in replayer.run(starts)
            ]

    # -- proofs ------------------------------------------------------------------------------------------------

    def check_intact(self) -> None:
        """As `PlainEngine.check_intact`; and trials that changed an output, run plainly, must give the same bits.

        That is the last such trial of each batch.

        Raises:
            UnsilentError: it does not.
        """
        super().check_intact()
        telling, self._telling = getattr(self, "_telling", {}), {}
        for batch, faults in telling.items():
            with self._in_memory(faults):
                try:
                    same = same_outputs(super()._evaluate(batch, faults), self._evaluate(batch, faults))
                except Exception:
                    same = False
            if not same:
                raise UnsilentError(
                    f"shortcuts gave other bits than a plain run ({faults[0].describe()}); nothing since the last proof is "
                    "stored: use --engine plain, and report this as a defect"
                )

    def _in_memory(self, faults: Sequence[Fault]) -> AbstractContextManager[None]:
        if self._versions != self._count_writes():
            self.parameters = Parameters(self.model)
            self.weights_hash = self.parameters.hash()
            self._record_golden()
            self.record()
        return super()._in_memory(faults)

    def _count_writes(self) -> list[int]:
        """What changes when anyone but us writes into the model: the recording is stale then."""
        return [tensor._version for tensor in self._watched]


def mixed_inputs(batch: Any, step: int) -> list[Fault]:
    """Faults that exchange a few elements of every input, so that all values are ones that do occur."""
    faults = []
    for name, tensor in named_inputs(batch):
        if strikeable(tensor) and tensor.numel() > 1:
            elements = np.unique(np.linspace(0, tensor.numel() - 1, 8).astype(np.int64))
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            swapped = np.ascontiguousarray(elements[::-1])
            faults.append(Fault(f"input:{name}", dtype, shape, elements, "copy_from", swapped, step=step))
    return faults


def assemble(replayer: Replayer, dirty: Holders) -> Any:
    """The output of the run with what differs put in."""
    memo: dict[int, Any] = {}
    for leaf, window in replayer.tape.leaves:
        holder = dirty.get(window.value)
        memo[id(leaf)] = leaf if holder is None else look(holder, window)
    return copy.deepcopy(replayer.tape.output, memo)


def timer(now: Callable[[], float]) -> Callable[[Node | None], None]:
    """To be told of every operation before it runs; puts the seconds since into the one before."""
    last: list[tuple[Node, float]] = []

    def observe(node: Node | None) -> None:
        at = now()
        if last:
            before, since = last.pop()
            before.seconds = at - since
        if node is not None:
            last.append((node, now()))

    return observe
