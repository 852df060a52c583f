"""Data sets that are generated, in Decathlon's layout: the phantom, and a brain from nilearn's MNI152 template."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from unet3d.base import progress
from unet3d.base.errors import UserError, is_disk_full, make_room
from unet3d.base.files import write_text
from unet3d.config.schema import LAYOUTS, Data, Phantom
from unet3d.data import restore
from unet3d.data.cases import DatasetInfo, layout, sound
from unet3d.data.layouts.stored import DatasetJson, decathlon, decathlon_of

PHANTOM_VERSION = MNI152_VERSION = 1  # raise one with every change of its voxels
PHANTOM: dict[str, Any] = {  # its dataset.json, without the cases
    "name": "Phantom",
    "description": "Generated: no patient, no licence",
    "modality": {"0": "MRI"},
    "labels": {"0": "background", "1": "organ", "2": "vessel", "3": "lesion"},
}
SPACING = (1.0, 1.0, 2.5)  # mm, as coarse along z as many clinical scans
AIR = 0.02  # intensities
BODY = 0.40
ORGAN = 0.75
VESSEL = 1.15
LESION = 0.18
JITTER = 0.02  # std of a tone from case to case
NOISE = 0.03  # std of each channel
BIAS = 0.15  # std of the log of the gain
GAP = 0.03  # between structures; 1 is half the volume
FAR = 0.6  # stands for any large distance
# Its name, image and label (X, Y, Z), stored in their types, and the affine (4, 4) of both, to mm.
GeneratedCase = tuple[str, np.ndarray, np.ndarray, np.ndarray]
LEVELS = 255  # nilearn divides its 8-bit voxels by their largest value


@layout(generated="data/phantom")
def phantom(root: Path, data: Data) -> DatasetInfo:
    """Return the phantom of data.phantom. Raises UserError."""
    return decathlon(ensure_phantom(data.phantom, root), data)


@layout(generated="data/mni152")
def mni152(root: Path, data: Data) -> DatasetInfo:
    """Return the brain of nilearn's template. Raises UserError."""
    return decathlon(ensure_mni152(root), data)


def phantom_outline(data: Data) -> DatasetInfo:
    """Return what `read_dataset` returns for the phantom, and generate no file. Raises UserError."""
    folder = phantom_folder(data.phantom, Path(data.root or LAYOUTS["phantom"]["generated"]))
    content = _content(PHANTOM, _phantom_names(data.phantom))
    return sound(decathlon_of(DatasetJson(folder, data.allow_outside, content), data))


