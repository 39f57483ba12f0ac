"""The pages in a real browser, as wide as a desk's screen and as a phone's."""

import html
import json
import re
import shutil
import subprocess

import pytest

from run_folders import comparison
from symexplin.lab.report.pages import report_comparison

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--enable-logging=stderr", "--allow-file-access-from-files"),
)
# A window cannot be as narrow as a phone, a frame can. What it finds is written where --dump-dom shows it.
WRAPPER = """<!doctype html><title>wrapper</title>
<iframe src="page.html" style="border: 0; width: {width}px; height: 900px"></iframe>
<pre id="found"></pre>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentWindow, root = page.document.documentElement;
  const size = node => {{ const box = node.getBoundingClientRect(); return [box.width, box.height, box.right]; }};
  document.getElementById("found").textContent = JSON.stringify({{
    inner: page.innerWidth, scroll: root.scrollWidth, height: root.scrollHeight, words: page.document.body.innerText,
    charts: [...page.document.querySelectorAll("svg")].map(size),
    texts: [...page.document.querySelectorAll("svg text")].map(node => size(node)[1]),
    labels: [...page.document.querySelectorAll("svg")].map(svg => Math.max(...[...svg.querySelectorAll("text")].map(
      node => size(node)[2])) - size(svg)[2]),
    hidden: [...page.document.querySelectorAll(".scroll")].map(node => node.scrollWidth - node.clientWidth),
    errors: page.performance.getEntriesByType("resource").map(entry => entry.name),
  }});
}};
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    return report_comparison(comparison(folder, (0, 1, 2), 2.4, ("SEL", 0.01, 1), unit="nats per token"))


def rendered(page, folder, width):
    """What the browser finds on the page at a width in pixels."""
    shutil.copy(page, folder / "page.html")
    (folder / "wrapper.html").write_text(WRAPPER.format(width=width))
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (folder / "wrapper.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1])), console


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_fits_and_shows_everything(page, tmp_path, width):
    found, console = rendered(page, tmp_path, width)
    assert console == []
    assert found["inner"] == width
    assert found["scroll"] <= width
    assert found["height"] > 1500
    assert found["errors"] == []  # nothing was fetched
    for text in ("Where it comes from", "nats per token"):
        assert text in found["words"]
    assert len(found["charts"]) == page.read_text().count("<svg") > 2
    for wide, high, right in found["charts"]:
        assert wide > 200
        assert high > 150
        assert right <= width
    assert min(found["texts"]) > 8  # pixels: to be read on a phone
    assert max(found["labels"]) <= 2  # no legend is cut off
    assert width < 1000 or max(found["hidden"]) <= 0  # no column either; on a phone a shadow says so


def test_a_page_that_is_too_wide_is_found(tmp_path):
    """The check itself: it would see a page that overflows, and an error on the console."""
    page = tmp_path / "wide.html"
    page.write_text("<!doctype html><div style='width: 600px'>x</div><script>console.error('seen')</script>")
    found, console = rendered(page, tmp_path, 390)
    assert found["scroll"] == 608  # and the margin of the body
    assert any("seen" in line for line in console)
