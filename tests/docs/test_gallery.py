"""The gallery is the page that its tool writes, with a file for each figure, drawn of figures that there are."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from unsilent.basics.options import options_of
from unsilent.cli.table import find_command_name, load_command

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("gallery_page", ROOT / "tools" / "gallery_page.py")
gallery_page = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gallery_page)
FIGURES = [(campaign, name) for campaign in gallery_page.CAMPAIGNS for name in campaign.figures]


def test_the_page_is_that_of_the_tool():
    assert (ROOT / "docs" / "gallery.md").read_text("utf-8") == gallery_page.page(), "run tools/gallery_page.py"


def test_every_figure_has_a_file_and_no_file_is_left_over():
    files = {path.name for path in (ROOT / "docs" / "images" / "gallery").iterdir()}
    assert files == {gallery_page.file_name(*figure) for figure in FIGURES}


@pytest.mark.parametrize("campaign", gallery_page.CAMPAIGNS, ids=lambda campaign: campaign.store)
def test_its_commands_have_options_that_there_are(campaign):
    for command in (campaign.command, *(gallery_page.figure_command(campaign, name) for name in campaign.figures)):
        words = shlex.split(command)[1:]
        known = options_of(*load_command(find_command_name(words)).all_option_classes())
        flags = {one.flag for one in known.values()} | {"-o"}
        assert {word for word in words if word.startswith("-")} <= flags
