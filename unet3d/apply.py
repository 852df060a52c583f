"""A trained network applied to files: NIfTI in, label maps out on each input's own grid."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unet3d import build, checks, snapshot, trained
from unet3d.data.cases import Case, in_order, volumes_in, without_channel
from unet3d.data.intensity import Intensity, normalise
from unet3d.data.nifti import channels, open_image, save_labels, stem
from unet3d.data.volumes import Volume, contradictions, read_volume, to_original
from unet3d.data.voxels import STRICT, Leniency
from unet3d.errors import UserError
from unet3d.inference import Predictor
from unet3d.trained import Trained


@dataclass(frozen=True)
class Segmenter:
    """A network and everything between a file and it."""

    predictor: Predictor
    intensity: tuple[Intensity, ...]
    spacing: list[float] | None  # mm, of the grid it was trained on; None: the file's own
    leniency: Leniency = STRICT
    by_channel: bool = False  # files are of one channel each, and named so, also where there is but one

    def to_file(self, case: Case, path: Path) -> Volume:
        """Segment one case. Returns it on the network's grid. Raises UserError."""
        volume = read_volume(dataclasses.replace(case, label=None), 0, None, self.spacing, self.leniency)
        found, wanted = len(volume.image), len(self.intensity)
        if found != wanted:
            raise UserError(f"{case.id}: {case.images[0]} has {found} channels; this network takes {wanted}")
        image = torch.from_numpy(normalise(volume.image, self.intensity))
        save_prediction(path, self.predictor.probabilities(image), case, self.spacing)
        return volume


def save_prediction(path: Path, probabilities: Tensor, case: Case, spacing: Sequence[float] | None) -> None:
    """Write the label map of a case, on the grid of its file. Raises UserError, OSError."""
    save_labels(path, to_original(probabilities.numpy(), case, spacing), case.images[0])


def open_snapshot(path: Path, device: str, mirror: bool | None = None) -> Segmenter:
    """What segments as a snapshot, of a run or published, says. Raises SnapshotError, or UserError for the device."""
    return segmenter(trained.parse(snapshot.load(path), path), device, mirror)


def segmenter(found: Trained, device: str, mirror: bool | None) -> Segmenter:
    """What segments as these networks do. `mirror` None: as they were validated. Raises as `open_snapshot` does."""
    config = dataclasses.replace(found.config, device=device)
    if mirror is not None:
        config.inference = dataclasses.replace(config.inference, mirror=mirror)
        checks.check(config, here=False)  # not every network can be mirrored
    where = build.device(config)
    networks = trained.networks(found, where)
    predictor = build.predictor(config, networks, config.model, build.policy(config, where.type, ()))
    by_channel = config.data.format == "nnunet"
    return Segmenter(predictor, found.intensity, config.data.spacing, Leniency.of(config.data), by_channel)


def let_pass(case: Case) -> list[str]:
    """What contradicts itself in a case that a snapshot's options take all the same, as they did in training."""
    opened = {path: open_image(case.id, path) for path in case.images}
    return [str(error) for error in contradictions(case, opened)]


def files_in(inputs: Sequence[Path]) -> list[Path]:
    """Files, and the NIfTI files of folders. Raises UserError where there is none."""
    for path in inputs:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
    found = [file for path in inputs for file in ([path] if path.is_file() else volumes_in(path))]
    if not found:
        raise UserError(f"no .nii or .nii.gz file in {', '.join(map(str, inputs))}")
    return found


def find_cases(inputs: Sequence[Path], count: int, by_channel: bool = False) -> tuple[list[Case], list[str]]:
    """Files, and the NIfTI files of folders, as cases of `count` channels; `_0000`, `_0001` .. are those of one.

    A single channel is numbered only where files are `by_channel`. Beside them what is wrong with those that are none,
    a line each. Raises UserError where there is nothing to segment.
    """
    grouped: dict[str, list[Path]] = {}
    for file in files_in(inputs):
        if count == 1:
            name = stem(file).removesuffix("_0000") if by_channel else stem(file)
        else:
            name = stem(file) if _is_whole(file, count) else without_channel(stem(file))
        grouped.setdefault(name, []).append(file)
    cases, problems = [], []
    for name, files in grouped.items():
        try:
            cases.append(_case(name, files, count))
        except UserError as error:
            problems.append(str(error))
    return cases, problems


def _case(name: str, files: Sequence[Path], count: int) -> Case:
    """Files of one name as a case. Raises UserError."""
    listed = ", ".join(map(str, files))
    if len(files) > count > 1 and len({file.name for file in files}) == len(files):
        raise UserError(f"{name}: has {len(files)} files ({listed}); this network takes {count} channels")
    if len(files) > count:
        raise UserError(f"{name}: {len(files)} files of one name ({listed}); their label maps would be one file")
    return Case(name, in_order(name, files), None)


def _is_whole(file: Path, count: int) -> bool:
    """Whether a file holds all the channels of a case; one that cannot be read is told of when its turn comes."""
    try:
        return channels(open_image(stem(file), file)) == count
    except UserError:
        return False
