"""Records of two networks compared layer by layer: sums of differences, a row per layer, and conclusions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from unsilent.compare.quantised_products import LayerNoise
from unsilent.compare.suspects import Suspect, find_suspects, has_other_weights
from unsilent.engine.digests import digest, digest_all

FLOORS = 4.0
"""Least ratio of a difference to its noise floor for it to be called more than noise."""

FEW = 3
"""Least number of layers for which differences in most of them indicate quantisation."""


@dataclass(frozen=True)
class LayerFloor:
    """Relative differences of a layer from itself, by the variation of the run."""

    relative: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        """The largest relative difference of all variations."""
        return max(self.relative.values(), default=0.0)


@dataclass
class Difference:
    """Sums for the difference between all outputs of a layer in two networks, in float64.

    Attributes:
        error: Sum of squared differences.
        original, deployed, product: Sums of squares of the two outputs, and sum of their products.
        digests: Hashes of the bits of both outputs for each tensor of each batch; the order of elements matters.
    """

    error: float = 0.0
    original: float = 0.0
    deployed: float = 0.0
    product: float = 0.0
    digests: list[tuple[int, int]] = field(default_factory=list)

    def add(self, original: Tensor, deployed: Tensor) -> None:
        """Add the outputs of both networks for one batch."""
        hashes = digest([original]), digest([deployed])
        self.digests.append(hashes)
        original_values = original.double()
        square = float(original_values.square().sum())
        self.original += square
        if hashes[0] == hashes[1] and math.isfinite(square):
            self.deployed += square
            self.product += square
            return
        deployed_values = deployed.to(original.device).double()
        self.error += float((deployed_values - original_values).square().sum())
        self.deployed += float(deployed_values.square().sum())
        self.product += float((original_values * deployed_values).sum())

    @property
    def has_same_bits(self) -> bool:
        """Whether the outputs of both networks are identical bit for bit, with the same dtype."""
        return all(first == second for first, second in self.digests)

    @property
    def hashes(self) -> tuple[int, int]:
        """Hashes of the outputs of both networks over all batches."""
        return digest_all([first for first, _ in self.digests]), digest_all([second for _, second in self.digests])

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the original's outputs; infinite if not finite."""
        if self.error == 0:
            return 0.0
        share = math.sqrt(self.error / self.original) if self.original else math.inf
        return share if math.isfinite(share) else math.inf

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise ratio in dB; infinite without a difference."""
        return math.inf if self.relative == 0 else -20 * math.log10(self.relative)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the outputs; NaN if one is all zeros or not finite."""
        norms = math.sqrt(self.original) * math.sqrt(self.deployed)
        return self.product / norms if norms and math.isfinite(norms) else math.nan


@dataclass
class LayerRow:
    """The comparison of one layer in both networks.

    Attributes:
        name: Path of the module in the original, followed by ``#2`` for its second call.
        kind: Class of the original's module.
        accumulated: Difference between the two networks, each with its own earlier layers.
        local: Difference of the deployed layer, given the inputs of the original's layer; ``None`` if it could not be run alone.
        local_problem: Why it could not be run alone.
        operation: First operation of the deployed layer whose result has different bits, given the same inputs.
        floor: Difference of the original from itself; ``None`` if it was not measured.
        rounding: Relative difference that other kernels may cause in the same layer.
        has_parameters: Whether the original's layer has parameters.
        has_only_vectors: Whether all of them are vectors, like those of norms, which quantisation does not change.
        noise: Expected and measured errors from quantisation of this layer; ``None`` if it is not a product.
    """

    name: str
    kind: str
    accumulated: Difference = field(default_factory=Difference)
    local: Difference | None = field(default_factory=Difference)
    local_problem: str = ""
    operation: str = ""
    floor: LayerFloor | None = None
    rounding: float = 0.0
    has_parameters: bool = False
    has_only_vectors: bool = False
    noise: LayerNoise | None = None

    @property
    def local_noise(self) -> float:
        """The relative difference that noise and rounding may cause in this layer alone."""
        return max(self.rounding, FLOORS * self.floor.largest if self.floor else 0.0)

    @property
    def agrees_locally(self) -> bool:
        """Whether the outputs of the two layers for the same input differ by at most `local_noise`."""
        return self.local is not None and self.local.relative <= self.local_noise

    @property
    def is_beyond_floor(self) -> bool:
        """Whether the accumulated difference is clearly above the noise floor.

        Without a noise floor, any differing bit counts.
        """
        if self.floor is None or self.floor.largest == 0:
            return not self.accumulated.has_same_bits
        return self.accumulated.relative > FLOORS * self.floor.largest


