"""The evaluation of one batch and the verdict on its output as one CUDA graph.

A CUDA graph is a recording of all kernels that a call launches. It can be launched again as a whole, which costs far less than
launching each kernel from Python. A recording reads the same memory as before, so faults are written there before a
launch. The verdict on each sample is collected on the device for many trials, and read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsilent.basics.cuda_capture import capture, side_stream
from unsilent.engine.tape import READBACK, Tape
from unsilent.outcomes.base import JudgeVerdict
from unsilent.outcomes.classify import BatchOutcome, changed_and_nonfinite, outcome_of_samples
from unsilent.outcomes.decision_judges import DecisionJudge, host_rows
from unsilent.outcomes.tensors import leaves, words_of
from unsilent.sites.dispatch_mode import DispatchMode

# A captured evaluation takes the path of the golden run. If the golden run read a number, the same number is returned
# again, and the device records whether the tensor still has it. If not, a real run may take another path and has to be
# made.

READ = torch.ops.aten._local_scalar_dense.default


class HostReads(DispatchMode):
    """Checks that the numbers which Python reads from the device stay the same in each evaluation of a batch.

    The first evaluation records the numbers, all later ones compare.

    Attributes:
        changed: Whether a number has changed in the last evaluation, bool[1] on the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._known: list[tuple[Tensor, Any]] = []
        self._recorded = False
        self._none = torch.zeros(1, dtype=torch.bool, device=device)
        self.changed = self._none
        self._count = 0

    def __enter__(self) -> HostReads:
        self._count, self.changed = 0, self._none
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._recorded = True

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not READ:
            return func(*args, **kwargs)
        words = words_of(args[0].detach())
        if not self._recorded:
            self._known.append((words.clone(), func(*args, **kwargs)))
            return self._known[-1][1]
        golden, value = self._known[self._count]
        self._count += 1
        self.changed = self.changed | (words != golden).reshape(1)
        return value


Call = Callable[[], Any]
Capture = Callable[[Call], Call]
"""Function that converts a function to one that repeats its work on the same memory and returns the same result."""
WARM_UPS = 2
"""Number of calls before a capture, in which libraries choose kernels and allocate their memory."""
MOST_TRIALS = 64
"""Largest number of trials that are collected before the host reads them."""
MOST_BYTES = 256 << 20
"""Largest number of bytes of decision rows that are collected."""


