"""What to change: the level of the U that holds most of the peak, and what its width would save, by a dry run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unet3d.checks import check
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.tables import NAMES, Entry


def resized(options: Model, change: Callable[[int, int], int]) -> Model:
    """The network with other widths: `change` is given a level and its width, encoder and decoder alike."""
    features = [change(level, width) for level, width in enumerate(options.features)]
    decoder = options.decoder and [change(level, width) for level, width in enumerate(options.decoder)]
    return replace(options, features=features, decoder=decoder)


def halved(config: Config, options: Model, level: int) -> Model | None:
    """The network with half the channels at one level; None where that is no network, as with groups of 8 on 4."""
    narrower = resized(options, lambda at, width: width // 2 if at == level else width)
    try:
        check(replace(config, model=narrower), here=False)
    except UserError:
        return None
    return narrower


def overrides(options: Model) -> str:
    """The widths as a command line has them."""
    given = f"model.features={options.features}".replace(" ", "")
    return given if options.decoder is None else f"{given} model.decoder={options.decoder}".replace(", ", ",")


def advise(config: Config, options: Model, entry: Entry, peak: Callable[[Model], int]) -> dict[str, Any]:
    """The level that holds most at the peak, what of, and the peak with half its width, if it has one.

    `peak` predicts the bytes of another network under the same config.
    """
    row = max((row for row in entry["levels"] if row["level"] != "other"), key=lambda row: row["bytes"])
    narrower = halved(config, options, row["level"])
    return {
        "level": row["level"],
        "bytes": row["bytes"],
        "mostly": max(NAMES, key=lambda kind: row[kind]),
        "override": narrower and overrides(narrower),
        "halved_peak_bytes": narrower and peak(narrower),
    }