@dataclass(frozen=True)
class LayerComparison:
    """The result of `compare_layers`.

    Attributes:
        rows: Rows in the order in which the original runs the layers.
        unaligned: Layers of the original that have no counterpart, or did not run there.
        other_shapes: Layers whose outputs have different shapes in the two networks.
        problems: Why layers could not be compared, by name.
        added: Layers that only the deployed network has.
        further_calls: Calls of layers that only the deployed network makes.
        answers_differ: Whether tensors that the networks returned have different bits.
        floor_problems: Why variations of the noise floor could not be run, by variation.
        unreadable: Why layers could not be read at all; empty if they were read.
        quantised: Sentence on the layers of the deployed network that `unsilent` has quantised; empty if there are none.
        batches: Number of batches that were run.
    """

    rows: tuple[LayerRow, ...]
    unaligned: tuple[str, ...] = ()
    other_shapes: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    further_calls: tuple[str, ...] = ()
    answers_differ: bool = False
    floor_problems: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""
    quantised: str = ""
    batches: int = 0

    @property
    def differs_everywhere(self) -> bool:
        """Whether most layers differ even with equal inputs, as in a quantised or pruned network.

        Convolutions and linear layers count; if there are none, other layers with parameters. With only one or two layers, this
        also requires readable scales.
        """
        alone = [row for row in self.rows if row.has_parameters and row.local is not None]
        rows = [row for row in alone if row.noise is not None] or alone
        if len(rows) < FEW and all(row.noise is None or row.noise.weight_step is None for row in rows):
            return False
        return 2 * sum(not row.agrees_locally for row in rows) > len(rows)

    @property
    def other_weights(self) -> tuple[LayerRow, ...]:
        """Products whose weights are not the original's after rounding or pruning.

        Only convolutions and linear layers count.
        """
        return tuple(row for row in self.rows if row.noise is not None and has_other_weights(row.noise))

    @property
    def has_other_weights(self) -> bool:
        """Whether most convolutions and linear layers have other weights."""
        return 2 * len(self.other_weights) > sum(row.noise is not None for row in self.rows)

    @property
    def judged_norms(self) -> tuple[LayerRow, ...]:
        """Layers such as norms, if at least half agree with the original, so that all should.

        Their parameters are vectors.
        """
        norms = tuple(row for row in self.rows if row.has_only_vectors and row.local is not None)
        return norms if 2 * sum(row.agrees_locally for row in norms) >= len(norms) else ()

    @property
    def first_difference(self) -> LayerRow | None:
        """The first layer whose outputs differ in any bit, or None."""
        return next((row for row in self.rows if not row.accumulated.has_same_bits), None)

    @property
    def first_beyond_floor(self) -> LayerRow | None:
        """The first layer that differs by more than the noise floor, or None.

        ``None`` also if most layers differ even with equal inputs.
        """
        return None if self.differs_everywhere else next((row for row in self.rows if row.is_beyond_floor), None)

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """Layers that differ more than their quantisation explains, the most suspicious first."""
        if not self.differs_everywhere or self.has_other_weights:
            return ()
        noises = {row.name: row.noise for row in self.rows if row.noise is not None}
        norms = self.judged_norms
        text = "given the same inputs, outputs differ by {:.2g} of their norm; {} of {} layers with vectors as parameters agree"
        norm_suspects = [
            Suspect(
                row.name, None, row.local.relative / row.local_noise,
                text.format(row.local.relative, sum(norm.agrees_locally for norm in norms), len(norms)),
            )
            for row in norms
            if row.local is not None and not row.agrees_locally
        ]  # fmt: skip
        return tuple(sorted((*find_suspects(noises), *norm_suspects), key=lambda suspect: -suspect.excess))
