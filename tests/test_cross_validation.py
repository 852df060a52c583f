"""A cross-validation from its trainings to one table, one published file and its label maps."""

import csv
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev

import nibabel as nib
import numpy as np
import pytest
from guards import unchanged, without
from scipy import ndimage
from training import TINY, face, train

from unet3d.base.errors import UserError
from unet3d.run import checkpoint, predict, publish

FOLDS = 3
NAMES = ("organ", "vessel", "lesion")
WORDS = (*TINY, "data.phantom.cases=6", f"data.folds={FOLDS}", "steps=6", "eval_every=3", "data.spacing=[1,1,1]")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folds of a tiny network on six phantoms, whose label maps lie on another grid than the network's."""
    place = tmp_path_factory.mktemp("sweep")
    for fold in range(FOLDS):
        ended = train(place, *WORDS, f"data.fold={fold}", f"hydra.run.dir={place / 'runs' / str(fold)}")
        assert ended.code == 0, ended.err
    return place / "runs"


@pytest.fixture(autouse=True)
def where_the_phantom_is(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sweep.parent)


def truth_of(sweep: Path, case: str) -> np.ndarray:
    (path,) = (sweep.parent / "data" / "phantom").rglob(f"labelsTr/{case}.nii.gz")
    return np.asanyarray(nib.load(path).dataobj)


def dice(prediction: np.ndarray, truth: np.ndarray, label: int) -> float | None:
    sizes = np.count_nonzero(prediction == label) + np.count_nonzero(truth == label)
    return 2 * np.count_nonzero((prediction == label) & (truth == label)) / sizes if sizes else None


def by_hand(sweep: Path) -> dict[str, dict[str, float]]:
    """The Dice of all out-of-fold cases by class and case, from the label files alone."""
    scores: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    for path in sorted(sweep.glob("*/predictions/*.nii.gz")):
        case = path.name.removesuffix(".nii.gz")
        prediction = np.asanyarray(nib.load(path).dataobj)
        for label, name in enumerate(NAMES, start=1):
            value = dice(prediction, truth_of(sweep, case), label)
            if value is not None:
                scores[name][case] = value
    return scores


def largest_by_hand(prediction: np.ndarray, label: int) -> np.ndarray:
    """The label map in which the class has the largest of its parts alone, which touch by faces, edges or corners."""
    parts, count = ndimage.label(prediction == label, np.ones((3, 3, 3)))
    sizes = [np.count_nonzero(parts == part) for part in range(1, count + 1)]
    cleaned = prediction.copy()
    if sizes:
        cleaned[(prediction == label) & (parts != 1 + int(np.argmax(sizes)))] = 0
    return cleaned


