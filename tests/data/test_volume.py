"""Arrays checked by where they lie in space, and predictions by the way back to the file's own grid."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from guards import unchanged, without
from nibabel.affines import apply_affine
from nibabel.eulerangles import euler2mat
from nibabel.orientations import apply_orientation
from nifti_files import SHIFTED, case, changed, checked, decathlon, image, label, save_labels, told, write, write_header
from promises import promise
from scipy import ndimage

from unet3d.base.errors import UserError
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Data
from unet3d.data.cases import Case
from unet3d.data.restore import to_original
from unet3d.data.volume import ImageFiles, LabelValues, canonical_grid, read_volume, target_grid

ORIENTATIONS = ["RAS", "LPS", "PIR", "SAL", "ARI"]


def write_labels(path: Path, labels: np.ndarray, one: Case, spacing: list[float] | None) -> None:
    """As a network that is sure of them would."""
    sure = np.stack([labels == k for k in range(int(labels.max()) + 1)]).astype(np.float32)
    save_labels(path, to_original(whole(sure), one, spacing), one.images[0])


def whole(probabilities: np.ndarray) -> list[ProbabilityBlock]:
    """The volume as one strip."""
    _, x, y, z = probabilities.shape
    return [ProbabilityBlock((x, y, z), (0, 1, 2), (0, 0, 0), torch.from_numpy(probabilities))]


def cut(probabilities: np.ndarray, axes: tuple[int, int, int], steps: Sequence[int]) -> Iterator[ProbabilityBlock]:
    """Strips of these widths along two axes, each in the memory of the one before."""
    (strip,), memory = whole(probabilities), np.empty(probabilities.size, np.float32)
    starts = [range(0, strip.sizes[axis], step) for axis, step in zip(axes, steps, strict=False)]
    for a, b in product(*starts):
        corner, box = [0, 0, 0], [slice(None)] * 3
        corner[axes[0]], corner[axes[1]] = a, b
        box[axes[0]], box[axes[1]] = slice(a, a + steps[0]), slice(b, b + steps[1])
        part = probabilities[(slice(None), *box)]
        own = memory[: part.size].reshape(part.shape)
        own[...] = part
        yield ProbabilityBlock(strip.sizes, axes, (corner[0], corner[1], corner[2]), torch.from_numpy(own))


def affine(codes: str, turn: Sequence[float] = (0, 0, 0)) -> np.ndarray:
    """Axes that run towards `codes`, with voxels of 1 x 1.5 x 2.5 mm, turned by angles."""
    ornt = nib.orientations.axcodes2ornt(codes)
    matrix = np.zeros((3, 3))
    for axis, (world, sign) in enumerate(ornt):
        matrix[int(world), axis] = sign * (1, 1.5, 2.5)[axis]
    return nib.affines.from_matvec(euler2mat(*turn) @ matrix, (5, -7, 11))


def one_case(folder: Path, codes: str, turn: Sequence[float] = (0, 0, 0), shape: Sequence[int] = (12, 10, 8)) -> Case:
    where = affine(codes, turn)
    paths = (write(folder / "i.nii.gz", image(tuple(shape)), where), write(folder / "l.nii.gz", blob(shape), where))
    return Case("a", paths[:1], paths[1])


def blob(shape: Sequence[int]) -> np.ndarray:
    """An asymmetric ball of 1 with a 2 in it."""
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1)
    distance = np.linalg.norm((grid - np.multiply(shape, 0.4)) / np.multiply(shape, 0.3), axis=-1)
    return ((distance < 1).astype(np.uint8) + (distance < 0.4)).astype(np.uint8)


def one_hot(labels: np.ndarray, classes: int = 3) -> np.ndarray:
    return np.stack([labels == k for k in range(classes)]).astype(np.float32)


@without("unet3d.data.volume.apply_orientation", unchanged, only="LPS-turn1")
@pytest.mark.parametrize("turn", [(0, 0, 0), (0.3, -0.2, 0.25)])
@pytest.mark.parametrize("codes", ORIENTATIONS)
def test_a_voxel_keeps_its_place_and_its_label(tmp_path: Path, codes: str, turn: tuple) -> None:
    stored = image((12, 10, 8))
    stored[3, 7, 2] = 1000
    where = affine(codes, turn)
    path = write(tmp_path / "i.nii", stored, where)
    volume = read_volume(Case("a", (path,), write(tmp_path / "l.nii", blob(stored.shape), where)), LabelValues(3), None)
    assert nib.aff2axcodes(volume.grid.affine) == tuple("RAS")
    found = np.unravel_index(volume.image[0].argmax(), volume.image.shape[1:])
    assert np.allclose(apply_affine(volume.grid.affine, found), apply_affine(where, (3, 7, 2)), atol=1e-4)
    assert volume.label is not None
    assert volume.label[found] == blob(stored.shape)[3, 7, 2]
    assert np.allclose(volume.grid.spacing, nib.affines.voxel_sizes(volume.grid.affine))
    assert volume.image.dtype == np.float32
    assert volume.image.flags.c_contiguous
    assert volume.label.flags.c_contiguous


@promise("Prediction", "images turned, anisotropic, in ...")
@pytest.mark.parametrize("codes", ORIENTATIONS)
def test_labels_return_to_their_file_unchanged(tmp_path: Path, codes: str) -> None:
    one = one_case(tmp_path, codes, (0.2, 0.1, -0.3))
    volume = read_volume(one, LabelValues(3), None)
    assert volume.label is not None
    stored = np.asanyarray(nib.load(one.label).dataobj)
    returned = to_original(whole(one_hot(volume.label)), one, None)
    assert returned.dtype == np.uint8
    assert np.array_equal(returned, stored)
    write_labels(tmp_path / "out.nii.gz", volume.label, one, None)
    assert np.array_equal(np.asanyarray(nib.load(tmp_path / "out.nii.gz").dataobj), stored)


@promise("Prediction", "images turned, anisotropic, in ...")
@pytest.mark.parametrize("codes", ORIENTATIONS)
def test_resampled_labels_return_within_a_voxel(tmp_path: Path, codes: str) -> None:
    one = one_case(tmp_path, codes, shape=(40, 30, 24))
    volume = read_volume(one, LabelValues(3), [1.2, 1.2, 1.2])
    assert volume.label is not None
    assert np.allclose(volume.grid.spacing, 1.2)
    stored = np.asanyarray(nib.load(one.label).dataobj)
    returned = to_original(whole(one_hot(volume.label)), one, [1.2, 1.2, 1.2])
    assert returned.shape == stored.shape
    for k in (1, 2):
        assert 2 * ((returned == k) & (stored == k)).sum() / ((returned == k).sum() + (stored == k).sum()) > 0.93
    write_labels(tmp_path / "out.nii", volume.label, one, [1.2, 1.2, 1.2])
    assert (np.asanyarray(nib.load(tmp_path / "out.nii").dataobj) == stored).mean() > 0.98


@without("unet3d.data.volume.CUBIC", 0, only="spacing0")
@pytest.mark.parametrize("spacing", [[0.7, 0.9, 1.1], [2, 2, 2], [1.0, 1.5, 1.0]])
def test_resampling_moves_nothing(tmp_path: Path, spacing: list[float]) -> None:
    """A ramp in space stays that ramp: cubic splines are exact for it, and half a voxel's shift would show."""
    shape, slope = (30, 24, 20), np.array([2.0, -3.0, 1.5])
    where = affine("LPS")
    positions = apply_affine(where, np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1))
    path = write(tmp_path / "i.nii", (positions @ slope).astype(np.float32), where)
    volume = read_volume(Case("a", (path,), None), LabelValues(2), spacing)
    inner = tuple(slice(n // 3, -(n // 3)) for n in volume.image.shape[1:])
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in volume.image.shape[1:]), indexing="ij"), -1)
    assert np.allclose(volume.image[0][inner], (apply_affine(volume.grid.affine, grid) @ slope)[inner], atol=0.05)
    before, after = np.multiply(shape, (1, 1.5, 2.5)), np.multiply(volume.image.shape[1:], volume.grid.spacing)
    assert np.all(np.abs(before - after) <= np.array(spacing) / 2 + 1e-6)
    grids = ((where, shape), (volume.grid.affine, volume.image.shape[1:]))
    centres = [apply_affine(affine, (np.array(size) - 1) / 2) for affine, size in grids]
    assert np.allclose(*centres, atol=1e-4)


