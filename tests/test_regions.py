"""Regions from the command line: a run on nnU-Net's regions, its label maps, scores, checkpoints and memory."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from brain import HELD, NAMES, ORDER, make_brain
from training import face, records, train, weights

import unet3d
from unet3d.base.errors import UserError
from unet3d.base.files import read_csv
from unet3d.run import checkpoint, publish

OF_DATA = ["data=nnunet", "data.val_fraction=0.5"]
RUN = [
    *(*OF_DATA, "model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "batch=2", "steps=12"),
    *("eval_every=0", "optim.lr=0.02", "device=cpu", "workers=0", "hydra.run.dir=run"),
]


def voxels(path: Path) -> np.ndarray:
    return np.asanyarray(nib.load(path).dataobj)


def drawn(probabilities: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Return nnU-Net's label map of probabilities X Y Z K: each region in this order, over those before."""
    labels = np.zeros(probabilities.shape[:3], np.uint8)
    for region, label in enumerate(order):
        labels[probabilities[..., region] > 0.5] = label
    return labels


def trained(place: Path, data: Path, *words: str, frills: bool = False) -> Path:
    """Return the last checkpoint of a run in `place`."""
    done = train(place, *RUN, f"data.root={data}", *words, frills=frills)
    assert done.code == 0, done.err
    return place / "run" / "checkpoints" / "last.pt"


def assert_scores(folder: Path, made: Path, truths: Path, ignored: int = 0) -> None:
    """Compare the table of scores in a folder with the Dice of the regions in the label maps of its held-out cases."""
    rows = read_csv(folder / "scores.csv")
    assert len(rows) == 2
    for row in rows:
        truth = voxels(truths / f"{row['case']}.nii.gz")
        is_known = (truth != ignored) | (ignored == 0)
        found = voxels(made / f"{row['case']}.nii.gz")[is_known]
        for name, labels in zip(NAMES, HELD, strict=True):
            a, b = np.isin(found, labels), np.isin(truth[is_known], labels)
            dice = 2 * (a & b).sum() / (a.sum() + b.sum())
            assert float(row[f"dice/{name}"]) == pytest.approx(dice, abs=1e-12)
            assert float(row[f"iou/{name}"]) == pytest.approx(dice / (2 - dice), abs=1e-12)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the brain's data set in `data`, and a finished run on it in `run`."""
    folder = tmp_path_factory.mktemp("regions")
    trained(folder, make_brain(folder / "data"), frills=True)
    return folder


@pytest.fixture
def last(place: Path) -> Path:
    return place / "run" / "checkpoints" / "last.pt"


def test_a_run_has_an_output_for_each_region_learns_and_predicts_its_peak_to_the_byte(place: Path, last: Path) -> None:
    state = checkpoint.load_checkpoint(last)
    assert state["classes"] == ["background", *NAMES]
    assert state["model_options"]["regions"] == [list(labels) for labels in HELD]
    assert weights(place / "run")["outc.conv.weight"].shape[:2] == (3, 4)
    (scores,) = [record for record in records(place / "run") if "val/dice_mean" in record]
    assert float.fromhex(scores["val/dice/whole_tumor"]) > 0.7
    loss = [record["train/loss"] for record in records(place / "run") if "train/loss" in record][-1]
    assert float.fromhex(scores["val/loss"]) == pytest.approx(float.fromhex(loss), rel=0.5)
    memory = json.loads((place / "run" / "memory.json").read_text())
    assert memory["predicted"]["peak_bytes"] == memory["measured"]["peak_bytes"]
    page = (place / "run" / "report.html").read_text()
    assert "of overlapping regions" in page
    assert all(name in page for name in NAMES)


