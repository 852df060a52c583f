"""Files that are refused before memory is taken, damage that nibabel does not see, and headers kept to the bit."""

import gzip
import io
import logging
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import nibabel as nib
import numpy as np
import pytest
from guards import nothing, without
from nibabel.arrayproxy import ArrayProxy
from nifti_files import LPS, doubtful_places, holds, image, label, save_labels, write, write_header
from promises import promise

from unet3d.base.errors import UserError
from unet3d.data import nifti, restore
from unet3d.data.cases import Case
from unet3d.data.volume import LabelValues, read_label_map

compress = gzip.compress


def read(path: Path) -> np.ndarray:
    with nifti.opened("a", path, "auto") as file:
        return nifti.read_array(file._replace(image=nifti.open_image("a", path)))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        nifti.open_image("case7", path)
    assert str(caught.value).startswith(f"case7: {path}: ")
    return str(caught.value)


@promise("Data", "scaled integers, big-endian files ...")
@pytest.mark.parametrize("name", ["plain.nii", "packed.nii.gz", "Bild 1 µm é.nii.gz", "A.NII.GZ", "a.Nii"])
def test_compressed_or_not_the_voxels_are_the_same(tmp_path: Path, name: str) -> None:
    voxels = image((6, 5, 4, 2))
    write(tmp_path / f"x{name.lower()}", voxels).rename(tmp_path / name)
    assert np.array_equal(read(tmp_path / name), voxels) and nifti.stem(tmp_path / name) == name.split(".")[0]
    restore.save_image(tmp_path / f"again {name}", nib.Nifti1Image(voxels, LPS))
    assert np.array_equal(read(tmp_path / f"again {name}"), voxels)


@promise("Data", "4D and 2D images ...")
@pytest.mark.parametrize(("shape", "seen"), [((6, 5, 4, 1), (6, 5, 4)), ((6, 5, 4, 1, 3), (6, 5, 4, 3))])
def test_axes_of_one_are_dropped(tmp_path: Path, shape: tuple[int, ...], seen: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.nii.gz", image(shape))
    assert read(path).shape == seen
    assert nifti.channels(nifti.open_image("a", path)) == shape[-1]


def unscaled(file: Path | IO[bytes], about: object, **options: bool) -> ArrayProxy:
    """Return the voxels of a stream without their slope and intercept."""
    return ArrayProxy(file, (*about[:3], 1, 0) if isinstance(about, tuple) else about, **options)


@promise("Data", "scaled integers, big-endian files, spaces and umlauts in names", "the same voxels")
@without("unet3d.data.nifti.ArrayProxy", unscaled, only="i2-0.5--1024-<-a.nii.gz")
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "slope", "inter"), [("f4", 1, 0), ("i2", 0.5, -1024), ("u1", 10, 0)])
def test_type_scaling_and_byte_order_are_followed(
    tmp_path: Path, name: str, order: str, kind: str, slope: float, inter: float
) -> None:
    values = np.arange(0, 1200, 10, dtype=float).reshape(6, 5, 4)
    header = nib.Nifti1Header(endianness=order)
    header.set_data_shape(values.shape)
    header.set_data_dtype(np.dtype(kind))
    header.set_sform(LPS, code=1)
    header["magic"], header["vox_offset"], header["scl_slope"], header["scl_inter"] = b"n+1", 352, slope, inter
    voxels = ((values - inter) / slope).round().astype(np.dtype(kind).newbyteorder(order))
    content = header.binaryblock + bytes(4) + voxels.tobytes("F")  # nib.save would choose a scaling of its own
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert np.array_equal(read(tmp_path / name), values)


@promise("Data", "labels above the classes ...")
@without("unet3d.data.volume.ROUNDING", 0.0)
def test_a_mask_that_is_scaled_to_almost_one_is_a_mask(tmp_path: Path) -> None:
    """255 stored as a byte with a slope of 1/255 in float32."""
    path = write(tmp_path / "a.nii.gz", label(classes=2) * np.uint8(255))
    write_header(path, "scl_slope", 1 / 255)
    assert np.array_equal(read_label_map(Case("a", (path,), path), path, LabelValues(2))[0], label(classes=2))