@without("unet3d.data.volume.LINEAR", 0, only="spacing0")
@pytest.mark.parametrize("spacing", [[2, 2, 2], [0.5, 0.5, 0.5], [1.7, 2, 0.8]])
def test_resampled_labels_lie_where_their_image_lies(tmp_path: Path, spacing: list[float]) -> None:
    """A ball in an even number of voxels: voxels of twice the size lie between two of them."""
    axes = np.meshgrid(*(np.arange(n) for n in (30, 32, 28)), indexing="ij")
    ball = (sum((axis - middle) ** 2 for axis, middle in zip(axes, (14.3, 15.1, 13.8), strict=True)) < 81).astype("u1")
    where = nib.affines.from_matvec(euler2mat(0.2, 0.1, 0.3), (3, -4, 5))
    paths = write(tmp_path / "i.nii.gz", ball.astype(np.float32), where), write(tmp_path / "l.nii.gz", ball, where)
    volume = read_volume(Case("a", paths[:1], paths[1]), LabelValues(2), spacing)
    assert volume.label is not None
    before = apply_affine(where, np.argwhere(ball)).mean(0)
    after = apply_affine(volume.grid.affine, np.argwhere(volume.label)).mean(0)
    assert np.abs(after - before).max() < 0.1
    assert volume.label.sum() * np.prod(spacing) == pytest.approx(ball.sum(), rel=0.05)


