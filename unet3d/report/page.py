"""Pages from the templates beside this file: everything that they show is escaped. No script, no network."""

import base64
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unet3d.base.errors import escaped

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("templates")
MAX_PICTURE_BYTES = 2**24
PNG = b"\x89PNG\r\n\x1a\n"  # how each PNG file begins
MAX_WIDTH = 2000  # pixels on the page


class Picture(NamedTuple):
    """A PNG file within a page."""

    data: str  # base64
    about: str  # for those who cannot see it
    width: int  # pixels on the page; at two thirds of it letters are still legible: below, the picture scrolls


def read_picture(path: Path, about: str) -> Picture | None:
    """Read a PNG file for a page; None without a file, or for one that is large or no PNG."""
    if not path.is_file() or path.stat().st_size > MAX_PICTURE_BYTES:
        return None
    content = path.read_bytes()
    if not content.startswith(PNG):
        return None
    pixels = int.from_bytes(content[16:20], "big")  # at 150 per inch; 100 on the page
    return Picture(base64.b64encode(content).decode(), about, min(pixels * 2 // 3, MAX_WIDTH))


def render(template: str, **values: Any) -> str:
    """Return a page or a paragraph: a template of the folder with these values, without control codes."""
    return escaped(environment().get_template(template).render(values), keep="\n")


@cache
def environment() -> "jinja2.Environment":
    """Return what makes templates, once for a process: it compiles each once. Only pages are escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
