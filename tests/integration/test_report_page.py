"""The HTML report in a real browser: drawn, without errors, at phone and desktop width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.cli.main import main

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium here: apt-get install -y chromium"
)

PROBE = """<!doctype html><body style="margin: 0"><script>
const page = PAGE, frame = document.createElement("iframe");
frame.style = "width: WIDTHpx; height: 900px; border: 0";
frame.onload = () => {
  const inner = frame.contentDocument, width = inner.documentElement.clientWidth;
  const shown = node => !node.closest(".scroll") || node.matches(".scroll");
  const result = {
    width,
    scrolls: inner.documentElement.scrollWidth,
    beyond: [...inner.querySelectorAll("body *")].filter(
      node => shown(node) && node.getBoundingClientRect().right > width + 1
    ).map(node => node.tagName + " " + node.textContent.slice(0, 40)),
    background: frame.contentWindow.getComputedStyle(inner.body).backgroundColor,
    pictures: Object.fromEntries([...inner.querySelectorAll("figure")].map(
      figure => [figure.id, figure.querySelectorAll("rect, path").length]
    )),
    text: inner.body.innerText,
  };
  const node = document.createElement("pre");
  node.id = "probe";
  node.textContent = JSON.stringify(result);
  document.body.append(node);
};
frame.srcdoc = page;
document.body.append(frame);
</script>"""
"""In a frame, because a browser's own window cannot be as narrow as a phone's."""


@dataclass(frozen=True)
class Shown:
    """What the browser made of a page."""

    console: list[str]
    probe: dict[str, Any]


def show(page: Path, profile: Path, width: int, *flags: str) -> Shown:
    """The page as it is after loading, ``width`` wide."""
    assert BROWSER is not None
    profile.mkdir()
    text = json.dumps(page.read_text(encoding="utf-8")).replace("<", "\\u003c")
    probed = profile / "probe.html"
    probed.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", text), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile / 'data'}",
            "--window-size=1600,1000", "--enable-logging=stderr", *flags, "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    return Shown(console, json.loads(unescape(found[1])))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "step.html"
    status = main(
        ["simulate", "--distribution", "reference", "--model", "7b", "--tp-size", "8",
         "--cp-size", "2", "--pp-size", "4", "--vpp-size", "2", "--dp-size", "2",
         "--num-micro-batches", "16", "--steps", "4", "--num-seeds", "2", "--report", str(path)]
    )  # fmt: skip
    assert status == 0
    return path


@pytest.mark.parametrize("width", [390, 1280])
def test_report_is_drawn_without_errors_and_fits(report: Path, tmp_path: Path, width: int) -> None:
    shown = show(report, tmp_path / "profile", width)
    assert shown.console == []
    assert shown.probe["width"] == width
    assert shown.probe["scrolls"] <= width
    assert shown.probe["beyond"] == []
    assert set(shown.probe["pictures"]) == {"lengths", "levels", "micro", "timeline", "memory"}
    assert min(shown.probe["pictures"].values()) > 10, shown.probe["pictures"]
    for text in (
        "Simulated: no time or byte in this page was measured", "7b on 128 × h100-sxm",
        "TP 8 × CP 2 × PP 4 × VPP 2 × DP 2", "fixed-greedy, 1 batch, adaptive",
        "hold, shaped, adaptive", "1.000×",
    ):  # fmt: skip
        assert text in shown.probe["text"], text


def test_report_follows_the_colour_scheme(report: Path, tmp_path: Path) -> None:
    dark = show(report, tmp_path / "profile", 800, "--blink-settings=preferredColorScheme=0")
    light = show(report, tmp_path / "other", 800, "--blink-settings=preferredColorScheme=1")
    assert light.probe["background"] == "rgb(255, 255, 255)"
    assert dark.probe["background"] == "rgb(20, 23, 26)"
    assert dark.console == light.console == []


def test_browser_test_sees_errors_and_overflow(report: Path, tmp_path: Path) -> None:
    """The probe itself: a page that is broken on purpose must not pass."""
    broken = tmp_path / "broken.html"
    text = report.read_text(encoding="utf-8")
    wide = '<div style="width: 3000px">wide</div><script>nothing.there</script></body>'
    broken.write_text(text.replace("</body>", wide), encoding="utf-8")
    shown = show(broken, tmp_path / "profile", 390)
    assert any("nothing is not defined" in line for line in shown.console)
    assert shown.probe["scrolls"] >= 3000
    assert shown.probe["beyond"] == ["DIV wide"]
