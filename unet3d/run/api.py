"""A trained network from Python: `unet3d.load("net.pt").segment(image)`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unet3d.base.errors import warn
from unet3d.data.in_memory import ImageLike, Probabilities, are_paths, returned, temporary_case
from unet3d.memory.simulate import refuse_large_window
from unet3d.run.checkpoint import read_networks
from unet3d.run.predict import Segmenter, doubtful_places_in, segmenter

if TYPE_CHECKING:
    import numpy as np


class MeanOfLogits(nn.Module):
    """Several networks as one, which gives the mean of their logits; of regions, the logit of mean probabilities."""

    def __init__(self, networks: Sequence[nn.Module], has_regions: bool = False) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.has_regions = has_regions

    def forward(self, image: Tensor) -> Tensor:
        """Return mean logits N K D H W of images N C D H W."""
        first, *others = self.networks
        total = self._averaged(first(image))
        for network in others:
            total = total + self._averaged(network(image))
        mean: Tensor = total / len(self.networks)
        return mean.logit() if self.has_regions else mean

    def _averaged(self, logits: Tensor) -> Tensor:
        """Return what the mean is of."""
        return logits.sigmoid() if self.has_regions else logits


@dataclass(frozen=True)
class Network:
    """A trained network and how images are prepared for it. `classes` are its labels' names, background first."""

    classes: tuple[str, ...]
    channels: tuple[str, ...]
    segmenter: Segmenter = field(repr=False)  # with all layers

    @cached_property
    def module(self) -> Any:
        """The torch module: normalised images N C D H W in, logits N K D H W out; of several networks, their mean."""
        networks = self.segmenter.predictor.models
        if len(networks) == 1:
            return networks[0]
        return MeanOfLogits(networks, self.segmenter.regions is not None).eval()

    @property
    def values(self) -> tuple[int, ...]:
        """The value of each class in label maps: the files' own, where data.label_map made the class of one label.

        Of regions, what each is drawn as, later ones over earlier ones.
        """
        regions = self.segmenter.regions
        if regions is None:
            return self.segmenter.values or tuple(range(len(self.classes)))
        of_labels = self.segmenter.values or tuple(range(regions.label_count))
        return tuple(of_labels[label] for label in (0, *regions.drawn))

    def segment(
        self,
        image: ImageLike,
        spacing: Sequence[float] | None = None,
        affine: "np.ndarray | Sequence[Sequence[float]] | None" = None,
        probabilities: bool = False,
    ) -> Any:
        """Return the labels of an image, on its own grid; with `probabilities`, labels and all classes' probabilities.

        `image`: an array X Y Z or C X Y Z, with its `affine` (4 x 4, from voxels to mm, as nibabel's), or with its
        `spacing` (mm) if its axes run right, anterior, superior; or an image of nibabel; or the path of a NIfTI file,
        or a list of one file or image a channel. An array gives an array of uint8 or uint16, everything else an image
        of nibabel; X Y Z 1 counts as X Y Z. They equal what `python -m unet3d predict` writes for the same voxels, with
        the same `values`. Probabilities are float32, K X Y Z of an array, else an image X Y Z K: 4 bytes of memory per
        voxel and class. Of regions there are as many, none of the background. Where an image is far from those of
        training, a line on stderr says so. Raises UserError.
        """
        with temporary_case(image, spacing, affine, len(self.channels)) as of_files:
            case = of_files._replace(affine=self.segmenter.affine)
            for line in doubtful_places_in([case]):
                warn(line if are_paths(image) else line.replace(str(case.images[0]), "as it was given"))
            scores = Probabilities(case) if probabilities else None
            labels = returned(image, self.segmenter.labels(case, scores), case)
            if scores is None:
                return labels
            return labels, scores.returned(image)


def load(
    path: str | PathLike[str],
    device: str = "auto",
    mirror: bool | None = None,
    model: str | None = None,
    batch: int | str | None = None,
    overlap: float | None = None,
) -> Network:
    """Return the network of a run's checkpoint, or of a published file.

    `device`: auto, cpu or cuda. `mirror`: average over mirrorings; None: as in validation. `model`: package.module:name
    of your own network, where the file holds one. `batch`: windows in a forward pass, or auto; `overlap`: least share
    of a window that its neighbour covers too, 0 to 0.9; None: as in validation. No code is taken from the file. Raises
    CheckpointError, UserError.
    """
    path = Path(path)
    networks = read_networks(path, model)
    opened = segmenter(networks, device, mirror, batch, overlap)
    refuse_large_window(opened.predictor, path)
    return Network(networks.classes, networks.channels, opened)
