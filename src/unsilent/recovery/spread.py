"""Differences between executions of one step, and a tolerance for steps that are not deterministic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from unsilent.recovery.digests import digest_text

Values = Mapping[str, Tensor]
MARGIN = 8.0
"""Largest difference of a tensor within the tolerance, in multiples of the difference between clean executions."""


MOST_TOLERANCE = 0.1
"""Largest tolerance; executions that differ more do not differ by rounding."""


class Spread:
    """Compares executions of a step with a result and with each other.

    Args:
        result: Tensors on the host with which executions are compared.
        digest: Digest of these tensors.

    Attributes:
        digests: Digests of the executions.
    """

    def __init__(self, result: Values, digest: str) -> None:
        self._result, self._digest = result, digest
        self.digests: list[str] = []
        self._from_result: list[dict[str, float]] = []
        self._groups = {False: _Group(), True: _Group()}

    def add(self, tensors: Values, has_alarm: bool) -> None:
        """Add an execution; the tolerance is learnt separately from executions with and without an alarm."""
        digest = digest_text(tensors)
        self.digests.append(digest)
        self._from_result.append({} if digest == self._digest else differences(tensors, self._result))
        self._groups[has_alarm].add(tensors, digest)

    @property
    def apart(self) -> float:
        """The largest difference of an element between executions with an alarm, or between those without.

        It is relative to the largest magnitude of its tensor, and infinite if a value is not finite in only one execution.
        """
        return max(group.apart for group in self._groups.values())

    @property
    def tolerance(self) -> float:
        """The largest difference between executions relative to the L2 norm; 0 if the step is deterministic."""
        return self._group.tolerance

    def are_equal(self) -> list[bool]:
        """Whether each execution's tensors equal those of the result, within the tolerance."""
        largest = self._group.largest if self.tolerance else {}
        limits = {name: MARGIN * apart for name, apart in largest.items()}
        return [all(apart <= limits.get(name, 0.0) for name, apart in tensors.items()) for tensors in self._from_result]

    @property
    def _group(self) -> _Group:
        return max(self._groups.values(), key=lambda group: len(group.digests))


class _Group:
    """Executions that should agree except for rounding.

    Attributes:
        digests: Digests of the executions.
        largest: Largest difference of each tensor from that of the first execution, by name.
        apart: The largest of these differences, relative to the largest magnitude of its tensor.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.largest: dict[str, float] = {}
        self.apart = 0.0
        self._first: Values = {}
        self._relative = 0.0

    def add(self, tensors: Values, digest: str) -> None:
        self.digests.append(digest)
        if len(self.digests) == 1:
            self._first = host_copies(tensors)
        elif digest != self.digests[0]:
            apart = differences(tensors, self._first)
            self.largest = {name: max(apart[name], self.largest.get(name, 0.0)) for name in apart}
            ratios = [_ratio(distance, _magnitude(self._first.get(name))) for name, distance in apart.items()]
            self.apart = max(self.apart, *ratios)
            self._relative = max(self._relative, _relative_difference(tensors, self._first))

    @property
    def tolerance(self) -> float:
        """The tolerance for rounding; 0 for equal bits, a single execution, or differences larger than rounding."""
        is_deterministic = len(self.digests) < 2 or max(Counter(self.digests).values()) > 1
        is_rounding = all(map(math.isfinite, self.largest.values())) and self._relative <= MOST_TOLERANCE
        return self._relative if is_rounding and not is_deterministic else 0.0


def host_copies(tensors: Values) -> Values:
    """Copies of tensors on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def differences(tensors: Values, reference: Values) -> dict[str, float]:
    """The largest difference of an element in each tensor; at least one unit in the last place if the bits differ.

    The difference is infinite if a name is missing, if shapes or dtypes differ, and for elements that are not floating-point
    numbers or that are not finite in only one of the two.
    """
    return {name: _difference(tensors.get(name), reference.get(name)) for name in tensors.keys() | reference.keys()}


def _difference(first: Tensor | None, second: Tensor | None) -> float:
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return math.inf
    first = first.detach().cpu()
    if digest_text({"": first}) == digest_text({"": second}):
        return 0.0
    if not (first.is_floating_point() or first.is_complex()):
        return math.inf
    wide = torch.complex128 if first.is_complex() else torch.float64
    wide_first, wide_second = first.to(wide), second.to(wide)
    # Equal infinities: no difference.
    are_alike = (wide_first == wide_second) | (wide_first.isnan() & wide_second.isnan())
    apart = float((wide_first - wide_second).masked_fill(are_alike, 0.0).abs().max())
    least = torch.finfo(first.dtype).eps * _magnitude(second)
    return max(apart, least) if math.isfinite(apart) else math.inf


def _ratio(apart: float, magnitude: float) -> float:
    return apart / magnitude if magnitude else math.inf if apart else 0.0


def _magnitude(tensor: Tensor | None) -> float:
    """The largest finite magnitude in a tensor; 0 if there is none."""
    if tensor is None:
        return 0.0
    sizes = tensor.detach().abs().to(torch.float64)
    return float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0


def _relative_difference(tensors: Values, reference: Values) -> float:
    """The L2 norm of all differences, relative to that of all elements."""
    apart = whole = 0.0
    for name, reference_tensor in reference.items():
        tensor = tensors.get(name)
        is_real_or_complex = reference_tensor.is_floating_point() or reference_tensor.is_complex()
        if tensor is None or tensor.shape != reference_tensor.shape or not is_real_or_complex:
            continue  # `differences` handles these
        apart += _norm(tensor.detach().cpu() - reference_tensor) ** 2
        whole += _norm(reference_tensor) ** 2
    return math.sqrt(apart / whole) if whole else math.inf


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64))
