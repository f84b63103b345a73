"""The HTML file: offline, escaped, complete; opened in a real browser where there is one."""

import errno
import html
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from report.showing import figures, render_html, report_of, write_html
from unsilent.basics.errors import UsageError
from unsilent.render.pages import is_unsilent_page, json_for_script
from unsilent.report.heat import HeatMap
from unsilent.studies.pvf.analysis import MIXED_WIDTHS_REASON
from unsilent.version import __version__

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

    @property
    def attributes(self):
        return [pair for _, attributes in self.tags for pair in attributes.items()]

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


def check_harmless(page):
    """Nothing is fetched, nothing is a handler, and scripts are those that belong here: one, or three with figures."""
    for tag, attributes in page.tags:
        elsewhere = {
            name: value for name, value in attributes.items() if not (name == "href" and value.startswith("#"))
        }
        assert not set(elsewhere) & {"src", "href", "srcset", "action", "xlink:href", "background"}, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert page.count("script") == (3 if ("id", "figure-data") in page.attributes else 1)
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
        "Findings",
        *demo.notes,
        *(row.target for row in demo.rows),
    ):
        assert wanted in page.text, wanted
    assert set(figures(demo)) == {"curves", "heat-0", "outcomes", "due", "lookups"}
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
    cells = figures(corners["bf16"])["heat-0"]["data"][0]
    assert cells["z"] == [[-2.0, None]]
    assert "no trial" in cells["text"][0][1]


def test_an_upper_limit_below_all_lower_limits_is_drawn(result, row):
    rows = [row("a", low=0.004, high=0.02), row("b", estimate=0.0, low=0.0, high=0.0002)]
    assert figures(result(rows))["curves"]["layout"]["xaxis"]["range"][0] <= math.log10(0.0002)


def test_hover_and_labels_hold_no_markup_of_names(hostile):
    text = json.dumps(figures(hostile))
    assert "<script" not in text
    assert "<img" not in text
    assert "<a " not in text
    # hovertemplate would read %{x} in a name
    assert "template" not in text


def test_as_script_cannot_leave_its_element():
    text = json_for_script({"</script><!--": "\u2028&<>"})
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


def test_knows_its_own_files(demo, hostile, tmp_path):
    for name, study in (("a", demo), ("b", hostile)):
        assert is_unsilent_page(write_html(study, tmp_path / name))
    page = (tmp_path / "a").read_text(encoding="utf-8")
    assert f'<meta name="generator" content="Unsilent {__version__}">' in page
    other = tmp_path / "other.html"
    for text in ("", "<!doctype html><p>Unsilent", "x" * 4096 + page, page[:30]):
        other.write_text(text, encoding="utf-8")
        assert not is_unsilent_page(other), text[:40]
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", tmp_path / ("x" * 300), "a\0b"):
        assert not is_unsilent_page(path)


def test_says_how_to_make_it_again(demo):
    assert "this command reproduces these numbers" in render_html(demo)
    call = replace(demo, command="unsilent.pvf(workload, trials=500, seed=7)")
    assert "this Python call reproduces these numbers" in render_html(call)


def test_table_keeps_what_matters_in_sight(result, row):
    rows = [row("a", incorrect_trials=9, method="by hand <b>", bits=77_777), row("b", incorrect_trials=10)]
    text = render_html(result(rows), fit_per_bit=1e-4)
    (table,) = next(section.parts for section in report_of(result(rows)).sections if section.title == "All rows")
    columns = [column.name for column in table.columns]
    assert [h for h in columns if h in ("silent", "detectable", "silent %")] == [
        "silent",
        "detectable",
        "silent %",
    ]
    assert not {"units", "elements", "method"} & set(columns)
    page = Page(text)
    titles = [attributes["title"] for tag, attributes in page.tags if tag == "tr" and "title" in attributes]
    assert (
        titles[0]
        == "1,000 elements, 77,777 bits, 50,000 samples judged, 9 faults with an incorrect output; by hand <b>; "
        "nonfinite 100"
    )


def test_no_fit_for_mixed_widths(result, row):
    page = Page(render_html(result([row("a"), row("b", widest_share_of_bits=0.5)]), fit_per_bit=1e-4))
    assert page.text.count(MIXED_WIDTHS_REASON) == 2  # in the table, and below it


def test_heat_map_of_one_row_has_a_bar_that_fits(demo):
    fields = {0: "mantissa", 15: "sign"}
    one = replace(demo, heat_maps=(HeatMap("float16", ("fc",), (0, 15), fields, ((0.1, 0.0),), ((5, 9),)),))
    drawn = figures(one)["heat-0"]
    assert drawn["data"][0]["colorbar"]["orientation"] == "h"
    assert drawn["layout"]["height"] - drawn["layout"]["margin"]["t"] - drawn["layout"]["margin"]["b"] > 40


def test_every_dtype_has_its_map_on_one_scale(corners, demo):
    drawn = figures(corners["mixed"])
    floats, tokens = drawn["heat-0"], drawn["heat-1"]
    assert [len(f["data"][0]["x"]) for f in (floats, tokens)] == [32, 64]
    assert [a["text"] for a in tokens["layout"]["annotations"]] == ["sign", "value bits"]
    assert "bit 5 (value)" in tokens["data"][0]["text"][0][58]
    assert floats["data"][0]["zmin"] == tokens["data"][0]["zmin"]
    page = Page(render_html(corners["mixed"]))
    counts = [found.total_trials for found in corners["mixed"].heat_maps]
    assert f"Computed from the {sum(counts):,} trials that flipped exactly one bit" in page.text
    assert f"float32 {counts[0]:,} trials" in page.text
    assert f"int64 {counts[1]:,} trials" in page.text
    assert "Each dtype has its own map" not in Page(render_html(demo)).text