def _content(about: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a dataset.json of the cases of these names."""
    entries = [{kind: f"{kind}sTr/{name}.nii.gz" for kind in ("image", "label")} for name in names]
    return {**about, "numTraining": len(names), "training": entries}


def write_dataset(folder: Path, about: Mapping[str, Any], cases: Iterable[GeneratedCase]) -> Path:
    """Return `folder`; unless complete, written from `about`, the start of dataset.json, and `cases`.

    dataset.json is written last: a generation that stops before it begins again, and several at once write the same
    bytes. Raises UserError.
    """
    if (folder / "dataset.json").is_file():
        return folder
    try:
        names = list[str]()
        for name, *arrays, affine in cases:
            names.append(name)
            for part, voxels in zip(("imagesTr", "labelsTr"), arrays, strict=True):
                image = nib.Nifti1Image(voxels, affine)
                image.header.set_xyzt_units("mm")
                (folder / part).mkdir(parents=True, exist_ok=True)
                restore.save_image(folder / part / f"{name}.nii.gz", image)
        write_text(folder / "dataset.json", json.dumps(_content(about, names), indent=1))
    except OSError as error:
        remedy = make_room(error) if is_disk_full(error) else "name a writable folder in data.root"
        raise UserError(f"{folder}: cannot be generated ({error.strerror}); {remedy}") from error
    return folder


def ensure_phantom(options: Phantom, parent: Path) -> Path:
    """Return the phantom's folder below `parent`, named after the options; generated if absent. Raises UserError."""
    return write_dataset(phantom_folder(options, parent), PHANTOM, _phantom_cases(options))


def phantom_folder(options: Phantom, parent: Path) -> Path:
    """Return where the phantom is, or will be."""
    shape = "x".join(map(str, options.shape))
    return parent / f"v{PHANTOM_VERSION}-{options.cases}x{shape}-seed{options.seed}"


def phantom_header(options: Phantom) -> nib.Nifti1Image:
    """Return an image on the grid of the phantom's, whose voxels take no memory."""
    return nib.Nifti1Image(np.broadcast_to(np.int16(0), options.shape), _phantom_affine(options))


def _phantom_affine(options: Phantom) -> np.ndarray:
    """Return the affine of axes towards left, posterior, superior, as scanners store them, centred at 0 mm."""
    affine = np.diag([-SPACING[0], -SPACING[1], SPACING[2], 1])
    affine[:3, 3] = -affine[:3, :3] @ (np.subtract(options.shape, 1) / 2)
    return affine


def _phantom_cases(options: Phantom) -> Iterator[GeneratedCase]:
    """Yield the cases one by one."""
    affine = _phantom_affine(options)
    for index, name in enumerate(progress.track(_phantom_names(options), "generating cases", options.cases)):
        image, label = draw_phantom(np.random.default_rng([options.seed, index]), options.shape)
        yield name, np.rint(1000 * image).astype(np.int16), label, affine


def _phantom_names(options: Phantom) -> list[str]:
    return [f"phantom_{index:03d}" for index in range(options.cases)]


def draw_phantom(rng: np.random.Generator, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return one case: image float64 (X, Y, Z), air near 0 and vessels near 1; label uint8 (X, Y, Z)."""
    from scipy.spatial import cKDTree
    from scipy.spatial.transform import Rotation

    # Voxel centres (3, X, Y, Z) in [-1, 1]: structures keep their proportions in any shape.
    points = np.stack(np.meshgrid(*((np.arange(n) + 0.5) / n * 2 - 1 for n in shape), indexing="ij"))
    for axis in points:
        axis += 0.06 * _smooth(rng, shape, width=0.12)  # makes every shape irregular
    pose = Rotation.from_rotvec(rng.normal(0, 0.25, 3))
    centre = rng.uniform((-0.2, -0.3, -0.1), (0.2, 0.0, 0.1))
    radii = rng.uniform((0.62, 0.52, 0.66), (0.74, 0.60, 0.80))
    body = _ellipsoid(points, centre=np.zeros(3), radii=np.array((0.94, 0.88, 1.5)), turn=np.eye(3))
    spine = np.hypot(points[0], points[1] - 0.6) - 0.20
    outside = np.minimum(-body, spine)
    organ = _ellipsoid(points, centre, radii, pose.as_matrix())
    organ = np.maximum(organ, GAP - outside)
    line = centre + pose.apply(radii * _vessel_axes(rng))
    away, _ = cKDTree(line).query(np.moveaxis(points, 0, -1), distance_upper_bound=FAR)  # infinite beyond
    vessel = np.maximum(away - 0.15, organ + 2 * GAP)
    in_organ = (organ < -GAP) & (vessel > 0)
    in_body = (body < 0) & (organ > GAP) & (spine > 0)
    lesions = place_balls(rng, points, in_organ, rng.uniform(0.20, 0.30, 3))
    others = place_balls(rng, points, in_body, rng.uniform(0.15, 0.25, 5))
    layers = [
        (body, BODY),
        (spine, VESSEL),
        (organ, ORGAN),
        (vessel, VESSEL),
        *((ball, LESION) for ball in lesions),
        *zip(others, (LESION, VESSEL, LESION, ORGAN, LESION), strict=False),
    ]
    label = np.zeros(organ.shape, np.uint8)
    for value, distance in enumerate((organ, vessel, np.minimum.reduce(lesions)), start=1):  # later ones cover others
        label[distance < 0] = value
    return _scanned(rng, layers), label


def _scanned(rng: np.random.Generator, layers: Sequence[tuple[np.ndarray, float]]) -> np.ndarray:
    """Return an image (X, Y, Z) with each layer's tone where its distance is negative.

    With a smooth gain, as the magnitude of two noisy channels.
    """
    tones = {tone: tone + JITTER * rng.standard_normal() for tone in (BODY, ORGAN, VESSEL, LESION)}
    image = np.full(layers[0][0].shape, AIR)
    for distance, tone in layers:
        share = np.clip(0.5 - distance * len(image) / 2, 0, 1)  # two tones share a voxel at a border
        image += share * (tones[tone] - image)
    gain = np.exp(BIAS * _smooth(rng, image.shape, width=0.3))
    real, imaginary = NOISE * rng.standard_normal((2, *image.shape))
    return np.asarray(np.hypot(image * gain + real, imaginary))


def _smooth(rng: np.random.Generator, shape: Sequence[int], width: float) -> np.ndarray:
    """Return a random field of unit std that varies over `width` (share of each length)."""
    from scipy.ndimage import gaussian_filter

    field = gaussian_filter(rng.standard_normal(shape), np.multiply(width, shape), mode="nearest")
    return np.asarray((field - field.mean()) / field.std())


def _ellipsoid(points: np.ndarray, centre: np.ndarray, radii: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return the distance to its surface (X, Y, Z), negative inside; at most the true one."""
    offset = np.tensordot(turn.T, points - centre[:, None, None, None], 1)
    norm = np.linalg.norm(offset / radii[:, None, None, None], axis=0)
    return np.asarray((norm - 1) * radii.min())


def _vessel_axes(rng: np.random.Generator) -> np.ndarray:
    """Return points (N, 3) on a winding trunk and a branch, in the posterior half of the unit ball."""
    x = np.linspace(-0.8, 0.8, 60)
    phase = 2.5 * x + rng.uniform(0, 2 * np.pi)
    trunk = np.stack([x, 0.35 + 0.15 * np.sin(phase), 0.25 * np.cos(phase)], axis=1)
    fork = trunk[30]
    away = np.array([rng.choice([-0.5, 0.5]), 0, -np.copysign(0.9, fork[2])])
    branch = fork + np.linspace(0, 1, 40)[:, None] * away
    return np.concatenate([trunk, branch])


def place_balls(rng: np.random.Generator, points: np.ndarray, free: np.ndarray, radii: np.ndarray) -> list[np.ndarray]:
    """Return distances to balls inside `free` that do not touch each other: the largest, and the others that fit."""
    from scipy.ndimage import distance_transform_edt

    room = distance_transform_edt(free, sampling=np.divide(2, free.shape)) - GAP
    balls = list[np.ndarray]()
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
    """Return the folder of the brain below `parent`; made from nilearn's template if absent. Raises UserError."""
    about = {
        "name": "MNI152",
        "description": "ICBM 152 template 2009a, non-linear, symmetric, without skull; as nilearn has it",
        "reference": "McConnell Brain Imaging Centre, Montreal Neurological Institute, McGill University",
        "modality": {"0": "T1"},
        "labels": {"0": "background", "1": "gray", "2": "white"},
    }
    return write_dataset(parent / f"v{MNI152_VERSION}", about, _mni152_cases())


def _mni152_cases() -> Iterator[GeneratedCase]:
    """Yield the one case, its voxels from 0 to LEVELS as in nilearn's files, of which it makes shares in float32."""
    try:
        from nilearn import datasets  # takes a second, and only the first run needs it
    except ImportError as error:
        command = 'python -m pip install -c constraints.txt -e ".[brain]"'
        raise UserError(f"data=mni152 is made from nilearn's template, but {error}; install it: {command}") from error
    loads = datasets.load_mni152_template, datasets.load_mni152_gm_template, datasets.load_mni152_wm_template
    maps = [load(resolution=1) for load in loads]
    image, gray, white = (np.rint(LEVELS * np.asarray(one.dataobj)).astype(np.int16) for one in maps)
    yield "mni152", image, mni152_labels(gray, white), maps[0].affine


def mni152_labels(gray: np.ndarray, white: np.ndarray) -> np.ndarray:
    """Return labels uint8 (X, Y, Z) from maps in 1 / LEVELS: the likeliest, or first, of neither (0), gray, white."""
    assert (gray + white).max() <= LEVELS, "two shares of one voxel"
    neither = LEVELS - gray - white
    return np.asarray(np.stack([neither, gray, white]).argmax(0), np.uint8)
