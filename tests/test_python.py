"""The package from Python: train, load, segment; equal to what the commands write."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from promises import promise
from training import PLAIN, TINY, face, status

import unet3d
from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.cli.train import TrainedRun
from unet3d.run.predict import Network

OBLIQUE = np.array([[0, -1.1, 0.1, 7], [-0.9, 0, 0, 3], [0, 0.1, -2.2, 5], [0, 0, 0, 1]])  # neither RAS nor straight
VOXELS = np.random.default_rng(0).normal(100, 20, (22, 18, 17)).astype(np.float32)
VOXELS[6:14, 5:12, 4:11] += 150
IMAGE = nib.Nifti1Image(VOXELS, OBLIQUE)
ONES = (1, 1, 1)


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


@pytest.fixture(scope="module")
def network(trained: TrainedRun) -> Network:
    return unet3d.load(trained.checkpoint, device="cpu")


@pytest.fixture(scope="module")
def written(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the image, a.nii.gz, and in maps/ what the command writes for it."""
    place = tmp_path_factory.mktemp("written")
    nib.save(IMAGE, place / "a.nii.gz")
    words = ["predict", trained.checkpoint, place / "a.nii.gz", "-o", place / "maps", "--probabilities"]
    assert face(*words, "--device", "cpu") == 0
    return place


@promise("What scripts rely on", "the Python that the ...")
@pytest.mark.slow
def test_a_run_is_trained_in_this_process(trained: TrainedRun) -> None:
    assert trained.folder.parent.parent.name == "outputs" and status(trained.folder)[:5] == "done\n"
    assert trained.checkpoint.is_file() and trained.memory["predicted"]["peak_bytes"] > 0
    assert trained.memory["measured"]["peak_bytes"] == trained.memory["predicted"]["peak_bytes"]
    (scores,) = trained.scores
    assert trained.dice == pytest.approx(np.mean([float(v) for k, v in scores.items() if k.startswith("dice/")]))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("chkpt=2",), r"\bchkpt\b.*\bckpt\b"),
        (("seed=0,1", "-m"), r"-m\b.*\bunet3d\.train\b"),
        ("amp=true", r"\bunet3d\.train\b.*\['amp=true'\]"),
        (("data=decathlon", "data.root=.", "hydra.run.dir=run"), r"\bdataset\.json\b"),
    ],
)
def test_what_would_end_the_command_is_raised(
    words: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UserError, match=rf"^[^\n]*{line}[^\n]*$"):
        unet3d.train(words)
    assert not (tmp_path / "run").exists() or status(tmp_path / "run").endswith("exit code 2\n")


def test_it_trains_in_one_process_by_its_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match=r"^unet3d\.train\b[^\n]*\bthread\b[^\n]*$"):
        pool.submit(unet3d.train, [*TINY]).result()
    monkeypatch.setattr(ranks, "SIZE", 2)
    with pytest.raises(UserError, match=r"\bunet3d\.train\b.*\btorchrun train\.py\b"):
        unet3d.train([])


def test_images_and_files_are_segmented_as_by_the_command(network: Network, written: Path) -> None:
    assert network.classes == ("background", "organ", "vessel", "lesion") and network.channels == ("MRI",)
    assert network.module(torch.zeros(1, 1, 16, 16, 16)).shape == (1, 4, 16, 16, 16)
    made = nib.load(written / "maps" / "a.nii.gz")
    assert len(np.unique(made.dataobj)) > 1
    for given in (IMAGE, [IMAGE], written / "a.nii.gz", [str(written / "a.nii.gz")]):
        found = network.segment(given)
        assert np.array_equal(found.dataobj, made.dataobj) and found.get_data_dtype() == np.uint8
        assert np.allclose(found.affine, made.affine)


def test_an_array_is_segmented_as_an_image_with_its_spacing(network: Network) -> None:
    labels = network.segment(VOXELS, (1.1, 0.9, 2.2))
    assert isinstance(labels, np.ndarray) and labels.dtype == np.uint8 and labels.any()
    straight = nib.Nifti1Image(VOXELS, np.diag([1.1, 0.9, 2.2, 1]))
    assert np.array_equal(labels, np.asanyarray(network.segment(straight).dataobj))
    for other in (VOXELS[None], VOXELS[..., None]):
        assert np.array_equal(labels, network.segment(other, (1.1, 0.9, 2.2)))


@promise("Prediction", "an array in Python whose axes do not run right, anterior, superior", "turned by its affine")
def test_an_array_with_its_affine_is_turned_as_a_file_is(network: Network, written: Path) -> None:
    labels = network.segment(IMAGE.get_fdata(), affine=OBLIQUE)
    assert np.array_equal(labels, nib.load(written / "maps" / "a.nii.gz").dataobj)
    floats = nib.Nifti1Image(IMAGE.get_fdata(), OBLIQUE, IMAGE.header)
    floats.header.set_data_dtype(np.uint8)
    assert np.array_equal(np.asarray(network.segment(floats).dataobj), labels), "not rounded to its header's type"


