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
from nifti_files import LPS, SHIFTED, changed, checked, decathlon, image, label, told, write, write_header
from promises import promise
from scipy import ndimage

from unet3d.base.errors import UserError
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Data
from unet3d.data.cases import Case
from unet3d.data.restore import to_original
from unet3d.data.volume import ImageFiles, LabelValues, Volume, canonical_grid, read_volume, target_grid

ORIENTATIONS = ["RAS", "LPS", "PIR", "SAL", "ARI"]
OBLIQUE = nib.affines.from_matvec(euler2mat(0.2, 0.1, 0.3), (3, -4, 5))


def written(folder: Path, voxels: np.ndarray, labels: np.ndarray | None = None, where: np.ndarray = LPS) -> Case:
    paths = [
        write(folder / f"{name}.nii.gz", array, where)
        for name, array in (("i", voxels), ("l", labels))
        if array is not None
    ]
    return Case("a", (paths[0],), *paths[1:] or (None,))


def read(
    folder: Path,
    voxels: np.ndarray,
    labels: np.ndarray | None = None,
    where: np.ndarray = LPS,
    spacing: Sequence[float] | None = None,
    values: LabelValues | None = None,
) -> Volume:
    """A case with these arrays in its files, as the network sees it."""
    return read_volume(written(folder, voxels, labels, where), values or LabelValues(3), spacing)


def affine(codes: str, turn: Sequence[float] = (0, 0, 0)) -> np.ndarray:
    """Axes that run towards `codes`, with voxels of 1 x 1.5 x 2.5 mm, turned by angles."""
    matrix = np.zeros((3, 3))
    for axis, (world, sign) in enumerate(nib.orientations.axcodes2ornt(codes)):
        matrix[int(world), axis] = sign * (1, 1.5, 2.5)[axis]
    return nib.affines.from_matvec(euler2mat(*turn) @ matrix, (5, -7, 11))


