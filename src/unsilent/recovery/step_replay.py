"""Executes the step of an alarm again and records the results, which are the evidence for `fault_verdict`.

The step is executed with the batch and the generators of the previous rank (if several ranks hold the same state), with every
operation checked in float64, and several times without changes. All results of the step are compared by digests with the current
state of the job. The body of the user's loop runs between the items that `StepReplay.run` yields, so that ``rerun``, ``replay``
and a recorded incident execute a step in the same way. All ranks do the same in the same order; if one of them cannot do
something, none does.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.nested import leaves_in
from unsilent.recovery.digests import digest_text
from unsilent.recovery.evidence import EARLIER_CHECKPOINT, NEIGHBOUR, SAME_DEVICE, Execution
from unsilent.recovery.fault_verdict import is_decided
from unsilent.recovery.neighbour_check import Findings, compare
from unsilent.recovery.operation_check import OperationCheck
from unsilent.recovery.rank_link import Parcel, RankLink
from unsilent.recovery.ring import check_room
from unsilent.recovery.spread import Spread, Values, host_copies

EXECUTIONS, MOST_STEPS = 3, 300
"""Smallest number of executions on the same device, besides the others, and largest number of steps of all of them."""
SECONDS = 10.0
"""Seconds for further executions on the same device, because rare faults show only in many executions."""


class IterationStart(NamedTuple):
    """Start of an iteration: the item that the loop receives, and a function that restores the random generators."""

    item: Any
    restore_generators: Callable[[], None]


class ReplayedSteps(Protocol):
    """The iterations since a stored state, which can be executed any number of times.

    Attributes:
        model: Model that is trained.
        problem: Difference between the start of the iterations and the first time, in words; empty if none is known.
    """

    model: nn.Module
    problem: str

    def go_back(self) -> None:
        """Restore the state before the first iteration, except the random generators."""

    def starts(self) -> Sequence[IterationStart]:
        """The starts of the iterations."""

    def end_iteration(self) -> None:
        """Evaluate the signals of the iteration whose body was just executed."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the current training state, by name."""

    def batches(self) -> Sequence[Any]:
        """The batches of the iterations, if they are known."""

    def portable(self) -> Any:
        """Values that can be pickled and let another rank execute these iterations.

        Raises ``UsageError`` if there are no such values.
        """

    def starts_of(self, portable: Any) -> Sequence[IterationStart]:
        """The iterations of another rank, for execution on this rank, from its `portable` values."""


def execute(steps: ReplayedSteps, starts: Sequence[IterationStart] | None = None) -> Iterator[Any]:
    """Restore the state, and yield each iteration's item so that the caller executes the body.

    ``starts`` replaces the iterations' own starts.
    """
    steps.go_back()
    for item, restore_generators in steps.starts() if starts is None else starts:
        restore_generators()
        yield item
        steps.end_iteration()


