"""NIfTI files: read as they say, refused before memory is taken, damage that nibabel does not see; and written ones."""

import gzip
import logging
import resource
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import nibabel as nib
import numpy as np
import pytest
from guards import nothing, without
from nibabel.arrayproxy import ArrayProxy
from nifti_files import LPS, doubtful_places, image, label, save_labels, write, write_header
from promises import promise
from tables import says, table

from unet3d.base.errors import UserError
from unet3d.data import nifti, restore
from unet3d.data.cases import Case
from unet3d.data.volume import LabelValues, read_label_map


def read(path: Path) -> np.ndarray:
    with nifti.opened("a", path, "auto") as file:
        return nifti.read_array(file._replace(image=nifti.open_image("a", path)))


def refusal(path: Path, form: str = "auto") -> str:
    """Return why a file is refused by its header, without its name."""
    with pytest.raises(UserError) as caught:
        nifti.open_image("case7", path, form)
    text = str(caught.value)
    assert text.startswith(f"case7: {path}: ")
    return text.removeprefix(f"case7: {path}: ")


def labels_in(path: Path, classes: int) -> np.ndarray:
    return read_label_map(Case("a", (path,), path), path, LabelValues(classes))[0]


@promise("Data", "scaled integers, big-endian files ...")
@pytest.mark.parametrize("name", ["Bild 1 µm é.nii.gz", "A.NII.GZ", "a.Nii"])
def test_a_file_of_any_name_is_read_and_written(tmp_path: Path, name: str) -> None:
    voxels = image((6, 5, 4, 2))
    write(tmp_path / f"x{name.lower()}", voxels).rename(tmp_path / name)
    assert np.array_equal(read(tmp_path / name), voxels)
    assert nifti.stem(tmp_path / name) == name.split(".")[0]
    restore.save_image(tmp_path / f"again {name}", nib.Nifti1Image(voxels, LPS))
    assert np.array_equal(read(tmp_path / f"again {name}"), voxels)