@pytest.mark.parametrize(("pair", "wanted"), [((0, 1), 1), ((2, 1), 2), ((9, 2), 2), ((0, 9), 0)])
def test_of_labels_with_equal_shares_a_class_is_kept_and_what_is_ignored_is_not(
    tmp_path: Path, pair: tuple[int, int], wanted: int
) -> None:
    labels = np.broadcast_to(np.resize(pair, 4)[:, None, None], (4, 4, 4)).astype(np.uint8)
    where = nib.affines.from_matvec(euler2mat(0.2, 0.1, 0.3), (3, -4, 5))
    paths = write(tmp_path / "i.nii.gz", labels.astype(np.float32), where), write(tmp_path / "l.nii.gz", labels, where)
    volume = read_volume(Case("a", paths[:1], paths[1]), LabelValues(3, 9), [2, 1, 1])
    assert volume.label is not None and volume.label.shape == (2, 4, 4) and (volume.label == wanted).all()


def test_resampling_invents_no_intensity(tmp_path: Path) -> None:
    stored = np.zeros((20, 20, 20), np.int16)
    stored[:10] = 1000
    volume = read_volume(Case("a", (write(tmp_path / "i.nii", stored),), None), LabelValues(2), [0.8, 0.8, 0.8])
    assert volume.image.min() == 0
    assert volume.image.max() == 1000


def test_resampling_continues_the_edge(tmp_path: Path) -> None:
    stored = np.full((8, 8, 8), 50, np.int16)
    stored[3:5, 3:5, 3:5] = 0
    volume = read_volume(Case("a", (write(tmp_path / "i.nii", stored),), None), LabelValues(2), [0.5, 0.5, 0.5])
    assert volume.image[0][[0, 0, -1], [0, -1, -1], [0, 0, -1]] == pytest.approx(50, abs=0.5)


def test_the_files_own_spacing_is_left_alone(tmp_path: Path) -> None:
    one = one_case(tmp_path, "RAS")
    volume = read_volume(one, LabelValues(3), [1.0004, 1.5, 2.5])
    assert np.array_equal(volume.image[0], np.asanyarray(nib.load(one.images[0]).dataobj))


def test_probabilities_are_interpolated_before_the_choice(tmp_path: Path) -> None:
    """Half way between two voxels the larger class wins, also where neither of them chose it."""
    path = write(tmp_path / "i.nii", image((3, 1, 1)), np.eye(4))
    one = Case("a", (path,), None)
    probabilities = np.array([[0.5, 0.1], [0.1, 0.5], [0.4, 0.4]], np.float32).reshape(3, 2, 1, 1)
    assert to_original(whole(probabilities), one, [2, 1, 1]).ravel().tolist() == [0, 2, 1]


def test_a_file_that_changed_size_since_it_was_read_is_one_line(tmp_path: Path) -> None:
    one = Case("a", (write(tmp_path / "i.nii", image((3, 1, 1))),), None)
    with pytest.raises(UserError, match=r"^a: .*i\.nii: "):
        to_original(whole(np.zeros((3, 4, 1, 1), np.float32)), one, None)


ORDERS = [*permutations(range(3))]
SPACINGS = [None, [1.3, 1.1, 2.5], [0.8, 3.0, 40.0], [3.1, 0.9, 1.0]]
# each order with each spacing, and each of both with each orientation
GRIDS = [(*pair, ORIENTATIONS[number % 3]) for number, pair in enumerate(product(ORDERS, SPACINGS))]