@without("unet3d.data.volume.QUANTUM", 0.0, only="3-i2")
@pytest.mark.parametrize(("classes", "kind"), [(2, "i2"), (3, "i2"), (5, "i2"), (100, "u2")])
def test_labels_that_nibabel_has_scaled_to_integers_are_labels(tmp_path: Path, classes: int, kind: str) -> None:
    """As where a map is read as floats and saved with the header it had: 1 of 0, 1, 2 becomes 1.0000153."""
    voxels = np.resize(np.arange(classes), (6, 5, 8))
    stored = nib.Nifti1Image(voxels.astype(np.float64), LPS)
    stored.set_data_dtype(np.dtype(kind))
    nib.save(stored, tmp_path / "a.nii")
    path = tmp_path / "a.nii"
    assert np.array_equal(read_label_map(Case("a", (path,), path), path, LabelValues(classes))[0], voxels)


@promise("Data", "labels above the classes ...")
@without("unet3d.data.volume.QUANTUM", 1.0, only="0.9999")
@pytest.mark.parametrize(("slope", "stored"), [(0.9999, 1), (1e-4, 9999), (1e-4, 10010)])
def test_labels_that_lie_beside_whole_numbers_by_their_scale_are_refused(
    tmp_path: Path, slope: float, stored: int
) -> None:
    """A finer integer was there for the whole number, or none is fine enough to say that it was meant."""
    path = write_header(write(tmp_path / "a.nii", np.full((6, 5, 4), stored, np.int16)), "scl_slope", slope)
    with pytest.raises(UserError, match=rf"^a: .*a\.nii: 120 .*{slope * stored:g}\b.*\b2\b"):
        read_label_map(Case("a", (path,), path), path, LabelValues(3))


def test_high_labels_that_are_scaled_in_float32_are_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", np.resize([0, 1, 32767], (6, 5, 4)).astype(np.float32) * np.float32(3.0))
    write_header(path, "scl_slope", 1 / 3)
    found = read_label_map(Case("a", (path,), path), path, LabelValues(32768))[0]
    assert np.unique(found).tolist() == [0, 1, 32767]


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def header(field: str, *values: float) -> Callable[[Path], object]:
    return lambda path: write_header(path, field, *values)


GEOMETRY = {
    "nan affine": ("srow_x", (np.nan, 0, 0, 10), ["[nan, 0.0, 0.0, 10.0]", "sform"]),
    "infinite affine": ("srow_y", (np.inf, 0, 0, 10), ["[inf, 0.0, 0.0, 10.0]", "sform"]),
    "flat": ("srow_z", (0, 0, 0, 0), ["[0.0, 0.0, 0.0, 0.0]", "sform"]),
    "tiny": ("srow_x", (1e-30, 0, 0, 10), ["1.0000000031710769e-30", "mm", "sform"]),
    "huge": ("srow_z", (0, 0, 1e30, 0), ["1.0000000150474662e+30", "mm", "sform"]),
    "far": ("srow_z", (0, 0, 2.5, 1e30), ["1.0000000150474662e+30", "mm", "sform"]),
    "thin": ("pixdim", (1, 1, 0, 2.5, 1, 1, 1, 1), ["[1.0, 0.0, 2.5]", "mm"]),
    "thin below": ("pixdim", (1, 1, -0.0, 2.5, 1, 1, 1, 1), ["[1.0, -0.0, 2.5]", "mm"]),
    "nan size": ("pixdim", (1, np.nan, 1.5, 2.5, 1, 1, 1, 1), ["[nan, 1.5, 2.5]", "mm"]),
}
FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (Path.unlink, []),
    "folder": (a_folder, []),
    "empty": (lambda path: path.write_bytes(b""), []),
    "page": (lambda path: path.write_text("<!DOCTYPE html>" + "not found " * 100), ["NIfTI-1", "NIfTI-2"]),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), [" 832 ", " 831 "]),
    "cut header": (lambda path: path.write_bytes(path.read_bytes()[:200]), ["NIfTI-1", "NIfTI-2"]),
    "plane": (header("dim", 2, 6, 20, 1, 1, 1, 1, 1), ["(6, 20)", "X,Y,Z,C"]),
    "five axes": (header("dim", 5, 6, 5, 1, 2, 2, 1, 1), ["(6, 5, 1, 2, 2)", "X,Y,Z,C"]),
    "negative": (header("dim", 3, -6, 5, 4, 1, 1, 1, 1), ["(-6, 5, 4)", "X,Y,Z,C"]),
    "large": (header("dim", 3, 32767, 32767, 32767, 1, 1, 1, 1), ["35,181,150,961,663", "2,147,483,648"]),
    "colours": (header("datatype", 128), ["('R', 'u1')"]),
    "complex": (header("datatype", 32), ["complex64"]),
    "no type": (header("datatype", 77), ["NIfTI", "77"]),
    **{name: (header(field, *values), parts) for name, (field, values, parts) in GEOMETRY.items()},
}


