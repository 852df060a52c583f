"""Data sets that are generated, in Decathlon's layout: the phantom, and a brain from nilearn's MNI152 template."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np

from unet3d.base import progress
from unet3d.base.errors import UserError, is_disk_full, make_room
from unet3d.base.files import making_folder
from unet3d.config.schema import Phantom
from unet3d.data import nifti_write

PHANTOM_ROOT, MNI152_ROOT = Path("data/phantom"), Path("data/mni152")
PHANTOM_VERSION = MNI152_VERSION = 1  # raise one with every change of its voxels
SPACING = (1.0, 1.0, 2.5)  # mm, as coarse along z as many clinical scans
AIR, BODY, ORGAN, VESSEL, LESION = 0.02, 0.40, 0.75, 1.15, 0.18  # intensities
JITTER, NOISE, BIAS = 0.02, 0.03, 0.15  # std: of a tone from case to case, of each channel, of the log of the gain
GAP, FAR = 0.03, 0.6  # between structures, and what stands for any large distance; 1 is half the volume
LEVELS = 255  # nilearn divides its 8-bit voxels by their largest value


class GeneratedCase(NamedTuple):
    """`image` and `label` (X, Y, Z), stored in their types, and the `affine` (4, 4) of both, to mm."""

    name: str
    image: np.ndarray
    label: np.ndarray
    affine: np.ndarray


def write_dataset(folder: Path, about: Mapping[str, Any], cases: Iterable[GeneratedCase]) -> Path:
    """`folder`; if absent, written whole from `about`, the start of dataset.json, and `cases`. Raises UserError."""
    if folder.is_dir():
        return folder
    try:
        with making_folder(folder) as temporary:
            entries = [_write_case(temporary, case) for case in cases]
            content = {**about, "numTraining": len(entries), "training": entries}
            (temporary / "dataset.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        if not folder.is_dir():  # else another process was faster, and its bytes are the same
            remedy = make_room(error) if is_disk_full(error) else "name a writable folder in data.root"
            raise UserError(f"{folder}: cannot be generated ({error.strerror}); {remedy}") from error
    return folder


def _write_case(folder: Path, case: GeneratedCase) -> dict[str, str]:
    entry = {kind: f"{kind}sTr/{case.name}.nii.gz" for kind in ("image", "label")}
    for name, voxels in zip(entry.values(), (case.image, case.label), strict=True):
        image = nib.Nifti1Image(voxels, case.affine)
        image.header.set_xyzt_units("mm")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        nifti_write.save_image(folder / name, image)
    return entry


def ensure_phantom(options: Phantom, parent: Path) -> Path:
    """The phantom's folder below `parent`, named after the options; generated if absent. Raises UserError."""
    labels = {"0": "background", "1": "organ", "2": "vessel", "3": "lesion"}
    about = {"name": "Phantom", "description": "Generated: no patient, no licence", "modality": {"0": "MRI"}}
    name = f"v{PHANTOM_VERSION}-{options.cases}x{'x'.join(map(str, options.shape))}-seed{options.seed}"
    return write_dataset(parent / name, {**about, "labels": labels}, _phantom_cases(options))


def _phantom_cases(options: Phantom) -> Iterator[GeneratedCase]:
    # Axes towards left, posterior, superior, as scanners store them, and the volume's centre at 0 mm.
    affine = np.diag([-SPACING[0], -SPACING[1], SPACING[2], 1])
    affine[:3, 3] = -affine[:3, :3] @ (np.subtract(options.shape, 1) / 2)
    for index in progress.track(range(options.cases), "generating cases", options.cases):
        image, label = draw_phantom(np.random.default_rng([options.seed, index]), options.shape)
        yield GeneratedCase(f"phantom_{index:03d}", np.rint(1000 * image).astype(np.int16), label, affine)


