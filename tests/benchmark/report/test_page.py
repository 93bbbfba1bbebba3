"""Blocks as HTML and as Markdown."""

import pytest

from benchmark.report import page
from benchmark.report.blocks import (
    NAME,
    NOTE,
    NUMBER,
    SHORT,
    Caution,
    Figure,
    Heading,
    Intervals,
    Paragraph,
    Report,
    Table,
)

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def report():
    figures = [Figure(name, EVIL, f"of {EVIL}", Intervals(None, "")) for name in ("one", "two")]
    blocks = [
        Heading(f"About {EVIL}"),
        Paragraph(EVIL),
        Caution(EVIL),
        *figures,
        Table(("what", EVIL), [("a|b", f"{EVIL}\nnext")], (SHORT, NOTE)),
    ]
    return Report(f"Report {EVIL}", [], blocks)


SVGS = {"one": "<svg>1</svg>", "two": "<svg>2</svg>"}


def test_all_texts_are_escaped(report):
    html = page.to_html(report, SVGS)
    assert EVIL not in html and html.count("&lt;script&gt;") == 10
    markdown = page.to_markdown(report)
    assert EVIL not in markdown and markdown.count("&lt;script&gt;") == 10


def test_figures_that_follow_each_other_stand_beside_each_other(report):
    html = page.to_html(report, SVGS)
    assert html.count('<div class="figures">') == 1
    assert html.index("<svg>1</svg>") < html.index("<svg>2</svg>") < html.index("</div>")
    assert "Data: figures/one.csv" in html


def test_headings_can_be_reached(report):
    html = page.to_html(report, SVGS)
    name = "About-script-alert-1-script-"
    assert f'href="#{name}"' in html and f'<h2 id="{name}"' in html


def test_line_breaks_in_cells_stay(report):
    assert "&lt;/script&gt;<br>next</td>" in page.to_html(report, SVGS)
    assert "| a\\|b | &lt;script&gt;alert(1)&lt;/script&gt;; next |" in page.to_markdown(report)


def test_page_reloads_itself_only_where_it_is_drawn_again(report):
    assert 'http-equiv="refresh"' not in page.to_html(report, SVGS)
    assert str(page.refresh_tag(7)) in page.to_html(report, SVGS, refresh_s=7)


@pytest.mark.parametrize(
    ("styles", "rule"),
    [
        ((NAME, NUMBER, NUMBER), "| --- |---:|---:|"),
        ((NAME, NUMBER, NOTE), "| --- |---:| --- |"),
        ((SHORT, SHORT, NOTE), "| --- | --- | --- |"),
    ],
)
def test_numbers_stand_on_the_right_and_words_on_the_left(styles, rule):
    table = Table(("variant", "seeds", "score"), [("a", "1", "2")], styles)
    lines = page.markdown_table(table).splitlines()
    assert lines == ["| variant | seeds | score |", rule, "| a | 1 | 2 |"]


def test_a_page_is_whole_at_any_time(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        page.write(path, "\udcff")
    assert path.read_text() == "old"
    page.write(path, "new")
    assert [(x.name, x.read_text()) for x in tmp_path.glob("report.html")] == [(path.name, "new")]
