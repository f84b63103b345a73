"""A model of scenes as a workload: what tells one from another, and how all are trained, scored and evaluated."""

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
    """The specification of one model of scenes, images [n, 1, 32, 32].

    Attributes:
        scenes: Number of scenes that it is trained on.
        targets, loss: Targets that it learns of scenes, [n, ...], and the loss of its output and these.
        score: The score that ``goal`` is about, of the trained model on scenes; without gradients.
        run: The answer to images, which ``judge`` compares.
    """

    scenes: int
    schedule: Schedule
    targets: Callable[[Scenes], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    score: Callable[[nn.Module, Scenes], float]
    run: Callable[[nn.Module, Tensor], Any]
    judge: str


def scenes_workload(name: str, one: SceneModel, evaluations: int, seed: int, progress: Progress) -> ScenesWorkload:
    """The trained model on so many scenes of held-out digits [n, 1, 32, 32]."""
    check_option_range(name, "eval", evaluations, EVALUATION_SCENES, "scenes")
    held_out = evaluation_scenes()

    def train(model: nn.Module) -> float:
        scenes = training_scenes(one.scenes)
        targets = one.targets(scenes)
        fit(
            model,
            lambda rows: (scenes.images[rows], targets[rows]),
            one.scenes,
            one.loss,
            one.schedule,
            seed=seed,
            description=f"training {name}",
            progress=progress,
        )
        with torch.no_grad():
            return one.score(model, held_out)

    recipe = TrainedWeightsRecipe(name, one.version, {"seed": seed}, digits().hash)
    model, score = load_or_train(recipe, one.build, train, one.goal, seed=seed)
    return ScenesWorkload(
        model,
        [held_out.images[:evaluations].clone()],
        judge=one.judge,
        name=name,
        components=one.components,
        run=one.run,
        info=model_info(one, DESCRIPTION, score, model, evaluations, CITATION),
    )
