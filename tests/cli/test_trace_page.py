"""The page of `holdfast trace` and of `holdfast plan --pipeline --html` in a real browser, used as a person uses it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from browser_kit import CHROMIUM, Browser, Pixel, contrast, rgb
from holdfast.cli.planning.pipeline_plan import load, pipeline, predicted
from holdfast.cli.timeline import trace
from kit.pipelines import described

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

WIDTH, HEIGHT = 1200, 600
LEGIBLE = 4.5
# What happened, when, and in which colour a person sees it; the run lasts ten seconds.
KEEPER = "keeper <b>node a</b>"
RUN = {
    "rank 0": [
        ("step", 0.0, 10.0, "#9fb4c7"), ("0F0", 0.0, 1.5, "#6fb0e4"), ("wait", 1.5, 3.0, "#c9cdd2"),
        ("copy", 1.6, 2.6, "#2fa36b"), ("0B0", 3.0, 6.25, "#2f6ba6"), ("fence", 6.25, 7.0, "#d8574f"),
    ],
    "rank 1": [("step", 0.5, 9.5, "#9fb4c7"), ("1F0", 1.5, 3.0, "#6fb0e4"), ("copy beside", 4.0, 5.5, "#2fa36b")],
    KEEPER: [
        ("node.sealed", 2.6, 3.1, "#7bbf6a"), ("node.replicated", 3.2, 4.7, "#8a6fd1"), ("node.persisted", 4.0, 8.125, "#d99a2b")
    ],
}  # fmt: skip
KINDS = {"0F0": "compute", "wait": "bubble", "node.replicated": "replicate", "node.persisted": "persist"}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Written by hand, on one clock, so that every time is known exactly."""
    for name, spans in RUN.items():
        head = {"track": name, "pid": 1, "monotonic": 1000.0, "wall": 5000.0}
        lines = [head, *([what, 1000.0 + start, 1000.0 + end] for what, start, end, _ in spans)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{re.sub('[^a-z0-9]', '', name)}.trace.jsonl").write_text(text)
    trace([str(tmp_path)], html=str(tmp_path / "page.html"), perfetto=None, as_json=True)
    return tmp_path / "page.html"


@dataclass
class View:
    """What a person sees of the timeline: the axis is the labels' width from the left, and a margin from the right."""

    browser: Browser

    def __post_init__(self) -> None:
        box = self.browser.box("#view")
        self.left, self.top = box["x"] + 150, box["y"]
        self.width = box["width"] - 150 - 12

    def x(self, seconds: float, start: float = 0.0, end: float = 10.0) -> float:
        """Where a time is, of all that is shown."""
        return self.left + (seconds - start) / (end - start) * self.width

    def y(self, track: str, what: str) -> float:
        """The top of the lane that has it."""
        told = self.browser.value(
            f"rows.find(r => r.track.name === {json.dumps(track)} && r.spans.some(s => s[0] === {json.dumps(what)})).y"
        )
        return self.top - self.browser.value("stage.scrollTop") + told

    def bars(self, track: str, what: str, colour: str) -> list[tuple[float, float]]:
        """From where to where something of this colour lies in its lane."""
        self.browser.point(2, 2)  # what is told of a place covers others
        (line,) = self.browser.screen(0, self.y(track, what) + 1, WIDTH, 1)
        runs: list[tuple[float, float]] = []
        for at, pixel in enumerate(line):
            if pixel != rgb(colour):
                continue
            if runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], at + 1)
            else:
                runs.append((at, at + 1))
        return runs

    def told(self, x: float, y: float) -> list[str]:
        """What the page says of the place that is pointed at; empty: nothing."""
        self.browser.point(x, y)
        shown = self.browser.value("getComputedStyle(tip).display === 'block' ? tip.innerText : ''")
        return shown.splitlines()