@promise("What scripts rely on", "label maps and probabilities ...")
def test_probabilities_come_with_the_labels_on_request(network: Network, written: Path) -> None:
    """Those that the command writes."""
    wanted = np.asanyarray(nib.load(written / "maps" / "a_probabilities.nii").dataobj)
    labels, found = network.segment(IMAGE, probabilities=True)
    assert found.get_data_dtype() == np.float32 and np.array_equal(np.asanyarray(found.dataobj), wanted)
    assert np.allclose(found.affine, labels.affine) and np.array_equal(labels.dataobj, wanted.argmax(-1))
    labels, found = network.segment(VOXELS, affine=OBLIQUE, probabilities=True)
    assert np.array_equal(np.moveaxis(found, 0, -1), wanted) and np.array_equal(labels, found.argmax(0))


@pytest.mark.parametrize("kind", [np.uint64, np.longdouble, ">f2", np.bool_])
def test_an_array_of_any_numbers_is_segmented(network: Network, kind: Any) -> None:
    bright = (VOXELS > 150).astype(np.float32)
    wanted = network.segment(bright, (1, 1, 2))
    assert wanted.any() and np.array_equal(network.segment(bright.astype(kind), (1, 1, 2)), wanted)
    other = nib.MGHImage(bright, np.diag([1, 1, 2, 1]))
    assert np.array_equal(np.asanyarray(network.segment(other).dataobj), wanted)


@promise(
    "Prediction",
    "an array for `segment` with a spacing that is no three lengths, or with masked voxels",
    "one line",
)
@pytest.mark.parametrize(
    ("given", "spacing", "affine", "line"),
    [
        (VOXELS, None, None, "segment.*spacing.*None"),
        (VOXELS, (1, 0, 1), None, r"segment.*spacing.*\(1, 0, 1\)"),
        (VOXELS, ONES, OBLIQUE, "segment.*affine.*spacing"),
        (VOXELS, None, np.diag([1, 1, 0, 1]), "segment.*inverted"),
        (VOXELS, None, np.eye(3), "segment.*4 x 4"),
        (IMAGE, ONES, None, "segment.*nibabel.*spacing"),
        (np.ma.masked_greater(VOXELS, 100), ONES, None, "segment.*masked.*filled"),
        (VOXELS[0], ONES, None, r"segment.*X Y Z.*float32.*\(18, 17\)"),
        (np.stack([VOXELS] * 2), ONES, None, r"image.*2 channels.*\b1\b"),
        (Path("none.nii"), None, None, r"none.*none\.nii"),
        ([VOXELS, VOXELS], None, None, "segment.*C X Y Z"),
        ([IMAGE, "a.nii.gz"], None, None, "segment.*C X Y Z"),
        (VOXELS, 1.0, None, r"segment.*spacing.*\b1\.0\b"),
        (VOXELS, ("1", "1", "1"), None, "segment.*spacing.*'1'"),
        (VOXELS, (1e-300, 1, 1), None, r"segment.*spacing.*\b1e-300\b"),
        (VOXELS, None, np.full((4, 4), np.nan), "segment.*4 x 4"),
        (IMAGE, None, OBLIQUE, "segment.*affine"),
        (np.where(VOXELS > 300, np.nan, VOXELS), ONES, None, r"image.*\bNaN\b"),
        (nib.Nifti1Image(VOXELS.astype(np.complex64), OBLIQUE), None, None, "segment.*complex64"),
        (3, None, None, r"segment.*\bint\b"),
    ],
)
def test_an_image_that_does_not_suit_is_one_line(
    network: Network, given: Any, spacing: Any, affine: Any, line: str
) -> None:
    with pytest.raises(UserError, match=rf"^{line}[^\n]*$"):
        network.segment(given, spacing, affine)


@promise("Prediction", "a checkpoint read under another number of ranks", "read")
def test_a_checkpoint_is_read_under_any_number_of_ranks_on_a_device_that_exists(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How its run took its steps is no part of the network."""
    monkeypatch.setattr(ranks, "SIZE", 7)
    assert unet3d.load(str(trained.checkpoint)).classes
    with pytest.raises(UserError, match=r"^device=cuda:0: .*auto.*cpu.*cuda"):
        unet3d.load(trained.checkpoint, device="cuda:0")


@promise(
    "What scripts rely on",
    "names in Python",
    "`unet3d.load`, `train`, `recompute`, `memory`; `unet3d.memory.predict`, `explain`, `assert_below`",
)
def test_its_faces_are_listed_and_found_though_nothing_has_loaded_them() -> None:
    assert [*dir(unet3d)] == ["__version__", "load", "memory", "recompute", "train"]
    assert dir(unet3d.memory) == ["assert_below", "explain", "predict"]
    assert not hasattr(unet3d, "nothing") and not hasattr(unet3d.memory, "nothing")
    program = "import unet3d; print(callable(unet3d.train), callable(unet3d.memory.predict), callable(unet3d.load))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True True True\n", done.stderr[-300:]