@promise("Data", "4D and 2D images ...")
@pytest.mark.parametrize("shape", [(6, 5, 4, 1), (6, 5, 4, 1, 3)])
def test_axes_of_one_are_dropped(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.nii.gz", image(shape))
    channels = shape[-1]
    assert read(path).shape == ((6, 5, 4) if channels == 1 else (6, 5, 4, channels))
    assert nifti.channels(nifti.open_image("a", path)) == channels


def unscaled(file: Path | IO[bytes], about: object, **options: bool) -> ArrayProxy:
    """Return the voxels of a stream without their slope and intercept."""
    return ArrayProxy(file, (*about[:3], 1, 0) if isinstance(about, tuple) else about, **options)


@promise("Data", "scaled integers, big-endian files, spaces and umlauts in names", "the same voxels")
@without("unet3d.data.nifti.ArrayProxy", unscaled, only="-1024")
@pytest.mark.parametrize(
    ("name", "kind", "slope", "inter"),
    [("a.nii", ">f4", 1, 0), ("a.nii", ">i2", 0.5, -1024), ("a.nii.gz", "<i2", 0.5, -1024), ("a.nii.gz", ">u1", 10, 0)],
)
def test_type_scaling_and_byte_order_are_followed(
    tmp_path: Path, name: str, kind: str, slope: float, inter: float
) -> None:
    values = np.arange(0, 1200, 10, dtype=float).reshape(6, 5, 4)
    header = nib.Nifti1Header(endianness=kind[0])
    header.set_data_shape(values.shape)
    header.set_data_dtype(np.dtype(kind))
    header.set_sform(LPS, code=1)
    header["magic"], header["vox_offset"], header["scl_slope"], header["scl_inter"] = b"n+1", 352, slope, inter
    voxels = ((values - inter) / slope).round().astype(kind)
    content = header.binaryblock + bytes(4) + voxels.tobytes("F")  # nib.save would choose a scaling of its own
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert np.array_equal(read(tmp_path / name), values)


@promise("Data", "labels above the classes ...")
@without("unet3d.data.volume.ROUNDING", 0.0, only="u1")
@pytest.mark.parametrize(("kind", "labels", "factor"), [("u1", [0, 1], 255), ("f4", [0, 1, 32767], 3)])
def test_labels_that_their_scale_makes_almost_whole_are_labels(
    tmp_path: Path, kind: str, labels: list[int], factor: int
) -> None:
    """As of a mask of 255 as a byte, with a slope of 1/255 in float32."""
    voxels = np.resize(labels, (6, 5, 4))
    path = write(tmp_path / "a.nii.gz", (voxels * factor).astype(kind))
    write_header(path, "scl_slope", 1 / factor)
    assert np.array_equal(labels_in(path, labels[-1] + 1), voxels)


@without("unet3d.data.volume.QUANTUM", 0.0, only="3-i2")
@pytest.mark.parametrize(("classes", "kind"), [(3, "i2"), (100, "u2")])
def test_labels_that_nibabel_has_scaled_to_integers_are_labels(tmp_path: Path, classes: int, kind: str) -> None:
    """As where a map is read as floats and saved with the header it had: 1 of 0, 1, 2 becomes 1.0000153."""
    voxels = np.resize(np.arange(classes), (6, 5, 8))
    stored = nib.Nifti1Image(voxels.astype(np.float64), LPS)
    stored.set_data_dtype(np.dtype(kind))
    nib.save(stored, tmp_path / "a.nii")
    assert np.array_equal(labels_in(tmp_path / "a.nii", classes), voxels)


@promise("Data", "labels above the classes ...")
@without("unet3d.data.volume.QUANTUM", 1.0, only="0.9999")
@pytest.mark.parametrize(("slope", "stored"), [(0.9999, 1), (1e-4, 9999), (1e-4, 10010)])
def test_labels_that_lie_beside_whole_numbers_by_their_scale_are_refused(
    tmp_path: Path, slope: float, stored: int
) -> None:
    """A finer integer was there for the whole number, or none is fine enough to say that it was meant."""
    path = write_header(write(tmp_path / "a.nii", np.full((6, 5, 4), stored, np.int16)), "scl_slope", slope)
    with pytest.raises(UserError, match=rf"^a: .*a\.nii: 120 .*{slope * stored:g}\b.*\b2\b"):
        labels_in(path, 3)


def all_finite(values: np.ndarray) -> np.ndarray:
    """Take every number for a finite one."""
    return np.ones(np.shape(values), bool)


# A file's name, what becomes of its content (so many bytes are kept, or a field of the header has other values), and
# what the refusal says.
FAULTS = """
    a.nii    | gone                             | no such file
    a.nii    | folder                           | no such file
    a.mha    |                                  | .nii.gz
    a.nii.gz | page                             | gzip
    a.nii    | page                             | NIfTI-1 ... NIfTI-2
    a.nii    | kept 0                           | is empty
    a.nii    | kept 200                         | NIfTI-1 ... NIfTI-2
    a.nii    | kept 831                         | 832 ... 831
    a.nii    | dim 2 6 20 1 1 1 1 1             | (6, 20) ... X,Y,Z,C
    a.nii    | dim 5 6 5 1 2 2 1 1              | (6, 5, 1, 2, 2) ... X,Y,Z,C
    a.nii    | dim 3 -6 5 4 1 1 1 1             | (-6, 5, 4) ... X,Y,Z,C
    a.nii    | dim 3 32767 32767 32767 1 1 1 1  | 35,181,150,961,663 ... 2,147,483,648
    a.nii    | datatype 128                     | ('R', 'u1')
    a.nii    | datatype 77                      | NIfTI ... 77
    a.nii    | srow_x nan 0 0 10                | [nan, 0.0, 0.0, 10.0] ... sform
    a.nii    | srow_z 0 0 0 0                   | [0.0, 0.0, 0.0, 0.0] ... sform
    a.nii    | srow_x 1e-30 0 0 10              | 1.0000000031710769e-30 ... mm ... sform
    a.nii    | srow_z 0 0 2.5 1e30              | 1.0000000150474662e+30 ... mm ... sform
    a.nii    | pixdim 1 1 -0.0 2.5 1 1 1 1      | [1.0, -0.0, 2.5] ... mm
    a.nii    | pixdim 1 nan 1.5 2.5 1 1 1 1     | [nan, 1.5, 2.5] ... mm
    a.nii.gz | dim 3 1000 1000 1000 1 1 1 1     | 4,000,000,352
    a.nii.gz | dim 3 32767 32767 32767 1 1 1 1  | 35,181,150,961,663
"""


def spoil(path: Path, fault: str, *values: str) -> None:
    """Do what a row of FAULTS says."""
    if fault in ("gone", "folder"):
        path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault == "page":
        path.write_text("<!DOCTYPE html>" + "not found " * 100)
    elif fault == "kept":
        path.write_bytes(path.read_bytes()[: int(values[0])])
    elif fault != "gone":
        write_header(path, fault, *values)


@promise("data sets", "a header that claims more than the file can hold is refused before memory is taken")
@promise(
    "Data",
    "a header that claims more than the file can hold; a spacing that asks for too many voxels",
    "refused before memory is taken",
)
@promise("Data", "a file that is ...")
@promise("Data", "4D and 2D images ...")
@promise("Data", "an affine that is NaN, singular or too large; voxel sizes of 0", "refused")
@without("unet3d.data.nifti.LARGEST", np.inf, only="2.5 1e30")
@without("numpy.isfinite", all_finite, only="1 nan 1.5")
@without("unet3d.data.nifti.MAX_DEFLATE", 10**12, only="1000 1000")
@without("unet3d.data.nifti.MAX_VOXELS", 2**62, only="a.nii.gz dim 3 32767")
@pytest.mark.parametrize(("name", "fault", "words"), table(FAULTS))
def test_a_bad_file_is_refused_with_case_and_path(tmp_path: Path, name: str, fault: str, words: str) -> None:
    path = tmp_path / name
    write(tmp_path / f"a.nii{'.gz' if name.endswith('.gz') else ''}", image()).rename(path)
    if fault:
        spoil(path, *fault.split())
    text = refusal(path)
    assert says(text, words)
    assert ("NIfTI" in text) == ("NIfTI" in words), "it is not the header that is wrong"


def test_a_name_that_is_too_long_for_a_file_is_said_so(tmp_path: Path) -> None:
    assert "File name too long" in refusal(tmp_path / f"{'a' * 300}.nii")


BY_SFORM = (-1, -1, 1, 1)  # what `doubtful_places` makes of LPS


@promise("Data", "voxel sizes of sform ...")
@pytest.mark.parametrize(
    ("form", "sizes", "otherwise"),
    [
        ("sform", BY_SFORM, (-1, -1.5, 2.5, 1)),
        ("qform", (-1, -1.5, 2.5, 1), BY_SFORM),
        ("pixdim", (-1, -1.5, 2.5, 1), None),
        ("auto", BY_SFORM, None),
    ],
)
def test_an_affine_is_that_of_the_form_and_the_header_stays_as_it_is(
    tmp_path: Path, form: str, sizes: Sequence[float], otherwise: Sequence[float] | None
) -> None:
    path = doubtful_places(write(tmp_path / "a.nii", image()))
    found = nifti.open_image("a", path, form)
    assert np.allclose(np.diag(found.affine), sizes, atol=1e-5)
    for name in ("sform", "qform"):
        assert np.array_equal(getattr(found, f"get_{name}")(), getattr(nib.load(path), f"get_{name}")())
    restore.save_image(tmp_path / "map.nii", restore.image_like(label(), found))
    assert np.array_equal(nib.load(tmp_path / "map.nii").affine, nib.load(path).affine), "as viewers show the image"
    if otherwise is not None:
        write_header(path, f"{form}_code", 0)
        assert np.allclose(np.diag(nifti.open_image("a", path, form).affine), otherwise, atol=1e-5)


@promise("Data", "a label map that ...")
@pytest.mark.parametrize(
    ("form", "fields", "words"),
    table("""
    auto   | srow_x 0 0 0 0                     | correct its sform, or take data.affine=qform
    pixdim | srow_x 0 0 0 0                     | correct its sform, or take data.affine=qform
    qform  | quatern .6 .6 .6                   | qform that is no rotation ... its qform, or take data.affine=sform
    auto   | quatern .6 .6 .6, sform_code 0     | qform that is no rotation; correct its qform
    qform  | srow_x 0 0 0 0                     |
    sform  | quatern .6 .6 .6                   |
"""),
)
def test_a_form_that_is_no_affine_is_refused_with_one_that_is(
    tmp_path: Path, form: str, fields: str, words: str
) -> None:
    path = doubtful_places(write(tmp_path / "a.nii", image()))
    for field in fields.split(","):
        write_header(path, *field.split())
    if words:
        assert says(refusal(path, form), words)
    else:
        nifti.open_image("a", path, form)


def with_extension(path: Path, code: int, content: bytes, offset: float) -> Path:
    """The sound image in `path` with a header extension before its voxels."""
    plain = write_header(path, "vox_offset", offset).read_bytes()
    block = np.array([8 + len(content), code], "<i4").tobytes() + content
    path.write_bytes(plain[:348] + b"\1\0\0\0" + block + plain[352:])
    return path


def loaded(case: str, path: Path) -> nib.Nifti1Image:
    """Open a file as nibabel does."""
    return nib.load(path)


@promise("data sets", "header extensions (DICOM, XML) are not parsed")
@without("unet3d.data.nifti.open_image", loaded)
@pytest.mark.parametrize("code", [2, 32], ids=["dicom", "cifti"])
def test_an_extension_is_skipped_unread(tmp_path: Path, code: int) -> None:
    """nibabel would hand it to a parser of DICOM or XML, now or as it is asked for."""
    content = b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;".ljust(40, b" ")
    path = with_extension(write(tmp_path / "a.nii", image()), code, content, 400)
    assert np.array_equal(read(path), image())
    assert nib.load(path).header.extensions
    assert not nifti.open_image("a", path).header.extensions


def reading(stream: gzip.GzipFile, offset: int) -> None:
    """Reach a place in a stream by reading all that is before it."""
    stream.read(offset)


@promise(
    "data sets",
    "gzip is inflated in pieces, and only the voxels that the header names are kept: at most 1032 times "
    "the file (deflate's limit) and 2^31 voxels",
)
@without("gzip.GzipFile.seek", reading)
def test_voxels_far_into_the_stream_take_no_memory_for_what_is_before_them(tmp_path: Path) -> None:
    content = write_header(write(tmp_path / "a.nii", image()), "vox_offset", 2**24).read_bytes()
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(content[:352].ljust(2**24, b"\0") + content[352:], 1))
    tracemalloc.start()
    voxels = read(packed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(voxels, image())
    assert peak < 2**22


@promise(
    "data sets",
    "what a small gzip file holds before and behind its voxels is inflated to at most 64 MiB and 1 MiB",
)
@without("unet3d.data.nifti.MAX_TRAILING", 2**21, only="1048577")
@pytest.mark.parametrize(("extra", "is_read"), [(2**20, True), (2**20 + 1, False), (2**27, False)])
def test_a_stream_that_goes_on_behind_its_voxels_is_not_followed(tmp_path: Path, extra: int, is_read: bool) -> None:
    """Its checksum is reached where little follows; the last one here is cut, so that its end is not reached at all."""
    content = write(tmp_path / "a.nii", image()).read_bytes()
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(content + bytes(extra), 1)[: None if extra < 2**27 else -9])
    if is_read:
        assert np.array_equal(read(packed), image())
    else:
        with pytest.raises(UserError, match=r"^a: .*a\.nii\.gz: .*\b1,048,576\b"):
            read(packed)


