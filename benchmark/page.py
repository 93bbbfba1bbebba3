"""The pages of benchmark.report: its blocks as one HTML file, and as Markdown.

The HTML asks for nothing else. A block is a tuple: ("h1" | "h2" | "p" | "warning", text), ("table",
header, rows of strings, kind) or ("figure", name, title, caption, SVG). All text is escaped here; a
line break in a cell of a table stays one.
"""

import html
import re

REFRESH = '<meta http-equiv="refresh" content="{}">\n'
STYLE = """
:root { color-scheme: light dark; --line: #8886; --warn: #e69f0033; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 0 1rem 3rem; max-width: 92rem;
       background: Canvas; color: CanvasText; overflow-wrap: anywhere; }
h1, h2 { line-height: 1.2; }
h1 { font-size: clamp(1.3rem, 5vw, 2rem); }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
nav a { display: inline-block; margin-right: 1rem; }
p, figcaption { max-width: 48rem; }
.warning { background: var(--warn); padding: .5rem .75rem; border-radius: 4px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr));
           gap: 1.5rem; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 40rem; height: auto; }
figcaption { font-size: .85rem; }
#overview { grid-column: 1 / -1; }
#overview svg { max-width: 80rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums;
        overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
         border-bottom: 1px solid var(--line); }
th, .numbers td:not(:first-child) { white-space: nowrap; }
td { min-width: 3rem; max-width: 36rem; }
:is(.noted, :not(.numbers)) > tbody td:last-child { min-width: 14rem; }
.numbers :is(td, th):not(:first-child) { text-align: right; }
.numbers td:first-child { min-width: 9rem; }
.noted :is(td, th):last-child { text-align: left; white-space: normal; }
.runs td:nth-child(-n+3) { min-width: 12rem; }
.runs td:nth-child(n+11):nth-child(-n+13) { min-width: 20rem; }
@media (max-width: 40rem) {
    .words :is(tr, td) { display: block; max-width: none; }
    .words thead { display: none; }
    .words td { border: 0; }
    .words tr { border-bottom: 1px solid var(--line); }
}
@media (prefers-color-scheme: dark) { figure svg { filter: brightness(1.4); } }
"""


def slug(text):
    """text as a part of a file's name and of an id in the page."""
    return re.sub(r"[^\w.-]+", "-", text)


def html_table(header, rows, kind):
    """A table of a kind, which says how wide its columns are.

    "numbers": all but the first are short; "numbers noted": all but the first and the last; "runs":
    the table of every run; "words": one of few columns.
    """

    def line(values, tag):
        return "".join(
            f"<{tag}>{html.escape(value)}</{tag}>".replace("\n", "<br>") for value in values
        )

    head = f"<tr>{line(header, 'th')}</tr>"
    body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in rows)
    return (
        f'<div class="table" tabindex="0"><table class="{kind}"><thead>{head}'
        f"</thead><tbody>\n{body}</tbody></table></div>"
    )


def to_html(blocks, refresh_s):
    """The page; it reloads itself every refresh_s seconds, if that is not None."""
    parts, figures = [], []
    heads = [block[1] for block in blocks if block[0] == "h2"]
    for kind, *block in blocks:
        if kind == "figure":
            name, _, caption, svg = block
            figures.append(
                f'<figure id="{html.escape(name)}">{svg}<figcaption>{html.escape(caption)} Data: '
                f"figures/{html.escape(name)}.csv</figcaption></figure>"
            )
            continue
        if figures:
            parts, figures = [*parts, '<div class="figures">', *figures, "</div>"], []
        if kind == "table":
            parts.append(html_table(*block))
        elif kind == "h2":
            parts.append(f'<h2 id="{html.escape(slug(block[0]))}">{html.escape(block[0])}</h2>')
        elif kind == "warning":
            parts.append(
                f'<p class="warning"><strong>Warning.</strong> {html.escape(block[0])}</p>'
            )
        else:
            parts.append(f"<{kind}>{html.escape(block[0])}</{kind}>")
        if kind == "h1":
            links = " ".join(f'<a href="#{slug(h)}">{html.escape(h)}</a>' for h in heads)
            parts.append(f"<nav>{links}</nav>")
    title = next(html.escape(block[1]) for block in blocks if block[0] == "h1")
    refresh = REFRESH.format(refresh_s) if refresh_s else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{refresh}<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{chr(10).join(parts)}\n</body>\n</html>\n"
    )


def to_markdown(blocks):
    def text(value):
        return html.escape(value, quote=False).replace("|", "\\|").replace("\n", "; ")

    lines = []
    for kind, *block in blocks:
        if kind == "figure":
            lines.append(f"![{text(block[1])}](figures/{block[0]}.png)\n\n{text(block[2])}")
        elif kind == "table":
            header, rows, look = block
            rule = [" --- "] + ["---:" if "numbers" in look else " --- "] * (len(header) - 1)
            rule[-1] = " --- " if "noted" in look else rule[-1]
            table = [f"| {' | '.join(map(text, header))} |", f"|{'|'.join(rule)}|"]
            table += [f"| {' | '.join(map(text, row))} |" for row in rows]
            lines.append("\n".join(table))
        else:
            mark = {"h1": "# ", "h2": "## ", "warning": "**Warning.** "}.get(kind, "")
            lines.append(mark + text(block[0]))
    return "\n\n".join(lines) + "\n"


def write(path, text):
    """Writes a file that is whole at any time, for a browser that reloads it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