@promise("Prediction", "a volume whose probabilities ...")
@pytest.mark.parametrize(("axes", "spacing", "codes"), GRIDS)
def test_strips_on_the_files_grid_are_the_volume_in_one_piece(
    tmp_path: Path, codes: str, spacing: list | None, axes: tuple[int, int, int]
) -> None:
    """To the bit, as labels and as probabilities, with strips of one voxel too; and as scipy's splines, to rounding."""
    one = one_case(tmp_path, codes)
    stored = nib.load(one.images[0])
    source, target = target_grid(one, stored, spacing), canonical_grid(stored)
    probabilities = np.random.default_rng(0).random((4, *source.shape), np.float32)
    matrix = np.linalg.inv(source.affine) @ target.affine
    options = {"output_shape": target.shape, "order": 1, "mode": "nearest"}
    dense = np.stack([ndimage.affine_transform(scores, matrix, **options) for scores in probabilities], -1)
    scores = np.empty((3, *stored.shape, 4), np.float32)
    labels = [to_original(whole(probabilities), one, spacing, lambda label: scores[0, ..., label])]
    labels += [
        to_original(cut(probabilities, axes, n), one, spacing, lambda label, i=i: scores[i, ..., label])
        for i, n in STEPS
    ]
    for index in range(3):
        assert np.array_equal(scores[index], scores[0]) and np.array_equal(labels[index], scores[0].argmax(-1))
    there = apply_orientation(scores[0], nib.io_orientation(stored.affine))
    assert np.allclose(there, dense, atol=1e-6, rtol=0) and (there.argmax(-1) == dense.argmax(-1)).all()


STEPS = [(1, (5, 3)), (2, (1, 1))]


@promise("Data", "4D and 2D images", "the fourth axis must match the channels, or is 1 and dropped; 2D is refused")
@without("unet3d.data.nifti.np.moveaxis", unchanged)
def test_channels_come_first(tmp_path: Path) -> None:
    stored = image((6, 5, 4, 3))
    packed = Case("a", (write(tmp_path / "4d.nii.gz", stored, np.eye(4)),), None)
    files = tuple(write(tmp_path / f"a_{c:04d}.nii", stored[..., c], np.eye(4)) for c in range(3))
    for one in (packed, Case("a", files, None)):
        assert np.array_equal(read_volume(one, LabelValues(2), None).image, stored.transpose(3, 0, 1, 2))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float32, np.float64])
def test_integral_labels_are_exact_in_any_type(tmp_path: Path, kind: type) -> None:
    volume = read_volume(case(tmp_path, image(), label().astype(kind)), LabelValues(3), None)
    assert volume.label is not None
    assert volume.label.dtype == np.uint8
    assert np.array_equal(volume.label[::-1, ::-1], label())


@pytest.mark.parametrize(
    ("value", "classes", "ignore", "kind"),
    [(255, 3, 255, np.uint8), (300, 3, 300, np.uint16), (299, 300, None, np.uint16)],
)
def test_high_labels_are_kept(tmp_path: Path, value: int, classes: int, ignore: int | None, kind: type) -> None:
    stored = label().astype(np.int16)
    stored[0, 0, 0] = value
    volume = read_volume(case(tmp_path, image(), stored), LabelValues(classes, ignore), None)
    assert volume.label is not None
    assert (volume.label.max(), volume.label.dtype) == (value, kind)


def test_a_scaled_label_is_what_the_scaling_says(tmp_path: Path) -> None:
    one = case(tmp_path, image(), label() * np.uint8(2))
    assert one.label is not None
    write_header(one.label, "scl_slope", 0.5)
    volume = read_volume(one, LabelValues(3), None)
    assert volume.label is not None and np.array_equal(volume.label[::-1, ::-1], label())


def all_finite(values: np.ndarray) -> np.ndarray:
    """Take every number for a finite one."""
    return np.ones(np.shape(values), bool)


@promise("Data", "voxels that are NaN ...")
@without("numpy.isfinite", all_finite, only="nan")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_voxels_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    one = case(tmp_path, changed(image(), value), label())
    with pytest.raises(UserError) as caught:
        read_volume(one, LabelValues(3), None)
    assert told([str(caught.value)], [[f"a: {one.images[0]}: 1 ", "NaN"]])


def test_channels_in_files_must_be_single_and_fit(tmp_path: Path) -> None:
    first = write(tmp_path / "a_0000.nii", image())
    with pytest.raises(UserError, match=r"^a: .*a_0001\.nii: .*\(6, 5, 4, 2\)"):
        read_volume(Case("a", (first, write(tmp_path / "a_0001.nii", image((6, 5, 4, 2)))), None), LabelValues(3), None)
    with pytest.raises(UserError, match=r"^a: .*a_0002\.nii: .* 1 .*a_0000\.nii"):
        read_volume(Case("a", (first, write(tmp_path / "a_0002.nii", image(), SHIFTED)), None), LabelValues(3), None)


