"""The HTML file: offline, escaped, complete; opened in a real browser where there is one."""

import errno
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from unsilent.errors import UsageError
from unsilent.report.html import as_script, figures, render_html, write_html

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--v=0", "--dump-dom", "--virtual-time-budget=5000"),
]


class Page(html.parser.HTMLParser):
    """Tags with attributes, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.skip, self.open = [], "", 0, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.skip += tag in ("script", "style")

    def handle_endtag(self, tag):
        self.skip -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.skip:
            self.text += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


def check_harmless(page):
    """Nothing is fetched, nothing is a handler, and scripts are the three that belong here."""
    for tag, attributes in page.tags:
        assert not set(attributes) & {"src", "href", "srcset", "action", "xlink:href", "background"}, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert page.count("script") == 3
    assert not page.count("img")
    assert not page.count("iframe")


def test_hostile_names_are_only_text(hostile, hostile_names):
    text = render_html(hostile, fit_per_bit=1e-4)
    page = Page(text)
    check_harmless(page)
    for name in hostile_names:
        visible = name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
        assert visible in page.text
        if "<" in name:
            assert name not in text


def test_everything_is_there(demo):
    page = Page(render_html(demo, fit_per_bit=1e-4))
    check_harmless(page)
    for wanted in (
        "parameter vulnerability factor",
        "arXiv 2405.01741",
        "not the program vulnerability factor",
        demo.command,
        demo.campaign,
        "per-element",
        "torch 2.13.0",
        "AUC 0.7931",
        "Hot and cold embedding rows",
        "FIT estimate",
        "What limits these numbers",
        *demo.notes,
        *(row.target for row in demo.rows),
    ):
        assert wanted in page.text, wanted
    assert set(figures(demo)) == {"curves", "heat", "outcomes", "due", "lookups"}
    assert "--fit-per-bit" in Page(render_html(demo)).text


def test_corners_render(corners):
    for name, study in corners.items():
        page = Page(render_html(study, fit_per_bit=1e-4))
        check_harmless(page)
        assert page.count("h1") == 1, name


def test_figures_are_valid_plotly(demo, hostile, corners):
    import plotly.graph_objects as go

    for study in (demo, hostile, *corners.values()):
        for figure in figures(study).values():
            go.Figure(json.loads(json.dumps(figure, allow_nan=False)))


def test_zero_and_no_data_stay_apart(corners, demo):
    drawn = figures(corners["no event"])["curves"]["data"]
    limits = [t for t in drawn if "open" in str(t["marker"]["symbol"]) and t.get("x") not in ([None], [])]
    assert [t["x"] for t in limits] == [[0.00383], [0.00383]]
    cells = figures(corners["bf16"])["heat"]["data"][0]
    assert cells["z"] == [[-2.0, None]]
    assert "no trial" in cells["text"][0][1]


def test_hover_and_labels_hold_no_markup_of_names(hostile):
    text = json.dumps(figures(hostile))
    assert "<script" not in text
    assert "<img" not in text
    assert "<a " not in text
    # hovertemplate would read %{x} in a name
    assert "template" not in text


def test_as_script_cannot_leave_its_element():
    text = as_script({"</script><!--": "\u2028&<>"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script><!--": "\u2028&<>"}


def test_policy_allows_two_scripts_and_no_network(demo):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', render_html(demo)).group(1)
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    assert "http" not in policy
    assert "unsafe-eval" not in policy


def test_write_replaces_in_one_step(demo, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_html(demo, path) == path
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["report.html"]


def test_full_disk_keeps_the_old_file(demo, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left") as caught:
        write_html(demo, path)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_unwritable_places_are_one_line(demo, tmp_path):
    for path in (tmp_path, tmp_path / "no" / "such" / "report.html", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot write the report"):
            write_html(demo, path)
    assert os.listdir(tmp_path) == []


def test_heavy_packages_are_imported_late():
    code = (
        "import sys, unsilent.report.html, unsilent.report.terminal, unsilent.report.jsonout;"
        "print([m for m in ('plotly', 'jinja2', 'rich', 'numpy', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def opened(path, profile):
    """The page after its scripts ran, and what the browser's console said."""
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("name", ["demo", "hostile", "deep", "no event", "nothing"])
def test_browser_draws_it_without_a_word(name, demo, hostile, corners, tmp_path):
    study = {"demo": demo, "hostile": hostile, **corners}[name]
    path = write_html(study, tmp_path / "report.html", fit_per_bit=1e-4)
    text, console = opened(path, tmp_path / "profile")
    assert console == []
    drawn = figures(study)
    for figure in drawn:
        start = text.index(f'id="figure-{figure}"')
        assert 'class="main-svg"' in text[start : start + 3000], figure
    page = Page(text)
    assert not page.count("img")
    links = [value for _, a in page.tags for name, value in a.items() if name in ("href", "xlink:href", "src")]
    assert all(link.startswith("data:image/png;base64,") for link in links)  # the heat map is an image
    assert len(links) == ("heat" in drawn)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_table_sorts_and_filters(demo, tmp_path):
    text = render_html(demo)
    clicks = """<script>
        var heads = Array.from(document.querySelectorAll("#all-rows th button"));
        heads.find(function (b) { return b.textContent === "PVF %"; }).click();
        var filter = document.getElementById("filter");
        filter.value = "top_mlp.";
        filter.dispatchEvent(new Event("input"));
    </script></body>"""
    path = tmp_path / "open.html"
    # Without its policy, which would refuse the script that clicks.
    path.write_text(re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", clicks), encoding="utf-8")
    found, console = opened(path, tmp_path / "profile")
    assert console == []
    body = found[found.index('id="all-rows"') :]
    rows = re.findall(r"<tr([^>]*)><td>([^<]*)</td>", body[: body.index("</table>")])
    shown_rows = [name for attributes, name in rows if "hidden" not in attributes]
    layers = sorted((r for r in demo.rows if r.target.startswith("top_mlp.")), key=lambda r: -r.estimate)
    assert shown_rows == [r.target for r in layers]
    best = max(demo.rows, key=lambda r: r.estimate)
    assert rows[0][1] == best.target
