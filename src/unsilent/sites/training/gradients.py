"""Corruption of the gradients that one operation's backward node computes.

An output of the backward node (``grad_wt/out``) is replaced by a corrupted copy when the node returns it, so that only later
operations see it. For a corrupted operand of one gradient (``grad_in/second``), the node's operations are run again with the
corrupted operand, and only this gradient is taken from the rerun: other gradients, which a kernel may compute from the same
operand, stay golden. The operand of a gradient follows from the autograd graph (the edge of the operand), never from the order of
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from unsilent.basics.errors import InjectionError
from unsilent.basics.nested import map_tensors, tensors_in
from unsilent.faults import Fault
from unsilent.faults.naming import OPERANDS, SiteName
from unsilent.sites.calling import OperationCall, call_axes, window_refusal
from unsilent.sites.corrupting import copied, has_plain_memory
from unsilent.sites.landing import FaultOrDraw, Landings
from unsilent.sites.operands import operand_number, operands_of, operation_name, same_place, written_by
from unsilent.sites.output_windows import OperandRerun, splice_outputs
from unsilent.sites.training.dilated_gradient import DilatedGradient


class BackwardOperation(NamedTuple):
    """An operation that a backward node ran, with its arguments and result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Edge(NamedTuple):
    """Origin of a tensor in the autograd graph: number and output of a node, or the leaf tensor itself."""

    number: int
    output: int
    leaf: Tensor | None