def opened(browser: Browser, page: Path) -> View:
    browser.open(page.as_uri(), ready="document.body && document.body.dataset.ready")
    return View(browser)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_every_track_and_answers_the_pointer(page: Path, tmp_path: Path, dark: bool) -> None:
    with Browser(tmp_path / "profile", width=WIDTH, height=HEIGHT, dark=dark) as browser:
        view = opened(browser, page)
        for track, spans in RUN.items():
            for what, start, end, colour in spans:
                runs = view.bars(track, what, colour)
                at = (view.x(start), view.x(end))
                assert any(run == pytest.approx(at, abs=1.6) for run in runs), (track, what, at, runs)
                told = view.told(view.x((start + end) / 2), view.y(track, what) + 7)
                assert told[0] == what
                assert told[1].startswith(f"{track}, {KINDS.get(what, '')}"), "as it is written, not as markup"
                length = f"{end - start:.3f} s" if end - start >= 1 else f"{(end - start) * 1e3:.2f} ms"
                assert f"{length}, from {start:.6f} s to {end:.6f} s" in told, "exact times"
        assert view.told(view.x(2.0), view.y("rank 0", "0F0") + 7)[0] == "wait", "and not the action before it"
        assert "forward of micro-batch 0 on stage 0" in view.told(view.x(1.0), view.y("rank 0", "0F0") + 7)
        assert view.told(view.x(9.9), view.y(KEEPER, "node.sealed") + 7) == [], "nothing is there"
        browser.point(2, 2)
        lines = browser.screen(0, view.top + 20, WIDTH, 1)[0]
        grid = rgb(browser.value("css('--line')"))
        ticks = [at for at, pixel in enumerate(lines) if pixel == grid]
        assert ticks == pytest.approx([view.x(second) for second in (0, 2, 4, 6, 8, 10)], abs=1), "every two seconds"