def positions(where: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The place of each voxel in mm."""
    return apply_affine(where, np.moveaxis(np.indices(shape), 0, -1))


def blob(shape: Sequence[int]) -> np.ndarray:
    """An asymmetric ball of 1 with a 2 in it."""
    away = positions(np.eye(4), shape) - np.multiply(shape, 0.4)
    distance = np.linalg.norm(away / np.multiply(shape, 0.3), axis=-1)
    return (distance < 1).astype(np.uint8) + (distance < 0.4)


def whole(probabilities: np.ndarray) -> list[ProbabilityBlock]:
    """The volume as one strip."""
    _, x, y, z = probabilities.shape
    return [ProbabilityBlock((x, y, z), (0, 1, 2), (0, 0, 0), torch.from_numpy(probabilities))]


@without("unet3d.data.volume.apply_orientation", unchanged, only="LPS")
@pytest.mark.parametrize("codes", ORIENTATIONS)
def test_a_voxel_keeps_its_place_and_its_label(tmp_path: Path, codes: str) -> None:
    stored, where = image((12, 10, 8)), affine(codes, (0.3, -0.2, 0.25))
    stored[3, 7, 2] = 1000
    volume = read(tmp_path, stored, blob(stored.shape), where)
    assert nib.aff2axcodes(volume.grid.affine) == tuple("RAS")
    found = np.unravel_index(volume.image[0].argmax(), volume.image.shape[1:])
    assert np.allclose(apply_affine(volume.grid.affine, found), apply_affine(where, (3, 7, 2)), atol=1e-4)
    assert volume.label[found] == blob(stored.shape)[3, 7, 2]


@without("unet3d.data.volume.CUBIC", 0, only="fine")
@pytest.mark.parametrize("spacing", [[0.7, 0.9, 1.1], [2, 2, 2]], ids=["fine", "coarse"])
def test_resampling_moves_nothing(tmp_path: Path, spacing: list[float]) -> None:
    """A ramp in space stays that ramp: cubic splines are exact for it, and half a voxel's shift would show."""
    where, slope = affine("LPS"), np.array([2.0, -3.0, 1.5])
    before = positions(where, (30, 24, 20))
    volume = read(tmp_path, (before @ slope).astype(np.float32), where=where, spacing=spacing)
    after = positions(volume.grid.affine, volume.image.shape[1:])
    inner = tuple(slice(n // 3, -(n // 3)) for n in volume.image.shape[1:])
    assert np.allclose(volume.image[0][inner], (after @ slope)[inner], atol=0.05)
    assert np.allclose(before.mean((0, 1, 2)), after.mean((0, 1, 2)), atol=1e-4)


@without("unet3d.data.volume.LINEAR", 0, only="coarse")
@pytest.mark.parametrize("spacing", [[2, 2, 2], [1.7, 2, 0.8]], ids=["coarse", "mixed"])
def test_resampled_labels_lie_where_their_image_lies(tmp_path: Path, spacing: list[float]) -> None:
    """A ball in an even number of voxels: voxels of twice the size lie between two of them."""
    ball = np.linalg.norm(positions(np.eye(4), (30, 32, 28)) - (14.3, 15.1, 13.8), axis=-1) < 9
    volume = read(tmp_path, ball.astype(np.float32), ball.astype(np.uint8), OBLIQUE, spacing)
    before = positions(OBLIQUE, ball.shape)[ball].mean(0)
    after = positions(volume.grid.affine, volume.label.shape)[volume.label > 0].mean(0)
    assert np.abs(after - before).max() < 0.1
    assert volume.label.sum() * np.prod(spacing) == pytest.approx(ball.sum(), rel=0.05)


@pytest.mark.parametrize(("pair", "wanted"), [((0, 1), 1), ((2, 1), 2), ((9, 2), 2), ((0, 9), 0)])
def test_of_labels_with_equal_shares_a_class_is_kept_and_what_is_ignored_is_not(
    tmp_path: Path, pair: tuple[int, int], wanted: int
) -> None:
    labels = np.broadcast_to(np.resize(pair, 4)[:, None, None], (4, 4, 4)).astype(np.uint8)
    found = read(tmp_path, labels.astype(np.float32), labels, OBLIQUE, [2, 1, 1], LabelValues(3, 9)).label
    assert found.shape == (2, 4, 4) and (found == wanted).all()


def test_resampling_invents_no_intensity_and_continues_the_edge(tmp_path: Path) -> None:
    block = np.full((8, 8, 8), 50, np.int16)
    block[3:5, 3:5, 3:5] = 0
    found = read(tmp_path, block, spacing=[0.5, 0.5, 0.5]).image[0]
    assert (found.min(), found.max()) == (0, 50)
    assert found[[0, 0, -1], [0, -1, -1], [0, 0, -1]] == pytest.approx(50, abs=0.5)


def test_the_files_own_spacing_is_left_alone(tmp_path: Path) -> None:
    assert np.array_equal(read(tmp_path, image(), spacing=[1.0004, 1.5, 2.5]).image[0], image()[::-1, ::-1])


def test_probabilities_are_interpolated_before_the_choice(tmp_path: Path) -> None:
    """Half way between two voxels the larger class wins, also where neither of them chose it."""
    one = written(tmp_path, image((3, 1, 1)), where=np.eye(4))
    probabilities = np.array([[0.5, 0.1], [0.1, 0.5], [0.4, 0.4]], np.float32).reshape(3, 2, 1, 1)
    assert to_original(whole(probabilities), one, [2, 1, 1]).ravel().tolist() == [0, 2, 1]
    with pytest.raises(UserError, match=r"^a: .*i\.nii\.gz: "):  # it changed size since it was read
        to_original(whole(np.zeros((3, 4, 1, 1), np.float32)), one, None)


def strips(probabilities: np.ndarray, axes: tuple[int, int, int], steps: Sequence[int]) -> Iterator[ProbabilityBlock]:
    """Strips of these widths along two axes, each in the memory of the one before."""
    sizes, memory = probabilities.shape[1:], np.empty(probabilities.size, np.float32)
    for starts in product(*(range(0, sizes[axis], step) for axis, step in zip(axes, steps, strict=False))):
        corner, box = [0, 0, 0], [slice(None)] * 4
        for axis, start, step in zip(axes, starts, steps, strict=False):
            corner[axis], box[axis + 1] = start, slice(start, start + step)
        part = probabilities[tuple(box)]
        own = memory[: part.size].reshape(part.shape)
        own[...] = part
        yield ProbabilityBlock(sizes, axes, tuple(corner), torch.from_numpy(own))


SPACINGS = [None, [1.3, 1.1, 2.5], [0.8, 3.0, 40.0], [3.1, 0.9, 1.0]]
# Each order with each spacing, and each of both with each of three orientations.
GRIDS = [(*pair, ORIENTATIONS[number % 3]) for number, pair in enumerate(product(permutations(range(3)), SPACINGS))]


@promise("Prediction", "a volume whose probabilities ...")
@pytest.mark.parametrize(("axes", "spacing", "codes"), GRIDS)
def test_strips_on_the_files_grid_are_the_volume_in_one_piece(
    tmp_path: Path, codes: str, spacing: list[float] | None, axes: tuple[int, int, int]
) -> None:
    """To the bit, as labels and as probabilities, with strips of one voxel too; and as scipy's splines, to rounding."""
    one = written(tmp_path, image((12, 10, 8)), where=affine(codes))
    stored = nib.load(one.images[0])
    source, target = target_grid(one, stored, spacing), canonical_grid(stored)
    probabilities = np.random.default_rng(0).random((4, *source.shape), np.float32)
    scores = np.empty((3, *stored.shape, 4), np.float32)
    cuts = [whole(probabilities), strips(probabilities, axes, (5, 3)), strips(probabilities, axes, (1, 1))]
    for blocks, own in zip(cuts, scores, strict=True):
        labels = to_original(blocks, one, spacing, lambda label, own=own: own[..., label])
        assert np.array_equal(own, scores[0])
        assert np.array_equal(labels, scores[0].argmax(-1))
    matrix = np.linalg.inv(source.affine) @ target.affine
    options = {"output_shape": target.shape, "order": 1, "mode": "nearest"}
    dense = np.stack([ndimage.affine_transform(channel, matrix, **options) for channel in probabilities], -1)
    there = apply_orientation(scores[0], nib.io_orientation(stored.affine))
    assert np.allclose(there, dense, atol=1e-6, rtol=0)


@promise("Data", "4D and 2D images", "the fourth axis must match the channels, or is 1 and dropped; 2D is refused")
@without("unet3d.data.nifti.np.moveaxis", unchanged)
def test_channels_come_first(tmp_path: Path) -> None:
    stored = image((6, 5, 4, 3))
    assert np.array_equal(read(tmp_path, stored, where=np.eye(4)).image, stored.transpose(3, 0, 1, 2))
    files = tuple(write(tmp_path / f"a_{c:04d}.nii", stored[..., c], np.eye(4)) for c in range(3))
    found = read_volume(Case("a", files, None), LabelValues(2), None).image
    assert np.array_equal(found, stored.transpose(3, 0, 1, 2))


def test_channels_in_files_must_be_single_and_fit(tmp_path: Path) -> None:
    first = write(tmp_path / "a_0000.nii", image())
    double = write(tmp_path / "a_0001.nii", image((6, 5, 4, 2)))
    shifted = write(tmp_path / "a_0002.nii", image(), SHIFTED)
    for other, wanted in ((double, r"a_0001\.nii: .*\(6, 5, 4, 2\)"), (shifted, r"a_0002\.nii: .* 1 .*a_0000\.nii")):
        with pytest.raises(UserError, match=f"^a: .*{wanted}"):
            read_volume(Case("a", (first, other), None), LabelValues(3), None)


@pytest.mark.parametrize(
    ("value", "values", "kind"),
    [
        (2, LabelValues(3), np.uint8),
        (255, LabelValues(3, 255), np.uint8),
        (300, LabelValues(3, 300), np.uint16),
        (299, LabelValues(300), np.uint16),
    ],
)
def test_labels_are_exact_in_the_smallest_type_that_holds_them(
    tmp_path: Path, value: int, values: LabelValues, kind: type
) -> None:
    stored = changed(label(), value)
    found = read(tmp_path, image(), stored, values=values).label
    assert found.dtype == kind and np.array_equal(found[::-1, ::-1], stored)


@promise("data sets", "resampling to `data.spacing` makes at most 32 times the voxels that are stored")
@promise("Data", "a header that claims ...")
@without("unet3d.data.volume.MAX_GROWTH", 10**9)
def test_a_grid_may_hold_32_times_the_voxels_that_are_stored(tmp_path: Path) -> None:
    """Also where that is far less than the most that a file may hold; the check lists every such case."""
    stored, where = image((12, 10, 8)), np.eye(4)
    assert read(tmp_path, stored, where=where, spacing=[0.5, 0.25, 0.25]).image.size == 32 * 960
    with pytest.raises(UserError, match=r"24x40x33 .*data\.spacing=\[0\.5, 0\.25, 0\.24\] mm.*\b33\b.*\b960\b.*\b32\b"):
        read(tmp_path, stored, where=where, spacing=[0.5, 0.25, 0.24])
    data = decathlon(tmp_path / "set")
    data.spacing = [0.03, 0.03, 0.03]
    assert [line.split(": ")[0] for line in checked(data, full=False)] == [*"abcd"]


COUNT = np.arange(120.0).reshape(6, 5, 4)


@promise("Data", "values that float32 cannot tell apart, as behind an offset of 1e9", "refused")
@without("unet3d.data.nifti.GREYS", 0, only="int32")
@pytest.mark.parametrize(
    ("voxels", "slope", "inter"),
    [
        ((1_000_000_000 + COUNT * 8).astype(np.int32), 1, 0),
        (-1e9 - COUNT, 1, 0),
        (COUNT.astype(np.int16), 1, 1e9),
        (COUNT.astype(np.float32), 1e-3, 1e6),
    ],
    ids=["int32", "negative", "intercept", "slope"],
)
def test_values_that_float32_cannot_tell_apart_are_refused(
    tmp_path: Path, voxels: np.ndarray, slope: float, inter: float
) -> None:
    one = written(tmp_path, voxels)
    write_header(write_header(one.images[0], "scl_slope", slope), "scl_inter", inter)
    low, high = sorted(float(voxels.ravel()[end]) * slope + inter for end in (0, -1))
    with pytest.raises(UserError) as caught:
        read_volume(one, LabelValues(3), None)
    assert told([str(caught.value)], [[f"a: {one.images[0]}: ", f" {low:.12g} ", f" {high:.12g}", "float32"]])


def test_values_that_float32_cannot_tell_apart_are_refused_beside_some_that_are_replaced(tmp_path: Path) -> None:
    accepted = ImageFiles(Data(nonfinite="zero"))
    with pytest.raises(UserError, match=r"^a: .*float32"):
        read_volume(written(tmp_path, changed(1e9 + COUNT, np.nan)), LabelValues(3), None, accepted)
    one = written(tmp_path, np.full(COUNT.shape, np.nan))
    assert read_volume(one, LabelValues(3), None, accepted).nonfinite_voxels == 120


@pytest.mark.parametrize("voxels", [COUNT * 1e9, 1e6 + COUNT, COUNT * 0 + 2**30 + 1, 1e9 * (COUNT > 5)])
def test_values_that_float32_can_tell_apart_are_read(tmp_path: Path, voxels: np.ndarray) -> None:
    """A wide range, a moderate offset, one value alone, two."""
    assert np.array_equal(read(tmp_path, voxels).image[0], voxels[::-1, ::-1].astype(np.float32))
