"""``unsilent triage train``: learn the order of debugging queries from a collection of incidents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.options import WORKLOAD_PANEL, Option, Request, check_count
from unsilent.command import AFTER_ALARM, Command, DisplayOptions, output_option


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``unsilent triage train``."""

    farms: Annotated[tuple[Path, ...], Option(
        "Folders of collections of incidents with labels.jsonl.", "", metavar="FARM", is_argument=True, is_repeatable=True,
        missing_error="no collection was given; give the folder of one, such as farm")]  # fmt: skip
    output: Annotated[Path, output_option("File that the model is written to.")] = Path("model.npz")
    seed: Annotated[int, Option("Seed of the training.", WORKLOAD_PANEL)] = 0

    def __post_init__(self) -> None:
        check_count("--seed", self.seed, 0)


def train_model(request: Request) -> int:
    """Learn the order of debugging queries from a collection of incidents whose queries were executed and graded.

    unsilent triage INCIDENT --model FILE uses the model.
    """
    from unsilent.cli.report_output import show_report
    from unsilent.triage.farm.labelled import LABELS_FILE, read_labels
    from unsilent.triage.ranking.model import train
    from unsilent.triage.ranking.model_file import write_model
    from unsilent.triage.ranking.training_report import Trained

    options, display = request[TrainOptions], request[DisplayOptions]
    incidents = [incident for farm in options.farms for incident in read_labels(farm / LABELS_FILE)]
    write_model(train(incidents, options.seed), options.output)
    show_report(Trained(options.output, incidents).report(), None, display.as_json, display.plain)
    return 0


COMMAND = Command(
    "triage train", AFTER_ALARM, "unsilent triage train farm -o model.npz", (TrainOptions, DisplayOptions), train_model
)
