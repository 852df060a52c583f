"""The label maps of the held-out cases: made in the last validation, once, whatever happens in it; and by `predict`."""

import errno
import re
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import nibabel as nib
import numpy as np
import pytest
import torch
from promises import promise
from torch import Tensor
from training import (
    RUN,
    Hook,
    call,
    face,
    fail,
    forked,
    kill,
    records,
    resume,
    same,
    saved_step,
    status,
    train,
    when,
)

import unet3d
from unet3d.base.errors import UserError
from unet3d.base.files import read_csv
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Data, Model
from unet3d.data import restore
from unet3d.data.cases import Case
from unet3d.data.patches import PreparedCase, prepare
from unet3d.data.restore import ArgmaxCollector
from unet3d.report import held_out, plots
from unet3d.run import checkpoint, predicted_files, validation
from unet3d.run.predict import Segmenter
from unet3d.run.validation import evaluate

Capture = pytest.CaptureFixture[str]
PICTURE = "figures/prediction_worst.png"
SAVE = "unet3d.run.predict.Segmenter.save"
READ = "unet3d.data.prepare.CaseReader.read_volume"
FULL = OSError(errno.ENOSPC, "No space left on device")


def maps(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.nii*")}


def both(*hooks: Hook) -> Hook:
    return partial(_all, hooks)


def _all(hooks: tuple[Hook, ...]) -> None:
    for hook in hooks:
        hook()


def at_most(count: int, target: str = "unet3d.training.inference.Predictor.strips") -> Hook:
    """As many cases are predicted, or read; one more ends the run."""
    return when(target, count + 1, partial(fail, AssertionError("once more")))


def die_drawing() -> None:
    """Killed once half of a picture is in its file."""

    def half(file: IO[bytes], **_: object) -> None:
        file.write(b"half")
        file.flush()
        kill()

    figure = plots.blank(1, 1)
    figure.savefig = half
    held_out.segmentation = lambda *drawn: plots.save_picture(
        figure, next(path for path in drawn if isinstance(path, Path))
    )


@promise("Resume", "a kill beside a save, or in ...")
@promise("Resume", "a kill after the last step", "resume writes what is missing")
@promise("Disk and limits", "it is full as ...")
@pytest.mark.slow
def test_whatever_ends_a_run_at_its_end_all_is_made_of_what_is_missing_and_nothing_twice(
    copy: Path, whole: Path
) -> None:
    """Two of five cases are held out. The run is ended four times after its last step."""
    folder = copy / "predictions"
    done = resume(copy, hook=both(at_most(2), at_most(5, READ), when(SAVE, 2, kill)))
    assert done.code == -signal.SIGKILL and len(maps(folder)) == 1, done.err
    assert saved_step(copy) == 6 and not (copy / PICTURE).exists()
    # The validation is repeated; no score is lost with a label map.
    done = resume(copy, hook=both(at_most(3), when(SAVE, 2, partial(fail, FULL), lasting=True)))
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert re.search(r"\.nii\.gz: .*No space left on device.*train\.py resume=", done.err)
    assert (copy / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()
    assert same(copy, whole) and len(maps(folder)) == 1
    # Memory may run out later: the grid of a file may be far larger than the one that is scored.
    done = resume(copy, hook=when(SAVE, 1, partial(fail, MemoryError())))
    assert done.code == 5 and "MemoryError" in done.err and len(maps(folder)) == 1
    (first,) = folder.iterdir()
    written = first.stat().st_mtime_ns
    done = resume(copy, hook=both(at_most(1), die_drawing))
    assert done.code == -signal.SIGKILL and status(copy) == "running\n", done.err
    assert not [*(copy / "figures").glob("prediction*")], "half a picture would count as one"
    done = resume(copy, hook=at_most(0))
    assert done.code == 0 and status(copy).startswith("done") and (copy / PICTURE).exists(), done.err
    assert maps(folder) == maps(whole / "predictions") and first.stat().st_mtime_ns == written
    assert same(copy, whole) and (copy / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()


@pytest.mark.slow
def test_a_run_that_goes_on_removes_what_its_earlier_end_left(whole: Path, tmp_path: Path) -> None:
    """Also where the disk is full then: label maps of other weights would count as its own."""
    shutil.copytree(whole.parent, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "run"
    done = resume(folder, "steps=8", hook=when(SAVE, 2, partial(fail, FULL), lasting=True))
    assert done.code == 2 and not (folder / PICTURE).exists(), done.err
    ((name, after),) = maps(folder / "predictions").items()
    assert after != maps(whole / "predictions")[name]


RESAMPLED = [*RUN[:-1], "data.spacing=[1.5,1.5,2]", "data.label_map={1:3,2:1,3:2}", "inference.mirror=true", "steps=2"]

SPARSE = [*RUN, "amp=false", "data.sparse=[3,3,3]", "data.semi=true", "data.ignore=3", "data.cache=off", "steps=1"]


@pytest.fixture(scope="module")
def resampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a grid that is not the files', and with classes that have other numbers than the files' labels."""
    place = tmp_path_factory.mktemp("resampled")
    done = train(place, *RESAMPLED, "hydra.run.dir=run")
    assert done.code == 0, done.err
    return place / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("run", "batch"), [("whole", "1"), ("resampled", "auto"), ("sparse", "3")])
def test_label_maps_are_those_that_predict_makes_of_the_last_checkpoint(
    run: str, batch: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """However many windows `predict` sees at once; of whole images, also where slices alone have labels."""
    if run == "sparse":
        assert train(tmp_path, *SPARSE).code == 0
    folder = tmp_path / "run" if run == "sparse" else request.getfixturevalue(run)
    found = maps(folder / "predictions")
    images = [path for path in folder.parent.glob("data/phantom/*/imagesTr/*.nii.gz") if path.name in found]
    words = [*images, "--batch", batch, "-o", tmp_path / "made"]
    assert face("predict", folder / "checkpoints" / "last.pt", *words) == 0
    assert maps(tmp_path / "made") == found != {}


@promise(
    "Prediction",
    "scores of resampled volumes",
    "on the files' own grids first; those on the network's grid are named so",
)
@pytest.mark.slow
def test_scores_are_of_the_label_maps_as_they_lie_in_files_and_then_on_the_networks_grid(
    resampled: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With the files' own labels; `score` writes the same."""
    found = read_csv(resampled / "scores.csv")
    assert len(found) == 2
    for row in found:
        made, truth = (
            nib.load(next(resampled.parent.glob(f"{folder}/{row['case']}.nii.gz"))).get_fdata()
            for folder in ("run/predictions", "data/phantom/*/labelsTr")
        )
        for name, value in (("lesion", 3), ("organ", 1), ("vessel", 2)):
            sizes = (made == value).sum() + (truth == value).sum()
            assert float(row[f"dice/{name}"]) == 2 * ((made == value) & (truth == value)).sum() / sizes
    (validated,) = [record for record in records(resampled) if "val/dice/organ" in record]
    mean = np.mean([float(row["network_dice/organ"]) for row in found])
    assert mean == pytest.approx(float.fromhex(validated["val/dice/organ"]))
    assert found[0]["network_dice/organ"] != found[0]["dice/organ"]
    monkeypatch.chdir(resampled.parent)
    assert face("score", resampled / "checkpoints" / "last.pt", *RESAMPLED, "-o", tmp_path / "scored") == 0
    assert (tmp_path / "scored" / "scores.csv").read_text() == (resampled / "scores.csv").read_text()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.index("on the files' own grids") < printed.index("The same on the network's grid")
    assert not [key for key in read_csv(whole / "scores.csv")[0] if "network" in key], "there is one"


class Watched:
    """A predictor of two strips that asks whether the strips it gave before are still in memory; it may run out."""

    def __init__(self, runs_out: bool = False) -> None:
        self.given, self.runs_out = list[weakref.ref[Tensor]](), runs_out
        self.options = Model(classes=2)

    def strips(self, image: Tensor, name: str) -> Iterator[ProbabilityBlock]:
        assert all(given() is None for given in self.given)
        for first in (0, 2):
            if first and self.runs_out:
                raise MemoryError
            made = torch.stack([image[0, first : first + 2], 3 - image[0, first : first + 2]])
            self.given.append(weakref.ref(made))
            yield ProbabilityBlock((4, 4, 4), (0, 1, 2), (first, 0, 0), made)

    def evaluated(self, ids: str, keep: Callable[[Case, ArgmaxCollector], None]) -> list:
        cases = [Case(name, (), None) for name in ids]
        return [*evaluate(Segmenter(self, (), Data()), cases, ones, False, "all", keep)]  # type: ignore[arg-type]


def ones(case: Case) -> PreparedCase:
    image = np.ones((1, 4, 4, 4), np.float32)
    return prepare(case.id, image, image[0].astype(np.uint8), (1.0, 1.0, 1.0), None)


def test_no_strip_is_in_memory_while_a_case_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though who keeps the strips takes all of them, some or none."""
    predictor, kept = Watched(), []

    def score(_: str, prediction: np.ndarray, *of: object) -> list:
        return [given() for given in predictor.given] + [int(prediction.sum())]

    def keep(case: Case, strips: ArgmaxCollector) -> None:
        kept.append([case.id, *(strip.corner[0] for strip in islice(strips, "cba".index(case.id)))])

    monkeypatch.setattr(validation, "score_case", score)
    found = predictor.evaluated("abc", keep)
    assert kept == [["a", 0, 2], ["b", 0], ["c"]]
    assert found == [[*[None] * 2 * n, 64] for n in (1, 2, 3)], "all voxels are of class 1"


@promise("Prediction", "a volume whose probabilities ...")
def test_what_ends_a_prediction_early_leaves_no_score_though_it_ended_while_strips_were_kept() -> None:
    def keep(_: Case, strips: ArgmaxCollector) -> None:
        with suppress(MemoryError):
            list(strips)

    with pytest.raises(MemoryError):
        Watched(runs_out=True).evaluated("a", keep)


@pytest.fixture
def scans(tmp_path: Path) -> list[Path]:
    """Five images in two folders, whose names begin and end alike."""
    found = [tmp_path / "ba"[number % 2] / f"scan_{number:04d}.nii.gz" for number in range(5)]
    for number, path in enumerate(found):
        path.parent.mkdir(exist_ok=True)
        voxels = np.random.default_rng(number).normal(size=(30, 9, 9)).astype(np.float32)
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)
    return found


def test_a_network_is_loaded_with_another_overlap(whole: Path, scans: list[Path]) -> None:
    path = whole / "checkpoints" / "last.pt"
    made = [unet3d.load(path, overlap=share).segment(scans[0]).get_fdata() for share in (None, 0.5, 0.9)]
    assert np.array_equal(made[0], made[1]) and not np.array_equal(made[0], made[2])
    for value in (True, 1.0):
        with pytest.raises(UserError, match=rf"^overlap={value}: "):
            unet3d.load(path, overlap=value)


def predict_and_die(words: list[str], number: int) -> None:
    """Killed as it is to write label map `number`, of which the probabilities are there already."""
    call(restore, "save_image", number, kill)
    face(*words)


def killed_predicting(*words: object) -> None:
    """`predict WORDS`, killed as it is to write its second label map."""
    child = forked(predict_and_die, ["predict", *map(str, words)], 2)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@promise(
    "Prediction",
    "a shard that is killed and started again; files in another order; a part that does not exist",
    "what is missing is written, label maps after probabilities; the same cases; one line",
)
@pytest.mark.slow
def test_shards_are_all_cases_and_one_that_was_killed_writes_what_is_missing(
    whole: Path, scans: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    out, words = (
        tmp_path / "out",
        [whole / "checkpoints" / "best.pt", tmp_path / "a", tmp_path / "b", "--probabilities"],
    )
    assert face("predict", *words, "-o", tmp_path / "all") == 0
    killed_predicting(*words, "-o", out, "--shard", "0/2")
    assert sorted(maps(out)) == ["scan_0000.nii.gz", "scan_0000_probabilities.nii", "scan_0002_probabilities.nii"]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.nii*")}
    capsys.readouterr()
    assert face("predict", *words, "-o", out, "--shard", "0/2") == 0
    assert capsys.readouterr().out.count("--overwrite") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(maps(out)) == 6
    assert face("predict", *words, "-o", out, "--shard", "1/2") == 0
    assert maps(out) == maps(tmp_path / "all") and len(maps(out)) == 10


@promise("Prediction", "a shard that is ...")
def test_a_shard_is_the_same_cases_in_whatever_order_the_files_are_named(scans: list[Path]) -> None:
    """Channels of a case are never parted."""

    def shards(inputs: list[Path], channels: int, count: int) -> list[list[str]]:
        found = [predicted_files.find_cases(inputs, channels, shard=(index, count)) for index in range(count)]
        return [[case.id for case in cases] for cases, _ in found]

    wanted = [["scan_0000", "scan_0003"], ["scan_0001", "scan_0004"], ["scan_0002"]]
    assert shards(scans, 1, 3) == shards(scans[::-1], 1, 3) == wanted
    assert shards(scans[:1], 1, 2) == [["scan_0000"], []]
    pairs = [scans[0].with_name(name) for name in ("x_0001.nii.gz", "x_0000.nii.gz", "y_0001.nii.gz", "y_0000.nii.gz")]
    for path in pairs:
        shutil.copy(scans[0], path)
    assert shards(pairs, 2, 2) == [["x"], ["y"]]


def refusal(capsys: Capture, *words: object) -> str:
    """What `predict` says, once, of what it does not write."""
    capsys.readouterr()
    assert face("predict", *words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "--overwrite" in printed.err
    return printed.err


def changed(path: Path, target: Path) -> Path:
    """A checkpoint of other weights."""
    state = checkpoint.load_checkpoint(path)
    for weights in (state["model"], state["average"]):
        weights |= {name: value * 1.5 + 0.01 for name, value in weights.items()}
    checkpoint.save_checkpoint(target, state)
    return target


@promise(
    "what is printed and written",
    "a label map is neither skipped nor replaced by its name alone: a plain line of `predictions.jsonl` "
    "has to say that this network wrote these bytes from this image",
)
@promise("Prediction", "a label map that ...")
@pytest.mark.slow
def test_label_maps_of_others_are_neither_skipped_nor_replaced(
    whole: Path, scans: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    """Of another network, of other options, of another image of the name, of another program; and of nobody knows."""
    last, out, path = whole / "checkpoints" / "last.pt", tmp_path / "out", tmp_path / "a.nii.gz"
    shutil.copy(scans[0], path)
    other = changed(last, tmp_path / "other.pt")
    shutil.copy(last, tmp_path / "copied.pt")
    assert face("predict", last, path, "-o", out) == 0
    made = (out / "a.nii.gz").read_bytes()
    assert face("predict", tmp_path / "copied.pt", path, "-o", out, "--batch", "2") == 0
    assert str(last) in refusal(capsys, other, path, "-o", out)
    assert "overlap 0.5, not 0.25" in refusal(capsys, last, path, "-o", out, "--overlap", "0.25")
    assert "mirror" in refusal(capsys, last, path, "-o", out, "--mirror")
    shutil.copy(scans[1], path)
    assert "other images" in refusal(capsys, last, path, "-o", out)
    shutil.copy(scans[0], path)
    assert (out / "a.nii.gz").read_bytes() == made
    assert face("predict", other, path, "-o", out, "--overwrite") == 0
    assert "another network" in refusal(capsys, last, path, "-o", out)
    shutil.copy(scans[2], out / "a.nii.gz")
    assert "changed or replaced" in refusal(capsys, other, path, "-o", out)
    (out / "predictions.jsonl").write_text('{"file": "a.nii.gz"}\n[]\n{"cut')
    assert "which network" in refusal(capsys, last, path, "-o", out)
    (out / "a.nii.gz").rename(out / "a_probabilities.nii")
    assert "a_probabilities.nii" in refusal(capsys, last, path, "-o", out, "--probabilities")


@promise("Prediction", "a label map that ...")
@pytest.mark.slow
def test_a_network_killed_as_it_replaced_another_s_label_maps_goes_on_with_them(
    whole: Path, scans: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    last, out = whole / "checkpoints" / "last.pt", tmp_path / "out"
    words = [*scans[:2], "--probabilities", "-o"]
    other = changed(last, tmp_path / "other.pt")
    assert face("predict", last, *words, out) == 0
    killed_predicting(other, *words, out, "--overwrite")
    assert "another network" in refusal(capsys, last, *words, out)
    assert face("predict", other, *words, out) == 0 and "1 label map written, 1 skipped" in capsys.readouterr().out
    assert face("predict", other, *words, tmp_path / "all") == 0
    assert maps(out) == maps(tmp_path / "all")


@promise("Prediction", "a shard that is ...")
@pytest.mark.parametrize(
    "word",
    [
        *(f"--shard={value}" for value in ("3/3", "a/b", "-1/2", "1/2/3", "", "²/3", "0/" + "9" * 5000)),
        *(f"--batch={value}" for value in ("0", "many", "9" * 5000)),
        *(f"--overlap={value}" for value in ("0.95", "-1.0", "nan", "half")),
    ],
)
def test_a_value_that_is_none_of_its_option_is_one_line(
    word: str, whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    option, _, value = word.partition("=")
    assert face("predict", whole / "checkpoints" / "last.pt", whole, "-o", tmp_path / "out", word) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {option} {value[:60]}") and line.count("\n") == 1
    assert not (tmp_path / "out").exists()
