"""`scenes-detector`: which digits a scene has, and where; the answer that is judged is the list of detections."""

from __future__ import annotations

from torch import Tensor, nn

from unsilent.workloads.base import call_model
from unsilent.workloads.model_fitting import Goal, Progress, Schedule, no_progress
from unsilent.workloads.scenes.average_precision import average_precision
from unsilent.workloads.scenes.composing import CANVAS, Scenes, ScenesWorkload
from unsilent.workloads.scenes.detector_model import STRIDE, Detections, Detector, detect, detection_loss, target_of
from unsilent.workloads.scenes.models import SceneModel, scenes_workload


def run(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The fields of `Detections` of images [n, 1, 32, 32], by name."""
    return detections_in(model, batch)._asdict()


def detections_in(model: nn.Module, images: Tensor) -> Detections:
    """The detections in images [n, 1, 32, 32]."""
    return detect(call_model(model, images))


def _score(model: nn.Module, scenes: Scenes) -> float:
    return average_precision(detections_in(model, scenes.images), scenes.boxes, scenes.digits)


MODEL = SceneModel(
    version=1,
    description="small anchor-free one-stage detector with batch norm that finds handwritten digits in scenes",
    build=Detector,
    scenes=8000,
    schedule=Schedule(epochs=2, batch=32, rate=0.01),
    components={part: f"{part}.*" for part in ("stem", "body", "tower", "classes", "boxes")},
    targets=lambda scenes: target_of(scenes.boxes, scenes.digits, CANVAS // STRIDE, CANVAS // STRIDE),
    loss=detection_loss,
    score=_score,
    run=run,
    goal=Goal("AP50", 0.60),
    judge="detections",
)


def detector(*, eval: int = 64, seed: int = 0, progress: Progress = no_progress) -> ScenesWorkload:  # noqa: A002 - option name
    """The trained model on ``eval`` scenes of held-out digits [eval, 1, 32, 32]; its answer is the detected digits."""
    return scenes_workload("scenes-detector", MODEL, eval, seed, progress)