def test_a_spacing_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    one = case(tmp_path, image(), label())
    with pytest.raises(UserError, match=r"6000x7500x10000 .*data\.spacing=\[0\.001, 0\.001, 0\.001\] mm"):
        read_volume(one, LabelValues(3), [0.001, 0.001, 0.001])


@promise("data sets", "resampling to `data.spacing` makes at most 32 times the voxels that are stored")
@promise("Data", "a header that claims ...")
@without("unet3d.data.volume.MAX_GROWTH", 10**9)
def test_a_grid_may_hold_32_times_the_voxels_that_are_stored(tmp_path: Path) -> None:
    """Also where that is far less than the most that a file may hold; the check lists every such case."""
    one = Case("a", (write(tmp_path / "i.nii", image((12, 10, 8)), np.eye(4)),), None)
    assert read_volume(one, LabelValues(2), [0.5, 0.25, 0.25]).image.size == 32 * 960
    with pytest.raises(UserError, match=r"24x40x33 .*data\.spacing=\[0\.5, 0\.25, 0\.24\] mm.*\b33\b.*\b960\b.*\b32\b"):
        read_volume(one, LabelValues(2), [0.5, 0.25, 0.24])
    data = decathlon(tmp_path / "set")
    data.spacing = [0.03, 0.03, 0.03]
    assert [line.split(": ")[0] for line in checked(data, full=False)] == [*"abcd"]


@promise("Data", "values that float32 cannot tell apart, as behind an offset of 1e9", "refused")
@without("unet3d.data.nifti.GREYS", 0, only="int32")
@pytest.mark.parametrize(
    ("voxels", "slope", "inter"),
    [
        (1_000_000_000 + np.arange(120, dtype=np.int32) * 8, 1, 0),
        (1e9 + np.arange(120.0), 1, 0),
        (-1e9 - np.arange(120.0), 1, 0),
        (np.arange(120, dtype=np.int16), 1, 1e9),
        (np.arange(120, dtype=np.float32), 1e-3, 1e6),
    ],
    ids=["int32", "float64", "negative", "intercept", "slope"],
)
def test_values_that_float32_cannot_tell_apart_are_refused(
    tmp_path: Path, voxels: np.ndarray, slope: float, inter: float
) -> None:
    one = case(tmp_path, voxels.reshape(6, 5, 4), label())
    write_header(write_header(one.images[0], "scl_slope", slope), "scl_inter", inter)
    low, high = sorted((float(voxels[0]) * slope + inter, float(voxels[-1]) * slope + inter))
    with pytest.raises(UserError) as caught:
        read_volume(one, LabelValues(3), None)
    assert told([str(caught.value)], [[f"a: {one.images[0]}: ", f" {low:.12g} ", f" {high:.12g}", "float32"]])


def test_values_that_float32_cannot_tell_apart_are_refused_beside_some_that_are_replaced(tmp_path: Path) -> None:
    accepted = ImageFiles(Data(nonfinite="zero"))
    one = case(tmp_path, changed(1e9 + np.arange(120.0).reshape(6, 5, 4), np.nan), label())
    with pytest.raises(UserError, match=rf"^a: {one.images[0]}: .*float32"):
        read_volume(one, LabelValues(3), None, accepted)
    one = case(tmp_path, np.full((6, 5, 4), np.nan), label())
    assert read_volume(one, LabelValues(3), None, accepted).nonfinite_voxels == 120


@pytest.mark.parametrize("voxels", [np.arange(120.0) * 1e9, 1e6 + np.arange(120.0), np.full(120, 2**30 + 1), [0, 1e9]])
def test_values_that_float32_can_tell_apart_are_read(tmp_path: Path, voxels: np.ndarray) -> None:
    """A wide range, a moderate offset, one value alone, two."""
    stored = np.resize(voxels, (6, 5, 4)).astype(np.float64)
    volume = read_volume(case(tmp_path, stored, label()), LabelValues(3), None)
    assert np.array_equal(volume.image[0], stored[::-1, ::-1].astype(np.float32))


def test_labels_of_another_grid_are_not_saved(tmp_path: Path) -> None:
    like = write(tmp_path / "i.nii", image())
    with pytest.raises(AssertionError):
        save_labels(tmp_path / "out.nii", label((6, 5, 3)), like)
    assert not (tmp_path / "out.nii").exists()
