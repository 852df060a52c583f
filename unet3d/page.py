"""A self-contained HTML page from parts: no network, no scripts, pictures inside, light and dark as the reader's.

Every function that takes text escapes it.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #fff; --tint: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --paper: #0d1117; --tint: #161b22 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line) }
p { margin: .25rem 0 .75rem; color: var(--soft) }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0 }
dl div { padding: .6rem .8rem; background: var(--tint); border: 1px solid var(--line); border-radius: 8px }
dt { font-size: .8rem; color: var(--soft) }
dd { margin: 0; font-size: 1.1rem; font-weight: 600 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 0 0 1rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .9rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-size: .85rem; font-weight: 600; color: var(--soft); white-space: normal; overflow-wrap: break-word;
  vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: break-word; padding-left: 0;
  min-width: 6rem; max-width: 20rem }
img { display: block; max-width: 100%; height: auto; margin: 0 0 1rem; background: #fff; border: 1px solid var(--line);
  border-radius: 8px; padding: .6rem }
pre { overflow-x: auto; padding: .9rem 1.1rem; background: var(--tint); border: 1px solid var(--line);
  border-radius: 8px; font-size: .82rem; line-height: 1.45; overflow-wrap: normal }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole document; `parts` are HTML that the functions below made."""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"<head>{meta}<title>{escape(title)}</title><style>{STYLE}</style></head>"
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'


def headline(title: str) -> str:
    return f"<h1>{escape(title)}</h1>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def section(heading: str, *parts: str) -> str:
    """A heading and its parts; nothing where all parts are empty."""
    body = "\n".join(part for part in parts if part)
    return f"<h2>{escape(heading)}</h2>\n{body}" if body else ""


def facts(pairs: Mapping[str, str]) -> str:
    """Small boxes: what, and how much."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f"<dl>{boxes}</dl>" if boxes else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with their units, rows of text; nothing without rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>' if rows else ""


def picture(path: Path, about: str) -> str:
    """A PNG file, put into the page; nothing where there is no such file. `about` is for those who cannot see it."""
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(about)}" src="data:image/png;base64,{data}">'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text else ""
