"""An order of queries by the published equations of Revelio (MLSys 2022).

The equations are known at second hand.

A template is scored on [v_R; v_L; v_T]: report, telemetry, and the root of a graph convolution over the small tree of the
template (operation, metric, blanks). A value is scored on [v_b; L_u; rank_u]: the node of its blank, features of the candidate,
and its place. Softmax over templates, and over the candidates of a template; cross-entropy. Our changes: the report vector is
that of `words` instead of BERT; several templates or candidates may be right; the query that examines everything is a candidate
at the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unsilent.triage.farm.labelled import RIGHT
from unsilent.triage.possible_queries import PossibleQuery, possible_queries
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking.examples import Example
from unsilent.triage.ranking.features import candidate_features, incident_features
from unsilent.triage.ranking.words import DIRECTIONS, Words
from unsilent.triage.runbook import ScoredQuery, Signals

SIZE, EPOCHS, RATE, DECAY = 32, 60, 3e-3, 1e-3
REASON = "the published equations"
NAMES = [*TEMPLATES]


def _tree_nodes(template: str) -> list[str]:
    """Names of a template's tree nodes, the root first: ``compare``, ``gradients``, ``a tensor``."""
    operation, _, metric = template.partition("-")
    return [operation, metric, *(f"a {blank}" for blank in TEMPLATES[template].blanks)]


VOCABULARY = sorted({node for name in NAMES for node in _tree_nodes(name)})


class _Trees(nn.Module):
    """A graph convolution of two layers over the trees of all templates, with an output vector for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), SIZE)
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])
        nodes = [(name, node) for name in NAMES for node in _tree_nodes(name)]
        self.places = {node: place for place, node in enumerate(nodes)}
        self.roots = torch.tensor([self.places[name, _tree_nodes(name)[0]] for name in NAMES])
        self.words = torch.tensor([VOCABULARY.index(node) for _, node in nodes])
        joined = torch.eye(len(nodes))
        for place, (name, _) in enumerate(nodes):
            root = self.places[name, _tree_nodes(name)[0]]
            joined[place, root] = joined[root, place] = 1
        degree = joined.sum(1).rsqrt()
        self.joined = degree[:, None] * joined * degree

    def forward(self) -> Tensor:
        nodes: Tensor = self.embedding(self.words)
        for layer in self.layers:
            nodes = torch.relu(self.joined @ layer(nodes))
        return nodes


class Equations(nn.Module):
    """The two scoring networks, for templates and for candidates."""

    def __init__(self, telemetry: int, candidate: int) -> None:
        super().__init__()
        self.trees = _Trees()
        self.telemetry = nn.Linear(telemetry, SIZE)
        self.joint, self.score = nn.Linear(DIRECTIONS + 2 * SIZE, SIZE), nn.Linear(2 * SIZE, 1)
        self.value = nn.Sequential(
            nn.Linear(SIZE + candidate, SIZE), nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 1)
        )

    def template_scores(self, nodes: Tensor, reports: Tensor, telemetry: Tensor) -> Tensor:
        """Scores of all templates on each incident, float32[incidents, templates]."""
        roots = nodes[self.trees.roots].expand(len(reports), -1, -1)
        known = torch.cat([reports, self.telemetry(telemetry)], 1)[:, None].expand(-1, len(NAMES), -1)
        joint = self.joint(torch.relu(torch.cat([known, roots], 2)))
        scores: Tensor = self.score(torch.relu(torch.cat([joint, roots], 2)))[..., 0]
        return scores

    def value_scores(self, nodes: Tensor, places: Tensor, candidates: Tensor) -> Tensor:
        """Scores of candidates, float32[candidates].

        ``places`` are the indices of the nodes of their blanks.
        """
        scores: Tensor = self.value(torch.cat([nodes[places], candidates], 1))[:, 0]
        return scores


@dataclass(frozen=True, eq=False)
class _Input:
    """The numerical inputs of one incident.

    Attributes:
        report: float32[`DIRECTIONS`].
        telemetry: float32[features].
        candidates: float32[queries, features].
        templates: int64[queries], the place of each query's template in `NAMES`.
    """

    report: Tensor
    telemetry: Tensor
    candidates: Tensor
    templates: Tensor


def _input_of(signals: Signals, queries: Sequence[PossibleQuery], words: Words) -> _Input:
    rows = [
        [*candidate_features(query, signals, "").values()] for query in queries
    ]  # values do not depend on the report
    numbers = (words.vectors([signals.bundle.report()[0] or ""])[0], [*incident_features(signals).values()], rows)
    report, telemetry, candidates = (torch.tensor(values, dtype=torch.float32) for values in numbers)
    return _Input(report, telemetry, candidates, torch.tensor([NAMES.index(query.query.template) for query in queries]))


@dataclass(frozen=True, eq=False)
class EquationsOrder:
    """The trained networks, with the means and deviations that scale their inputs."""

    words: Words
    network: Equations
    telemetry: tuple[Tensor, Tensor]
    candidate: tuple[Tensor, Tensor]

    @classmethod
    def empty(cls, words: Words, telemetry: int, candidate: int) -> EquationsOrder:
        """An untrained order for the given numbers of features, to be filled with trained values."""
        network = Equations(telemetry, candidate)
        scales = [(torch.zeros(count), torch.ones(count)) for count in (telemetry, candidate)]
        return cls(words, network, *scales)

    def tensors(self) -> dict[str, Tensor]:
        """All trained tensors by name, without copying."""
        scales = {"telemetry": self.telemetry, "candidate": self.candidate}
        of_scales = {f"{name}.{n}": tensor for name, pair in scales.items() for n, tensor in enumerate(pair)}
        return {**{name: parameter.detach() for name, parameter in self.network.named_parameters()}, **of_scales}

    def log_chances(self, inputs: Sequence[_Input], blanks: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Logarithms of the probabilities of templates, and of each query given its template.

        The first have shape [incidents, templates].
        """
        nodes, counts = self.network.trees(), [len(incident.templates) for incident in inputs]
        telemetry = _scaled_features(torch.stack([incident.telemetry for incident in inputs]), self.telemetry)
        scores = self.network.template_scores(nodes, torch.stack([incident.report for incident in inputs]), telemetry)
        owner = torch.repeat_interleave(torch.arange(len(inputs)), torch.tensor(counts))
        templates = torch.cat([incident.templates for incident in inputs])
        is_asked = torch.zeros_like(scores, dtype=torch.bool).index_put((owner, templates), torch.tensor(True))
        rows = _scaled_features(torch.cat([incident.candidates for incident in inputs]), self.candidate)
        values = self.network.value_scores(nodes, torch.cat([*blanks]), rows)
        groups = owner * len(NAMES) + templates
        total = torch.zeros(len(inputs) * len(NAMES)).index_add(0, groups, values.clamp(-50, 50).exp())
        of_values = values.clamp(-50, 50) - total[groups].log()
        return scores.masked_fill(~is_asked, -1e9).log_softmax(1), [*of_values.split(counts)]

    def blanks_of(self, queries: Sequence[PossibleQuery]) -> Tensor:
        """Index of the tree node of each query's filled blank, or of the root without one, int64[queries]."""
        places = self.network.trees.places
        roots = {name: places[name, _tree_nodes(name)[0]] for name in NAMES}
        named = [(query.query.template, f"a {query.blank}") for query in queries]
        return torch.tensor([places.get(node, roots[node[0]]) for node in named])

    def scored_queries(self, signals: Signals) -> list[ScoredQuery]:
        """Every possible query, the most probable one first."""
        queries = possible_queries(signals.bundle, signals.candidates)
        incident_input = _input_of(signals, queries, self.words)
        with torch.no_grad():
            of_templates, of_values = self.log_chances([incident_input], [self.blanks_of(queries)])
        chances = (of_templates[0, incident_input.templates] + of_values[0]).exp().tolist()
        result = [ScoredQuery(query.query, chance, REASON) for query, chance in zip(queries, chances, strict=True)]
        return sorted(result, key=lambda query: (-query.score, TEMPLATES[query.query.template].seconds))


