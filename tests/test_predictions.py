"""The label maps of the held-out cases: made in the last validation, once, whatever happens in it."""

import errno
import functools
import re
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO

import nibabel as nib
import numpy as np
import pytest
import torch
from nibabel.orientations import apply_orientation
from promises import promise
from scipy import ndimage
from torch import Tensor
from training import TINY, call, face, forked, probabilities, records, send, status, train

import unet3d
from unet3d.base.errors import UserError
from unet3d.base.files import read_csv
from unet3d.base.types import ProbabilityBlock
from unet3d.config.schema import Data, Model
from unet3d.data import restore
from unet3d.data.cases import Case
from unet3d.data.intensity import Intensity
from unet3d.data.patches import PreparedCase, prepare
from unet3d.data.prepare import CaseReader
from unet3d.data.restore import ArgmaxCollector
from unet3d.data.volume import canonical_grid
from unet3d.model.unet import UNet3D
from unet3d.report import held_out, plots
from unet3d.run import checkpoint, predicted_files, validation
from unet3d.run.predict import Segmenter
from unet3d.run.validation import Validator, evaluate
from unet3d.training.inference import Predictor
from unet3d.training.policy import MemoryPolicy

RUN = [*TINY, "data.val_fraction=0.5", "data.root=../phantom", "hydra.run.dir=run"]
PICTURE = "figures/prediction_worst.png"


