"""Cross-validations: which runs are the folds of one method, and its mean and SD."""

import csv
import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml
from legibility import drawing
from promises import promise
from training import yaml_of

from unet3d.report import compare, compared_runs, held_out
from unet3d.report.compared_runs import read_runs

HEAD = "case,dice/left,dice/right,hd95_mm/left\n"
SCORES = ("a,.5,.7,1\nb,.7,,2\n", "c,.8,.9,\n", "d,.1,.4,3\n")  # of folds 0, 1 and 2


def make(folder: Path, *words: str, scores: str = "", status: str = "done\nexit code 0\n", whole: bool = True) -> Path:
    """A run folder with these lines of scores.csv."""
    folder.mkdir(parents=True)
    (folder / "STATUS").write_text(status)
    (folder / "overrides.yaml").write_text(json.dumps(words))
    if whole:
        (folder / "config.yaml").write_text(config(*words))
    if scores:
        (folder / "scores.csv").write_text(HEAD + scores)
    return folder


def config(*words: str) -> str:
    """The config.yaml of a run of these, composed once for all."""
    values = yaml.safe_load(yaml_of())
    for word in words:
        name, _, value = word.partition("=")
        *groups, last = name.split(".")
        part = values
        for group in groups:
            part = part[group]
        part[last] = yaml.safe_load(value)
    return yaml.safe_dump(values)


def sweep(place: Path, *methods: str, count: int = 3) -> list[Path]:
    """The runs of `-m data.fold=0,1,2 METHODS`."""
    words = [(number, method) for number in range(count) for method in methods]
    return [
        make(place / str(at), f"data.fold={number}", method, f"wandb.name=n{at}", scores=SCORES[number])
        for at, (number, method) in enumerate(words)
    ]


@pytest.mark.parametrize(
    ("words", "scores"),
    [
        (("data.folds=3", "data.folds=5"), SCORES),
        (("data.folds=3", "data.folds=3"), (SCORES[0], SCORES[0])),  # another data set: it holds out the same case
    ],
    ids=["other folds", "the same cases"],
)
def test_runs_that_only_look_like_folds_stay_rows_of_their_own(
    tmp_path: Path, words: tuple[str, str], scores: tuple[str, ...]
) -> None:
    runs = [
        make(tmp_path / str(fold), f"data.fold={fold}", word, scores=scores[fold]) for fold, word in enumerate(words)
    ]
    assert len(compared_runs.methods(read_runs(runs))) == 2


def test_two_methods_on_the_same_folds_are_two_rows_that_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(compare, "folds_plot", lambda rows, path: drawn.extend(label for label, _ in rows))
    runs = read_runs(sweep(tmp_path, "optim.lr=0.1", "optim.lr=0.2"))
    compare.print_comparison(runs)
    printed = capsys.readouterr().out
    assert "not comparable" not in printed
    compare.write_comparison(runs, tmp_path / "out")
    with (tmp_path / "out" / "compare.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["run"], second["run"]) == ("0,2,4", "1,3,5") and second["optim.lr"] == "0.2"
    left, right = [0.6, 0.8, 0.1], [0.7, 0.9, 0.4]
    every = [fmean(pair) for pair in zip(left, right, strict=True)]
    expected = {
        **{"dice_mean": fmean(every), "dice_sd": stdev(every), "dice/left": fmean(left), "dice_sd/left": stdev(left)},
        **{"dice/right": fmean(right), "dice_pooled/left": fmean([0.5, 0.7, 0.8, 0.1]), "hd95_mm_pooled/left": 2},
        **{"dice_pooled_sd/right": stdev([0.7, 0.9, 0.4]), "hd95_mm/left": fmean([1.5, 3]), "cases": 4},
    }
    assert {name: float(first[name]) for name in expected} == pytest.approx(expected)
    assert first["folds"] == "0,1,2" and drawn == ["0,2,4: lr=0.1", "1,3,5: lr=0.2"]
    assert f"{fmean(every):.3f}±{stdev(every):.3f}" in " ".join(printed.split())
    with (tmp_path / "out" / "folds.csv").open() as file:
        assert [row["data.fold"] for row in csv.DictReader(file)] == list("001122")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert f"{stdev(left):.3f}" in page and "Not comparable" not in page


@promise("Training", "a fold of a ...")
def test_folds_that_differ_in_more_are_not_one_method(tmp_path: Path) -> None:
    runs = read_runs([make(tmp_path / str(n), f"data.fold={n}", f"optim.lr=0.{n + 1}") for n in range(2)])
    assert [row.name for row in compared_runs.methods(runs)] == ["0", "1"]
    again = read_runs([make(tmp_path / name, "data.fold=0") for name in "ab"])
    assert [row.name for row in compared_runs.methods(again)] == ["a", "b"], "a fold that was run twice"


@promise("Training", "a fold of a ...")
@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([("data.fold=0", "seed=1"), ("data.fold=1", "seed=1")], ["seed: 0 (", "seed=1"]),
        ([("data.fold=0", "amp=true"), ("data.fold=2", "amp=true")], ["data.fold: 0,1 (run 0,1), 0,2 (run 2,3)"]),
        ([("amp=true",)], ["data.fold: 0,1 (run 0,1), null (run 2)"]),
    ],
)
def test_methods_on_other_folds_are_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: list[tuple[str, ...]], said: list[str]
) -> None:
    folders = [make(tmp_path / str(n), f"data.fold={n}") for n in range(2)]
    folders += [make(tmp_path / str(n), *words) for n, words in enumerate(others, start=2)]
    compare.print_comparison(read_runs(folders))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not comparable: ")]
    assert said[0] in line


@promise(
    "Training",
    "a fold of a cross-validation that failed, never began or ran twice, folds whose runs differ in "
    "more, methods with other folds",
    "a mean over the others that says so; no mean; not comparable, with the reason",
)
def test_a_fold_that_failed_or_never_began_is_missed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = sweep(tmp_path, "amp=true", count=2)
    folders.append(
        make(tmp_path / "2", "data.fold=2", "amp=True", status="failed: killed\nexit code 137\n", whole=False)
    )
    folders += [
        make(tmp_path / str(n + 3), f"data.fold={n}", scores=lines) for n, lines in enumerate(SCORES)
    ]  # of another method
    compare.print_comparison(read_runs(folders))
    printed = capsys.readouterr().out
    assert " 2/3 " in printed and "2 done, 1 failed" in printed and "run 2 failed: killed" in printed
    assert "not comparable: folds scored: 0,1 (run 0,1,2), 0,1,2 (run 3,4,5)" in printed


def test_the_picture_has_a_point_a_fold_and_their_mean_with_its_sd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = compared_runs.methods(read_runs(sweep(tmp_path, "optim.lr=0.1", "optim.lr=0.2")))
    labelled = [(f"{row.name}: {'long_' * 9}", compared_runs.scores(row, "dice")) for row in rows]
    figure = drawing(tmp_path, monkeypatch)(lambda path: held_out.folds_plot(labelled, path))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["mean of\nclasses", "left", "right"]
    assert axes.lines[4].get_ydata() == pytest.approx([0.6, 0.8, 0.1]), "left, of each fold of the first method"