class CudaGraphs:
    """Captures functions as CUDA graphs that share temporary memory.

    The graphs must not run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Call) -> Call:
        """Capture a function as a graph.

        Raises any error of CUDA if that is not possible, for example if the function reads a result back.
        """
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), side_stream(self._device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    function()
            current.wait_stream(side)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            try:
                graph, result = capture(function, self._device, self._pool)
            except BaseException:
                self._pool = None  # memory of a failed capture is not used again
                raise

        def replay() -> Any:
            graph.replay()
            return result

        return replay


def host_read(tape: Tape) -> str:
    """The reason why an evaluation cannot be captured, or "" if it can.

    Such an evaluation waits for the device or reads memory of the host.
    """
    for node in tape.nodes:
        if node.func is None or READBACK in node.results:
            return f"Python reads a result back ({node.name})"
        tags = node.func.tags
        chosen_by_mask = any(w.dtype in (torch.bool, torch.uint8) for w in node.reads[1:])
        if torch.Tag.data_dependent_output in tags and node.func is not READ:
            return f"Python reads a result back ({node.name})"
        if torch.Tag.dynamic_output_shape in tags and (chosen_by_mask or node.func is not torch.ops.aten.index.Tensor):
            return f"the shape of a result depends on data ({node.name})"
        if "device" in node.kwargs and torch.device(node.kwargs["device"] or tape.device).type != tape.device.type:
            return f"a tensor is copied between devices ({node.name})"
        if node.generator is not None:
            return f"random numbers are drawn ({node.name})"
    if any(tensor.device.type != tape.device.type for tensor in tape.externals.values()):
        return "it reads a tensor of another device"
    return ""


class BatchGraph:
    """A graph of the evaluation of one batch and the verdict on its output.

    Args:
        run: Function that evaluates the batch and returns its output.
        golden: The golden output. judge, samples: of the batch.
        capture: `CudaGraphs`, or a function that returns its argument, which runs everything directly.

    Attributes:
        capacity: Number of evaluations that can be collected before they are read.
        output: Output of the last evaluation; the next evaluation overwrites it.
        seconds, plain_seconds, verdict_seconds: Seconds of an evaluation by this graph and of a plain one, both with
            the verdict, and seconds of a plain verdict; the creator of the graph sets them.

    Raises:
        Exception: any exception of ``capture``.
    """

    def __init__(self, run: Call, golden: Any, judge: DecisionJudge, samples: int, capture: Capture) -> None:
        self._run, self._golden, self._judge, self._samples = run, golden, judge, samples
        with torch.no_grad():
            rows = judge.decision_rows(golden)
            self._golden_rows = host_rows(rows)
            self.capacity = max(1, min(MOST_TRIALS, MOST_BYTES // max(1, rows.numel() * rows.element_size())))
            device = next(leaves(golden)).device
            # One more than are collected, because warming up and capturing write there.
            self._rows = rows.new_zeros((self.capacity + 1, *rows.shape))
            self._changed, self._nonfinite = (
                torch.zeros((self.capacity + 1, samples), dtype=torch.bool, device=device) for _ in range(2)
            )
            self._other_way = torch.zeros((self.capacity + 1, 1), dtype=torch.bool, device=device)
            self._reads = HostReads(device)
            self._number = torch.full((1,), self.capacity, dtype=torch.int64, device=device)
            self.output: Any = None
            self.seconds = self.plain_seconds = self.verdict_seconds = 0.0
            self.count = 0
            self._evaluate()  # finds the numbers that are read back
            self._call = capture(self._evaluate)
        self.clear()

    def _evaluate(self) -> Any:
        with self._reads:
            output = self._run()
        with torch.no_grad():
            changed, nonfinite = changed_and_nonfinite(self._golden, output, self._samples, wait=False)
            rows = self._judge.decision_rows(output)
            for collected, new in (
                (self._changed, changed), (self._nonfinite, nonfinite), (self._rows, rows), (self._other_way, self._reads.changed)
            ):  # fmt: skip
                collected.index_copy_(0, self._number, new[None])
            self._number.add_(1).clamp_(max=self.capacity)
        return output

    def clear(self) -> None:
        """Delete all collected verdicts."""
        self.count = 0
        self._number.zero_()

    def evaluate(self) -> int:
        """Evaluate the batch with the current memory.

        Returns the number of its verdict among the collected verdicts.
        """
        self.output = self._call()
        self.count += 1
        return self.count - 1

    def outcomes(self) -> list[BatchOutcome | None]:
        """Wait for the device and return the outcomes of all evaluations since `clear`, in order.

        None if a number that Python reads has changed, so that a run may take another path.
        """
        other_way = self._other_way[: self.count, 0].tolist()
        changed, nonfinite = torch.stack((self._changed[: self.count], self._nonfinite[: self.count])).cpu().numpy()
        judged = changed & ~nonfinite
        verdict = None
        if judged.any():
            trials, samples = np.nonzero(judged)
            places = torch.from_numpy(np.stack((trials, samples))).to(self._rows.device)
            faulty = host_rows(self._rows[places[0], places[1]])
            verdict = self._judge.compare(self._golden_rows[samples], faulty)
        result: list[BatchOutcome | None] = []
        first = 0
        for number, size in enumerate(judged.sum(1).tolist()):
            part = None
            if verdict is not None:
                rows_of_trial = slice(first, first + size)
                part = JudgeVerdict(verdict.incorrect[rows_of_trial], verdict.severity[rows_of_trial])
            result.append(None if other_way[number] else outcome_of_samples(changed[number], nonfinite[number], part))
            first += size
        return result
