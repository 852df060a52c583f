"""A trained network applied to files: NIfTI in, label maps out on each input's own grid."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unet3d import build, compose, snapshot
from unet3d.config import Model
from unet3d.data.cases import Case
from unet3d.data.intensity import Intensity, normalise
from unet3d.data.volumes import read_volume, save_labels, to_original
from unet3d.errors import SnapshotError, UserError
from unet3d.inference import Predictor

CHANNEL = re.compile(r"_(\d{4})$")


@dataclass(frozen=True)
class Segmenter:
    """A network and everything between a file and it."""

    predictor: Predictor
    intensity: tuple[Intensity, ...]
    spacing: list[float] | None  # mm, of the grid it was trained on; None: the file's own

    def to_file(self, case: Case, path: Path) -> None:
        """Segment one case. Raises UserError where its images cannot be used."""
        volume = read_volume(dataclasses.replace(case, label=None), 0, None, self.spacing)
        if len(volume.image) != len(self.intensity):
            found, wanted = len(volume.image), len(self.intensity)
            raise UserError(f"{case.id}: {case.images[0]} has {found} channels; this network takes {wanted}")
        image = torch.from_numpy(normalise(volume.image, self.intensity))
        probabilities = self.predictor.probabilities(image).numpy()
        save_labels(path, to_original(probabilities, volume, case.images[0]), case.images[0])


def open_snapshot(path: Path, device: str, mirror: bool | None = None) -> Segmenter:
    """The segmenter that a run's snapshot holds. Raises SnapshotError, or UserError for the device."""
    state = snapshot.load(path)
    try:
        config = compose.from_plain(state["config"] | {"device": device, "resume": None, "ckpt": 0})
        options = Model(**state["model_options"])
        rules = tuple(Intensity(**rule) for rule in state["intensity"])
        weights = state["model"]
    except (KeyError, TypeError, UserError) as error:
        raise SnapshotError(f"{path}: not a snapshot of a run ({error})") from error
    if mirror is not None:
        config.inference.mirror = mirror
    where = build.device(config)
    network = build.model(options, seed=0)
    snapshot.load_weights(network, weights, path)
    predictor = build.predictor(config, network.to(where), options, build.policy(config, where.type))
    return Segmenter(predictor, rules, config.data.spacing)


def find_cases(inputs: Sequence[Path], channels: int) -> list[Case]:
    """Files, and the NIfTI files of folders, as cases; `_0000`, `_0001` .. are one case's channels."""
    files = sorted(file for path in inputs for file in _files(path))
    if not files:
        raise UserError(f"no .nii or .nii.gz file in {', '.join(map(str, inputs))}")
    if channels == 1:
        return [Case(_stem(file), (file,), None) for file in files]
    grouped: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        grouped.setdefault((file.parent, CHANNEL.sub("", _stem(file))), []).append(file)
    return [Case(name, tuple(images), None) for (_, name), images in grouped.items()]


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.iterdir() if file.name.endswith((".nii", ".nii.gz")) and file.name[0] != ".")
    elif path.is_file():
        yield path
    else:
        raise UserError(f"{path}: no such file or folder")


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").removesuffix(".nii")
