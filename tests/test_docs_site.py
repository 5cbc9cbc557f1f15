"""The documentation site builds without a complaint, is complete, and needs nothing from elsewhere to be read."""

import fcntl
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kairostep.registry import samplers

ROOT = Path(__file__).parents[1]
PACKAGES = ("timesteps", "diffusion", "evaluation", "training", "generation", "data", "networks", "experiments")
PACKAGES += ("analysis", "reports", "runs")
DESKTOP, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the folder of the site, built once for all processes of the tests, as `make docs` does."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python", "matplotlib"):
        pytest.importorskip(module, reason=f"the site needs {module}: pip install 'kairostep[docs]'")
    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build_site(folder)
    return folder


def build_site(folder: Path) -> None:
    """Build the site; a dead link, page or anchor is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Resources(HTMLParser):
    """Collects what a browser loads for a page by itself; links that a reader may follow are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an address."""
        given = dict(attrs)
        address = given.get("src") or (given.get("href") if tag == "link" else None)
        if address:
            self.addresses.append(address)


def test_every_page_is_there(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    results = {path.relative_to(ROOT).parent / "index.html" for path in ROOT.glob("results/*/README.md")}
    missing = sorted(str(page) for page in pages | results if not (site / page).is_file())
    assert missing == []
    assert len(results) > 10
    assert not (site / "hooks").exists()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        resources = Resources()
        resources.feed(page.read_text())
        elsewhere = [address for address in resources.addresses if re.match(r"(https?:)?//", address)]
        assert elsewhere == [], page.name
        local = [address for address in resources.addresses if not address.startswith(("data:", "#"))]
        assert local
        if page.name != "404.html":  # served from anywhere, it has addresses from the root
            assert [name for name in local if not (page.parent / re.split(r"[?#]", name)[0]).exists()] == [], page.name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str, site: Path) -> None:
    text = (site / "reference" / f"{package}.html").read_text()
    exported = re.findall(r"import \w+ as (\w+)", (ROOT / "src" / "kairostep" / package / "__init__.py").read_text())
    assert exported
    assert [name for name in exported if f'id="kairostep.{package}.{name}"' not in text] == []


def test_every_integration_is_in_the_reference_and_has_a_section(site: Path) -> None:
    modules = {path.stem for path in (ROOT / "src" / "kairostep" / "integrations").glob("*.py")} - {"__init__"}
    text = (site / "reference" / "integrations.html").read_text()
    assert [name for name in sorted(modules) if f"kairostep.integrations.{name}" not in text] == []
    page = (ROOT / "docs" / "integrations.md").read_text()
    shared = {"foreign_loop", "noise_levels"}
    assert [name for name in sorted(modules - shared) if f"kairostep.integrations.{name}" not in page] == []


def test_every_name_of_the_library_itself_is_in_the_reference(site: Path) -> None:
    source = (ROOT / "src" / "kairostep" / "__init__.py").read_text()
    text = "".join((site / "reference" / f"{name}.html").read_text() for name in ("index", "timesteps", "diffusion"))
    names = [name for name in re.findall(r"import \w+ as (\w+)", source) if name not in ("evaluation", "__version__")]
    assert [name for name in names if not re.search(rf'id="kairostep\.(\w+\.)?{name}"', text)] == []


def test_arguments_of_docstrings_are_tables(site: Path) -> None:
    text = (site / "reference" / "timesteps.html").read_text()
    assert re.search(r"<tr[^>]*>\s*<td>\s*<code>loss_weight</code>\s*</td>", text)


@pytest.mark.parametrize("name", list(samplers))
def test_the_page_of_a_sampler_shows_its_density(site: Path, name: str) -> None:
    text = (site / "methods" / f"{name}.html").read_text()
    pictures = re.findall(r'<img alt="([^"]+)" class="density" src="([^"#]+)#only-(\w+)"', text)
    assert [theme for _, _, theme in pictures] == ["light", "dark"]
    for alt, address, _ in pictures:
        assert "highest at t = " in alt or "flat" in alt
        assert (site / "methods" / address).read_text().count("<path") > 3


def test_results_are_on_the_site_with_their_logs(site: Path) -> None:
    page = (site / "results" / "sampler_cost" / "index.html").read_text()
    assert 'href="cpu_2.log"' in page
    assert (site / "results" / "sampler_cost" / "cpu_2.log").is_file()
    assert 'href="results/exact_mixture/index.html"' in (site / "choosing.html").read_text()
    assert 'href="reference/timesteps.html"' in (site / "method.html").read_text()  # was a source file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sys.path.append(str(ROOT / "tests" / "reports"))
    with importlib.import_module("browser").open_browser() as opened:
        yield opened


CLIPPED = """[...document.querySelectorAll('pre > code')].filter(code => code.checkVisibility()
    && code.scrollWidth > code.clientWidth + 1).map(code => code.innerText)"""
BROKEN = """[...document.querySelectorAll('td code, td code span')].filter(code => code.checkVisibility()
    && /^\\S+$/.test(code.innerText) && code.getClientRects().length > 1).map(code => code.innerText)"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_open_from_the_disk_without_a_complaint(site: Path, browser: Any, size: dict[str, int]) -> None:
    page = browser.new_context(viewport=size).new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    for name in (
        "index",
        "choosing",
        "methods/adaptive",
        "integrations",
        "reference/timesteps",
        "results/index",
        "several_gpus",
    ):
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector("h1")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider == 0, f"{name} is wider than the screen"
        assert page.evaluate(CLIPPED) == [], f"code of {name} is clipped"
        assert page.evaluate(BROKEN) == [], f"identifiers in tables of {name} are broken"
    assert complaints == []
    page.context.close()


SEARCHES = {"RootLoss": "methods/root_loss.html"} | dict.fromkeys(
    ("multi-GPU", "DDP", "FSDP", "DeepSpeed", "SLURM", "torchrun"), "several_gpus.html"
)


@pytest.mark.parametrize(("words", "address"), SEARCHES.items())
def test_search_finds_a_page_from_the_disk(words: str, address: str, site: Path, browser: Any) -> None:
    page = browser.new_context(viewport=DESKTOP).new_page()
    page.goto((site / "methods" / "speed.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type(words)
    for _ in range(60):
        page.keyboard.type("s")  # keys pressed before the page's scripts started were not heard: press some more
        page.keyboard.press("Backspace")
        page.wait_for_timeout(1000)
        if page.query_selector(".md-search-result__link"):
            break
    found = [link.get_attribute("href") for link in page.query_selector_all(".md-search-result__link")]
    assert any(address in link for link in found), found
    page.context.close()