def all_finite(values: np.ndarray) -> np.ndarray:
    """Take every number for a finite one."""
    return np.ones(np.shape(values), bool)


@promise("data sets", "a header that claims more than the file can hold is refused before memory is taken")
@promise("Data", "4D and 2D images ...")
@promise("Data", "an affine that is NaN, singular or too large; voxel sizes of 0", "refused")
@without("unet3d.data.nifti.LARGEST", np.inf, only="far")
@without("numpy.isfinite", all_finite, only="nan size")
@pytest.mark.parametrize(("fault", "parts"), FAULTS.values(), ids=FAULTS)
def test_a_bad_header_is_refused_with_case_and_path(tmp_path: Path, fault: Callable, parts: list[str]) -> None:
    path = write(tmp_path / "scan.nii", image())
    fault(path)
    text = refusal(path).removeprefix(f"case7: {path}: ")
    assert holds(text, parts) and ("NIfTI" in text) == ("NIfTI" in "".join(parts)), "a file that is there or not"


@promise("Data", "a file that is ...")
@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.mha", b"x", ".nii.gz"),
        ("a.nii.gz", b"<!DOCTYPE html>", "gzip"),
        (f"{'a' * 300}.nii", None, "File name too long"),
    ],
    ids=["ending", "page", "name"],
)
def test_a_file_that_is_no_nifti_is_refused(tmp_path: Path, name: str, content: bytes | None, part: str) -> None:
    if content:
        (tmp_path / name).write_bytes(content)
    text = refusal(tmp_path / name).removeprefix(f"case7: {tmp_path / name}: ")
    assert part in text and "NIfTI" not in text, "it is its name that is wrong, not its header"


@promise("data sets", "a header that claims ...")
@promise(
    "Data",
    "a header that claims more than the file can hold; a spacing that asks for too many voxels",
    "refused before memory is taken",
)
@without("unet3d.data.nifti.MAX_DEFLATE", 10**12, only="1000")
@without("unet3d.data.nifti.MAX_VOXELS", 2**62, only="32767")
@pytest.mark.parametrize("length", [1000, 32767])
def test_a_small_packed_file_that_claims_much_is_refused_before_memory_is_taken(tmp_path: Path, length: int) -> None:
    path = write_header(write(tmp_path / "a.nii.gz", image()), "dim", 3, length, length, length, 1, 1, 1, 1)
    assert (" 4,000,000,352 " if length == 1000 else " 35,181,150,961,663 ") in refusal(path)


def test_an_affine_that_overflows_is_refused_without_a_warning(tmp_path: Path) -> None:
    stored = nib.Nifti2Image(image(), LPS)
    stored.header["srow_x"] = 1e200, 0, 0, 10
    (tmp_path / "a.nii").write_bytes(stored.header.binaryblock + bytes(4) + image().tobytes("F"))
    assert holds(refusal(tmp_path / "a.nii"), ["1e+200", "sform"])


