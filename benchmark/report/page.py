"""A report as one HTML file, which needs no other file, and as Markdown."""

import base64
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from benchmark.report import figures
from benchmark.report.tables import escaped, markdown

TEMPLATE = Path(__file__).with_name("template.html.jinja")


def to_html(title, warnings, sections, pngs):
    """pngs: {figure's name: its bytes}."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    images = {name: base64.b64encode(data).decode() for name, data in pngs.items()}
    return template.render(title=title, warnings=warnings, sections=sections, images=images)


def to_markdown(title, warnings, sections, folder="figures/"):
    """folder: what stands before the names of the figures' files."""
    parts = [f"# {escaped(title)}"]
    parts += [f"**Warning.** {escaped(warning)}" for warning in warnings]
    for section in sections:
        parts.append(f"## {escaped(section.title)}")
        parts += map(escaped, section.texts)
        for name, caption, _ in section.figures:
            parts += [f"![{escaped(caption)}]({folder}{name}.png)", escaped(caption)]
        parts += map(markdown, section.tables)
    return "\n\n".join(parts) + "\n"


def write(folder, title, warnings, sections):
    """Writes report.html, report.md and figures/ -> the paths."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    drawn = [figure for section in sections for figure in section.figures]
    pngs = {name: figures.png(figure) for name, _, figure in drawn}
    paths = [folder / "report.html", folder / "report.md"]
    paths[0].write_text(to_html(title, warnings, sections, pngs), encoding="utf-8")
    paths[1].write_text(to_markdown(title, warnings, sections), encoding="utf-8")
    for name, data in pngs.items():
        paths.append(folder / "figures" / f"{name}.png")
        paths[-1].write_bytes(data)
    return paths