class StepReplay:
    """The repeated executions of one step after its alarm.

    The caller restores the state afterwards.

    Args:
        steps: The iterations from a state before the step up to now.
        take_findings: Returns the findings since its last call.
        link: Connection to the other ranks.
        suspect: Rank that is suspected; -1: undetermined.
        load_earlier: Loads the checkpoint before the one that was loaded last into model and optimizers; None if it is not known,
            or if no checkpoint was loaded recently.

    Attributes:
        executions, steps_per_execution, is_neighbour_checked, apart, tolerance: See `Evidence`; equal in all ranks.
        problem: Reason why the step was not executed again; empty if it was.
        no_neighbour: Reason, see `Evidence`.
        batch_problem: Problem of the suspect's batch, see `Evidence`.
        far: The first operation with a finite result that is far from the one in float64; empty if there is none.
    """

    def __init__(
        self,
        steps: ReplayedSteps,
        take_findings: Callable[[], Findings],
        link: RankLink,
        suspect: int,
        load_earlier: Callable[[], object] | None = None,
    ) -> None:
        self._steps, self._link, self._suspect, self._load_earlier = steps, link, suspect, load_earlier
        self._take_findings = take_findings
        self._near: Findings | None = None
        self.executions: list[Execution] = []
        self.steps_per_execution, self.is_neighbour_checked = 1, False
        self.apart, self.tolerance, self.problem, self.no_neighbour = 0.0, 0.0, "", ""
        self.batch_problem = self.far = ""

    def run(self) -> Iterator[Any]:
        """Yield the items of all repeated iterations, so that the caller executes their bodies."""
        tensors = self._steps.tensors()
        try:
            check_room(list(tensors.values()), 3, "host")
            problem = ""
        except UsageError as error:
            problem = str(error)
        self.batch_problem = self._of_suspect(self._link.gather(batch_problem(self._steps.batches())))
        if problem := self._link.first_problem(problem):
            self.problem = problem
            return
        self.steps_per_execution = len(self._steps.starts())
        now, digest = host_copies(tensors), digest_text(tensors)
        yield from self._ask_neighbour()
        yield from self._check_operations()
        yield from self._repeat(now, digest)
        if self._load_earlier is not None:
            yield from self._begin_earlier(self._load_earlier)
        if problem := self._link.first_problem(self._steps.problem):
            self.problem, self.executions = problem, []

    # -- by another rank ---------------------------------------------------------------------------------------

    def _ask_neighbour(self) -> Iterator[Any]:
        link = self._link
        if link.world_size == 1 or self._suspect < 0:
            self.no_neighbour = "there is one rank" if link.world_size == 1 else "no rank is suspected"
            return
        parcel, problem = None, ""
        try:
            parcel = Parcel(self._steps.portable())
        except Exception as error:  # any error that a user's class raises when it is pickled
            problem = kind_and_line(error)
        self._steps.go_back()
        if not (problem := link.first_problem(problem)):
            held = link.gather((self._state_digest(), len(self._steps.starts())))
            if len(set(held)) > 1:
                problem = "the ranks hold different states, or made other numbers of iterations"
        if problem or parcel is None:
            self.no_neighbour = problem
            return
        device = next(self._steps.model.parameters()).device
        yield from execute(self._steps, self._steps.starts_of(link.pass_on(parcel, device)))
        neighbour = (self._suspect + 1) % link.world_size
        self._near = self._take_findings()
        has_alarm = neighbour in self._near.ranks
        self.executions.append(Execution(place=NEIGHBOUR, rank=neighbour, has_alarm=has_alarm))

    def _check_neighbour(self, with_own_batches: Findings) -> None:
        """Discard the neighbour's execution unless the neighbour computes the same results as the suspect."""
        if (near := self._near) is None:
            return
        link, usual = self._link, with_own_batches.usual()
        received: Tensor = link.pass_on(Parcel(torch.from_numpy(usual)), torch.device("cpu"))
        upto = max(1, near.clean)  # signals of the first iteration are from before any value is shared
        gathered = link.gather(compare(near.signals[:upto], received.numpy(), usual))
        self.no_neighbour, number = gathered[(self._suspect + 1) % link.world_size]
        self.is_neighbour_checked = number >= 0 and not self.no_neighbour
        if self.no_neighbour:
            self.executions = [execution for execution in self.executions if execution.place != NEIGHBOUR]

    def _state_digest(self) -> str:
        """Digest of parameters and optimizer states, which is equal on all replicas."""
        buffers = {name for name, _ in self._steps.model.named_buffers()}
        tensors = self._steps.tensors()
        names = [name for name in tensors if name not in buffers and not name.startswith("gradient of ")]
        return digest_text({name: tensors[name] for name in names})

    # -- by this rank ------------------------------------------------------------------------------------------

    def _check_operations(self) -> Iterator[Any]:
        check = OperationCheck(self._steps.model)
        yield from _around_bodies(check, execute(self._steps))
        infinite = "" if all(map(_is_finite, self._steps.tensors().values())) else "a value"
        gathered = self._link.gather((check.overflowed, check.differing, check.far, infinite))
        alarms = self._take_findings().ranks
        overflowed, differing, self.far, infinite = map(self._of_suspect, zip(*gathered, strict=True))
        self.executions.append(
            Execution(
                place=SAME_DEVICE, rank=self._suspect, dtype="float64", overflowed=overflowed,
                has_alarm=self._is_alarm(alarms) and not overflowed, is_equal=False if differing else None,
                is_finite=not infinite,
            )
        )  # fmt: skip

    def _repeat(self, now: Values, digest: str) -> Iterator[Any]:
        """Execute the step unchanged, and compare the result."""
        spread, begun = Spread(now, digest), time.perf_counter()
        alarms: list[bool] = []
        findings: list[Findings] = []
        while self._goes_on(list(zip(spread.digests, alarms, strict=True)), begun):
            yield from execute(self._steps)
            findings.append(self._take_findings())
            alarms.append(self._is_alarm(findings[-1].ranks))
            spread.add(self._steps.tensors(), alarms[-1])
        self._check_neighbour(findings[0])
        of_ranks = self._link.gather((spread.tolerance, spread.digests, spread.are_equal(), spread.apart))
        chosen = of_ranks if self._suspect < 0 else [of_ranks[self._suspect]]
        self.tolerance, self.apart = max(entry[0] for entry in chosen), max(entry[3] for entry in chosen)
        for number, has_alarm in enumerate(alarms):
            is_equal, met = all(entry[2][number] for entry in chosen), findings[number]
            self.executions.append(
                Execution(
                    place=SAME_DEVICE, rank=self._suspect, is_equal=is_equal, has_alarm=has_alarm, digest=chosen[0][1][number],
                    ranks=tuple(sorted(met.ranks)) if met.are_own else (),
                )
            )  # fmt: skip

    def _goes_on(self, own_results: Sequence[tuple[str, bool]], begun: float) -> bool:
        """Whether to execute the step once more on the same device; equal on all ranks."""
        if len(own_results) < EXECUTIONS:
            return True
        if len(own_results) * len(self._steps.starts()) >= MOST_STEPS:
            return False
        of_ranks = self._link.gather((time.perf_counter() - begun, own_results))
        if max(seconds for seconds, _ in of_ranks) >= SECONDS:
            return False
        chosen = of_ranks if self._suspect < 0 else [of_ranks[self._suspect]]
        return not any(is_decided(results) for _, results in chosen)

    def _begin_earlier(self, load_earlier: Callable[[], object]) -> Iterator[Any]:
        """Execute the same iterations from the state of an earlier checkpoint, if the alarm was repeated."""
        if not all(execution.has_alarm for execution in self.executions[-EXECUTIONS:]):
            return

        def begin(start: IterationStart) -> None:
            load_earlier()
            start.restore_generators()

        first, *later = self._steps.starts()
        earlier = first._replace(restore_generators=functools.partial(begin, first))
        yield from execute(self._steps, [earlier, *later])
        has_alarm = self._is_alarm(self._take_findings().ranks)
        execution = Execution(place=SAME_DEVICE, rank=self._suspect, start=EARLIER_CHECKPOINT, has_alarm=has_alarm)
        self.executions.append(execution)

    def _of_suspect(self, texts: Sequence[str]) -> str:
        return text_of_suspect(texts, self._suspect)

    def _is_alarm(self, ranks: frozenset[int]) -> bool:
        return self._suspect in ranks if self._suspect >= 0 else bool(ranks)