def fit_equations(examples: Sequence[Example], words: Words, seed: int) -> EquationsOrder:
    """Train the equations on the examples that have a right query; equal seeds give equal results."""
    examples = [example for example in examples if any(is_right for _, _, is_right in example.by_template())]
    queries = [[possible for possible, _ in example.graded] for example in examples]
    inputs = [_input_of(example.signals, possible, words) for example, possible in zip(examples, queries, strict=True)]
    telemetry = torch.stack([incident.telemetry for incident in inputs])
    candidates = torch.cat([incident.candidates for incident in inputs])
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        network = Equations(telemetry.shape[1], candidates.shape[1])
        order = EquationsOrder(words, network, _scale(telemetry), _scale(candidates))
        blanks = [order.blanks_of(possible) for possible in queries]
        optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(examples)).split(32):
                places = batch.tolist()
                chances = order.log_chances([inputs[at] for at in places], [blanks[at] for at in places])
                optimizer.zero_grad()
                _loss([examples[at] for at in places], *chances).backward()
                optimizer.step()
    return order


def _loss(examples: Sequence[Example], of_templates: Tensor, of_values: Sequence[Tensor]) -> Tensor:
    """Cross-entropy, where the probabilities of all right answers are added."""
    parts = []
    for example, templates, values in zip(examples, of_templates, of_values, strict=True):
        right: dict[int, list[int]] = {}
        for place, (_, graded) in enumerate(example.graded):
            if graded.grade == RIGHT:
                right.setdefault(NAMES.index(graded.query.template), []).append(place)
        parts.append(-templates[[*right]].logsumexp(0))
        parts += [-values[places].logsumexp(0) for places in right.values()]
    return torch.stack(parts).mean()


def _scale(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mean(0), rows.std(0, correction=0).clamp(min=1e-3)


def _scaled_features(rows: Tensor, scale: tuple[Tensor, Tensor]) -> Tensor:
    return ((rows - scale[0]) / scale[1]).clamp(-10, 10)
