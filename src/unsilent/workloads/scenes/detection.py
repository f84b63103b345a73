"""`scenes-detector`: which digits a scene has, and where; the answer that is judged is the list of detections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsilent.workloads.base import call_model
from unsilent.workloads.cache import TrainedWeightsRecipe, load_or_train
from unsilent.workloads.digits import CITATION, digits
from unsilent.workloads.model_fitting import (
    Goal,
    Progress,
    Schedule,
    check_option_range,
    fit,
    no_progress,
    parameter_count,
)
from unsilent.workloads.scenes.average_precision import average_precision
from unsilent.workloads.scenes.composing import (
    CANVAS,
    DESCRIPTION,
    EVALUATION_SCENES,
    ScenesWorkload,
    evaluation_scenes,
    training_scenes,
)
from unsilent.workloads.scenes.detector_model import STRIDE, Detections, Detector, detect, detection_loss, target_of

NAME = "scenes-detector"
VERSION = 1
GOAL = Goal("AP50", 0.60)
SCENES = 8000
"""Scenes that it is trained on."""
SCHEDULE = Schedule(epochs=2, batch=32, rate=0.01)
COMPONENTS = {part: f"{part}.*" for part in ("stem", "body", "tower", "classes", "boxes")}


def run(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The fields of `Detections` of images [n, 1, 32, 32], by name."""
    return detections_in(model, batch)._asdict()


def detections_in(model: nn.Module, images: Tensor) -> Detections:
    """The detections in images [n, 1, 32, 32]."""
    return detect(call_model(model, images))


def detector(*, eval: int = 64, seed: int = 0, progress: Progress = no_progress) -> ScenesWorkload:  # noqa: A002 - option name
    """The trained model on ``eval`` scenes of held-out digits [eval, 1, 32, 32]; its answer is the detected digits."""
    check_option_range(NAME, "eval", eval, EVALUATION_SCENES, "scenes")
    held_out = evaluation_scenes()

    def train(model: nn.Module) -> float:
        scenes = training_scenes(SCENES)
        targets = target_of(scenes.boxes, scenes.digits, CANVAS // STRIDE, CANVAS // STRIDE)
        fit(
            model,
            lambda rows: (scenes.images[rows], targets[rows]),
            SCENES,
            detection_loss,
            SCHEDULE,
            seed=seed,
            description=f"training {NAME}",
            progress=progress,
        )
        with torch.no_grad():
            return average_precision(detections_in(model, held_out.images), held_out.boxes, held_out.digits)

    recipe = TrainedWeightsRecipe(NAME, VERSION, {"seed": seed}, digits().hash)
    model, score = load_or_train(recipe, Detector, train, GOAL, seed=seed)
    return ScenesWorkload(
        model,
        [held_out.images[:eval].clone()],
        judge="detections",
        name=NAME,
        components=COMPONENTS,
        run=run,
        info={
            "description": "small anchor-free one-stage detector with batch norm that finds handwritten digits in scenes",
            "data": DESCRIPTION,
            "accuracy": {"name": GOAL.metric, "value": score},
            "parameters": parameter_count(model),
            "samples": eval,
            "citation": CITATION,
        },
    )