FAR_FROM_OTHERS = 1000.0
"""Ratio of a batch's largest magnitude to that of the others that indicates an error, for example another unit."""


def text_of_suspect(texts: Sequence[str], suspect: int) -> str:
    """The text of the suspected rank, or the first non-empty text if no rank is suspected."""
    return texts[suspect] if suspect >= 0 else next(filter(None, texts), "")


def batch_problem(batches: Sequence[Any]) -> str:
    """A sentence on an element that is not finite, or on a magnitude far from that of other batches; else empty.

    Only tensors of floating-point numbers are checked.
    """
    largest: dict[str, list[float]] = {}
    for path, tensor in leaves_in(batches):
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel()):
            continue
        name = "/".join(path[1:]) or "0"
        if tensor.numel() > 1:  # a single number is a setting
            largest.setdefault(name, []).append(float(tensor.detach().abs().max()))
        if not torch.isfinite(tensor).all():
            place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
            return f"element {place} of tensor {name} of the batch is {float(tensor[tuple(place)]):g}"
    for name, values in largest.items():
        usual = statistics.median_low(values)
        if usual > 0 and (ratio := max(values) / usual) > FAR_FROM_OTHERS:
            return f"the largest magnitude of tensor {name} of a batch is {ratio:.2g} times that of the {len(values) - 1} others"
    return ""


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _around_bodies(context: AbstractContextManager[Any], items: Iterator[Any]) -> Iterator[Any]:
    """Yield each item inside the context, so that the caller processes it there."""
    for item in items:
        with context:
            yield item