def draw_phantom(rng: np.random.Generator, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """One case: image float64 (X, Y, Z), air near 0 and vessels near 1; label uint8 (X, Y, Z)."""
    from scipy.spatial import cKDTree
    from scipy.spatial.transform import Rotation

    # Voxel centres (3, X, Y, Z) in [-1, 1]: structures keep their proportions in any shape.
    points = np.stack(np.meshgrid(*((np.arange(n) + 0.5) / n * 2 - 1 for n in shape), indexing="ij"))
    points += 0.06 * np.stack([_smooth(rng, shape, 0.12) for _ in range(3)])  # makes every shape irregular
    pose = Rotation.from_rotvec(rng.normal(0, 0.25, 3))
    centre = rng.uniform((-0.2, -0.3, -0.1), (0.2, 0.0, 0.1))
    radii = rng.uniform((0.62, 0.52, 0.66), (0.74, 0.60, 0.80))
    body = _ellipsoid(points, np.zeros(3), np.array((0.94, 0.88, 1.5)), np.eye(3))
    spine = np.hypot(points[0], points[1] - 0.6) - 0.20
    organ = np.maximum(_ellipsoid(points, centre, radii, pose.as_matrix()), GAP - np.minimum(-body, spine))
    tree = cKDTree(centre + pose.apply(radii * _vessel_axes(rng)))
    tube = tree.query(np.moveaxis(points, 0, -1), distance_upper_bound=FAR)[0] - 0.15
    vessel = np.maximum(tube, organ + 2 * GAP)
    lesions = place_balls(rng, points, (organ < -GAP) & (vessel > 0), rng.uniform(0.20, 0.30, 3))
    others = place_balls(rng, points, (body < 0) & (organ > GAP) & (spine > 0), rng.uniform(0.15, 0.25, 5))
    layers = [(body, BODY), (spine, VESSEL), (organ, ORGAN), (vessel, VESSEL), *((ball, LESION) for ball in lesions)]
    layers += zip(others, (LESION, VESSEL, LESION, ORGAN, LESION), strict=False)
    label = np.zeros(organ.shape, np.uint8)
    for value, distance in enumerate((organ, vessel, np.minimum.reduce(lesions)), start=1):
        label[distance < 0] = value
    return _scanned(rng, layers), label


def _scanned(rng: np.random.Generator, layers: Sequence[tuple[np.ndarray, float]]) -> np.ndarray:
    """Each layer's tone where its distance is negative, with a smooth gain, as the magnitude of two noisy channels."""
    tones = {tone: tone + JITTER * rng.standard_normal() for tone in (BODY, ORGAN, VESSEL, LESION)}
    image = np.full(layers[0][0].shape, AIR)
    for distance, tone in layers:
        share = np.clip(0.5 - distance * len(image) / 2, 0, 1)  # two tones share a voxel at a border
        image += share * (tones[tone] - image)
    gained = image * np.exp(BIAS * _smooth(rng, image.shape, 0.3))
    real, imaginary = NOISE * rng.standard_normal((2, *image.shape))
    return np.asarray(np.hypot(gained + real, imaginary))


def _smooth(rng: np.random.Generator, shape: Sequence[int], width: float) -> np.ndarray:
    """A random field of unit std that varies over `width` (share of each length)."""
    from scipy.ndimage import gaussian_filter

    field: np.ndarray = gaussian_filter(rng.standard_normal(shape), [width * n for n in shape], mode="nearest")
    return np.asarray((field - field.mean()) / field.std())


def _ellipsoid(points: np.ndarray, centre: np.ndarray, radii: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Distance to its surface (X, Y, Z), negative inside; at most the true one."""
    offset = np.tensordot(turn.T, points - centre[:, None, None, None], 1)
    norm = np.linalg.norm(offset / radii[:, None, None, None], axis=0)
    return np.asarray((norm - 1) * radii.min())


def _vessel_axes(rng: np.random.Generator) -> np.ndarray:
    """Points (N, 3) on a winding trunk and a branch, in the posterior half of the unit ball."""
    t = np.linspace(-0.8, 0.8, 60)
    phase = 2.5 * t + rng.uniform(0, 2 * np.pi)
    trunk = np.stack([t, 0.35 + 0.15 * np.sin(phase), 0.25 * np.cos(phase)], axis=1)
    away = np.array([rng.choice([-0.5, 0.5]), 0, -np.copysign(0.9, trunk[30, 2])])
    return np.concatenate([trunk, trunk[30] + np.linspace(0, 1, 40)[:, None] * away])


def place_balls(rng: np.random.Generator, points: np.ndarray, free: np.ndarray, radii: np.ndarray) -> list[np.ndarray]:
    """Distances to balls inside `free` that do not touch each other: the largest, and the others that fit."""
    from scipy.ndimage import distance_transform_edt

    room = distance_transform_edt(free, sampling=np.divide(2, free.shape)) - GAP
    balls: list[np.ndarray] = []
    for radius in np.sort(radii)[::-1]:
        fitting = np.flatnonzero(room > radius)
        if balls and not fitting.size:
            break
        chosen = rng.choice(fitting) if fitting.size else room.argmax()
        centre = points.reshape(3, -1)[:, chosen, None, None, None]
        distance = np.linalg.norm(points - centre, axis=0) - min(radius, room.flat[chosen])
        balls.append(np.where(free, distance, FAR))
        room = np.minimum(room, distance - GAP)
    return balls


def ensure_mni152(parent: Path) -> Path:
    """The folder of the brain below `parent`; made from nilearn's template if absent. Raises UserError."""
    about = {
        "name": "MNI152",
        "description": "ICBM 152 template 2009a, non-linear, symmetric, without skull; as nilearn has it",
        "reference": "McConnell Brain Imaging Centre, Montreal Neurological Institute, McGill University",
        "modality": {"0": "T1"},
        "labels": {"0": "background", "1": "gray", "2": "white"},
    }
    return write_dataset(parent / f"v{MNI152_VERSION}", about, _mni152_cases())


def _mni152_cases() -> Iterator[GeneratedCase]:
    """The one case, its voxels as nilearn's files store them, 0 to LEVELS."""
    try:
        from nilearn import datasets  # takes a second, and only the first run needs it
    except ImportError as error:
        command = 'python -m pip install -c constraints.txt -e ".[brain]"'
        raise UserError(f"data=mni152 is made from nilearn's template, but {error}; install it: {command}") from error
    template = datasets.load_mni152_template(resolution=1)
    maps = datasets.load_mni152_gm_template(resolution=1), datasets.load_mni152_wm_template(resolution=1)
    # nilearn gives shares of the largest voxel in float32; times its value they are the stored integers.
    image, gray, white = (np.rint(LEVELS * np.asarray(each.dataobj)).astype(np.int16) for each in (template, *maps))
    yield GeneratedCase("mni152", image, mni152_labels(gray, white), template.affine)


def mni152_labels(gray: np.ndarray, white: np.ndarray) -> np.ndarray:
    """Labels uint8 (X, Y, Z) from maps in 1 / LEVELS: the likeliest, or first, of neither (0), gray (1), white (2)."""
    assert (gray + white).max() <= LEVELS, "two shares of one voxel"
    return np.asarray(np.stack([LEVELS - gray - white, gray, white]).argmax(0), np.uint8)