def counted(name: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` as label map `number` is to be written; count the volumes that are read and predicted."""
    for owner, attribute in ((Predictor, "strips"), (CaseReader, "read_volume")):
        setattr(owner, attribute, _counting(getattr(owner, attribute), Path(f"{name}.{attribute}")))
    call(Segmenter, "save", number, act)


def _counting(before: Callable, path: Path) -> Callable:
    path.write_text("")

    def wrapped(*of: object) -> object:
        path.write_text(path.read_text() + "x")
        return before(*of)

    return wrapped


def kill() -> None:
    send(signal.SIGKILL)


def stop() -> None:
    send(signal.SIGTERM)


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def run_out() -> None:
    raise MemoryError


def hook(name: str, number: int = 0, act: Callable[[], None] = kill) -> Callable[[], None]:
    return functools.partial(counted, name, number, act)


def lasting(name: str, number: int, act: Callable[[], None]) -> None:
    """As label map `number` is to be written, and whenever it is tried again."""
    counted(name, number, act)
    call(Validator, "complete", 1, functools.partial(call, Segmenter, "save", 1, act))


def maps(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "predictions").iterdir()}


def times(place: Path, name: str) -> tuple[int, int]:
    """How many volumes were predicted, and how many read."""
    predicted, read = ((place / f"{name}.{what}").read_text() for what in ("strips", "read_volume"))
    return len(predicted), len(read)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictions")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing interrupted, of two held-out cases."""
    done = train(place / "whole", *RUN, hook=hook("whole"))
    assert done.code == 0, done.err
    return place / "whole" / "run"


def same(folder: Path, whole: Path) -> bool:
    equal = maps(folder) == maps(whole) and len(maps(whole)) == 2
    scores = [(run / "scores.csv").read_text() for run in (folder, whole)]
    return equal and scores[0] == scores[1] and records(folder) == records(whole) and (folder / PICTURE).exists()


def test_a_run_predicts_and_reads_each_case_once_a_validation(whole: Path) -> None:
    """Of 4 cases, 2 are held out; validations are two."""
    assert times(whole.parent, "whole") == (4, 4)


def test_predict_sees_several_windows_at_once_where_it_is_asked_to(
    whole: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, image = whole / "checkpoints" / "last.pt", next(place.glob("phantom/*/imagesTr/*.nii.gz"))
    made = []
    for batch in ("1", "3", "auto"):
        assert face("predict", path, image, "-o", tmp_path / batch, "--batch", batch) == 0
        made.append((tmp_path / batch / image.name).read_bytes())
    assert made[0] == made[1] == made[2]
    for batch in ("0", "many", "9" * 5000):
        assert face("predict", path, image, "-o", tmp_path / "none", "--batch", batch) == 2
        assert capsys.readouterr().err.startswith(f"error: --batch {batch[:60]}")
    assert not (tmp_path / "none").exists()


def test_predict_takes_another_overlap_in_its_range(
    whole: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, image = whole / "checkpoints" / "last.pt", next(place.glob("phantom/*/imagesTr/*.nii.gz"))
    made = {}
    for share in ("0.5", ".9"):  # as in validation, and more
        assert face("predict", path, image, "-o", tmp_path / share, "--overlap", share) == 0
        made[share] = nib.load(tmp_path / share / image.name).get_fdata()
        network = unet3d.load(path, overlap=float(share))
        assert np.array_equal(network.segment(image).get_fdata(), made[share])
    assert not np.array_equal(made["0.5"], made[".9"])
    for share in ("0.95", "-1.0", "nan", "half"):
        assert face("predict", path, image, "-o", tmp_path / "none", f"--overlap={share}") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --overlap {share}: ") and error.count("\n") == 1
    for value in (True, 1.0):
        with pytest.raises(UserError, match=rf"^overlap={value}: "):
            unet3d.load(path, overlap=value)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["data.spacing=[1.5,1.5,2]", "optim.average=0.5", "inference.mirror=true"],
        ["data.sparse=[3,3,3]", "data.semi=true", "data.val_fraction=0.2", "data.cache=off", "data.ignore=3"],
    ],
    ids=lambda options: "".join(options[:1]),
)
def test_label_maps_are_those_that_predict_makes_of_the_last_checkpoint(
    options: list[str], place: Path, tmp_path: Path, whole: Path
) -> None:
    if options:
        assert train(tmp_path, *RUN, "steps=2", f"data.root={place / 'phantom'}", *options).code == 0
    run = tmp_path / "run" if options else whole
    found = maps(run)
    images = [path for path in place.glob("phantom/*/imagesTr/*.nii.gz") if path.name in found]
    assert len(images) == len(found) > 0
    assert face("predict", run / "checkpoints" / "last.pt", *images, "-o", tmp_path / "made") == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").glob("*.nii*")} == found


@promise(
    "Prediction",
    "scores of resampled volumes",
    "on the files' own grids first; those on the network's grid are named so",
)
@pytest.mark.slow
def test_scores_are_of_the_label_maps_as_they_lie_in_files_and_then_on_the_networks_grid(
    place: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the files' own labels, which the classes are not numbered by; `score` writes the same."""
    own = ["data.spacing=[1.5,1.5,2]", "data.label_map={1:3,2:1,3:2}", f"data.root={place / 'phantom'}"]
    done = train(tmp_path, *RUN, "steps=2", *own)
    assert done.code == 0, done.err
    run, found = tmp_path / "run", read_csv(tmp_path / "run" / "scores.csv")
    names = [("lesion", 3), ("organ", 1), ("vessel", 2)]
    for row in found:
        made = np.asanyarray(nib.load(run / "predictions" / f"{row['case']}.nii.gz").dataobj)
        (label,) = place.glob(f"phantom/*/labelsTr/{row['case']}.nii.gz")
        truth = np.asanyarray(nib.load(label).dataobj)
        for name, value in names:
            sizes = (made == value).sum() + (truth == value).sum()
            assert float(row[f"dice/{name}"]) == 2 * ((made == value) & (truth == value)).sum() / sizes
    (validated,) = [record for record in records(run) if "val/dice/organ" in record]
    mean = np.mean([float(row["network_dice/organ"]) for row in found])
    assert mean == pytest.approx(float.fromhex(validated["val/dice/organ"]))
    assert found[0]["network_dice/organ"] != found[0]["dice/organ"] and len(found) == 2
    assert "(at 1.5x1.5x2 mm)" in done.out.replace("2.0 mm", "2 mm"), "validations are on the network's grid"
    words = [*RUN[:-1], *own, "-o", tmp_path / "scored"]
    assert face("score", run / "checkpoints" / "last.pt", *words) == 0
    assert (tmp_path / "scored" / "scores.csv").read_text() == (run / "scores.csv").read_text()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.index("on the files' own grids") < printed.index("The same on the network's grid")
    assert not [key for key in read_csv(whole / "scores.csv")[0] if "network" in key], "there is one"


@promise("Resume", "a kill after the ...")
@pytest.mark.slow
@pytest.mark.parametrize(("act", "code"), [(kill, -signal.SIGKILL), (stop, 75)])
def test_a_run_ended_within_its_last_validation_makes_all_of_it_again(
    act: Callable[[], None], code: int, place: Path, whole: Path
) -> None:
    shutil.rmtree(place / "ended", ignore_errors=True)
    done = train(place / "ended", *RUN, hook=hook("first", 2, act))
    folder = place / "ended" / "run"
    assert done.code == code and len(maps(folder)) == 1 and not (folder / PICTURE).exists(), done.err
    assert checkpoint.load_checkpoint(folder / "checkpoints" / "last.pt")["step"] == 4
    resumed = train(place / "ended", "resume=run", hook=hook("second"))
    assert resumed.code == 0 and same(folder, whole), resumed.err
    assert times(place / "ended", "second")[0] == 2


@promise("Disk and limits", "it is full as ...")
@pytest.mark.slow
def test_a_disk_that_is_full_as_label_maps_are_written_is_one_line_and_loses_no_score(place: Path, whole: Path) -> None:
    """A run that is resumed makes the map that is missing, and the pictures."""
    where = place / "full"
    done = train(where, *RUN, hook=functools.partial(lasting, "first", 2, fill_the_disk))
    folder = where / "run"
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert re.search(r"\.nii\.gz: .*No space left on device.*train\.py resume=", done.err)
    assert (folder / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "predictions").iterdir()}
    assert len(kept) == 1 and records(folder) == records(whole)
    resumed = train(where, "resume=run", hook=hook("second"))
    assert resumed.code == 0 and same(folder, whole), resumed.err
    assert times(where, "second")[0] == 1
    assert all((folder / "predictions" / name).stat().st_mtime_ns == at for name, at in kept.items())


def test_memory_that_runs_out_as_a_label_map_is_made_loses_no_score(place: Path, whole: Path) -> None:
    """Its grid may be far larger than the one that is scored."""
    done = train(place / "large", *RUN, hook=functools.partial(lasting, "large", 1, run_out))
    folder = place / "large" / "run"
    assert done.code == 5 and "MemoryError" in done.err, done.err
    assert (folder / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes() and len(maps(folder)) == 1


@promise("Resume", "a kill after the ...")
@pytest.mark.slow
def test_a_run_killed_in_its_picture_draws_from_its_label_maps(place: Path, whole: Path) -> None:
    done = train(place / "undrawn", *RUN, hook=die_drawing)
    folder = place / "undrawn" / "run"
    assert done.code == -signal.SIGKILL and maps(folder) == maps(whole) and status(folder) == "running\n", done.err
    assert not [*(folder / "figures").glob("prediction*")], "half a picture would count as one"
    resumed = train(place / "undrawn", "resume=run", hook=hook("second"))
    assert resumed.code == 0 and same(folder, whole), resumed.err
    assert times(place / "undrawn", "second")[0] == 0


def die_drawing() -> None:
    def half(file: IO[bytes], **_: object) -> None:
        file.write(b"half")
        file.flush()
        kill()

    figure = plots.blank(1, 1)
    figure.savefig = half
    held_out.segmentation = lambda *drawn: plots.save_picture(
        figure, next(path for path in drawn if isinstance(path, Path))
    )


@pytest.mark.slow
def test_a_run_that_goes_on_replaces_what_its_earlier_end_left(place: Path, whole: Path) -> None:
    """Also where the disk is full then: label maps of other weights would count as its own."""
    shutil.copytree(whole.parent, place / "longer")
    folder = place / "longer" / "run"
    (folder / "report.html").write_text("of step 4")
    done = train(place / "longer", "resume=run", "steps=6", hook=functools.partial(lasting, "longer", 2, fill_the_disk))
    assert done.code == 2 and len(maps(folder)) == 1 and not (folder / PICTURE).exists(), done.err
    assert train(place / "longer", "resume=run").code == 0
    assert not (folder / "report.html").exists(), "none is written here"
    assert maps(folder).keys() == maps(whole).keys() and (folder / PICTURE).exists()
    assert all(after != maps(whole)[name] for name, after in maps(folder).items())


class Watched:
    """A predictor of two strips that asks whether the strips it gave before are still in memory; it may run out."""

    def __init__(self, runs_out: bool = False) -> None:
        self.given, self.runs_out = list[weakref.ref[Tensor]](), runs_out
        self.options = Model(classes=2)

    def segmenter(self) -> Segmenter:
        return Segmenter(self, (), Data())  # type: ignore[arg-type]

    def strips(self, image: Tensor, name: str) -> Iterator[ProbabilityBlock]:
        assert all(given() is None for given in self.given)
        for first in (0, 2):
            if first and self.runs_out:
                raise MemoryError
            made = torch.stack([image[0, first : first + 2], 3 - image[0, first : first + 2]])
            self.given.append(weakref.ref(made))
            yield ProbabilityBlock((4, 4, 4), (0, 1, 2), (first, 0, 0), made)


@pytest.mark.parametrize("hd95", [False, True])
def test_no_strip_is_in_memory_while_a_case_is_scored(hd95: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though who keeps the strips takes all of them, some or none."""
    predictor, cases, kept = Watched(), [Case(name, (), None) for name in "abc"], []
    monkeypatch.setattr(
        validation, "score_case", lambda *of: [given() for given in predictor.given] + [int(of[1].sum())]
    )

    def keep(case: Case, strips: ArgmaxCollector) -> None:
        kept.append([case.id, *(strip.corner[0] for strip in islice(strips, "cba".index(case.id)))])

    found = [*evaluate(predictor.segmenter(), cases, phantom, hd95, "all", keep)]  # type: ignore[arg-type]
    assert kept == [["a", 0, 2], ["b", 0], ["c"]]
    assert found == [[*[None] * 2 * n, 64] for n in (1, 2, 3)], "all voxels are of class 1"


@promise("Prediction", "a volume whose probabilities ...")
def test_what_ends_a_prediction_early_leaves_no_score_though_it_ended_while_strips_were_kept() -> None:
    def keep(_: Case, strips: ArgmaxCollector) -> None:
        with suppress(MemoryError):
            list(strips)

    with pytest.raises(MemoryError):
        [*evaluate(Watched(runs_out=True).segmenter(), [Case("a", (), None)], phantom, False, "all", keep)]  # type: ignore[arg-type]


def phantom(case: Case) -> PreparedCase:
    image = np.ones((1, 4, 4, 4), np.float32)
    return prepare(case.id, image, image[0].astype(np.uint8), (1.0, 1.0, 1.0), None)


SPACINGS = [None, [1.5, 1.5, 2.0], [0.8, 2.5, 1.0]]


@pytest.mark.parametrize("spacing", SPACINGS)
def test_the_files_of_a_case_are_those_of_dense_probabilities(
    network: Callable[..., UNet3D], spacing: list | None, tmp_path: Path
) -> None:
    """Interpolated as a whole, by scipy, and in the axes of the file."""
    model, rules = network("model=unet_tiny"), (Intensity("zscore"),)
    predictor = Predictor((model,), model.options, MemoryPolicy(), (16, 16, 16))
    affine = np.array([[0, -1.1, 0, 7], [0, 0, 1.2, -3], [0.9, 0, 0, 4], [0, 0, 0, 1]])  # axes permuted and flipped
    voxels = np.random.default_rng(0).normal(size=(19, 41, 23)).astype(np.float32)
    nib.save(nib.Nifti1Image(voxels, affine), tmp_path / "a.nii.gz")
    case, paths = Case("a", (tmp_path / "a.nii.gz",), None), [tmp_path / "labels.nii.gz", tmp_path / "scores.nii"]
    volume = Segmenter(predictor, rules, Data(spacing=spacing)).to_file(case, *paths)
    dense = probabilities(predictor, torch.from_numpy(volume.image)).numpy()
    stored, target = nib.load(case.images[0]), canonical_grid(nib.load(case.images[0]))
    matrix = np.linalg.inv(volume.grid.affine) @ target.affine
    maps = [ndimage.affine_transform(p, matrix, output_shape=target.shape, order=1, mode="nearest") for p in dense]
    labels, scores = map(nib.load, paths)
    assert scores.get_data_dtype() == np.float32 and scores.shape == (19, 41, 23, 3)
    assert np.array_equal(scores.affine, stored.affine) and np.array_equal(labels.affine, stored.affine)
    inside = apply_orientation(np.asanyarray(scores.dataobj), nib.io_orientation(stored.affine))
    assert np.allclose(inside, np.stack(maps, -1), atol=1e-6, rtol=0)
    assert np.array_equal(np.asanyarray(labels.dataobj), np.asanyarray(scores.dataobj).argmax(-1))


def test_predict_writes_probabilities_on_request_and_replaces_neither_file_unasked(
    place: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = [path for path in place.glob("phantom/*/imagesTr/*.nii.gz") if path.name == sorted(maps(whole))[0]]
    best, name = whole / "checkpoints" / "last.pt", path.name.removesuffix(".nii.gz")
    words = ["predict", best, path, "-o", tmp_path / "out", "--probabilities"]
    assert face(*words) == 0
    assert sorted(p.name for p in (tmp_path / "out").glob("*.nii*")) == [path.name, f"{name}_probabilities.nii"]
    scores = nib.load(tmp_path / "out" / f"{name}_probabilities.nii")
    found, stored = np.asanyarray(scores.dataobj), nib.load(tmp_path / "out" / path.name)
    assert np.allclose(found.sum(-1), 1, atol=1e-5) and np.array_equal(found.argmax(-1), stored.dataobj)
    (tmp_path / "out" / path.name).unlink()
    capsys.readouterr()
    assert face(*words) == 0
    line, count = capsys.readouterr().out.splitlines()
    assert line == str(tmp_path / "out" / path.name) and re.match(r"1\b", count)
    assert face(*words) == 0
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'out' / path.name}: ") and "--overwrite" in line
    assert face(*words, "--overwrite") == 0 and (tmp_path / "out" / path.name).read_bytes() == maps(whole)[path.name]


@pytest.fixture(scope="module")
def scans(place: Path) -> list[Path]:
    """Seven images in two folders, whose names begin and end alike."""
    found = [
        place / "scans" / folder / f"scan_{number:04d}.nii.gz" for number in range(7) for folder in "ba"[number % 2]
    ]
    for number, path in enumerate(found):
        path.parent.mkdir(parents=True, exist_ok=True)
        voxels = np.random.default_rng(number).normal(size=(9, 9, 9)).astype(np.float32)
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)
    return found


def predict_and_die(words: list[str], number: int) -> None:
    """Killed as it is to write label map `number`, of which the probabilities are there already."""
    call(restore, "save_image", number, kill)
    face(*words)


def written(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.nii*")}


@promise(
    "Prediction",
    "a shard that is killed and started again; files in another order; a part that does not exist",
    "what is missing is written, label maps after probabilities; the same cases; one line",
)
@pytest.mark.slow
def test_shards_are_disjoint_and_complete_and_one_that_was_killed_writes_what_is_missing(
    whole: Path, scans: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, out = whole / "checkpoints" / "best.pt", tmp_path / "out"
    words = ["predict", str(best), str(scans[0].parent.parent / "a"), str(scans[0].parent), "--probabilities"]
    assert face(*words, "-o", tmp_path / "all") == 0
    done: dict[str, int] = {}
    for shard, count in (("0/3", 3), ("1/3", 2), ("2/3", 2)):
        own = [*words, "-o", str(out), "--shard", shard]
        child = forked(predict_and_die, own, 2)
        child.start()
        child.join()
        before = written(out)
        assert child.exitcode == -signal.SIGKILL and before.keys() - done.keys() == {
            *(name for case in sorted(p.name for p in scans)[int(shard[0]) :: 3][:1] for name in files_of(case)),
            files_of(sorted(p.name for p in scans)[int(shard[0]) + 3])[1],
        }
        capsys.readouterr()
        assert face(*own) == 0 and capsys.readouterr().out.count("--overwrite") == 1
        after = written(out)
        assert len(after) - len(done) == 2 * count and before.items() <= after.items() and done.items() <= after.items()
        done = after
    made, wanted = ({p.name: p.read_bytes() for p in folder.glob("*.nii*")} for folder in (out, tmp_path / "all"))
    assert made == wanted and len(made) == 14


def files_of(name: str) -> tuple[str, str]:
    return name, name.replace(".nii.gz", "_probabilities.nii")


@promise("Prediction", "a shard that is ...")
def test_a_shard_is_the_same_cases_in_whatever_order_the_files_are_named(scans: list[Path]) -> None:
    """Channels of a case are never parted."""
    for inputs in (scans, scans[::-1]):
        parts = [[case.id for case in predicted_files.find_cases(inputs, 1, shard=(index, 4))[0]] for index in range(4)]
        assert parts == [
            ["scan_0000", "scan_0004"],
            ["scan_0001", "scan_0005"],
            ["scan_0002", "scan_0006"],
            ["scan_0003"],
        ]
    pairs = [
        scan.with_name(f"{name}_{channel:04d}.nii.gz")
        for scan, name in ((scans[0], "x"), (scans[0], "y"))
        for channel in (1, 0)
    ]
    for path in pairs:
        shutil.copy(scans[0], path)
    found = [predicted_files.find_cases(pairs, 2, shard=(index, 2)) for index in range(2)]
    for path in pairs:
        path.unlink()
    assert [[len(case.images) for case in cases] for cases, _ in found] == [[2], [2]]
    assert [[case.id for case in cases] for cases, _ in found] == [["x"], ["y"]]
    assert predicted_files.find_cases(scans, 1, shard=(8, 9)) == ([], [])


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What `predict` says, once, of what it does not write."""
    assert face("predict", *words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "--overwrite" in printed.err
    return printed.err


@promise(
    "what is printed and written",
    "a label map is neither skipped nor replaced by its name alone: a plain line of `predictions.jsonl` "
    "has to say that this network wrote these bytes from this image",
)
@promise("Prediction", "a label map that ...")
def test_label_maps_of_others_are_neither_skipped_nor_replaced(
    whole: Path, scans: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another network, of other options, of another image of the name, of another program; and of nobody knows."""
    last, out, path = whole / "checkpoints" / "last.pt", tmp_path / "out", tmp_path / "a.nii.gz"
    shutil.copy(scans[0], path)
    state = checkpoint.load_checkpoint(last)
    name = next(iter(state["model"]))
    state["model"][name] = state["model"][name] * 1.5
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    shutil.copy(last, tmp_path / "copied.pt")
    assert face("predict", last, path, "-o", out) == 0
    made = (out / "a.nii.gz").read_bytes()
    for same in (last, tmp_path / "copied.pt"):
        assert face("predict", same, path, "-o", out, "--batch", "2") == 0
    capsys.readouterr()
    assert str(last) in refusal(capsys, tmp_path / "other.pt", path, "-o", out)
    assert "overlap 0.5, not 0.25" in refusal(capsys, last, path, "-o", out, "--overlap", "0.25")
    assert "mirror" in refusal(capsys, last, path, "-o", out, "--mirror")
    shutil.copy(scans[1], path)
    assert "other images" in refusal(capsys, last, path, "-o", out)
    shutil.copy(scans[0], path)
    assert (out / "a.nii.gz").read_bytes() == made
    assert face("predict", tmp_path / "other.pt", path, "-o", out, "--overwrite") == 0
    assert face("predict", tmp_path / "other.pt", path, "-o", out) == 0
    capsys.readouterr()
    assert "another network" in refusal(capsys, last, path, "-o", out)
    shutil.copy(scans[2], out / "a.nii.gz")
    assert "changed or replaced" in refusal(capsys, tmp_path / "other.pt", path, "-o", out)
    (out / "predictions.jsonl").write_text('{"file": "a.nii.gz"}\n[]\n{"cut')
    assert "which network" in refusal(capsys, last, path, "-o", out)
    (out / "a.nii.gz").rename(out / "a_probabilities.nii")
    assert "a_probabilities.nii" in refusal(capsys, last, path, "-o", out, "--probabilities")


@promise("Prediction", "a label map that ...")
def test_a_network_killed_as_it_replaced_another_s_label_maps_goes_on_with_them(
    whole: Path, scans: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last, best, out = whole / "checkpoints" / "last.pt", tmp_path / "best.pt", tmp_path / "out"
    state = checkpoint.load_checkpoint(last)
    for name in state["model"]:
        state["model"][name] = state["model"][name] * 1.5 + 0.01
    checkpoint.save_checkpoint(best, state)
    assert face("predict", last, *scans[:2], "-o", out, "--probabilities") == 0
    words = [str(word) for word in ("predict", best, *scans[:2], "-o", out, "--probabilities")]
    child = forked(predict_and_die, [*words, "--overwrite"], 2)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    capsys.readouterr()
    assert "another network" in refusal(capsys, last, *scans[:2], "-o", out)
    assert face(*words) == 0 and "1 label map written, 1 skipped" in capsys.readouterr().out
    assert face(*words[:-2], tmp_path / "all", "--probabilities") == 0
    assert {p.name: p.read_bytes() for p in out.glob("*.nii*")} == {
        p.name: p.read_bytes() for p in (tmp_path / "all").glob("*.nii*")
    }


@promise("Prediction", "a shard that is ...")
@pytest.mark.parametrize("shard", ["3/3", "a/b", "0/0", "1", "-1/2", "1/2/3", "", "²/3", "0/" + "9" * 5000])
def test_a_shard_that_is_no_part_is_one_line(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert face("predict", "no.pt", "in", "-o", "out", f"--shard={shard}") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: --shard {shard}: ") and "0/3" in line and line.count("\n") == 1