@promise("Data", "voxel sizes of sform ...")
@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("auto", np.diag([-1, -1, 1, 1])),
        ("sform", np.diag([-1, -1, 1, 1])),
        ("qform", LPS),
        ("pixdim", np.diag([-1, -1.5, 2.5, 1])),
    ],
    ids=["auto", "sform", "qform", "pixdim"],
)
def test_an_affine_is_that_of_the_form_and_the_header_stays_as_it_is(
    tmp_path: Path, form: str, wanted: np.ndarray
) -> None:
    path = doubtful_places(write(tmp_path / "a.nii", image()))
    found = nifti.open_image("a", path, form)
    np.testing.assert_allclose(found.affine, wanted, atol=1e-5)
    for name in ("sform", "qform"):
        assert np.array_equal(getattr(found, f"get_{name}")(), getattr(nib.load(path), f"get_{name}")())
    restore.save_image(tmp_path / "map.nii", restore.image_like(label(), found))
    assert np.array_equal(nib.load(tmp_path / "map.nii").affine, nib.load(path).affine), "as viewers show the image"
    if form in ("sform", "qform"):
        write_header(path, f"{form}_code", 0)
    taken = {"sform": LPS, "qform": np.diag([-1, -1, 1, 1])}.get(form, wanted)
    np.testing.assert_allclose(nifti.open_image("a", path, form).affine, taken, atol=1e-5)


BENT = ("quatern", 0.6, 0.6, 0.6)


@promise("Data", "a label map that ...")
@pytest.mark.parametrize(
    ("form", "fields", "parts"),
    [
        ("auto", [("srow_x", 0, 0, 0, 0)], ["correct its sform, or take data.affine=qform"]),
        ("pixdim", [("srow_x", 0, 0, 0, 0)], ["correct its sform, or take data.affine=qform"]),
        ("qform", [BENT], ["qform that is no rotation", "correct its qform, or take data.affine=sform"]),
        ("auto", [BENT, ("sform_code", 0)], ["qform that is no rotation", "correct its qform"]),
        ("qform", [("srow_x", 0, 0, 0, 0)], []),
        ("sform", [BENT], []),
    ],
)
def test_a_form_that_is_no_affine_is_refused_with_one_that_is(
    tmp_path: Path, form: str, fields: list[tuple], parts: list[str]
) -> None:
    path = doubtful_places(write(tmp_path / "a.nii", image()))
    for field in fields:
        write_header(path, *field)
    if not parts:
        nifti.open_image("a", path, form)
        return
    with pytest.raises(UserError) as caught:
        nifti.open_image("a", path, form)
    assert holds(str(caught.value), [f"a: {path}: has ", *parts]) and "replace" not in str(caught.value)


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
@pytest.mark.parametrize("code", [2, 4, 32], ids=["dicom", "afni", "cifti"])
def test_an_extension_is_skipped_unread(tmp_path: Path, code: int) -> None:
    """nibabel would hand it to a parser of DICOM or XML, now or as it is asked for."""
    content = b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;".ljust(40, b" ")
    plain = with_extension(write(tmp_path / "a.nii", image()), code, content, 400)
    assert np.array_equal(read(plain), image())
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert np.array_equal(read(packed), image())
    assert nib.load(plain).header.extensions and not nifti.open_image("a", plain).header.extensions


