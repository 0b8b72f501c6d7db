"""Reports follow the colour scheme of the reader: text can be read on a light and a dark page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from online_directories import write_online_run
from run_directories import write_complete_run

from chromium import browser
from turntree.report import svg
from turntree.report.html import build_report

# the lowest contrast (WCAG) between a text and the page below it, and whose it is
LOWEST = """
const light = (c) => { const v = c.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
                       return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };
const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const below = (e) => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
                       if (c.length === 3) return c.slice(0, 3) } return [255, 255, 255] };
let lowest = [99, ""];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length || e.closest("td[style*='--heat'], g rect ~ text, script, style")) continue;
  const style = getComputedStyle(e), ink = parts(e.ownerSVGElement ? style.fill : style.color);
  const [a, b] = [light(ink), light(below(e))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
  if (ratio < lowest[0]) lowest = [ratio, e.textContent.trim().slice(0, 60)];
}
return [getComputedStyle(document.body).backgroundColor, ...lowest];
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    return [
        build_report(write_complete_run(folder / "pivot")),
        build_report(write_online_run(folder / "online")),
    ]


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_can_be_read_in_both_schemes(pages: list[Path], dark: bool) -> None:
    with browser(dark=dark) as window:
        for page in pages:
            window.get(page.as_uri())
            ground, contrast, text = window.execute_script(LOWEST)
            assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
            assert contrast > 4.5, (page.parent.name, text)


def test_every_colour_that_a_page_names_is_there_in_both_schemes(pages: list[Path]) -> None:
    for page in pages:
        text = page.read_text()
        light, dark = (
            set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", text, re.S)[:2]
        )
        of_elements = {"--heat", "--strength", "--width", "--lane"}  # of a cell, a figure, a row
        used = set(re.findall(r"var\((--[\w-]+)", text)) - of_elements
        assert used and light == dark and used <= light
        drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
        plain = set(re.findall(r'(?:fill|stroke)(?:: |=")(#[0-9a-f]{6})', drawn))
        themed = (svg.INK, svg.MUTED, svg.EDGE, svg.GRID, "#000000", "#ffffff")
        assert not plain & {colour.lower() for colour in themed}


def test_a_colour_in_the_words_of_a_figure_stays() -> None:
    ink = svg.INK
    picture = svg.Picture("f", 9, 9)
    picture.text(0, 0, f"paint it {ink}", tint=ink)
    drawn = picture.svg()
    assert f">paint it {ink}<" in drawn and f"var(--ink, {ink})" in drawn