def test_a_label_map_is_the_drawing_of_the_probabilities(
    place: Path, last: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert face("predict", last, place / "data" / "imagesTr", "-o", tmp_path, "--probabilities") == 0
    assert "1 for whole_tumor, 2 for tumor_core, 3 for enhancing" in capsys.readouterr().out
    for number in range(4):
        probabilities = voxels(tmp_path / f"brain_{number}_probabilities.nii")
        assert probabilities.shape[3] == 3
        assert np.array_equal(voxels(tmp_path / f"brain_{number}.nii.gz"), drawn(probabilities, ORDER))
    for path in (place / "run" / "predictions").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_scores_are_those_of_the_regions_in_the_label_maps(place: Path, last: Path, tmp_path: Path) -> None:
    truths = place / "data" / "labelsTr"
    assert_scores(place / "run", place / "run" / "predictions", truths)
    assert face("score", last, f"data.root={place / 'data'}", *OF_DATA, "-o", tmp_path) == 0
    assert_scores(tmp_path, place / "run" / "predictions", truths)


def test_probabilities_are_resampled_and_then_drawn_and_ignored_voxels_are_not_scored(tmp_path: Path) -> None:
    words = ["data.spacing=[1.3,1.3,1.3]", "inference.mirror=true", "optim.average=0.5", "steps=4"]
    data = make_brain(tmp_path / "data", ignore=4)
    last = trained(tmp_path, data, *words)
    assert face("predict", last, data / "imagesTr", "-o", tmp_path / "made", "--probabilities") == 0
    for path in (tmp_path / "run" / "predictions").iterdir():
        name = path.name.removesuffix(".nii.gz")
        assert np.array_equal(voxels(path), drawn(voxels(tmp_path / "made" / f"{name}_probabilities.nii"), ORDER))
    assert_scores(tmp_path / "run", tmp_path / "made", data / "labelsTr", ignored=4)


def test_networks_published_as_one_give_mean_probabilities(place: Path, last: Path, tmp_path: Path) -> None:
    state = checkpoint.load_checkpoint(last)
    for name in state["model"]:
        state["model"][name] = state["model"][name] * 1.5 + 0.01
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    publish.publish([last, tmp_path / "other.pt"], tmp_path / "both.pt")
    paths = (last, tmp_path / "other.pt", tmp_path / "both.pt")
    networks = [unet3d.load(path, "cpu") for path in paths]
    assert (networks[2].classes, networks[2].values) == (("background", *NAMES), (0, *ORDER))
    tile = torch.randn(1, 4, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other, both = (network.module(tile).sigmoid() for network in networks)
    assert (one - other).abs().max() > 0.05
    torch.testing.assert_close(both, (one + other) / 2)
    image = np.stack([voxels(place / "data" / "imagesTr" / f"brain_0_{c:04d}.nii.gz") for c in range(4)])
    labels, probabilities = networks[2].segment(image, spacing=(1, 1, 1.5), probabilities=True)
    assert np.array_equal(labels, drawn(np.moveaxis(probabilities, 0, -1), ORDER))


def test_checkpoints_of_other_regions_are_not_published_together_or_scored(
    place: Path, last: Path, tmp_path: Path
) -> None:
    state = checkpoint.load_checkpoint(last)
    state["model_options"]["regions"] = [[1, 2, 3], [2], [3]]
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    with pytest.raises(UserError, match=r"model\.regions"):
        publish.publish([last, tmp_path / "other.pt"], tmp_path / "both.pt")
    words = [f"data.root={place / 'data'}", *OF_DATA]
    assert face("score", tmp_path / "other.pt", *words, "-o", tmp_path / "scores") == 2


def test_a_run_goes_on_with_its_regions_and_no_others(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    words = [f"data.root={tmp_path / 'data'}", "resume=run"]
    done = train(tmp_path, *words, "steps=14")
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "data" / "dataset.json").read_text())
    about["labels"]["tumor_core"] = [1, 2, 3]
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(about))
    done = train(tmp_path, *words, "steps=16")
    assert done.code == 2
    assert "regions" in done.err


def test_a_run_begins_with_the_regions_of_another(place: Path, last: Path, tmp_path: Path) -> None:
    labels = {"background": 0, "enhancing": [1, 2, 3], "rest": 2, "tumor_core": 3}
    trained(tmp_path, make_brain(tmp_path / "data", labels=labels), f"init={last}", "steps=1", "optim.lr=0")
    before, after = (weights(folder / "run")["outc.conv.weight"] for folder in (place, tmp_path))
    assert torch.equal(after[0], before[2])
    assert torch.equal(after[2], before[1])
    assert not torch.equal(after[1], before[0])