@pytest.mark.slow
def test_the_table_is_the_one_computed_by_hand_from_the_label_files(
    sweep: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert face("folds", sweep, "-o", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    scores = by_hand(sweep)
    assert all(len(values) == 6 for values in scores.values()), "each case once"
    with (tmp_path / "out" / "cross_validation.csv").open() as file:
        rows = {row["class"]: row for row in csv.DictReader(file) if row["score"] == "dice"}
    scores["mean of classes"] = {case: fmean(scores[name][case] for name in NAMES) for case in scores["organ"]}
    for name, values in scores.items():
        mean, sd = fmean(values.values()), stdev(values.values())
        assert (float(rows[name]["mean"]), float(rows[name]["sd"])) == pytest.approx((mean, sd), abs=1e-12)
        assert values[rows[name]["lowest_case"]] == min(values.values())
        assert f"{mean:.3f}±{sd:.3f}" in printed


@pytest.mark.slow
def test_each_class_keeps_its_components_unless_the_largest_alone_is_better_out_of_fold(sweep: Path) -> None:
    folders = [sweep / str(fold) for fold in range(FOLDS)]
    gains = publish.component_gains(folders)
    paths = sorted(sweep.glob("*/predictions/*.nii.gz"))
    for label, gain in enumerate(gains, start=1):
        after = []
        for path in paths:
            cleaned = largest_by_hand(np.asanyarray(nib.load(path).dataobj), label)
            after.append(dice(cleaned, truth_of(sweep, path.name.removesuffix(".nii.gz")), label))
        expected = fmean(value for value in after if value is not None)
        before = fmean(by_hand(sweep)[gain.name].values())
        assert (gain.before, gain.after) == pytest.approx((before, expected))
        assert gain.is_kept == (expected > before)
    assert {gain.name for gain in gains} == {*NAMES} and any(gain.changed for gain in gains)


@pytest.mark.slow
@without("unet3d.run.predict.largest_components", unchanged)
def test_one_file_has_all_folds_and_removes_what_was_decided(
    sweep: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first class alone, which then has many components."""
    gains = [publish.Gain(at, name, 6, 6, 0.5, 0.6 if at == 1 else 0.4) for at, name in enumerate(NAMES, start=1)]
    monkeypatch.setattr(publish, "component_gains", lambda folders: gains)
    assert face("folds", sweep, "--publish", tmp_path / "net.pt") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 networks" in said and f"only the largest connected component of {NAMES[0]} was kept" in said
    segmenter = predict.load(tmp_path / "net.pt", "cpu").segmenter
    assert segmenter.largest == (1,) and len(segmenter.predictor.models) == FOLDS
    (held_out, *_) = (sweep / "0" / "predictions").iterdir()
    (image,) = (sweep.parent / "data" / "phantom").rglob(f"imagesTr/{held_out.name}")
    state = checkpoint.load_checkpoint(tmp_path / "net.pt")
    checkpoint.save_checkpoint(tmp_path / "plain.pt", state | {"largest": []})
    plain, cleaned = (label_map_of(tmp_path / f"{name}.pt", image, tmp_path / name) for name in ("plain", "net"))
    assert "only the largest component is kept of: organ\n" in capsys.readouterr().out
    assert np.array_equal(cleaned, largest_by_hand(plain, 1)) and not np.array_equal(cleaned, plain)
    data = [*WORDS, f"data.root={sweep.parent / 'data' / 'phantom'}", "data.fold=0"]
    assert face("score", tmp_path / "net.pt", *data, "-o", tmp_path / "scores") == 0
    case = held_out.name.removesuffix(".nii.gz")
    with (tmp_path / "scores" / "scores.csv").open() as file:
        (found,) = [row["dice/organ"] for row in csv.DictReader(file) if row["case"] == case]
    assert float(found) == pytest.approx(dice(cleaned, truth_of(sweep, case), 1))


def label_map_of(checkpoint: Path, image: Path, out: Path) -> np.ndarray:
    assert face("predict", checkpoint, image, "-o", out, "--device", "cpu") == 0
    return np.asanyarray(nib.load(out / image.name).dataobj)


@pytest.mark.slow
def test_what_is_not_whole_is_not_published(sweep: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sweep, tmp_path / "copy")
    next((copy / "1" / "predictions").iterdir()).unlink()
    with pytest.raises(UserError, match=r"predictions/phantom_00\d\.nii\.gz: .*resume="):
        publish.report_folds([copy], None, published=tmp_path / "net.pt")
    (copy / "2" / "STATUS").write_text("stopped by SIGTERM\nexit code 75\n")
    with pytest.raises(UserError, match=r"net\.pt: .*fold 2"):
        publish.report_folds([copy], None, published=tmp_path / "net.pt")
    for path in copy.glob("*/config.yaml"):
        path.write_text(re.sub(r"(?m)^seed: 0$", "seed: 1", path.read_text()))
    with pytest.raises(UserError, match="2 methods"):
        publish.report_folds([sweep, copy], None, published=tmp_path / "net.pt")
    assert not (tmp_path / "net.pt").exists()
