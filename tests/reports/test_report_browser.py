"""The page in a real browser: everything is drawn, answers, and complains about nothing."""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import OpenPage
from made_runs import add_evaluations, add_grids, make_run
from PIL import Image

from kairostep.reports import Axis, Curve, Figure, Heat, Panel, write_figures, write_report

BAD = "<img src=x onerror=alert(1)>"
DRAWN = """[...document.querySelectorAll('.plot')].map(plot => {
  const layer = plot.querySelector('.scatterlayer path, .heatmaplayer image, .barlayer path, .scatterlayer .point');
  const box = plot.getBoundingClientRect(), main = plot.querySelector('.main-svg').getBoundingClientRect();
  const fits = main.width <= box.width + 1 && main.height <= box.height + 1;
  return {label: plot.getAttribute('aria-label'), drawn: !!layer, fits};
})"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    made = [make_run(place / f"{name}-{seed}", name, seed) for name in ("uniform", "adaptive") for seed in (0, 1)]
    made.append(make_run(place / "selected", "adaptive", options={"num_selected": 1}))
    made.append(make_run(place / "min_snr", weighting="min_snr", reach=700))
    made.append(make_run(place / "empty", "laplace", reach=0))
    made.append(make_run(place / BAD, BAD, options={"x": BAD}))
    for directory in made[:5]:
        add_grids(directory, [500, 1000])
        add_evaluations(directory, 500, 1.5)
        add_evaluations(directory, 1000)
    return made


@pytest.fixture(scope="module")
def report(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def page_of_all(browser: Any, report: Path) -> Iterator[OpenPage]:
    page = OpenPage(browser, report)
    yield page
    page.close()


@pytest.fixture
def opened(page_of_all: OpenPage) -> Iterator[OpenPage]:
    """Lend the page of all runs; in the end it has complained about nothing and asked nobody for anything."""
    page_of_all.page.click("#everything")
    yield page_of_all
    assert page_of_all.complaints == []
    assert [url for url in page_of_all.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def lines_of(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def shown_curves(page: OpenPage, figure: int = 0) -> list[str]:
    names = f"[...document.querySelectorAll('#figure-{figure} .plot')][0].data.filter(t => t.visible).map(t => t.name)"
    found: list[str] = page.ask(names)
    return found


def test_every_figure_is_drawn_within_its_card(opened: OpenPage) -> None:
    plots = opened.ask(DRAWN)
    assert len(plots) > 30
    assert [plot["label"] for plot in plots if not plot["drawn"]] == []
    assert [plot["label"] for plot in plots if not plot["fits"]] == []
    assert opened.ask("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}])
def test_dark_and_on_a_phone_too(options: dict[str, Any], browser: Any, report: Path) -> None:
    page = OpenPage(browser, report, **options)
    assert [plot["label"] for plot in page.ask(DRAWN) if not (plot["drawn"] and plot["fits"])] == []
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    dark = page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
    assert dark == ("color_scheme" in options)
    assert page.complaints == []
    page.close()


@pytest.mark.parametrize("width", [1400, 390])
def test_the_results_need_no_scrolling_sideways(width: int, browser: Any, report: Path) -> None:
    page = OpenPage(browser, report, viewport={"width": width, "height": 900})
    assert page.ask("(p => p.scrollWidth <= p.clientWidth)(document.querySelector('#results .scroll'))")
    cells = "[...document.querySelectorAll('#results-table tr:not(.seed) td:not(.missing)')]"
    outside = f"{cells}.filter(cell => cell.getBoundingClientRect().right > innerWidth || !cell.offsetHeight).length"
    assert page.ask(f"{cells}.length") > 30
    assert page.ask(outside) == 0
    named = "getComputedStyle(document.querySelector('#results-table td'), '::before').content"
    assert (page.ask(named) == '"held-out loss"') == (width == 390)  # where there is no heading above it
    tops = page.ask("['samples', 'results', 'figure-0'].map(id => document.getElementById(id).offsetTop)")
    assert tops.index(max(tops)) == 2
    assert (tops[0] < tops[1]) == (width == 390)
    page.close()


def test_settings_are_in_tooltips(opened: OpenPage) -> None:
    told = opened.page.locator("#results-table tr.seed th").first.get_attribute("title")
    assert "sampler: uniform" in told
    assert "learning_rate: 0.0002" in told
    for place in ("nav .chip", "#samples figcaption", "#configurations summary"):
        assert "uniform" in opened.page.locator(place).first.get_attribute("title")
    caption = opened.page.locator("#figure-0 ~ .figure figcaption", has_text="adaptive-0").first
    assert "num_selected 3" in caption.get_attribute("title")


def test_the_theme_can_be_switched(opened: OpenPage) -> None:
    tick = "getComputedStyle(document.querySelector('.xtick text')).fill"
    before = opened.ask(tick)
    opened.page.click("#theme")
    opened.wait()
    assert opened.ask("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
    assert opened.ask(tick) != before
    opened.page.click("#theme")
    opened.wait()
    assert opened.ask(tick) == before


def test_runs_are_hidden_and_shown_in_all_figures(opened: OpenPage) -> None:
    everything = shown_curves(opened)
    assert "uniform-0" in everything
    opened.page.click("nav .arm:first-child .chip:not(.seed)")
    assert [name for name in everything if name.startswith("uniform-")] == [
        "uniform-0",
        "uniform-1",
    ]
    assert shown_curves(opened) == [name for name in everything if not name.startswith("uniform-")]
    panels = ".panel:not([hidden]) figcaption"
    assert "uniform-0" not in opened.page.locator(panels).all_inner_texts()
    assert opened.page.locator(".grids figure:visible").count() == 3
    opened.page.click("nav .arm:first-child .chip.seed >> nth=1")
    assert "uniform-1" in shown_curves(opened)
    assert "uniform-0" not in shown_curves(opened)
    opened.page.click("#everything")
    assert shown_curves(opened) == everything
    assert opened.page.locator(".grids figure:visible").count() == 5


def test_hovering_tells_the_numbers(opened: OpenPage, runs: list[Path]) -> None:
    plot = opened.page.locator("#figure-0 .plot").nth(1)
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").first.bounding_box()
    x, y = opened.ask(
        "(() => { const p = document.querySelectorAll('#figure-0 .plot')[1], l = p._fullLayout, t = p.data[0];"
        "return [l.xaxis.c2p(t.x[4]), l.yaxis.c2p(t.y[4])] })()"
    )
    opened.page.mouse.move(box["x"] + x, box["y"] + y)
    label = plot.locator(".hoverlayer .hovertext")
    label.first.wait_for(timeout=5000)
    told = " ".join(label.all_text_contents())
    losses = [json.loads(line).get("held_out", {}).get("loss") for run in runs for line in lines_of(run)]
    assert "steps: 500" in told
    assert any(f"held-out loss: {loss:.6g}" in told for loss in losses if loss is not None), told
    assert "±" in told


def test_grids_go_back_in_training(opened: OpenPage) -> None:
    first = opened.page.locator(".grids figure").first
    assert first.locator(".step").inner_text() == "step 1,000"
    opened.page.locator("#grid").fill("0")
    assert first.locator(".step").inner_text() == "step 500"
    assert first.locator("img:visible").count() == 1


def test_every_figure_is_exported_as_csv_and_png(opened: OpenPage, tmp_path: Path) -> None:
    titles = [figure["title"] for figure in opened.ask("page.data.figures")]
    for i, title in enumerate(titles):
        with opened.page.expect_download() as waiting:
            opened.page.click(f"[data-csv='{i}']")
        rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
        assert len(rows) > 2, title
        assert waiting.value.suggested_filename.endswith(".csv")
        opened.page.wait_for_timeout(120)  # Chromium lets a page save ten files per second
    for i in (0, len(titles) - 1, titles.index("Where the draws go")):
        with opened.page.expect_download() as waiting:
            opened.page.click(f"[data-png='{i}']")
        with Image.open(waiting.value.path()) as image:
            assert image.format == "PNG"
            assert image.width > 1000
            assert image.convert("L").getextrema() != (255, 255)
            assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


def test_exported_numbers_are_those_of_the_files(opened: OpenPage, runs: list[Path]) -> None:
    with opened.page.expect_download() as waiting:
        opened.page.click("[data-csv='0']")
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
    found = [row for row in rows if row["name"] == "uniform-1" and row["x_title"] == "steps"]
    lines = [json.loads(text) for text in lines_of(runs[1])]
    expected = [line for line in lines if "held_out" in line]
    assert [float(row["x"]) for row in found] == [line["step"] for line in expected]
    assert [float(row["y"]) for row in found] == [line["held_out"]["loss"] for line in expected]
    with opened.page.expect_download() as waiting:
        opened.page.click("[data-table]")
    table = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert table[0][:2] == ["run", "held-out loss"]
    assert table[1][0] == "uniform (baseline, mean of 2)"
    assert table[2][0] == "uniform-0"
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", table[2][1])


def test_it_prints_on_white(browser: Any, report: Path, tmp_path: Path) -> None:
    page = OpenPage(browser, report, color_scheme="dark")
    page.page.emulate_media(media="print")
    assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert [plot["label"] for plot in page.ask(DRAWN) if not (plot["drawn"] and plot["fits"])] == []
    assert page.page.locator(".actions:visible").count() == 0
    assert page.complaints == []
    page.close()


def test_figures_of_plain_data_open_too(browser: Any, tmp_path: Path) -> None:
    curves = [Curve("one", [0.0, 1.0], [1.0, 30.0]), Curve(BAD, ["a", "b"], [2, 3], style="bars")]
    heat = Heat(BAD, [1, 2], [0.5], [[1.0, None]])
    panels = [Panel(Axis("t"), Axis("loss", log=True), curves), Panel(Axis("step"), Axis("t"), heat=heat)]
    page = OpenPage(browser, write_figures(BAD, BAD, [Figure(BAD, BAD, panels, BAD)], tmp_path / "page.html"))
    assert page.page.locator("h1").inner_text() == BAD
    assert [plot["drawn"] for plot in page.ask(DRAWN)] == [True, True]
    page.page.click(".legend button >> nth=0")
    assert shown_curves(page) == [BAD.replace("<", "&lt;").replace(">", "&gt;")]
    assert page.complaints == []
    page.close()
