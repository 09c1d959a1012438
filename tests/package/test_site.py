import functools
import html
import os
import re
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

import kerasdist
from browser import chromium, need, need_browser, served
from places import ROOT
from waiting import wait_until
from workers import ended

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
_PICTURE = """
const image = document.querySelector('article img');
return image && image.complete && image.naturalWidth > 0;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site of the present pages: that of `make docs`, or a new one."""
    made = ROOT / "site"
    if (made / "sitemap.xml").exists():
        built = (made / "sitemap.xml").stat().st_mtime
        folders = ("docs", "examples", "kerasdist", "callbacks", "benchmarks")
        places = [*ROOT.glob("*.md"), ROOT / "mkdocs.yml"]
        for folder in folders:
            found = (ROOT / folder).rglob("*.*")
            places += [p for p in found if not re.search("__pycache__|[.]so$", str(p))]
        if all(place.stat().st_mtime < built for place in places):
            return made
    missing = None if MKDOCS.is_file() else "there is no mkdocs in .venv-docs"
    need(missing, "make docs")
    folder = tmp_path_factory.mktemp("site") / "site"
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = (MKDOCS, "build", "--strict", "--site-dir", folder)
    done = ended(*build, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_link_to_files_and_show_arguments(site):
    page = (site / "strategies.html").read_text(encoding="utf-8")
    assert 'href="repository/examples/custom_loop.py.html"' in page
    assert (site / "repository/examples/custom_loop.py.html").is_file()
    for page in site.rglob("*.html"):
        assert 'href="../kerasdist/' not in page.read_text(encoding="utf-8")
    page = (site / "index.html").read_text(encoding="utf-8")
    assert f"<title>kerasdist {kerasdist.__version__}" in page
    page = html.unescape((site / "api.html").read_text(encoding="utf-8"))
    assert 'id="kerasdist.callbacks.ScaleLearningRate.base_learning_rate"' in page
    source = (ROOT / "kerasdist/strategies/ring.py").read_text(encoding="utf-8")
    described, *_ = re.findall(r"^ {8}devices: ([\w' ]+)", source, re.MULTILINE)
    assert described in page


def test_the_start_page_in_a_browser(site, tmp_path):
    """Wide and narrow it fits, shows its picture, and needs nothing from outside."""
    need_browser()
    pages = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with served(pages) as address, chromium(tmp_path) as driver:
        for width in (1280, 380):
            size = {"width": width, "height": 900, "mobile": width < 600}
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1}
            )
            driver.get(f"{address}/index.html")
            wait_until(lambda: driver.execute_script(_PICTURE), "its picture", 90)
            shown, whole = driver.execute_script(
                "const page = document.scrollingElement;"
                "return [page.clientWidth, page.scrollWidth];"
            )
            assert width - 20 <= shown <= width  # but for a scroll bar
            assert whole <= shown
            loaded = driver.execute_script(
                "return performance.getEntriesByType('resource').map(e => e.name);"
            )
            assert loaded
            assert [url for url in loaded if not url.startswith(address)] == []
        refused = driver.get_log("browser")
    assert [each for each in refused if each["level"] == "SEVERE"] == []
