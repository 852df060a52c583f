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
from unet3d.recomputing import search
from unet3d.report.report import methods_paragraph
from unet3d.run import checkpoint, predict, publish
from unet3d.run.record import read_run

RUN = [
    *("data=nnunet", "model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "data.val_fraction=0.5"),
    *("batch=2", "steps=12", "eval_every=0", "optim.lr=0.02", "device=cpu", "workers=0", "hydra.run.dir=run"),
]
Capture = pytest.CaptureFixture[str]


def voxels(path: Path) -> np.ndarray:
    return np.asanyarray(nib.load(path).dataobj)


def drawn(probabilities: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Return nnU-Net's label map of probabilities X Y Z K: each region in this order, over those before."""
    labels = np.zeros(probabilities.shape[:3], np.uint8)
    for region, label in enumerate(order):
        labels[probabilities[..., region] > 0.5] = label
    return labels


def dice(made: np.ndarray, truth: np.ndarray, labels: Sequence[int]) -> float:
    """Return the Dice of the voxels that have any of these labels."""
    a = np.isin(made, labels)
    b = np.isin(truth, labels)
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the brain's data set in `data`, and a finished run on it in `run`."""
    folder = tmp_path_factory.mktemp("regions")
    make_brain(folder / "data")
    done = train(folder, *RUN, f"data.root={folder / 'data'}", wandb="offline", frills=True)
    assert done.code == 0, done.err
    return folder


def test_a_run_has_an_output_for_each_region_and_learns(place: Path) -> None:
    state = checkpoint.load_checkpoint(place / "run" / "checkpoints" / "last.pt")
    assert state["classes"] == ["background", *NAMES]
    assert state["model_options"]["regions"] == [list(labels) for labels in HELD]
    assert weights(place / "run")["outc.conv.weight"].shape[:2] == (3, 4)
    (scores,) = [record for record in records(place / "run") if "val/dice_mean" in record]
    assert {f"val/dice/{name}" for name in NAMES} < scores.keys()
    assert float.fromhex(scores["val/dice/whole_tumor"]) > 0.7
    last = [float.fromhex(record["train/loss"]) for record in records(place / "run") if "train/loss" in record][-1]
    assert float.fromhex(scores["val/loss"]) == pytest.approx(last, rel=0.5)


def test_the_peak_is_predicted_to_the_byte(place: Path) -> None:
    memory = json.loads((place / "run" / "memory.json").read_text())
    assert memory["predicted"]["peak_bytes"] == memory["measured"]["peak_bytes"]


def test_a_methods_paragraph_names_the_regions_of_a_dataset_json(place: Path) -> None:
    assert "of overlapping regions" in methods_paragraph(read_run(place / "run"))


def test_a_label_map_is_the_drawing_of_the_probabilities(place: Path, tmp_path: Path, capsys: Capture) -> None:
    run = place / "run"
    image = place / "data" / "imagesTr"
    assert face("predict", run / "checkpoints" / "last.pt", image, "-o", tmp_path, "--probabilities") == 0
    assert "1 for whole_tumor, 2 for tumor_core, 3 for enhancing" in capsys.readouterr().out
    held = {}
    for number in range(4):
        probabilities = voxels(tmp_path / f"brain_{number}_probabilities.nii")
        assert probabilities.shape[3] == 3 and probabilities.min() >= 0 and probabilities.max() <= 1
        labels = voxels(tmp_path / f"brain_{number}.nii.gz")
        assert np.array_equal(labels, drawn(probabilities, ORDER))
        held |= {value: True for value in np.unique(labels).tolist()}
    assert {0, 1, 2, 3} >= held.keys() and len(held) > 1
    for path in (run / "predictions").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_scores_are_those_of_the_regions_in_the_label_maps(place: Path, tmp_path: Path) -> None:
    run = place / "run"
    for text in (run / "scores.csv", tmp_path / "scores" / "scores.csv"):
        if not text.exists():
            words = [f"data.root={place / 'data'}", "data=nnunet", "data.val_fraction=0.5"]
            last = run / "checkpoints" / "last.pt"
            assert face("score", last, *words, "-o", tmp_path / "scores") == 0
        rows = read_csv(text)
        assert len(rows) == 2
        for row in rows:
            made = voxels(run / "predictions" / f"{row['case']}.nii.gz")
            truth = voxels(place / "data" / "labelsTr" / f"{row['case']}.nii.gz")
            for name, labels in zip(NAMES, HELD, strict=True):
                expected = dice(made, truth, labels)
                assert float(row[f"dice/{name}"]) == pytest.approx(expected, abs=1e-12)
                assert float(row[f"iou/{name}"]) == pytest.approx(expected / (2 - expected), abs=1e-12)
    page = (run / "report.html").read_text()
    assert all(name in page for name in NAMES)


def test_on_another_spacing_probabilities_are_resampled_and_then_drawn(place: Path, tmp_path: Path) -> None:
    words = ["data.spacing=[1.3,1.3,1.3]", "inference.mirror=true", "optim.average=0.5"]
    done = train(tmp_path, *RUN, "steps=4", f"data.root={place / 'data'}", *words)
    assert done.code == 0, done.err
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    image = place / "data" / "imagesTr"
    assert face("predict", last, image, "-o", tmp_path / "made", "--probabilities") == 0
    rows = {row["case"]: row for row in read_csv(tmp_path / "run" / "scores.csv")}
    for case, row in rows.items():
        made = voxels(tmp_path / "run" / "predictions" / f"{case}.nii.gz")
        probabilities = voxels(tmp_path / "made" / f"{case}_probabilities.nii")
        assert np.array_equal(made, drawn(probabilities, ORDER))
        truth = voxels(place / "data" / "labelsTr" / f"{case}.nii.gz")
        assert float(row["dice/whole_tumor"]) == pytest.approx(dice(made, truth, HELD[0]), abs=1e-12)


def few_tries() -> None:
    search.TRIES = search.FEWEST_TRIES


@pytest.mark.parametrize("amp", ["amp=false", pytest.param("amp=true", marks=pytest.mark.slow)])
def test_what_recomputes_gives_the_same_losses_and_gradients(amp: str, place: Path, tmp_path: Path) -> None:
    """After a step of SGD at a rate of 1, weights are less by the gradient; the second step's loss follows."""
    words = ["optim=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.schedule=constant", "optim.clip=null"]
    runs = {}
    ways = ["ckpt=0", "ckpt=2", "recompute=lean", "recompute=tiles"]
    if amp == "amp=true":
        ways.remove("recompute=lean")
    for way in ways:
        folder = tmp_path / way.replace("=", "_")
        settings = [*words, "optim.lr=1", "steps=2", amp, way, f"data.root={place / 'data'}"]
        done = train(folder, *RUN, *settings, hook=few_tries)
        assert done.code == 0, done.err
        runs[way] = folder / "run"
    plain = runs.pop("ckpt=0")
    for way, run in runs.items():
        bound = 0.0 if way == "ckpt=2" else {"amp=false": 2e-5, "amp=true": 2e-2}[amp]
        assert _losses(run) == pytest.approx(_losses(plain), abs=bound, rel=0)
        pairs = zip(weights(run).values(), weights(plain).values(), strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) <= bound


def _losses(run: Path) -> list[float]:
    return [float.fromhex(record["train/loss"]) for record in records(run) if "train/loss" in record]


def test_networks_published_as_one_give_mean_probabilities(place: Path, tmp_path: Path) -> None:
    last = place / "run" / "checkpoints" / "last.pt"
    state = checkpoint.load_checkpoint(last)
    for name in state["model"]:
        state["model"][name] = state["model"][name] * 1.5 + 0.01
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    publish.publish([last, tmp_path / "other.pt"], tmp_path / "both.pt")
    paths = (last, tmp_path / "other.pt", tmp_path / "both.pt")
    tile = torch.randn(1, 4, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other, both = (predict.load(path, "cpu").segmenter.predictor.window_logits(tile) for path in paths)
        logits = [unet3d.load(path, "cpu").module(tile) for path in paths]
    assert (one - other).abs().max() > 0.05
    torch.testing.assert_close(one, logits[0].sigmoid())
    torch.testing.assert_close(both, (one + other) / 2)
    torch.testing.assert_close(logits[2].sigmoid(), both)
    network = unet3d.load(tmp_path / "both.pt", "cpu")
    assert network.classes == ("background", *NAMES) and network.values == (0, *ORDER)
    image = np.stack([voxels(place / "data" / "imagesTr" / f"brain_0_{c:04d}.nii.gz") for c in range(4)])
    labels, probabilities = network.segment(image, spacing=(1, 1, 1.5), probabilities=True)
    assert np.array_equal(labels, drawn(np.moveaxis(probabilities, 0, -1), ORDER))


def test_checkpoints_of_other_regions_are_not_published_together_or_scored(place: Path, tmp_path: Path) -> None:
    last = place / "run" / "checkpoints" / "last.pt"
    state = checkpoint.load_checkpoint(last)
    state["model_options"]["regions"] = [[1, 2, 3], [2], [3]]
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    with pytest.raises(UserError, match=r"model\.regions"):
        publish.publish([last, tmp_path / "other.pt"], tmp_path / "both.pt")
    words = [f"data.root={place / 'data'}", "data=nnunet", "data.val_fraction=0.5"]
    assert face("score", tmp_path / "other.pt", *words, "-o", tmp_path / "scores") == 2


def test_a_run_goes_on_with_its_regions_and_no_others(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.copytree(place / "data", tmp_path / "data")
    words = [f"data.root={tmp_path / 'data'}", "resume=run", "steps=14"]
    done = train(tmp_path, *words)
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "data" / "dataset.json").read_text())
    about["labels"]["tumor_core"] = [1, 2, 3]
    about["regions_class_order"] = [1, 2, 3]
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(about))
    done = train(tmp_path, *words[:2], "steps=16")
    assert done.code == 2 and "regions" in done.err


def test_a_run_begins_with_the_regions_of_another(place: Path, tmp_path: Path) -> None:
    last = place / "run" / "checkpoints" / "last.pt"
    labels = {"background": 0, "enhancing": [1, 2, 3], "rest": 2, "tumor_core": 3}
    make_brain(tmp_path / "data", labels=labels)
    words = [f"data.root={tmp_path / 'data'}", f"init={last}", "steps=1", "optim.lr=0"]
    done = train(tmp_path, *RUN, *words)
    assert done.code == 0, done.err
    before = weights(place / "run")["outc.conv.weight"]
    after = weights(tmp_path / "run")["outc.conv.weight"]
    assert torch.equal(after[0], before[2]) and torch.equal(after[2], before[1])
    assert not torch.equal(after[1], before[0])


def test_ignored_voxels_are_not_scored(tmp_path: Path) -> None:
    make_brain(tmp_path / "data", ignore=4)
    done = train(tmp_path, *RUN, "steps=4", f"data.root={tmp_path / 'data'}")
    assert done.code == 0, done.err
    for row in read_csv(tmp_path / "run" / "scores.csv"):
        made = voxels(tmp_path / "run" / "predictions" / f"{row['case']}.nii.gz")
        truth = voxels(tmp_path / "data" / "labelsTr" / f"{row['case']}.nii.gz")
        is_known = truth != 4
        for name, labels in zip(NAMES, HELD, strict=True):
            expected = dice(made[is_known], truth[is_known], labels)
            assert float(row[f"dice/{name}"]) == pytest.approx(expected, abs=1e-12)
