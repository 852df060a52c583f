"""A trained network applied to files and arrays: images in, label maps out on each input's own grid.

`unet3d.load("net.pt").segment(image)` is for Python, `.segmenter.to_file` for the command predict.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import UserError, warn
from unet3d.base.types import ProbabilityBlock, Regions
from unet3d.config import rules
from unet3d.config.schema import Config, Data, Model
from unet3d.data import restore
from unet3d.data.cases import Case
from unet3d.data.intensity import Intensity, Seen, normalise
from unet3d.data.labels import written_values, written_words
from unet3d.data.restore import ImageLike, ProbabilityMaps, largest_components, saving_scores, to_original
from unet3d.data.volume import ImageFiles, LabelValues, Volume, read_volume, with_values
from unet3d.memory.simulate import fitted, largest_map, refuse_large_window
from unet3d.run.checkpoint import TrainedNetworks, read_networks
from unet3d.run.predicted_files import doubts_about
from unet3d.training import switches
from unet3d.training.inference import Predictor, free_bytes
from unet3d.training.policy import MemoryPolicy


@dataclass(frozen=True)
class Segmenter:
    """A network and everything between a file and it."""

    predictor: Predictor
    intensity: tuple[Intensity, ...]
    options: Data  # Training's options: the grid, how headers are read, which value label maps have for a class.
    classes: tuple[str, ...] = ()  # their names, background first
    channels: tuple[str, ...] = ()
    largest: tuple[int, ...] = ()  # classes of which label maps have the largest component alone
    seen: Seen | None = None  # what the training cases were like
    origin: dict[str, Any] = field(default_factory=dict)  # a digest, and options that change label maps

    def to_file(self, case: Case, path: Path, scores: Path | None = None) -> Volume:
        """Segment one case; write class probabilities to `scores`. Return the case on the network's grid, normalised.

        Raises UserError.
        """
        volume, strips = self._predicted(case)
        self.save(strips, case, path, scores)
        return volume

    def save(
        self,
        strips: Iterable[ProbabilityBlock],
        case: Case,
        path: Path,
        scores: Path | None = None,
        files: ImageFiles | None = None,
    ) -> None:
        """Write the label map of a case, and its probabilities to `scores`, on its file's grid.

        Probabilities are float32 (X, Y, Z, K), in a NIfTI file that is not compressed: programs can read it in parts.
        The headers of `files`, which have been opened, are not read again. Raises UserError, OSError.
        """
        like = (files or ImageFiles()).header(case, case.images[0])
        with saving_scores(scores, like, self.outputs) if scores else nullcontext() as open_scores:
            labels = self.on_own_grid(strips, case, open_scores, like)
        # Last: where a label map is, all of the case is.
        restore.save_image(path, restore.image_like(with_values(labels, self.values), like))

    def on_own_grid(
        self,
        strips: Iterable[ProbabilityBlock],
        case: Case,
        open_scores: ProbabilityMaps | None = None,
        like: Any = None,
    ) -> np.ndarray:
        """Return the classes (X, Y, Z) of strips in the axes of the case's first file; arguments as `to_original`'s."""
        labels = to_original(strips, case, self.options.spacing, open_scores, like, self.regions)
        return largest_components(labels, self.largest)

    @property
    def regions(self) -> Regions | None:
        """Return the regions that the networks predict; None where their classes exclude each other."""
        return self.predictor.options.output_regions

    @property
    def values(self) -> tuple[int, ...]:
        """Return the value of each class, or of each label of regions, in label maps."""
        return written_values(self.options, self.label_count)

    @property
    def label_count(self) -> int:
        """Return how many labels a label map has, the background's among them."""
        count = self.predictor.options.classes if self.regions is None else self.regions.label_count
        assert count is not None
        return count

    @property
    def outputs(self) -> int:
        """Return how many probabilities a voxel has: of the classes, or of the regions."""
        return self.label_count if self.regions is None else len(self.regions.labels)

    @property
    def written(self) -> str:
        """Return these values and the classes' names in words."""
        return written_words(self.options, self.classes, self.regions)

    def labels(self, case: Case, open_scores: ProbabilityMaps | None = None) -> np.ndarray:
        """Return the labels (X, Y, Z) of a case in the axes of its first file; `to_original` writes probabilities.

        Raises UserError.
        """
        _, strips = self._predicted(case)
        return with_values(self.on_own_grid(strips, case, open_scores), self.values)

    def _predicted(self, case: Case) -> tuple[Volume, Iterator[ProbabilityBlock]]:
        """Return a case on the network's grid, and the strips of its probabilities there. Raises UserError."""
        files = ImageFiles(self.options)
        volume = read_volume(case._replace(label=None), LabelValues(0), self.options.spacing, files)
        if len(volume.image) != len(self.intensity):
            channels = f"{len(volume.image)} channels; this network takes {len(self.intensity)}"
            raise UserError(f"{case.id}: {case.images[0]} has {channels}")
        image = normalise(volume.image, self.intensity)
        if self.seen is not None:
            is_resampled = self.options.spacing is not None
            differences = list(self.seen.differences(image, self.intensity, volume.grid, is_resampled))
            if differences:
                warn(f"{case.id}: {'; '.join(differences)}")
        return volume, self.predictor.strips(torch.from_numpy(image), case.named)


