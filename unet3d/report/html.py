"""Parts of a page, as HTML from plain text: whoever wrote the text, it is escaped. No script, no network."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from unet3d.base.errors import escaped

LARGEST_PICTURE, PNG = 2**24, b"\x89PNG\r\n\x1a\n"  # bytes; how each PNG file begins


def html_page(title: str, parts: Iterable[str]) -> str:
    """The whole document; `parts` are HTML that the functions below made."""
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return escaped(page.substitute(title=escape(title), body="\n".join(filter(None, parts))), keep="\n")


def element(tag: str, text: str) -> str:
    """Text in an HTML element; nothing if the text is empty."""
    return f"<{tag}>{escape(text)}</{tag}>" if text else ""


def section(heading: str, *parts: str) -> str:
    """A heading and its parts; nothing if all parts are empty."""
    body = "\n".join(filter(None, parts))
    return f"<h2>{escape(heading)}</h2>\n{body}" if body else ""


def folded(heading: str, *parts: str) -> str:
    """Parts that are shown once their heading is clicked; nothing if all parts are empty."""
    body = "\n".join(filter(None, parts))
    return f"<details><summary>{escape(heading)}</summary>\n{body}</details>" if body else ""


def facts(pairs: Mapping[str, str]) -> str:
    """Names and values as boxes."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f"<dl>{boxes}</dl>" if boxes else ""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with their units, rows of text; nothing without rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>' if rows else ""


def picture(path: Path, about: str) -> str:
    """A PNG file inside the page; nothing if there is none, or a large one. `about` is for those who cannot see it."""
    if not path.is_file() or path.stat().st_size > LARGEST_PICTURE:
        return ""
    content = path.read_bytes()
    data = base64.b64encode(content).decode()
    width = min(int.from_bytes(content[16:20], "big") * 2 // 3, 2000)  # of 150 pixels per inch, 100 on the page
    size = f"width:{width}px;min-width:{width * 2 // 3}px"  # on a narrow screen letters stay legible, and it scrolls
    image = f'<img alt="{escape(about)}" style="{size}" src="data:image/png;base64,{data}">'
    return f'<div class="wide figure">{image}</div>' if content.startswith(PNG) else ""