def edge_of(tensor: Tensor) -> Edge | None:
    """The autograd edge of a tensor's gradient; None if it requires no gradient."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    return Edge(-1, 0, tensor) if node is None else Edge(node._sequence_nr(), tensor.output_nr, None)


def operand_of_gradient(site: SiteName) -> int:
    """Number (0: first) of the operand that a gradient site belongs to."""
    return 0 if site.phase == "grad_in" else 1 + (int(site.operand.partition(".")[2] or 0))


class GradientInjector:
    """Corrupts gradients in the backward pass of one operation.

    Args:
        name: Name of the operation.
        number: Number of the operation's backward node.
        call: Operation with its arguments.
        wanted: Sites with their faults.
        landings: Record of the applied faults.
    """

    def __init__(
        self,
        name: str,
        number: int,
        call: OperationCall,
        wanted: Sequence[tuple[SiteName, FaultOrDraw]],
        landings: Landings,
    ) -> None:
        self.name, self.number = name, number
        self._func, self._landings = call[0], landings
        # Faults in outputs come after faults in operands.
        self._wanted = sorted(wanted, key=lambda w: w[0].operand.startswith("out"))
        self._settings: OperationCall = call[0], tuple(None if isinstance(a, Tensor) else a for a in call[1]), {}
        tensors = operands_of(*call[1:])
        self._edges = [edge_of(t) for t in tensors]
        self._tensors = [tensors] if self.has_operand_faults else []  # otherwise no tensor is kept alive
        self._ran: list[BackwardOperation] = []
        self._handles: list[Any] = []

    @property
    def has_operand_faults(self) -> bool:
        """Whether operands of the backward node are corrupted, so that its operations must be recorded."""
        return any(not site.operand.startswith("out") for site, _ in self._wanted)

    def attach(self, results: Any, see: Callable[[bool], None] | None = None) -> bool:
        """Find the autograd node of the results and hook it; False if there is no node.

        ``see``: function that is called before (with True) and after the node runs, if its operations must be observed.
        """
        for out in tensors_in(results):
            if out.grad_fn is not None and out.grad_fn._sequence_nr() == self.number:
                if see is not None and self.has_operand_faults:
                    self._handles.append(out.grad_fn.register_prehook(lambda gradients: see(True)))
                    self._handles.append(out.grad_fn.register_hook(lambda gradients, gradients_above: see(False)))
                self._handles.append(out.grad_fn.register_hook(self._hand_back))
                self._places = self._match(out.grad_fn)
                return True
        return False

    def detach(self) -> None:
        """Remove the hooks and drop all recorded data."""
        for handle in self._handles:
            handle.remove()
        self._tensors, self._edges, self._ran = [], [], []

    def add_recomputed_operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Add the operands of the same operation when checkpointing recomputes it."""
        if self.has_operand_faults:
            self._tensors.append(operands_of(args, kwargs))

    def add_operation(self, ran: BackwardOperation) -> None:
        """Record an operation that the node runs."""
        self._ran.append(ran)

    def _match(self, node: Any) -> dict[int, int]:
        """Map positions of tensor arguments to positions of their gradients."""
        result, start = {}, 0
        nexts = [Edge(-1, 0, getattr(fn, "variable", None)) if hasattr(fn, "variable") else
                 Edge(fn._sequence_nr() if fn is not None else -2, nr, None) for fn, nr in node.next_functions]  # fmt: skip
        for i, edge in enumerate(self._edges):
            for k in range(start, len(nexts)) if edge else ():
                if edge is not None and nexts[k][:2] == edge[:2] and nexts[k].leaf is edge.leaf:
                    result[i], start = k, k + 1
                    break
        return result

    def _hand_back(self, computed: tuple[Tensor | None, ...], above: tuple[Tensor | None, ...]) -> Any:
        """The hook of the node: return the gradients with faults in them."""
        gradients, remade = list(computed), set[int]()
        for site, fault in self._wanted:
            place, why = self._place(site, computed)
            if place is None:
                if not self._landings.why(fault):  # keep the reason from an earlier backward pass
                    self._landings.refuse(fault, why)
                continue
            golden = gradients[place]
            assert golden is not None
            if not site.operand.startswith("out") and place in remade:
                self._landings.refuse(fault, "only one operand of a gradient can be corrupted at a time")
            elif (new := self._corrupted(site, fault, golden, above)) is not None:
                gradients[place] = _InPlaceOf.put(golden, new) if golden.requires_grad else new
                remade.add(place)
        self._ran = []
        if all(self._landings.has_landed(fault) for _, fault in self._wanted):
            self.detach()  # a later backward pass may reach the other faults
        return tuple(gradients)

    def _place(self, site: SiteName, computed: tuple[Tensor | None, ...]) -> tuple[int | None, str]:
        """Position of the gradient that a site names, or None with the reason."""
        number = operand_of_gradient(site)
        if number == 0 and "." in site.operand:
            why = "grad_in has only one gradient; the gradients of further operands are grad_wt/out, grad_wt/out.1 …"
            return None, why
        place = self._places.get(operand_number(self._func, OPERANDS[number + 1]) if number < 3 else number)
        if place is None or computed[place] is None:
            why = "no gradient is computed for this operand, because it is frozen, needs no gradient or does not exist"
            return None, why
        return place, ""

    def _corrupted(
        self, site: SiteName, fault: FaultOrDraw, golden: Tensor, above: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        if site.operand.startswith("out"):
            corrupted = self._landings.corrupt(
                site, fault, _dense(golden), True, call_axes(self._settings, site, golden.ndim)
            )
            return None if corrupted is None else corrupted.tensor
        if isinstance(fault, Fault) and fault.layout == "stuffed":
            return self._stuffed(site, fault, golden, above)
        from_above = site.operand == ("first" if site.phase == "grad_in" else "second")
        number = operand_number(self._func, site.operand)
        olds = [above[0]] if from_above else [t[number] for t in reversed(self._tensors) if number < len(t)]
        for old in olds:
            if old is None:
                continue
            with no_dispatch():
                again = BackwardReplay(self._ran, old, by_memory=not from_above)
                if again.is_needed_for(golden):
                    return self._again(site, fault, _dense(old) if from_above else old, golden, again.run)
        graph = "the backward pass builds a graph (create_graph), so only outputs can be corrupted"
        none = f"this gradient is not computed from a {site.operand} operand"
        self._landings.refuse(fault, graph if golden.requires_grad else none)
        return None

    def _again(
        self, site: SiteName, fault: FaultOrDraw, old: Tensor, golden: Tensor, run: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        """The gradient recomputed with a corrupted operand; None if the fault does not fit."""
        window = fault.reach if isinstance(fault, Fault) else fault.window
        if window is not None and (why := window_refusal(self._func, site, 0)):
            self._landings.refuse(fault, why)
            return None
        axes = call_axes(self._settings, site, old.ndim)
        corrupted = self._landings.corrupt(
            site, fault, old, True, axes, OperandRerun(golden, lambda new: run(new, golden))
        )
        if corrupted is None:
            return None
        faulty = run(corrupted.tensor, golden)
        if corrupted.reach is None:
            return faulty
        partly = copied(_dense(golden))
        splice_outputs(partly, faulty, corrupted.reach)
        return partly

    def _stuffed(self, site: SiteName, fault: Fault, golden: Tensor, above: tuple[Tensor | None, ...]) -> Tensor | None:
        """The input gradient of a convolution, computed from a corrupted output gradient with inserted zeros."""
        why = DilatedGradient.misfit(self._settings, site)
        if why or above[0] is None:
            self._landings.refuse(fault, why or "its output received no gradient")
            return None
        with no_dispatch():
            stuffed = DilatedGradient(self._settings, *self._tensors[-1][:2])
            return self._again(site, fault, stuffed.dilate(above[0]), golden, stuffed.faulty_input_gradient)


class _InPlaceOf(torch.autograd.Function):
    """Autograd function that returns a corrupted gradient but keeps the graph of the golden one."""

    @classmethod
    def put(cls, golden: Tensor, corrupted: Tensor) -> Tensor:
        placed: Tensor = cls.apply(golden, corrupted)  # type: ignore[no-untyped-call]
        return placed

    @staticmethod
    def forward(context: Any, golden: Tensor, corrupted: Tensor) -> Tensor:
        return corrupted

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _dense(gradient: Tensor) -> Tensor:
    """The gradient with separate memory for every element; the gradient of a sum is one expanded number."""
    if gradient.layout != torch.strided:
        return gradient
    with no_dispatch():
        return gradient if torch._debug_has_internal_overlap(gradient) == 0 else gradient.contiguous()


class BackwardReplay:
    """Reruns the operations of a backward node with one tensor replaced.

    Args:
        ran: Operations in order.
        old: Tensor that is replaced.
        by_memory: Whether other tensors with the same memory are replaced as well, such as those that autograd saved.
    """

    def __init__(self, ran: Sequence[BackwardOperation], old: Tensor, by_memory: bool) -> None:
        self._ran, self._old = ran, old
        self._memory = old.untyped_storage()._cdata if by_memory and has_plain_memory(old) else None

    def is_needed_for(self, goal: Tensor) -> bool:
        """Whether a result depends on the replaced tensor."""
        dirty: set[int] = set()
        for ran in self._ran:
            if any(id(t) in dirty or self._is_old(t) for t in operands_of(ran.args, ran.kwargs)):
                dirty |= {id(t) for t in tensors_in(ran.result)}
        return id(self._result(goal)) in dirty or self._is_old(goal)

    def run(self, new: Tensor, goal: Tensor) -> Tensor:
        """The recomputed result; raises ``InjectionError`` if the node overwrote one of its inputs."""
        known: dict[int, Tensor] = {}

        def now(tensor: Tensor) -> Tensor:
            return known[id(tensor)] if id(tensor) in known else self._window(tensor, new)

        for ran in self._ran:
            if all(now(t) is t for t in operands_of(ran.args, ran.kwargs)):
                continue
            if any(now(t) is t for t in written_by(ran.func, ran.args, ran.kwargs)):
                raise InjectionError(f"{operation_name(ran.func)} overwrites values that its gradient is computed from")
            args, kwargs = map_tensors((ran.args, ran.kwargs), lambda path, tensor: now(tensor))
            again = ran.func(*args, **kwargs)
            known.update({id(a): b for a, b in zip(tensors_in(ran.result), tensors_in(again), strict=True)})
        return now(self._result(goal))

    def _result(self, goal: Tensor) -> Tensor:
        """The recorded tensor that corresponds to the goal."""
        results = (t for ran in reversed(self._ran) for t in tensors_in(ran.result))
        same = (
            t for t in results if t is goal or (has_plain_memory(t) and has_plain_memory(goal) and same_place(t, goal))
        )
        return next(same, goal)

    def _is_old(self, tensor: Tensor) -> bool:
        if tensor is self._old:
            return True
        return self._memory is not None and has_plain_memory(tensor) and tensor.untyped_storage()._cdata == self._memory

    def _window(self, tensor: Tensor, new: Tensor) -> Tensor:
        """The new tensor with the offset and strides that an operation used to read the old one."""
        if tensor is self._old or not self._is_old(tensor):
            return new if tensor is self._old else tensor
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(new.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return view