@promise("data sets", "what a small gzip ...")
@without("unet3d.data.nifti.MAX_OFFSET", 2**40)
def test_voxels_that_begin_far_into_the_file_are_refused_unread(tmp_path: Path) -> None:
    path = write_header(write(tmp_path / "a.nii", image()), "vox_offset", 2**26 + 16)
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(path.read_bytes() + bytes(2**26), 1))
    assert says(refusal(packed), " 67,108,880 ... 67,108,864")


@promise(
    "Prediction",
    "nibabel and MONAI used in the same notebook",
    "nibabel's logger and MONAI's `track_meta` are unchanged",
)
@without("nibabel.imageglobals.logger.addFilter", nothing)
def test_what_nibabel_corrects_in_a_header_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would name neither case nor file. What others do with nibabel is logged as before."""
    path = with_extension(write(tmp_path / "a.nii", image()), 6, b" " * 49, 409)
    assert np.array_equal(read(path), image())
    assert not caplog.text
    assert capfd.readouterr() == ("", "")
    logging.getLogger("nibabel.global").warning("of others")
    assert "of others" in caplog.text


@promise("Data", "a byte flipped in a .nii.gz that still inflates", "found by the checksum at its end")
@promise("Data", "a file that is ...")
@without("unet3d.data.nifti.READ_ERRORS", (OSError, ValueError), only="cut")
@pytest.mark.parametrize(
    ("is_cut", "words"), [(False, "CRC check failed"), (True, "end-of-stream")], ids=["bit", "cut"]
)
def test_damage_to_compressed_voxels_is_found(tmp_path: Path, is_cut: bool, words: str) -> None:
    """nibabel takes a flipped byte that still inflates."""
    content = bytearray(gzip.compress(write(tmp_path / "a.nii", image((20, 20, 20))).read_bytes(), compresslevel=0))
    content[-100] ^= 1
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(content[:-3000] if is_cut else content)
    with pytest.raises(UserError, match=rf"^a: .*a\.nii\.gz: .*{words}"):
        read(packed)


def tilted(kind: type, shape: tuple[int, ...]) -> nib.Nifti1Image:
    """An oblique image whose sform and qform differ, with more in its header than geometry."""
    turned = LPS.copy()
    turned[:3, :3] = nib.eulerangles.euler2mat(0.3, -0.2, 0.1) @ LPS[:3, :3]
    stored = kind(image(shape), turned)
    stored.set_qform(LPS, code=1)
    stored.set_sform(turned, code=4)
    stored.header.set_xyzt_units("micron", "sec")
    stored.header["descrip"], stored.header["cal_max"] = b"scanner 7", 400
    return stored


KEPT = "qform_code sform_code srow_x srow_y srow_z qoffset_x quatern_b xyzt_units descrip"


@promise(
    "What scripts rely on",
    "label maps and probabilities",
    "NIfTI on the grid of the input, with its header; X Y Z class",
)
@promise("Prediction", "images turned, anisotropic, in ...")
@pytest.mark.parametrize(
    ("kind", "shape", "least", "stored"),
    [(nib.Nifti1Image, (6, 5, 4), 0, np.uint8), (nib.Nifti2Image, (6, 5, 4, 2), 256, np.uint16)],
)
def test_saved_labels_keep_the_header_to_the_bit_but_for_the_intensities(
    tmp_path: Path, kind: type, shape: tuple, least: int, stored: type
) -> None:
    labels = label().astype(stored) + least
    like = tmp_path / "like.nii.gz"
    nib.save(tilted(kind, shape), like)
    save_labels(tmp_path / "out.nii.gz", labels, like)
    before, after = nib.load(like), nib.load(tmp_path / "out.nii.gz")
    assert type(after) is kind
    for field in KEPT.split():
        assert after.header[field].tobytes() == before.header[field].tobytes(), field
    assert after.affine.tobytes() == before.affine.tobytes()
    assert after.header["pixdim"][:4].tobytes() == before.header["pixdim"][:4].tobytes()
    assert after.header.get_slope_inter() == (None, None)
    assert after.header["cal_max"] == 0, "a display range of intensities hides labels"
    assert after.get_data_dtype() == stored
    assert np.array_equal(np.asanyarray(after.dataobj), labels)


@contextmanager
def in_place(path: Path) -> Iterator[IO[bytes]]:
    """Write a file where it is."""
    with path.open("wb") as file:
        yield file


@promise("Prediction", "a write that fails or is cut short", "the old file stays whole; nothing else is left")
@without("unet3d.data.restore.replacing", in_place)
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii.gz", image())
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match="too large"):
            restore.save_image(path, nib.Nifti1Image(label(), LPS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_the_largest_component_of_the_named_classes_stays_and_all_else_as_it_was() -> None:
    """Class 1 has parts of 8, 3 and 1 voxels, class 2 of 4 and 2; corners touch in the largest of 1."""
    labels = np.zeros((12, 10, 8), np.uint8)
    labels[0:2, 0:2, 0] = labels[2:4, 2:4, 1] = 1  # by a corner
    labels[8, 8, 3:6] = labels[11, 0, 0] = 1
    labels[6, 0:4, 6] = labels[9, 2, 0:2] = 2
    before, wanted = labels.copy(), labels.copy()
    wanted[8, 8, 3:6] = wanted[11, 0, 0] = 0
    assert np.array_equal(restore.largest_components(labels, [1, 3]), wanted)
    wanted[9, 2, 0:2] = 0
    assert np.array_equal(restore.largest_components(labels, [1, 2]), wanted)
    assert np.array_equal(restore.largest_components(before, []), labels)
    tie = np.array([1, 0, 0, 1], np.uint16).reshape(4, 1, 1)
    assert restore.largest_components(tie, [1]).ravel().tolist() == [1, 0, 0, 0]
