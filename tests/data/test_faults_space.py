"""Where voxels lie and how they are stored: files that contradict each other, odd headers, volumes of odd sizes."""

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from nifti_files import LPS, case, decathlon, errors, image, label, told, write, write_header

from unet3d import build, compose
from unet3d.config import Config
from unet3d.data import nifti
from unet3d.data.cases import read_dataset
from unet3d.data.check import WARNING
from unet3d.data.patches import Patches, PatchIndex
from unet3d.data.preprocess import CaseReader
from unet3d.errors import UserError
from unet3d.run.predict import Segmenter
from unet3d.train.policy import MemoryPolicy

SHIFTED, FLIPPED, NOISY = LPS.copy(), LPS @ np.diag([-1, 1, 1, 1]), LPS + 1e-6
SHIFTED[0, 3] += 1


def test_d7_a_label_of_another_shape_is_an_error_even_where_affines_may_differ(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", label((6, 5, 3)))
    for data.affine_check in ("error", "warn"):
        for full in (False, True):
            (line, *_) = errors(told(data, full))
            assert line.startswith(f"a: {path}: has (6, 5, 3) voxels, not the (6, 5, 4) of")


@pytest.mark.parametrize(("where", "distance"), [(SHIFTED, "1"), (FLIPPED, "10")], ids=["shifted", "flipped"])
@pytest.mark.parametrize("full", [False, True])
def test_d7_a_label_elsewhere_is_an_error_or_by_choice_a_warning(
    tmp_path: Path, where: np.ndarray, distance: str, full: bool
) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", label(), where)
    line = (
        f"a: {path}: lies up to {distance} voxels away from {tmp_path / 'imagesTr/a.nii.gz'}; "
        "resample it onto the image's grid"
    )
    assert told(data, full) == [line]
    data.affine_check = "warn"
    assert told(data, full) == [WARNING + line]


def test_d7_a_run_with_affine_check_warn_says_so_and_pairs_voxel_with_voxel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", label(), FLIPPED)
    with pytest.raises(UserError, match="lies up to 10 voxels away"):
        build.data(Config(data=data))
    data.affine_check = "warn"
    ready = build.data(Config(data=data))
    assert f"{WARNING}a: {path}: lies up to" in capsys.readouterr().err
    volume = ready.read.raw(ready.train[0])
    assert np.array_equal(volume.image[0], image()[::-1, ::-1])
    assert np.array_equal(volume.label, label()[::-1, ::-1])


def test_d7_rounding_is_no_shift(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "labelsTr/a.nii.gz", label(), NOISY)
    assert told(data) == []


def test_d8_a_fourth_axis_is_channels_only_where_their_number_fits(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "imagesTr/a.nii.gz", image((6, 5, 4, 2)))
    assert told(data, full=False) == [f"a: {path}: has 2 channels, the data set 1 (CT); make them agree"]
    write(path, image((6, 5, 4, 1)))
    assert told(data) == []
    ready = build.data(Config(data=data))
    assert ready.read.raw(ready.train[0]).image.shape == (1, 6, 5, 4)
    config = compose.compose([f"data.root={tmp_path}", "data=decathlon", "model.in_channels=2"])
    with pytest.raises(UserError, match=r"model\.in_channels=2, but the data has 1"):
        build.model_options(config, ready.dataset, ready.train[0])


def test_d8_two_axes_are_an_error(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "imagesTr/a.nii.gz", image((20, 6, 1)))
    plain = write(tmp_path / "x.nii", image((20, 6, 1)))
    write_header(plain, "dim", (2, 20, 6, 1, 1, 1, 1, 1))
    nib.save(nib.load(plain), path)
    assert told(data, full=False) == [
        f"a: {path}: has shape (20, 6); a volume is X,Y,Z or, with channels, X,Y,Z,C",
    ]


@pytest.mark.parametrize("shape", [(21, 13, 3), (9, 9, 9), (5, 40, 1)], ids=str)
def test_d10_thick_slices_and_sizes_that_fit_nothing_train_and_predict(tmp_path: Path, shape: tuple) -> None:
    """1 x 1 x 5 mm; smaller than the patch, and no multiple of 2^levels."""
    data = decathlon(tmp_path, ("a", "b"))
    thick = LPS @ np.diag([1, 1 / 1.5, 2, 1])
    for name in "ab":
        write(tmp_path / f"imagesTr/{name}.nii.gz", image(shape, seed=ord(name)), thick)
        write(tmp_path / f"labelsTr/{name}.nii.gz", label(shape, seed=ord(name)), thick)
    config = compose.compose(["model=unet_tiny", f"data.root={tmp_path}", "data=decathlon", "data.patch=[16,16,16]"])
    ready = build.data(config)
    options = build.model_options(config, ready.dataset, ready.train[0])
    patch, target, _ = Patches(lambda index: ready.read(ready.train[index]), config.data, 0, config.data.patch)[
        PatchIndex(0, 0, 0)
    ]
    assert patch.shape == (1, 16, 16, 16) and torch.isfinite(patch).all() and target.shape == (16, 16, 16)
    predictor = build.predictor(config, [build.model(options, 0)], options, MemoryPolicy("cpu", None, ()))
    segmenter = Segmenter(predictor, ready.read.intensity, data.spacing)
    segmenter.to_file(ready.val[0], tmp_path / "out.nii.gz")
    source, found = nib.load(ready.val[0].images[0]), nib.load(tmp_path / "out.nii.gz")
    assert found.shape == shape and np.array_equal(found.affine, source.affine)
    assert found.header.get_zooms() == source.header.get_zooms() and set(np.unique(found.dataobj)) <= {0, 1, 2}


ODD = {
    "sheared": "its grid is sheared; it is used as if its axes were at right angles",
    "unplaced": "neither sform nor qform is set: which side is left is a guess; set one",
    "twofold": "sform and qform differ; the sform is used",
    "metres": "lengths are in meter; they are taken for mm, in data.spacing and in distances",
    "yards": "lengths are in a unit of code 7; they are taken for mm, in data.spacing and in distances",
}


def odd(kind: str) -> nib.Nifti1Image:
    stored = nib.Nifti1Image(image(), LPS)
    slanted = LPS.copy()
    slanted[0, 1] = 0.5
    if kind == "sheared":
        stored.set_sform(slanted, code=1)
        stored.set_qform(None, code=0)
    elif kind == "unplaced":
        stored.set_sform(None, code=0)
        stored.set_qform(None, code=0)
    elif kind == "twofold":
        stored.set_qform(LPS @ np.diag([-1, 1, 1, 1]), code=1)
    else:
        stored.header["xyzt_units"] = {"metres": 1, "yards": 0xFF}[kind]
    return stored


@pytest.mark.parametrize("kind", ODD)
def test_d11_odd_headers_are_warned_of_with_the_rule_that_is_followed(tmp_path: Path, kind: str) -> None:
    data = decathlon(tmp_path)
    path = tmp_path / "imagesTr/a.nii.gz"
    nib.save(odd(kind), path)
    write(tmp_path / "labelsTr/a.nii.gz", label(), nib.load(path).affine)
    assert [line for line in told(data) if "imagesTr" in line] == [f"{WARNING}a: {path}: {ODD[kind]}"]
    assert told(data, full=False) == [], "a run is not kept from starting"


def test_d11_the_sform_places_the_voxels_where_both_are_set(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    nib.save(odd("twofold"), tmp_path / "imagesTr/a.nii.gz")
    ready = build.data(Config(data=data))
    assert np.array_equal(ready.read.raw(ready.train[0]).image[0], image()[::-1, ::-1]), "the sform's LPS, turned"


@pytest.mark.parametrize(
    ("field", "values", "what"),
    [
        ("srow_x", (np.nan, 0, 0, 10), "maps no volume; mend its sform"),
        ("srow_x", (np.inf, 0, 0, 10), "maps no volume; mend its sform"),
        ("srow_z", (0, 0, 0, 0), "maps no volume; mend its sform"),
        ("srow_x", (1e-30, 0, 0, 10), "(mm), too small or large; mend its sform"),
        ("srow_z", (0, 0, 1e30, 0), "(mm), too small or large; mend its sform"),
        ("srow_z", (0, 0, 2.5, 1e30), "(mm), too small or large; mend its sform"),
        ("pixdim", (1, 1, 0, 2.5, 1, 1, 1, 1), "has voxel sizes [1.0, 0.0, 2.5] mm; write the true ones"),
        ("pixdim", (1, 1, -0.0, 2.5, 1, 1, 1, 1), "has voxel sizes [1.0, -0.0, 2.5] mm; write the true ones"),
        ("pixdim", (1, np.nan, 1.5, 2.5, 1, 1, 1, 1), "has voxel sizes [nan, 1.5, 2.5] mm; write the true ones"),
    ],
)
def test_d11_an_affine_that_places_nothing_is_an_error(tmp_path: Path, field: str, values: tuple, what: str) -> None:
    data = decathlon(tmp_path)
    (tmp_path / "dataset.json").write_text((tmp_path / "dataset.json").read_text().replace("a.nii.gz", "a.nii"))
    path = write(tmp_path / "imagesTr/a.nii", image())
    write(tmp_path / "labelsTr/a.nii", label())
    write_header(path, field, values)
    for full in (False, True):
        (line, *_) = errors(told(data, full))
        assert line.startswith(f"a: {path}: has ") and what in line


def test_d11_a_qform_that_is_no_rotation_is_warned_of(tmp_path: Path) -> None:
    """The sform places the voxels; b, c, d of a unit quaternion have squares that sum to 1 at most."""
    data = decathlon(tmp_path)
    (tmp_path / "dataset.json").write_text((tmp_path / "dataset.json").read_text().replace("a.nii.gz", "a.nii"))
    path = write(tmp_path / "imagesTr/a.nii", image())
    write(tmp_path / "labelsTr/a.nii", label())
    write_header(write_header(path, "qform_code", (1,)), "quatern", (0.6, 0.6, 0.6))
    assert told(data) == [f"{WARNING}a: {path}: its qform is no rotation; the sform is used"]


def test_d11_an_affine_that_overflows_is_an_error_and_no_warning(tmp_path: Path) -> None:
    stored = nib.Nifti2Image(image(), LPS)
    stored.header["srow_x"] = 1e200, 0, 0, 10
    (tmp_path / "a.nii").write_bytes(stored.header.binaryblock + bytes(4) + image().tobytes("F"))
    with pytest.raises(UserError, match="mend its sform"):
        nifti.open_image("a", tmp_path / "a.nii")


def stored_as(path: Path, order: str, kind: str, slope: float, inter: float) -> None:
    """The values 0, 10 .. 1190 with that byte order, type and scaling."""
    values = np.arange(0, 1200, 10, dtype=float).reshape(6, 5, 4)
    header = nib.Nifti1Header(endianness=order)
    header.set_data_shape(values.shape)
    header.set_data_dtype(np.dtype(kind))
    header.set_sform(LPS, code=1)
    header["pixdim"][1:4] = 1, 1.5, 2.5
    header["magic"], header["vox_offset"], header["scl_slope"], header["scl_inter"] = b"n+1", 352, slope, inter
    voxels = ((values - inter) / slope).round().astype(np.dtype(kind).newbyteorder(order))
    content = header.binaryblock + bytes(4) + voxels.tobytes("F")  # nib.save would choose a scaling of its own
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "ein Bild, 1 µm é.nii.gz"])
@pytest.mark.parametrize(
    ("order", "kind", "slope", "inter"),
    [("<", "f4", 1, 0), (">", "f4", 1, 0), ("<", "i2", 0.5, -1024), (">", "i2", 0.5, -1024), ("<", "u1", 10, 0)],
)
def test_d15_however_it_is_stored_the_volume_is_the_same(
    tmp_path: Path, name: str, order: str, kind: str, slope: float, inter: float
) -> None:
    data = decathlon(tmp_path)
    content = (tmp_path / "dataset.json").read_text()
    (tmp_path / "dataset.json").write_text(content.replace("imagesTr/a.nii.gz", f"imagesTr/{name}"))
    stored_as(tmp_path / "imagesTr" / name, order, kind, slope, inter)
    task = read_dataset(data)
    one = next(case for case in task.cases if case.images[0].name == name)
    data.intensity = "zscore"
    write(one.label or Path(), label())
    assert told(data) == []
    ready = build.data(Config(data=data))
    values = np.arange(0, 1200, 10, dtype=float).reshape(1, 6, 5, 4)[:, ::-1, ::-1]
    assert torch.allclose(
        ready.read(one).image, torch.from_numpy((values - values.mean()) / values.std()).float(), atol=1e-6
    )