def segmenter(
    trained: TrainedNetworks,
    device: str,
    mirror: bool | None,
    batch: int | str | None = None,
    overlap: float | str | None = None,
) -> Segmenter:
    """Return the segmenter of these networks; `mirror`, `batch`, `overlap` None: as validated.

    `batch` is of windows. Where it is auto and a GPU has not enough free, there are fewer at once. Raises
    CheckpointError, and UserError for a device or a value that the options do not have.
    """
    arguments = {"mirror": mirror, "batch": batch, "overlap": overlap}
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    if overlap is not None and (isinstance(overlap, bool) or not isinstance(overlap, (int, float))):
        raise UserError(f"overlap={overlap}: give a number from 0 to 0.9, a share of the window")
    try:
        # A prediction has no backward pass, which alone is not deterministic on a GPU, and is not compiled.
        config = dataclasses.replace(trained.config, device=device, deterministic=False, compile=False)
        config.inference = dataclasses.replace(config.inference, **given)
        rules.check(config, here=False)  # the device's name; and not every network can be mirrored
        if given.get("mirror") and not config.data.augment.mirror:
            warn("mirroring does nothing: this network has data.augment.mirror=[]")
        if "overlap" in given and config.model.padding == "valid":
            warn("overlap does nothing: this network has model.padding=valid, whose tiles do not overlap")
        place = build.device(config)
        policy = build.policy(config, place.type)
        networks = [policy.formatted(network) for network in trained.instantiate(place)]
        predictor = fitted_predictor(config, networks, config.model, policy, place)
        if place.type == "cuda":
            warning = switches.cudnn_warning(policy.dtype, partial(largest_map, predictor))
            if warning is not None:
                warn(warning)
    except UserError as error:
        text = str(error).removeprefix("inference.")
        if text != str(error) and text.partition("=")[0] in given:  # an argument that replaced an option
            raise UserError(text) from error
        raise
    return Segmenter(
        predictor,
        trained.intensity,
        config.data,
        trained.classes,
        trained.channels,
        trained.largest,
        trained.seen,
        origin={
            "network": trained.digest(),
            "overlap": predictor.overlap,
            "mirror": bool(predictor.mirror),
            "components": list(trained.largest),
        },
    )


def fitted_predictor(
    config: Config,
    networks: Sequence[nn.Module],
    model_config: Model,
    policy: MemoryPolicy,
    device: torch.device,
) -> Predictor:
    """Return the sliding window of these networks; on a GPU, with `auto`, of as many windows at once as fit."""
    predictor = build.predictor(config, networks, model_config, policy)
    if device.type != "cuda":
        return predictor
    return fitted(predictor, free_bytes(device) if config.inference.batch == "auto" else math.inf)


class MeanOfLogits(nn.Module):
    """Several networks as one, which gives the mean of their logits; of regions, the logit of mean probabilities."""

    def __init__(self, networks: Sequence[nn.Module], has_regions: bool = False) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.has_regions = has_regions

    def forward(self, image: Tensor) -> Tensor:
        """Return mean logits N K D H W of images N C D H W."""
        outputs: Iterable[Tensor] = (network(image) for network in self.networks)
        if self.has_regions:
            return (reduce(torch.add, map(torch.sigmoid, outputs)) / len(self.networks)).logit()
        return reduce(torch.add, outputs) / len(self.networks)


@dataclass(frozen=True)
class Network:
    """A trained network and how images are prepared for it. `classes` are its labels' names, background first."""

    classes: tuple[str, ...]
    channels: tuple[str, ...]
    segmenter: Segmenter = field(repr=False)  # Segmenter with all layers.

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
        values = self.segmenter.values
        return values if regions is None else tuple(values[label] for label in (0, *regions.drawn))

    def segment(
        self,
        image: ImageLike,
        spacing: Sequence[float] | None = None,
        affine: np.ndarray | Sequence[Sequence[float]] | None = None,
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
        with restore.temporary_case(image, spacing, affine, len(self.channels)) as of_files:
            case = of_files._replace(affine=self.segmenter.options.affine)
            for line in doubts_about([case]):
                warn(line if restore.are_paths(image) else line.replace(str(case.images[0]), "as it was given"))
            if not probabilities:
                return restore.returned(image, self.segmenter.labels(case), case)
            scores = restore.no_probabilities(case, self.segmenter.outputs)
            labels = self.segmenter.labels(case, scores.__getitem__)
            return restore.returned(image, labels, case), restore.returned(image, scores, case)


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
    opened = segmenter(read_networks(path, model), device, mirror, batch, overlap)
    refuse_large_window(opened.predictor, path)
    return Network(opened.classes, opened.channels, opened)