def test_wheel_drag_keys_and_buttons_do_what_the_page_says(page: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile", width=WIDTH, height=HEIGHT) as browser:
        view = opened(browser, page)

        def replicated() -> tuple[float, float]:
            (run,) = view.bars(KEEPER, "node.replicated", "#8a6fd1")
            return run

        whole = replicated()
        # The wheel: three notches towards what is under the pointer, which stays where it is.
        pointed = view.x(4.0)
        for _ in range(3):
            browser.wheel(pointed, view.y(KEEPER, "node.replicated") + 7, -120)
        near = replicated()
        for before, after in zip(whole, near, strict=True):
            assert after - pointed == pytest.approx((before - pointed) * 1.25**3, abs=3)
        browser.wheel(pointed, view.top + 60, 120)
        assert replicated()[0] - pointed == pytest.approx((whole[0] - pointed) * 1.25**2, abs=3)
        # Dragging moves what is seen with the hand.
        before = replicated()
        browser.drag((pointed, view.top + 60), (pointed - 90, view.top + 60))
        assert replicated() == pytest.approx((before[0] - 90, before[1] - 90), abs=2)
        assert browser.value("canvas.classList.contains('held')") is False
        # Keys, on what was clicked last: nearer, to the right by an eighth of what is seen, and all of it again.
        before = replicated()
        browser.press("+")
        assert replicated()[1] - replicated()[0] == pytest.approx((before[1] - before[0]) / 0.7, abs=3)
        browser.press("-")
        before = replicated()
        browser.press("ArrowRight")
        assert replicated()[0] == pytest.approx(before[0] - view.width / 8, abs=2)
        browser.press("ArrowLeft")
        assert replicated() == pytest.approx(before, abs=1)
        browser.press("Home")
        assert replicated() == whole
        # A double click, and the button, show everything as well.
        for again in (lambda: browser.click(pointed, view.top + 60, times=2), lambda: browser.click_on("#all")):
            browser.wheel(pointed, view.top + 60, -120)
            assert replicated() != whole
            again()
            assert replicated() == whole
        # A kind that is pressed is hidden, and told to be.
        browser.click_on("#legend button:nth-child(1)")
        assert browser.value("document.querySelector('#legend button').innerText") == "bubble"
        assert browser.value("document.querySelector('#legend button').getAttribute('aria-pressed')") == "false"
        assert view.bars("rank 0", "0F0", "#c9cdd2") == []
        assert view.bars("rank 0", "0F0", "#6fb0e4") != []


def legible(browser: Browser, view: View) -> dict[str, float]:
    """How much each text stands out from what is behind it; of the canvas as it is on the screen."""
    paper = rgb(browser.value("css('--page')"))
    found = {"paper": contrast(paper, (255, 255, 255))}
    view.told(view.x(1.0), view.y("rank 0", "0F0") + 7)
    for text in ("h1", "#sum", "#legend button", ".tool", "footer", "kbd", "#tip b", "#tip span"):
        behind = rgb(browser.value(f"css({json.dumps('--tip' if 'tip' in text else '--page')})"))
        ink = browser.value(f"getComputedStyle(document.querySelector({json.dumps(text)})).color")
        found[text] = contrast(rgb(ink), behind)
    browser.point(2, 2)
    name_at = (20, view.y("rank 0", "step") + 4, 120, 50)
    found["a track's name"] = best(browser.screen(*name_at), paper)
    found["a tick"] = best(browser.screen(view.x(2.0) - 12, view.top + 3, 24, 14), paper)
    for track, spans in RUN.items():
        for what, start, end, colour in spans:
            if what != "wait":
                inside = browser.screen(
                    view.x(start) + 2, view.y(track, what) + 3, min(view.x(end) - view.x(start) - 6, 70), 10
                )
                found[what] = best(inside, rgb(colour))
    return found


def best(rows: list[list[Pixel]], behind: Pixel) -> float:
    """Of the pixel that stands out most: the ink of a text."""
    assert any(behind in row for row in rows), (behind, rows[0][:5])
    return max(contrast(pixel, behind) for row in rows for pixel in row)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_in_both_themes_and_a_button_changes_them(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    with Browser(tmp_path / "profile", width=WIDTH, height=HEIGHT, dark=dark) as browser:
        view = opened(browser, page)
        papers = []
        for _ in range(3):
            found = legible(browser, view)
            papers.append(found.pop("paper"))
            # Small letters are drawn with softened edges: hardly a pixel of them has all of the ink.
            faint = {text: value for text, value in found.items() if value < (LEGIBLE if text[0] in "h#.fk" else 3.0)}
            assert not faint, faint
            browser.click_on("#theme")
        assert [paper > 10 for paper in papers] == [dark, not dark, dark], "the button changes it, and back"


def test_a_predicted_pipeline_is_looked_at_like_a_run(tmp_path: Path) -> None:
    """16 ranks of two stages each, 64 micro-batches: the times of the event model, where they belong."""
    times = {"forward": "10ms", "hop": "1ms", "sync": "100ms", "optimizer": "50ms"}
    file = described(tmp_path, "Interleaved1F1B", 16, 64, state="2GiB", **times)
    assert pipeline(file, html=str(tmp_path / "step.html"), as_json=True) == 0
    found = predicted(load(file))
    end = max(span.end for track in found.tracks for span in track.spans)
    with Browser(tmp_path / "profile", width=1600, height=600) as browser:
        view = opened(browser, tmp_path / "step.html")
        names = browser.value("rows.filter(r => r.first).map(r => r.track.name)")
        assert names == [f"rank {rank}" for rank in range(16)]
        assert (
            browser.value("document.body.innerText").count("16 ranks, 2 stages each, 64 micro-batches (predicted)") == 1
        )
        for rank, what in ((3, "3F5"), (0, "gradient sync"), (0, "optimizer"), (3, "19B60"), (15, "copy")):
            if rank == 15:  # it lies below what is seen, until the page is dragged up
                assert view.y("rank 15", what) > 600
                browser.drag((800, 500), (800, 150))
            span = next(span for span in found.tracks[rank].spans if span.what == what)
            told = view.told(view.x((span.start + span.end) / 2, end=end), view.y(f"rank {rank}", what) + 7)
            assert told[0] == what
            assert any(f"from {span.start:.6f} s to {span.end:.6f} s" in line for line in told), (told, span)
            assert ("backward of micro-batch 60 on stage 19" in told) == (what == "19B60")
        for rank in range(8, 16, 3):
            first = next(
                span for span in found.tracks[rank].spans if span.what == "wait" and span.end - span.start > 0.05
            )
            waits = view.bars(f"rank {rank}", "wait", "#c9cdd2")
            at = (view.x(first.start, end=end), view.x(first.end, end=end))
            assert any(run == pytest.approx(at, abs=1.6) for run in waits), (rank, at, waits)
