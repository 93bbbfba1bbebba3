"""A report as one HTML file, which needs no other file, and as Markdown. All text is escaped."""

import html
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from benchmark.report.blocks import NUMBER, Caution, Figure, Heading, Paragraph, Table, slug

TEMPLATE = Path(__file__).with_name("template.html.jinja")


def refresh_tag(seconds):
    """The tag that makes a page reload itself every so many seconds."""
    return Markup('<meta http-equiv="refresh" content="{}">').format(seconds)


def to_html(report, svgs, refresh_s=None):
    """The page of a report.

    svgs: {figure's name: its SVG for the page}; refresh_s: seconds after which the page reloads
    itself, or None.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    parts = groupby(report.blocks, key=lambda block: type(block).__name__)
    return template.render(
        title=report.title,
        refresh_s=refresh_s,
        refresh_tag=refresh_tag,
        headings=report.all(Heading),
        parts=[(kind, list(blocks)) for kind, blocks in parts],
        svgs={name: Markup(svg) for name, svg in svgs.items()},
        slug=slug,
    )


def to_markdown(report, folder="figures/"):
    """A report in Markdown; folder: what stands before the names of its PNGs."""
    lines = [f"# {escaped(report.title)}"]
    for block in report.blocks:
        if isinstance(block, Heading):
            lines.append(f"## {escaped(block.text)}")
        elif isinstance(block, Paragraph):
            lines.append(escaped(block.text))
        elif isinstance(block, Caution):
            lines.append(f"**Warning.** {escaped(block.text)}")
        elif isinstance(block, Figure):
            image = f"![{escaped(block.title)}]({folder}{block.name}.png)"
            lines.append(f"{image}\n\n{escaped(block.caption)}")
        else:
            lines.append(markdown_table(block))
    return "\n\n".join(lines) + "\n"


def markdown_table(table: Table):
    """A table in Markdown: numbers stand on the right, words on the left."""
    rule = ["---:" if style == NUMBER else " --- " for style in table.styles]
    lines = [f"| {' | '.join(map(escaped, table.header))} |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(map(escaped, row))} |" for row in table.rows]
    return "\n".join(lines)


def escaped(value):
    """A text in Markdown, on one line."""
    return html.escape(value, quote=False).replace("|", "\\|").replace("\n", "; ")


def write(path, text):
    """Writes a file that is complete at any time, for a browser that reloads it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
