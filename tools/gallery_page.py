"""Draws the figures of the gallery, docs/gallery.md, and writes the page: small campaigns, and figures of their stores.

``make gallery`` runs it. The commands are those that the page shows.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Campaign(NamedTuple):
    """A campaign of the gallery: its heading, its command, and figures by name with what they show."""

    title: str
    command: str
    store: str
    figures: dict[str, str]


CAMPAIGNS = (
    Campaign(
        "Corrupted parameters",
        "unsilent pvf digits-cnn --flips 1,8,64 --trials 300 --store pvf.sqlite --quiet",
        "pvf.sqlite",
        {
            "curves": "How often an answer is wrong, by component and number of flipped bits; with one number of flips, a dot "
            "for each component. A hollow triangle is the upper limit where no answer was wrong.",
            "heat-0": "The same by layer and bit position. Grey: no trial.",
            "outcomes": "How trials ended.",
            "due": "Which share of wrong answers is silent.",
        },
    ),
    Campaign(
        "Memories of an accelerator",
        "unsilent pvf digits-cnn --accelerator tpu-v4 --trials 40 --store memories.sqlite --quiet",
        "memories.sqlite",
        {
            "fit": "Silent and detectable failures in 10⁹ device hours by memory and component, with confidence limits. "
            "Figures of other campaigns in parameters have it with `--fit-per-bit RATE`.",
        },
    ),
    Campaign(
        "Faults in trainings",
        "unsilent training train-resnet --steps 30 --trials 60 --store training.sqlite --quiet",
        "training.sqlite",
        {
            "classes": "How faulty trainings ended, with confidence limits.",
            "group-0": "Shares of trainings that differ, are harmed, or hold harm that shows later, by group.",
            "conditions": "Largest values in the optimizer's history and in moving statistics after the fault, by outcome.",
        },
    ),
    Campaign(
        "Differences between fault-free runs",
        "unsilent noise train-resnet --steps 30 --switch init --replicas 6 --store noise.sqlite --quiet",
        "noise.sqlite",
        {"accuracy": "Accuracy of each run.", "churn": "Share of predictions in which two runs differ."},
    ),
)
HEAD = """# Gallery

Figures as `unsilent report STORE --figure NAME` writes them, in the width of a column or of a page of a paper.
[Make a figure for a paper](howto/show-result.md#make-a-figure-or-a-table-for-a-paper) says how to make
them of a store of your own. The campaigns here are small; `make gallery` runs them and draws this page.
"""


def file_name(campaign: Campaign, figure: str) -> str:
    """The file of a figure, by its campaign."""
    return f"{campaign.store.removesuffix('.sqlite')}-{figure}.svg"


def figure_command(campaign: Campaign, figure: str) -> str:
    """The command that writes a figure."""
    return f"unsilent report {campaign.store} --figure {figure} -o {file_name(campaign, figure)}"


def page() -> str:
    """The page."""
    lines = [HEAD]
    for campaign in CAMPAIGNS:
        lines += [f"## {campaign.title}", "", "<!-- not run: takes more than a minute -->", "```console"]
        lines += [
            f"$ {campaign.command}",
            *(f"$ {figure_command(campaign, name)}" for name in campaign.figures),
            "```",
            "",
        ]
        for name, text in campaign.figures.items():
            lines += [f"`{name}`: {text}", "", f"![{text}](images/gallery/{file_name(campaign, name)})", ""]
    return "\n".join(lines).rstrip() + "\n"


def draw(images: Path) -> None:
    """Run the campaigns in a folder of their own, and write their figures to ``images``."""
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for campaign in CAMPAIGNS:
            _run(campaign.command, Path(folder))
            for name in campaign.figures:
                _run(figure_command(campaign, name), Path(folder))
                shutil.copy(Path(folder) / file_name(campaign, name), images)


def _run(command: str, folder: Path) -> None:
    words = shlex.split(command)[1:]
    subprocess.run([sys.executable, "-m", "unsilent", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    draw(docs / "images" / "gallery")
    (docs / "gallery.md").write_text(page(), encoding="utf-8")
