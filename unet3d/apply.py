"""A trained network applied to files: NIfTI in, label maps out on each input's own grid."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unet3d import build, compose, snapshot
from unet3d.config import Model
from unet3d.data import intensity
from unet3d.data.cases import Case, volumes_in, without_channel
from unet3d.data.intensity import Intensity, normalise
from unet3d.data.nifti import save_labels, stem
from unet3d.data.volumes import Volume, read_volume, to_original
from unet3d.data.voxels import STRICT, Leniency
from unet3d.errors import SnapshotError, UserError
from unet3d.inference import Predictor

Weights = dict[str, torch.Tensor]
MOST_NETWORKS = 32  # in one published snapshot


@dataclass(frozen=True)
class Segmenter:
    """A network and everything between a file and it."""

    predictor: Predictor
    intensity: tuple[Intensity, ...]
    spacing: list[float] | None  # mm, of the grid it was trained on; None: the file's own
    leniency: Leniency = STRICT

    def to_file(self, case: Case, path: Path) -> tuple[Volume, torch.Tensor]:
        """Segment one case. Returns it on the network's grid, with the class of each voxel X Y Z. Raises UserError."""
        volume = read_volume(dataclasses.replace(case, label=None), 0, None, self.spacing, self.leniency)
        found, wanted = len(volume.image), len(self.intensity)
        if found != wanted:
            raise UserError(f"{case.id}: {case.images[0]} has {found} channels; this network takes {wanted}")
        image = torch.from_numpy(normalise(volume.image, self.intensity))
        probabilities = self.predictor.probabilities(image)
        save_labels(path, to_original(probabilities.numpy(), volume, case.images[0]), case.images[0])
        return volume, probabilities.argmax(0)


def open_snapshot(path: Path, device: str, mirror: bool | None = None) -> Segmenter:
    """What segments as a snapshot, of a run or published, says. Raises SnapshotError, or UserError for the device."""
    return segmenter(snapshot.load(path), path, device, mirror)


def segmenter(state: Mapping[str, Any], path: Path, device: str, mirror: bool | None) -> Segmenter:
    """From what the snapshot at `path` holds."""
    try:
        asked = {"device": device, "resume": None, "model": state["model_options"]}
        config = compose.from_plain(state["config"] | asked)
        rules = tuple(intensity.checked(rule) for rule in state["intensity"])
        weights = weights_in(state)
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path}: not a snapshot of a run ({error})") from error
    if mirror is not None:
        config.inference.mirror = mirror
    _refuse_misfit(config.model, weights, path)
    where = build.device(config)
    networks = [build.model(config.model, seed=0) for _ in weights]
    for network, values in zip(networks, weights, strict=True):
        snapshot.load_weights(network, values, path)
        network.to(where).eval()
    predictor = build.predictor(config, networks, config.model, build.policy(config, where.type, ()))
    return Segmenter(predictor, rules, config.data.spacing, Leniency.of(config.data))


def weights_in(state: Mapping[str, Any]) -> list[Weights]:
    """The weights to predict with, of each network: a run's snapshot holds one, a published one may hold several.

    Raises ValueError, TypeError or KeyError for a state that is no snapshot's.
    """
    others = state.get("others", [])  # a run's own snapshot has none
    if len(others) >= MOST_NETWORKS:  # a small file may name the same weights without end
        raise ValueError(f"more than {MOST_NETWORKS} networks")
    return [state["model"] | state["average"], *map(dict, others)]


def _refuse_misfit(options: Model, weights: Sequence[Weights], path: Path) -> None:
    """Raise SnapshotError where the weights are not those of the options, before memory is taken for a network."""
    try:
        with torch.device("meta"):
            network = build.model(options, seed=0)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise SnapshotError(f"{path}: no network has these options ({error})") from error
    for values in weights:
        snapshot.refuse_misfit(network, values, path)


def find_cases(inputs: Sequence[Path], channels: int) -> list[Case]:
    """Files, and the NIfTI files of folders, as cases; `_0000`, `_0001` .. are one case's channels."""
    grouped: dict[str, list[Path]] = {}
    for path in inputs:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else volumes_in(path):
            name = stem(file) if channels == 1 else without_channel(stem(file))
            grouped.setdefault(name, []).append(file)
    if not grouped:
        raise UserError(f"no .nii or .nii.gz file in {', '.join(map(str, inputs))}")
    for name, files in grouped.items():
        if len(files) > channels:
            listed = ", ".join(map(str, files))
            raise UserError(f"{name}: {len(files)} files of one name ({listed}); their label maps would be one file")
    return [Case(name, tuple(files), None) for name, files in grouped.items()]
