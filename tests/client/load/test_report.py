# SPDX-License-Identifier: Apache-2.0
"""Reports and comparisons as pages: well-formed, complete, safe, and drawn by a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kimi_client.load.compare import changes, comparison, new_failures
from kimi_client.load.report import report
from kimi_client.load.svg import line_plot

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
COLOURS = {(0x2F, 0x6F, 0xDE), (0xE2, 0x76, 0x1B), (0x2B, 0x9A, 0x66)}  # of the first three series


@pytest.fixture
def example(run: Callable[..., Any], load_test: Callable[..., Any]) -> Any:
    closed = [run(level, protocol) for protocol in ("grpc-stream", "grpc", "http") for level in (1, 4, 16)]
    return load_test([*closed, run(2, mode="rate"), run(8, mode="rate")])


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_every_run_is_in_the_table_and_every_plot_is_well_formed(example: Any) -> None:
    page = report(example)
    for words in ("grpc-stream 16 in flight", "http 4 in flight", "grpc-stream 8 req/s", "perf_analyzer -m kimi_vl"):
        assert words in page
    titles = [drawing.get("aria-label") for drawing in drawings(page)]
    assert {"Requests answered", "Time to first token", "Time between tokens", "Mean time per request"} <= set(titles)
    assert "What went wrong" not in page


def test_the_page_loads_nothing(example: Any) -> None:
    assert not re.search(r"<script|<link|src=|url\(|@import|https?://", report(example))


def test_points_lie_where_their_values_are() -> None:
    (drawing,) = drawings(line_plot("t", "x", "y", {"a": [(1, 0), (2, 50), (4, 100)]}))
    heights = [float(circle.get("cy", "")) for circle in drawing.iter("circle")]
    places = [float(circle.get("cx", "")) for circle in drawing.iter("circle")]
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2)
    assert heights[0] > heights[2]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)  # evenly, though 1, 2, 4 are not


def test_what_went_wrong_is_said_first(run: Callable[..., Any], load_test: Callable[..., Any]) -> None:
    failed = run(1, error="Connection refused <b>", requests=0, total_ms=None, ttft_ms=None, token_gap_ms=None)
    page = report(load_test([failed, run(4, server_requests=21)], title="<script>"))
    assert "grpc-stream 1 in flight: Connection refused &lt;b&gt;" in page
    assert "counted 20 requests and 160 tokens, the server 21 and 160" in page
    assert "<script>" not in page
    assert page.index("What went wrong") < page.index("All figures")


def test_a_test_that_answered_nothing_still_has_a_page(run: Callable[..., Any], load_test: Callable[..., Any]) -> None:
    nothing = run(1, error="gave up", requests=0, total_ms=None, ttft_ms=None, token_gap_ms=None, latencies_ms=())
    assert "gave up" in report(load_test([nothing]))


def test_comparison_names_what_got_worse_and_only_that(run: Callable[..., Any], load_test: Callable[..., Any]) -> None:
    before = load_test([run(1), run(4), run(9)])
    after = load_test([run(1, tokens_per_s=35.0), run(4, requests_per_s=40.0), run(16)])
    found = list(changes(before, after))
    assert {change.run for change in found} == {"grpc-stream 1 in flight", "grpc-stream 4 in flight"}
    worse = [str(change) for change in found if change.is_worse(0.1)]
    assert worse == ["grpc-stream 1 in flight: tokens written 40 -> 35 tokens/s (x0.88)"]
    assert not any(change.is_worse(0.2) for change in found)
    page = comparison(before, after, 0.1)
    assert worse[0].replace(">", "&gt;") in page
    assert len(drawings(page)) == 6


def test_comparison_counts_slower_as_worse(run: Callable[..., Any], load_test: Callable[..., Any]) -> None:
    slower = run(1, total_ms=type(run(1).total_ms)(150, 150, 160, 200))
    worse = [c for c in changes(load_test([run(1)]), load_test([slower])) if c.is_worse(0.1)]
    assert [change.measure.label for change in worse] == ["end to end p50"]


def test_comparison_tells_new_failures(run: Callable[..., Any], load_test: Callable[..., Any]) -> None:
    before, after = load_test([run(1, failed=1), run(4)]), load_test([run(1, failed=1), run(4, failed=3)])
    assert new_failures(before, after) == ["grpc-stream 4 in flight: 3 failed requests, 0 before"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_a_browser_draws_the_page_without_complaint(kind: str, example: Any, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text(report(example) if kind == "report" else comparison(example, example, 0.1))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,1600"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    screenshot = tmp_path / "x.png"
    command = [str(BROWSER), *options, profile, f"--screenshot={screenshot}", f"file://{tmp_path / 'x.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    picture = Image.open(screenshot).convert("RGB")
    seen = {colour for _, colour in picture.getcolors(1 << 24) or []}
    assert len(seen) > 50
    assert len(seen & COLOURS) == (3 if kind == "report" else 2)
