"""A trained network from Python: `unet3d.load("net.pt").segment(image)`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.data.given import Given, as_case, returned
from unet3d.memory.simulate import refuse_large_window
from unet3d.run.predict import Segmenter, parse, segmenter
from unet3d.training import checkpoint

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Network:
    """A trained network and how images are prepared for it. `classes` are its labels' names, background first."""

    classes: tuple[str, ...]
    channels: tuple[str, ...]
    segmenter: Segmenter = field(repr=False)  # with all layers

    @property
    def module(self) -> Any:
        """The torch module: normalised images N C D H W in, logits N K D H W out; of several, the first."""
        return self.segmenter.predictor.models[0]

    def segment(self, image: Given, spacing: Sequence[float] | None = None) -> "np.ndarray | Any":
        """Labels of an image, on its own grid.

        `image`: an array X Y Z or C X Y Z, whose axes run right, anterior, superior, with its `spacing` (mm); or an
        image of nibabel; or the path of a NIfTI file, or a list of one file a channel. An array gives an array of uint8
        or uint16, everything else an image of nibabel. They equal what `python -m unet3d predict` writes for the same
        voxels. Raises UserError.
        """
        with as_case(image, spacing) as case:
            return returned(image, self.segmenter.labels(case), case)


def load(
    path: str | PathLike[str],
    device: str = "auto",
    mirror: bool | None = None,
    model: str | None = None,
    batch: int | str | None = None,
    overlap: float | None = None,
) -> Network:
    """The network of a run's snapshot, or of a published file.

    `device`: auto, cpu or cuda. `mirror`: average over mirrorings; None: as in validation. `model`: package.module:name
    of your own network, where the file holds one. `batch`: windows in a forward pass, or auto; `overlap`: least share
    of a window that its neighbour covers too, 0 to 0.9; None: as in validation. No code is taken from the file. Raises
    SnapshotError, UserError.
    """
    path = Path(path)
    found = parse(checkpoint.load_snapshot(path), path, model)
    opened = segmenter(found, device, mirror, batch, overlap)
    refuse_large_window(opened.predictor, path)
    return Network(found.classes, found.channels, opened)
