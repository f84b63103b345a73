"""Workloads of scene models: the specification of a model, its training, score and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.workloads.cache import TrainedWeightsRecipe, load_or_train
from unsilent.workloads.digits import CITATION, digits
from unsilent.workloads.model_fitting import FittedModel, Progress, Schedule, check_option_range, fit, model_info
from unsilent.workloads.scenes.composing import (
    DESCRIPTION,
    EVALUATION_SCENES,
    Scenes,
    ScenesWorkload,
    evaluation_scenes,
    training_scenes,
)


@dataclass(frozen=True, kw_only=True)
class SceneModel(FittedModel):
    """The specification of one scene model for images [n, 1, 32, 32].

    Attributes:
        scenes: Number of scenes that the model is trained on.
        targets, loss: Function from scenes to training targets [n, ...], and the loss from the model's output and these
            targets.
        score: Score of the trained model on scenes, which must reach ``goal``; computed without gradients.
        run: Function from the model and images to the answer that ``judge`` compares.
    """

    scenes: int
    schedule: Schedule
    targets: Callable[[Scenes], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    score: Callable[[nn.Module, Scenes], float]
    run: Callable[[nn.Module, Tensor], Any]
    judge: str


def scenes_workload(name: str, spec: SceneModel, evaluations: int, seed: int, progress: Progress) -> ScenesWorkload:
    """The workload of a trained scene model on ``evaluations`` scenes of held-out digits."""
    check_option_range(name, "eval", evaluations, EVALUATION_SCENES, "scenes")
    held_out = evaluation_scenes()

    def train(model: nn.Module) -> float:
        scenes = training_scenes(spec.scenes)
        targets = spec.targets(scenes)

        def sample(rows: Tensor) -> tuple[Tensor, Tensor]:
            return scenes.images[rows], targets[rows]

        description = f"training {name}"
        fit(model, sample, spec.scenes, spec.loss, spec.schedule, seed=seed, description=description, progress=progress)
        with torch.no_grad():
            return spec.score(model, held_out)

    recipe = TrainedWeightsRecipe(name, spec.version, {"seed": seed}, digits().hash)
    model, score = load_or_train(recipe, spec.build, train, spec.goal, seed=seed)
    return ScenesWorkload(
        model,
        [held_out.images[:evaluations].clone()],
        judge=spec.judge,
        name=name,
        components=spec.components,
        run=spec.run,
        info=model_info(spec, DESCRIPTION, score, model, evaluations, CITATION),
    )
