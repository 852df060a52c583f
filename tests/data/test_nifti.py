"""Files that are refused before memory is taken, damage that nibabel does not see, and headers kept to the bit."""

import gzip
import io
import os
import tracemalloc
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nifti_files import LPS, image, label, write, write_header

from unet3d.data import nifti
from unet3d.errors import UserError


def read(path: Path) -> np.ndarray:
    return nifti.read_array("a", path, nifti.open_image("a", path))


def test_compressed_or_not_the_voxels_are_the_same(tmp_path: Path) -> None:
    voxels = image((6, 5, 4, 2))
    for name in ("plain.nii", "packed.nii.gz", "Bild 1 µm.nii.gz"):
        assert np.array_equal(read(write(tmp_path / name, voxels)), voxels)


@pytest.mark.parametrize(("shape", "seen"), [((6, 5, 4, 1), (6, 5, 4)), ((6, 5, 4, 1, 3), (6, 5, 4, 3))])
def test_axes_of_one_are_dropped(tmp_path: Path, shape: tuple[int, ...], seen: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.nii.gz", image(shape))
    assert read(path).shape == seen
    assert nifti.channels(nifti.open_image("a", path)) == shape[-1]


@pytest.mark.parametrize("order", ["<", ">"])
def test_slope_and_byte_order_are_honoured(tmp_path: Path, order: str) -> None:
    header = nib.Nifti1Header(endianness=order)
    header.set_data_shape((6, 5, 4))
    header.set_data_dtype(np.int16)
    header.set_sform(LPS, code=1)
    header.set_slope_inter(0.5, -1024)
    header["magic"], header["vox_offset"] = b"n+1", 352
    voxels = np.arange(120, dtype=f"{order}i2").reshape(6, 5, 4)
    path = tmp_path / "a.nii"
    path.write_bytes(header.binaryblock + bytes(4) + voxels.tobytes("F"))
    assert np.array_equal(read(path), voxels * 0.5 - 1024)


def not_there(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def web_page(path: Path) -> None:
    path.write_text("<!DOCTYPE html>" + "not found " * 100)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def two_axes(path: Path) -> None:
    write_header(path, "dim", (2, 6, 20, 1, 1, 1, 1, 1))


def time_and_channels(path: Path) -> None:
    write_header(path, "dim", (5, 6, 5, 1, 2, 2, 1, 1))


def a_negative_length(path: Path) -> None:
    write_header(path, "dim", (3, -6, 5, 4, 1, 1, 1, 1))


def largest_header(path: Path) -> None:
    write_header(path, "dim", (3, 32767, 32767, 32767, 1, 1, 1, 1))


def colours(path: Path) -> None:
    write_header(path, "datatype", (128,))


def complex_numbers(path: Path) -> None:
    write_header(path, "datatype", (32,))


def no_such_type(path: Path) -> None:
    write_header(path, "datatype", (77,))


def no_thickness(path: Path) -> None:
    write_header(path, "pixdim", (1, 1, 1.5, 0, 1, 1, 1, 1))


def nan_thickness(path: Path) -> None:
    write_header(path, "pixdim", (1, 1, 1.5, np.nan, 1, 1, 1, 1))


FAULTS = {
    not_there: "no such file",
    a_folder: "no such file",
    empty: "is empty",
    web_page: "not readable as NIfTI",
    cut_off: "claims 832 bytes but holds 831",
    cut_in_the_header: "not readable as NIfTI",
    two_axes: r"has shape \(6, 20\)",
    time_and_channels: r"has shape \(6, 5, 1, 2, 2\)",
    a_negative_length: "has shape",
    largest_header: "claims 35,181,150,961,663 voxels",
    colours: "stores",
    complex_numbers: "stores complex64",
    no_such_type: "not readable as NIfTI",
    no_thickness: "has voxel sizes",
    nan_thickness: "has voxel sizes",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_header_is_refused_with_case_and_path(tmp_path: Path, fault) -> None:
    path = write(tmp_path / "scan.nii", image())
    fault(path)
    with pytest.raises(UserError, match=FAULTS[fault]) as caught:
        nifti.open_image("case7", path)
    assert str(caught.value).startswith(f"case7: {path}: ")


@pytest.mark.parametrize(("row", "value"), [(0, np.nan), (1, np.inf), (2, 0)])
def test_an_affine_that_maps_no_volume_is_refused(tmp_path: Path, row: int, value: float) -> None:
    voxels = nib.Nifti1Image(image(), LPS)
    voxels.header["srow_" + "xyz"[row]] = value
    path = tmp_path / "a.nii"
    path.write_bytes(voxels.header.binaryblock + bytes(4) + image().tobytes("F"))
    with pytest.raises(UserError, match="maps no volume"):
        nifti.open_image("a", path)


def test_what_is_not_nifti_by_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mha"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"is no \.nii\.gz or \.nii file; convert it"):
        nifti.open_image("a", path)


def test_a_web_page_saved_as_gz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.nii.gz"
    web_page(path)
    with pytest.raises(UserError, match="is not gzip-compressed"):
        nifti.open_image("a", path)


def test_a_small_file_that_claims_much_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = write_header(write(tmp_path / "a.nii", image()), "dim", (3, 1000, 1000, 1000, 1, 1, 1, 1))
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match="claims 4,000,000,352 bytes but holds"):
        nifti.open_image("a", packed)


def with_extension(path: Path, code: int, content: bytes, offset: float) -> Path:
    """The sound image in `path` with a header extension before its voxels."""
    plain = path.read_bytes()
    block = np.array([8 + len(content), code], "<i4").tobytes() + content
    header = bytearray(plain[:348])
    header[108:112] = np.float32(offset).tobytes()
    path.write_bytes(bytes(header) + b"\1\0\0\0" + block + plain[352:])
    return path


@pytest.mark.parametrize("code", [2, 4, 32], ids=["dicom", "afni", "cifti"])
def test_an_extension_is_skipped_unread(tmp_path: Path, code: int) -> None:
    """nibabel would hand it to a parser of DICOM or XML."""
    content = b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;".ljust(40, b" ")
    plain = with_extension(write(tmp_path / "a.nii", image()), code, content, 400)
    assert np.array_equal(read(plain), image())
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert np.array_equal(read(packed), image())


def test_a_cifti_file_is_read_as_what_its_nifti_header_says(tmp_path: Path) -> None:
    """nibabel takes such an intent for CIFTI-2, and its XML for true."""
    stored = nib.Nifti2Image(image(), LPS)
    stored.header["intent_code"] = 3006
    path = tmp_path / "a.nii"
    path.write_bytes(stored.to_bytes())
    with pytest.raises(ValueError, match="CIFTI"):
        nib.load(path)
    assert np.array_equal(read(path), image())


def test_voxels_that_begin_far_into_the_stream_take_no_memory_for_what_lies_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", image())
    content = bytearray(path.read_bytes())
    content[108:112] = np.float32(2**26).tobytes()
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(bytes(content[:352]).ljust(2**26, b"\0") + content[352:], 1))
    tracemalloc.start()
    voxels = read(packed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(voxels, image()) and peak < 2**22


def test_what_nibabel_mends_in_a_header_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would name neither case nor file."""
    path = with_extension(write(tmp_path / "a.nii", image()), 6, b" " * 49, 409)
    assert np.array_equal(read(path), image())
    assert not caplog.text and capfd.readouterr() == ("", "")


def test_a_flipped_byte_is_found_though_it_still_inflates(tmp_path: Path) -> None:
    voxels = image((20, 20, 20))
    path = write(tmp_path / "a.nii", voxels)
    content = bytearray(gzip.compress(path.read_bytes(), compresslevel=0))
    content[-100] ^= 1
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(content)
    assert not np.array_equal(nib.load(packed).get_fdata(), voxels), "nibabel takes it"
    with pytest.raises(UserError, match=r"damaged \(CRC check failed"):
        read(packed)


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.99])
def test_a_truncated_gz_is_refused(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path / "a.nii.gz", image((20, 20, 20)))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError, match="damaged"):
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


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 4, 2)])
def test_saved_labels_keep_the_header_to_the_bit_but_for_the_intensities(
    tmp_path: Path, kind: type, shape: tuple
) -> None:
    like = tmp_path / "like.nii.gz"
    nib.save(tilted(kind, shape), like)
    before = nib.load(like)
    path = tmp_path / "out.nii.gz"
    nifti.save_labels(path, label(), like)
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
    nifti.save_labels(tmp_path / "out.nii", np.full((6, 5, 4), 256), like)
    saved = nib.load(tmp_path / "out.nii")
    assert saved.get_data_dtype() == np.uint16
    assert saved.get_fdata().min() == 256


def test_p2_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.nii.gz", image())
    before = path.read_bytes()

    def full_disk(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        nifti.replace(path, nib.Nifti1Image(label(), LPS))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.nii.gz"]


def test_the_same_image_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for clock in (1.0, 2_000_000_000.0):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        nifti.replace(tmp_path / "a.nii.gz", nib.Nifti1Image(label(), LPS))
        written.append((tmp_path / "a.nii.gz").read_bytes())
    assert written[0] == written[1]
    assert gzip.GzipFile(fileobj=io.BytesIO(written[0])).read()[344:348] == b"n+1\0"