def test_d15_a_constant_image_is_finite_once_normalised(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    case(tmp_path, np.full((6, 5, 4), 7, np.int16), label(), "a")
    for data.intensity in ("auto", "zscore", "none"):
        ready = build.data(Config(data=data))
        assert all(torch.isfinite(ready.read(one).image).all() for one in (*ready.train, *ready.val))


def test_what_the_prepared_cases_take_is_said_and_more_than_memory_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any voxel is read."""
    data = decathlon(tmp_path, ("a", "b"))
    data.intensity = "zscore"
    for name in "ab":
        write(tmp_path / f"imagesTr/{name}.nii.gz", image((64, 64, 64)))
        write(tmp_path / f"labelsTr/{name}.nii.gz", label((64, 64, 64)))
    build.data(Config(data=data))
    assert "2 cases kept in memory: 3.0 MiB (predicted)\n" in capsys.readouterr().out
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 2**20}[name])
    monkeypatch.setattr(CaseReader, "raw", lambda *_: pytest.fail("a volume is read"))
    with pytest.raises(UserError, match=r"of 3\.0 MiB; add data\.cache=false"):
        build.data(Config(data=data))
    data.cache = False
    build.data(Config(data=data))


def test_a_prediction_reads_no_voxel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the options leave open is in the data set's names and one header."""
    decathlon(tmp_path, ("a", "b"))
    words = [f"data.root={tmp_path}", "data=decathlon", "model=unet_tiny", "data.spacing=[1,1,4]"]
    config = compose.compose([*words, "data.patch=[32,32,32]", "model.strides=auto"])
    ready = build.data(config)
    whole = build.model_options(config, ready.dataset, ready.train[0])
    assert ready.read(ready.train[0]).spacing == (1, 1, 4)
    monkeypatch.setattr(CaseReader, "raw", lambda *_: pytest.fail("a volume is read"))
    assert build.outlined_options(config) == whole and [1, 1, 1] != whole.strides[0] != [2, 2, 2]
