"""The package from Python: train, load, segment; equal to what the commands write."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from promises import promise
from training import PLAIN, TINY, face
from training import train as fork

import unet3d
from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.cli.train import TrainedRun
from unet3d.data.cases import Case
from unet3d.run.validation import Validator

OBLIQUE = np.array([[0, -1.1, 0.1, 7], [-0.9, 0, 0, 3], [0, 0.1, -2.2, 5], [0, 0, 0, 1]])  # neither RAS nor straight


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedRun]:
    """Trained in this process, on a grid of its own."""
    place = tmp_path_factory.mktemp("trained")
    before, handlers = list(sys.argv), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("WANDB_MODE", "disabled")
        yield unet3d.train([*TINY, *PLAIN, "data.spacing=[1.5,1.5,2.5]", "optim.lr=0.1"])
    assert sys.argv == before and [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
def test_a_run_is_trained_in_this_process(trained: TrainedRun) -> None:
    assert trained.folder.parent.parent.name == "outputs" and (trained.folder / "STATUS").read_text()[:5] == "done\n"
    assert trained.checkpoint.is_file() and trained.memory["predicted"]["peak_bytes"] > 0
    assert trained.memory["measured"]["peak_bytes"] == trained.memory["predicted"]["peak_bytes"]
    assert len(trained.scores) == 1 and trained.dice == pytest.approx(
        np.mean([float(v) for k, v in trained.scores[0].items() if k.startswith("dice/")])
    )


def test_of_several_ranks_it_trains_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SIZE", 2)
    with pytest.raises(UserError, match=r"\bunet3d\.train\b.*\btorchrun train\.py\b"):
        unet3d.train([])


def test_what_would_end_the_command_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for words, line in {
        ("chkpt=2",): r"\bchkpt\b.*\bckpt\b",
        ("seed=0,1", "-m"): r"-m\b.*\bunet3d\.train\b",
        "amp=true": r"\bunet3d\.train\b.*\['amp=true'\]",
        ("data=decathlon", f"data.root={tmp_path}", "hydra.run.dir=run"): r"\bdataset\.json\b",
    }.items():
        with pytest.raises(UserError, match=rf"^[^\n]*{line}[^\n]*$"):
            unet3d.train(words)
    assert (tmp_path / "run" / "STATUS").read_text().endswith("exit code 2\n"), "of the one that began"


def image() -> nib.Nifti1Image:
    voxels = np.random.default_rng(0).normal(100, 20, (22, 18, 17)).astype(np.float32)
    voxels[6:14, 5:12, 4:11] += 150
    return nib.Nifti1Image(voxels, OBLIQUE)


@pytest.fixture
def predicted(trained: TrainedRun, tmp_path: Path) -> nib.Nifti1Image:
    """What the command writes for this image."""
    nib.save(image(), tmp_path / "a.nii.gz")
    assert face("predict", trained.checkpoint, tmp_path / "a.nii.gz", "-o", tmp_path / "maps", "--device", "cpu") == 0
    return nib.load(tmp_path / "maps" / "a.nii.gz")


def test_images_and_files_are_segmented_as_by_the_command(
    trained: TrainedRun, predicted: nib.Nifti1Image, tmp_path: Path
) -> None:
    network = unet3d.load(str(trained.checkpoint), device="cpu")
    assert network.classes == ("background", "organ", "vessel", "lesion") and network.channels == ("MRI",)
    assert network.module(torch.zeros(1, 1, 16, 16, 16)).shape == (1, 4, 16, 16, 16)
    expected = np.asanyarray(predicted.dataobj)
    assert len(np.unique(expected)) > 1
    for given in (image(), [image()], tmp_path / "a.nii.gz", [str(tmp_path / "a.nii.gz")]):
        found = network.segment(given)
        assert np.array_equal(np.asanyarray(found.dataobj), expected) and found.get_data_dtype() == np.uint8
        assert np.allclose(found.affine, predicted.affine)


def test_an_array_is_segmented_as_an_image_with_its_spacing(trained: TrainedRun) -> None:
    network, voxels = unet3d.load(trained.checkpoint), image().get_fdata(dtype=np.float32)
    straight = nib.Nifti1Image(voxels, np.diag([1.1, 0.9, 2.2, 1]))
    labels = network.segment(voxels, (1.1, 0.9, 2.2))
    assert isinstance(labels, np.ndarray) and labels.dtype == np.uint8 and labels.any()
    assert np.array_equal(labels, np.asanyarray(network.segment(straight).dataobj))
    for other in (voxels[None], voxels[..., None]):
        assert np.array_equal(labels, network.segment(other, (1.1, 0.9, 2.2)))


@promise("Prediction", "an array in Python whose axes do not run right, anterior, superior", "turned by its affine")
def test_an_array_with_its_affine_is_turned_as_a_file_is(trained: TrainedRun, predicted: nib.Nifti1Image) -> None:
    network, given, expected = unet3d.load(trained.checkpoint), image(), np.asanyarray(predicted.dataobj)
    labels = network.segment(given.get_fdata(), affine=given.affine)
    assert isinstance(labels, np.ndarray) and np.array_equal(labels, expected)
    floats = nib.Nifti1Image(given.get_fdata(), given.affine, given.header)
    floats.header.set_data_dtype(np.uint8)
    assert np.array_equal(np.asarray(network.segment(floats).dataobj), labels), "not rounded to its header's type"
    for affine, spacing, line in (
        (np.diag([1, 1, 0, 1]), None, r"segment\b.*\binverted\b"),
        (given.affine, (1, 1, 1), r"segment\b.*\baffine\b.*\bspacing\b"),
        (np.eye(3), None, r"segment\b.*\b4 x 4\b"),
        (np.full((4, 4), np.nan), None, r"segment\b.*\b4 x 4\b"),
        ("RAS", None, r"segment\b.*\b4 x 4\b"),
    ):
        with pytest.raises(UserError, match=rf"^{line}[^\n]*$"):
            network.segment(given.get_fdata(), spacing, affine)
    with pytest.raises(UserError, match=r"^segment\b.*\baffine\b"):
        network.segment(given, affine=given.affine)


@promise("What scripts rely on", "label maps and probabilities ...")
def test_probabilities_come_with_the_labels_on_request(trained: TrainedRun, tmp_path: Path) -> None:
    """Those that the command writes."""
    nib.save(image(), tmp_path / "a.nii.gz")
    words = ["predict", trained.checkpoint, tmp_path / "a.nii.gz", "-o", tmp_path / "maps", "--probabilities"]
    assert face(*words, "--device", "cpu") == 0
    written = np.asanyarray(nib.load(tmp_path / "maps" / "a_probabilities.nii").dataobj)
    network = unet3d.load(trained.checkpoint, device="cpu")
    labels, found = network.segment(image(), probabilities=True)
    assert found.get_data_dtype() == np.float32 and np.array_equal(np.asanyarray(found.dataobj), written)
    assert np.allclose(found.affine, labels.affine) and np.array_equal(labels.dataobj, written.argmax(-1))
    labels, found = network.segment(image().get_fdata(dtype=np.float32), affine=OBLIQUE, probabilities=True)
    assert np.array_equal(np.moveaxis(found, 0, -1), written) and np.array_equal(labels, found.argmax(0))


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.longdouble, np.float16, ">f2", np.bool_, np.int8, np.uint32])
def test_an_array_of_any_numbers_is_segmented(trained: TrainedRun, kind: Any) -> None:
    network, voxels = unet3d.load(trained.checkpoint), (image().get_fdata() > 150).astype(np.float32)
    wanted = network.segment(voxels, (1, 1, 2))
    assert np.array_equal(network.segment(voxels.astype(kind), (1, 1, 2)), wanted) and wanted.any()
    other = nib.MGHImage(voxels, np.diag([1, 1, 2, 1]))
    assert np.array_equal(np.asanyarray(network.segment(other).dataobj), wanted)


def test_a_device_of_another_name_is_refused(trained: TrainedRun) -> None:
    for name in ("gpu", "cuda:0"):
        with pytest.raises(UserError, match=f"^device={name}(?!:\\d).*auto.*cpu.*cuda"):
            unet3d.load(trained.checkpoint, device=name)


def without_room_for_a_picture() -> None:
    """Let no memory be left as the picture of the last validation is drawn."""
    draw = Validator.draw

    def drawn(self: Validator, case: Case, prediction: np.ndarray, path: Path, title: str) -> None:
        if path.name == "validation.png":
            raise MemoryError("no room")
        draw(self, case, prediction, path, title)

    Validator.draw = drawn  # type: ignore[method-assign]


def test_a_picture_that_memory_has_no_room_for_ends_no_training(tmp_path: Path) -> None:
    done = fork(tmp_path, *TINY, "tensorboard=true", "hydra.run.dir=run", hook=without_room_for_a_picture)
    assert done.code == 0, done.err
    (line,) = {line for line in done.err.splitlines() if "validation.png" in line}
    assert "run/figures/validation.png" in line and "MemoryError: no room" in line
    assert (tmp_path / "run" / "STATUS").read_text()[:5] == "done\n"


def test_a_training_outside_of_the_main_thread_is_one_line() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match=r"^unet3d\.train\b[^\n]*\bthread\b[^\n]*$"):
        pool.submit(unet3d.train, [*TINY]).result()


@promise(
    "Prediction",
    "an array for `segment` with a spacing that is no three lengths, or with masked voxels",
    "one line",
)
def test_an_image_that_does_not_suit_is_one_line(trained: TrainedRun, tmp_path: Path) -> None:
    network, voxels = unet3d.load(trained.checkpoint), image().get_fdata()
    bad = voxels.copy()
    bad[0, 0, 0] = np.nan
    for given, spacing, line in (
        (voxels, None, r"segment\b.*\bspacing\b.*\bNone\b"),
        (voxels, (1, 0, 1), r"segment\b.*\bspacing\b.*\(1, 0, 1\)"),
        (voxels, "111", r"segment\b.*\bspacing\b.*\b111\b"),
        (voxels, ("1", "1", "1"), r"segment\b.*\bspacing\b.*'1'"),
        (voxels, 1.0, r"segment\b.*\bspacing\b.*\b1\.0\b"),
        (voxels, (1j, 1, 1), r"segment\b.*\bspacing\b.*\b1j\b"),
        (voxels, (1e-300, 1, 1), r"segment\b.*\bspacing\b.*\b1e-300\b"),
        (np.ma.masked_greater(voxels, 100), (1, 1, 1), r"segment\b.*\bmasked\b.*\bfilled\b"),
        (voxels[0], (1, 1, 1), r"segment\b.*\bX Y Z\b.*\bfloat64\b.*\(18, 17\)"),
        (np.stack([voxels] * 2), (1, 1, 1), r"image\b.*\b2 channels\b.*\b1\b"),
        (bad, (1, 1, 1), r"image\b.*\bNaN\b"),
        (image(), (1, 1, 1), r"segment\b.*\bnibabel\b.*\bspacing\b"),
        (tmp_path / "none.nii", None, r"none\b.*\bnone\.nii\b"),
        (
            nib.Nifti1Image(voxels.astype(np.complex64), OBLIQUE),
            None,
            r"segment\b.*\bcomplex64\b",
        ),
        ([voxels, voxels], None, r"segment\b.*\bC X Y Z\b"),
        ([image(), "a.nii.gz"], None, r"segment\b.*\bC X Y Z\b"),
        ([image(), image()], None, r"image\b.*\b2 channels\b.*\b1\b"),
        (3, None, r"segment\b.*\bint\b"),
    ):
        with pytest.raises(UserError, match=rf"^{line}[^\n]*$"):
            network.segment(given, spacing)


@promise("Prediction", "a checkpoint read under another number of ranks", "read")
def test_a_file_is_read_under_any_number_of_ranks(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """How its run took its steps is no part of the network."""
    monkeypatch.setattr(ranks, "SIZE", 7)
    assert unet3d.load(trained.checkpoint).classes


@promise("What scripts rely on", "names in Python ...")
@pytest.mark.slow
def test_each_face_is_there_as_soon_as_the_package_is_imported() -> None:
    program = "import unet3d; print(callable(unet3d.train), callable(unet3d.memory.predict), callable(unet3d.load))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True True True\n", done.stderr[-300:]
    assert not hasattr(unet3d, "nothing") and not hasattr(unet3d.memory, "nothing")


@promise(
    "What scripts rely on",
    "names in Python",
    "`unet3d.load`, `train`, `recompute`, `memory`; `unet3d.memory.predict`, `explain`, `assert_below`",
)
def test_its_faces_are_listed_and_found_though_nothing_has_loaded_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*dir(unet3d)] == ["__version__", "load", "memory", "recompute", "train"]
    assert dir(unet3d.memory) == ["assert_below", "explain", "predict"]
    memory = unet3d.memory
    monkeypatch.delattr(unet3d, "memory")
    assert unet3d.memory is memory
