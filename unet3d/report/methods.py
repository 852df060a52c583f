"""A run as one paragraph for the methods section of a paper: network, data, recipe, versions, peaks by name.

Its sentences are in templates/methods.txt. The schema says `untold=` of the options that it does not tell.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.config.schema import LOSSES
from unet3d.report.page import render
from unet3d.run.record import RunRecord

TITLE = "For a methods section"


def methods_paragraph(run: RunRecord) -> str:
    """Return the paragraph; "" for a folder without a whole config, or of no training."""
    if not {"model", "data", "optim", "steps", "batch"} <= run.settings.keys() or run.last_step is None:
        return ""
    try:
        config = compose.from_plain(run.settings)
    except UserError:
        return ""
    return render(
        "methods.txt",
        c=config,
        run=run,
        channels=config.model.in_channels or len(run.data.get("channels", ())),
        outputs=config.model.classes or len(run.data.get("classes", ())),
        init_name=Path(config.init or "").name,
        labels_of=labels_of,
        listed=listed,
        sizes=sizes,
        mib=mib,
        LOSSES=LOSSES,
    )


def listed(items: Iterable[Any], as_text: Callable[[Any], str] = str) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *others, last = map(as_text, items)
    return f"{', '.join(others)} and {last}" if others else last


def sizes(value: object, between: str = "x") -> str:
    """Return sizes of all levels, `3`, `3x3x3`, or of each, `3x3x1 3x3x3`."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if any(isinstance(item, list) for item in value):
        return " ".join(map(sizes, value))
    return between.join(map(sizes, value))


def labels_of(labels: Any) -> str:
    """Return `label 1`, `labels 1 and 2`."""
    return f"labels {listed(labels)}" if isinstance(labels, list) and len(labels) > 1 else f"label {sizes(labels)}"