@promise("data sets", "header extensions (DICOM, XML) ...")
@without("unet3d.data.nifti.open_image", loaded)
def test_a_cifti_file_is_read_as_what_its_nifti_header_says(tmp_path: Path) -> None:
    """nibabel takes such an intent for CIFTI-2, and reads its XML."""
    stored = nib.Nifti2Image(image(), LPS)
    stored.header["intent_code"] = 3006
    path = tmp_path / "a.nii"
    path.write_bytes(stored.to_bytes())
    with pytest.raises(ValueError, match="CIFTI"):
        nib.load(path)
    assert np.array_equal(read(path), image())


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
    assert np.array_equal(voxels, image()) and peak < 2**22


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
    assert holds(refusal(packed), [" 67,108,880", " 67,108,864"])


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
    assert not caplog.text and capfd.readouterr() == ("", "")
    assert nib.imageglobals.logger is logging.getLogger("nibabel.global")
    nib.imageglobals.logger.warning("of others")
    assert "of others" in caplog.text


@promise("Data", "a byte flipped in a .nii.gz that still inflates", "found by the checksum at its end")
def test_a_flipped_byte_is_found_though_it_still_inflates(tmp_path: Path) -> None:
    voxels = image((20, 20, 20))
    path = write(tmp_path / "a.nii", voxels)
    content = bytearray(gzip.compress(path.read_bytes(), compresslevel=0))
    content[-100] ^= 1
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(content)
    assert not np.array_equal(nib.load(packed).get_fdata(), voxels), "nibabel takes it"
    with pytest.raises(UserError, match=r"^a: .*a\.nii\.gz: .*CRC check failed"):
        read(packed)


@promise("Data", "a file that is ...")
@without("unet3d.data.nifti.READ_ERRORS", (OSError, ValueError), only="0.9")
@pytest.mark.parametrize("kept", [0.5, 0.9, 0.99])
def test_a_truncated_gz_is_refused(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path / "a.nii.gz", image((20, 20, 20)))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError, match=r"^a: .*a\.nii\.gz: .*end-of-stream"):
        read(path)


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


@promise(
    "What scripts rely on",
    "label maps and probabilities",
    "NIfTI on the grid of the input, with its header; X Y Z class",
)
@promise("Prediction", "images turned, anisotropic, in ...")
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 4, 2)])
def test_saved_labels_keep_the_header_to_the_bit_but_for_the_intensities(
    tmp_path: Path, kind: type, shape: tuple
) -> None:
    like = tmp_path / "like.nii.gz"
    nib.save(tilted(kind, shape), like)
    before = nib.load(like)
    path = tmp_path / "out.nii.gz"
    save_labels(path, label(), like)
    after = nib.load(path)
    assert type(after) is kind
    kept = ("qform_code", "sform_code", "srow_x", "srow_y", "srow_z", "qoffset_x", "quatern_b", "xyzt_units", "descrip")
    for field in kept:
        assert after.header[field].tobytes() == before.header[field].tobytes(), field
    assert after.affine.tobytes() == before.affine.tobytes()
    assert after.header["pixdim"][:4].tobytes() == before.header["pixdim"][:4].tobytes()
    assert after.header.get_slope_inter() == (None, None)
    assert after.header["cal_max"] == 0, "a display range of intensities hides labels"
    assert after.get_data_dtype() == np.uint8
    assert np.array_equal(np.asanyarray(after.dataobj), label())


def test_labels_above_255_are_saved_as_uint16(tmp_path: Path) -> None:
    like = write(tmp_path / "like.nii", image())
    save_labels(tmp_path / "out.nii", np.full((6, 5, 4), 256), like)
    saved = nib.load(tmp_path / "out.nii")
    assert saved.get_data_dtype() == np.uint16
    assert saved.get_fdata().min() == 256


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
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.nii.gz"]


def stamped(content: bytes, mtime: float) -> bytes:
    """Compress with the time of now."""
    return compress(content)


@without("gzip.compress", stamped)
def test_the_same_image_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for clock in (1.0, 2_000_000_000.0):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        restore.save_image(tmp_path / "a.nii.gz", nib.Nifti1Image(label(), LPS))
        written.append((tmp_path / "a.nii.gz").read_bytes())
    assert written[0] == written[1]
    assert gzip.GzipFile(fileobj=io.BytesIO(written[0])).read()[344:348] == b"n+1\0"