def test_a_scale_of_colours_has_two_ends(corners):
    """Where every cell is 0 or 1 the scale still spans a decade."""
    certain = replace(corners["mixed"], heat_maps=corners["mixed"].heat_maps[1:])
    trace = figures(certain)["heat-0"]["data"][0]
    assert trace["zmin"] < trace["zmax"]
    assert trace["colorbar"]["ticktext"] == ["≤ 10 %", "100 %"]
    assert set(trace["z"][0]) == {trace["zmax"]}


def test_faults_of_a_run_are_judged_on_the_one_batch_they_corrupt(result, row):
    rows = [row("a", unit="batch"), row("b", unit="batch")]
    corrupted = {"transient": True, "unit": "batch", "batches": 4}
    text = Page(render_html(result(rows, **corrupted))).text
    assert "A fault is judged on one batch, the one that it corrupts" in text
    assert "many batches" not in text
    assert "which are not" not in text
    sample = Page(render_html(result([row("a")], **{**corrupted, "unit": "sample"}))).text
    assert "One fault is judged on many samples, those of the batch that it corrupts" in sample
    memory = Page(render_html(result(rows, **{**corrupted, "transient": False}))).text
    assert "One fault is judged on many batches, so" in memory
    alone = Page(render_html(result(rows, **{**corrupted, "transient": False, "batches": 1}))).text
    assert "A fault is judged on one batch, so" in alone


def test_counts_that_are_not_weighted_are_called_so(result, row):
    rows = [row("a"), row("model", "model")]
    said = "add up counts and weight percentages by how likely"
    assert said not in Page(render_html(result(rows))).text
    assert said in Page(render_html(result([*rows, row("b")]))).text


def test_heavy_packages_are_imported_late():
    code = (
        "import sys, unsilent.render.report_page, unsilent.render.report_terminal, unsilent.render.report_json;"
        "print([m for m in ('plotly', 'jinja2', 'rich', 'numpy', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def opened(path, profile, *flags):
    """The page after its scripts ran, and what the browser's console said."""
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("name", ["demo", "hostile", "mixed", "deep", "no event", "nothing"])
@pytest.mark.slow
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
    links = [link for link in links if not link.startswith("#")]  # of the table of contents
    assert all(link.startswith("data:image/png;base64,") for link in links)  # the heat map is an image
    assert len(links) == sum(figure.startswith("heat") for figure in drawn)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.slow
def test_browser_shows_the_whole_legend(width, corners, tmp_path):
    text = render_html(corners["mixed"])
    asks = """<script>
        document.body.dataset.seen = JSON.stringify(
          Array.from(document.querySelectorAll(".plot")).filter(function (p) { return /heat/.test(p.id); })
            .map(function (place) {
              var room = place.querySelector(".main-svg").getBoundingClientRect();
              var field = place.querySelector(".annotation-text").getBoundingClientRect();
              return Array.from(place.querySelectorAll(".gtitle, .cbaxis text")).map(function (text) {
                var box = text.getBoundingClientRect();
                return [text.textContent, box.left - room.left, room.right - box.right,
                  box.top - room.top, field.top - box.bottom];
              });
            }));
    </script></body>"""
    path = tmp_path / "open.html"
    # Without its policy, which would refuse the script that asks.
    path.write_text(re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", asks), encoding="utf-8")
    found, console = opened(path, tmp_path / "profile", f"--window-size={width},2000")
    assert console == []
    maps = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', found)[1]))
    assert len(maps) == 2
    for seen in maps:
        assert "P(incorrect)" in [text for text, *_ in seen]
        assert all(room >= 0 for _, *rooms in seen for room in rooms), seen
        below = {text: place for text, *_, place in seen}
        assert below.pop("P(incorrect)") > max(below.values()) + 10, seen  # in a line of its own


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.slow
def test_table_sorts_and_filters(demo, tmp_path):
    text = render_html(demo)
    clicks = """<script>
        var heads = Array.from(document.querySelectorAll("table.sortable th button"));
        heads.find(function (b) { return b.textContent === "PVF %"; }).click();
        var filter = document.querySelector(".filter input");
        filter.value = "top_mlp.";
        filter.dispatchEvent(new Event("input"));
    </script></body>"""
    path = tmp_path / "open.html"
    # Without its policy, which would refuse the script that clicks.
    path.write_text(re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", clicks), encoding="utf-8")
    found, console = opened(path, tmp_path / "profile")
    assert console == []
    body = found[found.index('class="report sortable long"') :]
    rows = re.findall(r"<tr([^>]*)><td[^>]*>([^<]*)</td>", body[: body.index("</table>")])
    shown_rows = [name for attributes, name in rows if "hidden" not in attributes]
    layers = sorted((r for r in demo.rows if r.target.startswith("top_mlp.")), key=lambda r: -r.estimate)
    assert shown_rows == [r.target for r in layers]
    best = max(demo.rows, key=lambda r: r.estimate)
    assert rows[0][1] == best.target
