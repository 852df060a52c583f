"""One table of all out-of-fold cases, and the test between two methods, on run folders made by hand."""

import csv
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from guards import without
from promises import promise
from test_folds import make

from unet3d.base.errors import UserError
from unet3d.base.types import Table
from unet3d.report import compare
from unet3d.report.compare import latex, markdown
from unet3d.report.compared_runs import ComparedRun
from unet3d.report.held_out import Score
from unet3d.report.report import render

HEAD = "case,dice/left,dice/right,hd95_mm/left\n"
FIRST = ("a,.5,.7,1\nb,.7,,2\n", "c,.8,.9,\n", "d,.1,.4,3\n")  # of folds 0, 1 and 2
SECOND = ("a,.6,.8,1\nb,.7,,1.5\n", "c,.9,.6,\n", "d,.3,.5,2\n")
LEFT = {"a": (0.5, 0.6), "b": (0.7, 0.7), "c": (0.8, 0.9), "d": (0.1, 0.3)}


def sweep(place: Path, scores: tuple[str, ...], *words: str, status: str = "done\nexit code 0\n") -> Path:
    """A sweep over data.fold with these scores; its last fold ended so."""
    for fold, lines in enumerate(scores):
        is_last = fold == len(scores) - 1
        ended = status if is_last else "done\nexit code 0\n"
        options = (f"data.fold={fold}", "data.folds=3", *words)
        make(place / str(fold), *options, scores=lines, status=ended)
    return place


@pytest.fixture
def methods(tmp_path: Path) -> list[ComparedRun]:
    sweeps = [sweep(tmp_path / "x", FIRST, "optim.lr=0.1"), sweep(tmp_path / "y", SECOND, "optim.lr=0.2")]
    return compare.read_methods(sweeps)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_two_sweeps_are_two_methods_named_by_what_differs(methods: list[ComparedRun]) -> None:
    assert [method.name for method in methods] == ["lr=0.1", "lr=0.2"]
    assert [len(method.scores) for method in methods] == [4, 4]


def test_the_table_has_mean_sd_and_the_worst_case_of_each_class(methods: list[ComparedRun]) -> None:
    table = compare.class_table(methods[0])
    left, right, mean = table.rows
    values = [first for first, _ in LEFT.values()]
    assert left == ["left", "4", f"{fmean(values):.3f}±{stdev(values):.3f}", "2.00±1.00 (3)", "d (0.100)"]
    assert right[:3] == ["right", "3", f"{fmean([0.7, 0.9, 0.4]):.3f}±{stdev([0.7, 0.9, 0.4]):.3f}"]
    of_cases = [0.6, 0.7, 0.85, 0.25]
    of_classes = fmean([fmean(values), fmean([0.7, 0.9, 0.4])])
    assert mean[2] == f"{of_classes:.3f}±{stdev(of_cases):.3f}" and mean[-1] == "d (0.250)"
    assert [row[:3] for row in compare.worst_table(methods[0]).rows][:2] == [
        ["d", "2", "0.250"],
        ["a", "0", "0.600"],
    ]


def test_all_is_written_for_papers_and_for_programs(methods: list[ComparedRun], tmp_path: Path) -> None:
    tables = compare.titled_tables(methods)
    out = tmp_path / "out"
    assert compare.write_tables(methods, tables, ["a fold is missing"], out) == out / "cross_validation.md"
    (left,) = [
        row
        for row in rows_of(out / "cross_validation.csv")
        if (row["method"], row["class"], row["score"]) == ("lr=0.1", "left", "dice")
    ]
    values = [first for first, _ in LEFT.values()]
    assert float(left["mean"]) == pytest.approx(fmean(values)) and float(left["sd"]) == pytest.approx(stdev(values))
    assert (left["cases"], left["lowest_case"], left["highest_case"]) == ("4", "d", "c")
    cases = rows_of(out / "cases.csv")
    assert len(cases) == 8 and [row["fold"] for row in cases[:4]] == list("0012")
    assert [float(row["dice/left"]) for row in cases[4:]] == [second for _, second in LEFT.values()]
    for name in ("cross_validation.md", "cross_validation.tex"):
        text = (out / name).read_text()
        assert "0.525" in text and "a fold is missing" in text
    assert {row["class"] for row in rows_of(out / "paired.csv")} == {"left", "right", "mean of classes"}


@without(
    "unet3d.report.compared_runs.scores", lambda row, metric: {"left": Score((), {"a": 0.5, "b": 0.7}, *[None] * 4)}
)
def test_the_paired_test_is_of_cases_that_both_have(methods: list[ComparedRun]) -> None:
    first, second = (method for method in methods)
    tests = {(test["score"], test["class"]): test for test in compare.paired_tests(first, second)}
    left = tests["dice", "left"]
    assert (left["pairs"], left["that differ"]) == (4, 3)
    assert left["mean difference"] == pytest.approx(fmean(after - before for before, after in LEFT.values()))
    assert left["W+"] == 6 and left["effect"] == 1 and left["p"] == pytest.approx(0.25), "2 of 2^3 orders of signs"
    right = tests["dice", "right"]  # +.1, -.3, +.1: ranks 1.5, 3, 1.5
    assert (right["pairs"], right["W+"], right["effect"]) == (3, 3, 0)
    assert tests["hd95_mm", "left"]["effect"] == -1


def test_the_effect_of_many_pairs_is_that_of_ranks_counted_by_hand(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    before = generator.uniform(0, 1, 60).round(3)
    after = (before + generator.normal(0.02, 0.1, 60)).clip(0, 1).round(3)
    lines = [[f"c{n:02d},{value},,\n" for n, value in enumerate(column)] for column in (before, after)]
    sweeps = [
        sweep(tmp_path / str(n), ("".join(part[:20]), "".join(part[20:40]), "".join(part[40:])), f"seed={n}")
        for n, part in enumerate(lines)
    ]
    first, second = (method for method in compare.read_methods(sweeps))
    test = next(test for test in compare.paired_tests(first, second) if test["class"] == "left")
    differences = [new - old for old, new in zip(before, after, strict=True) if new != old]
    sizes = sorted(abs(difference) for difference in differences)

    def rank(size: float) -> float:
        return fmean(place for place, other in enumerate(sizes, start=1) if other == size)

    up = sum(rank(abs(difference)) for difference in differences if difference > 0)
    down = sum(rank(abs(difference)) for difference in differences if difference < 0)
    assert test["W+"] == pytest.approx(up) and test["effect"] == pytest.approx((up - down) / (up + down))
    assert test["p"] is not None and 0 < test["p"] < 1 and test["pairs"] == 60


def test_equal_methods_have_no_p(tmp_path: Path) -> None:
    sweeps = [sweep(tmp_path / str(n), FIRST, f"seed={n}") for n in range(2)]
    first, second = (method for method in compare.read_methods(sweeps))
    tests = compare.paired_tests(first, second)
    assert tests and all((test["that differ"], test["p"], test["effect"]) == (0, None, None) for test in tests)
    assert compare.paired_table(tests).rows[0][-2:] == ["", ""]


def test_a_fold_that_is_missing_or_not_finished_is_said(tmp_path: Path) -> None:
    (method,) = compare.read_methods([sweep(tmp_path / "x", FIRST[:2])])
    (line,) = compare.problems(method)
    assert "fold 2" in line and "no scores" in line
    (method,) = compare.read_methods([sweep(tmp_path / "y", FIRST, status="stopped by SIGTERM\nexit code 75\n")])
    (line,) = compare.problems(method)
    assert "fold 2" in line and "not finished" in line


@pytest.mark.parametrize("words", [("data.fold=0",), ("amp=true",)])
def test_runs_that_are_no_cross_validation_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    make(tmp_path / "0", *words, scores=FIRST[0])
    with pytest.raises(UserError, match=r"data\.fold.*experiment=five_folds"):
        compare.read_methods([tmp_path])


@promise("Training", "two sweeps of equal options in one table of folds", "refused with the two runs")
def test_two_sweeps_of_one_method_are_refused_also_beside_another(tmp_path: Path) -> None:
    sweeps = [sweep(tmp_path / "x", FIRST, "seed=1"), sweep(tmp_path / "y", SECOND, "seed=1")]
    sweeps.append(sweep(tmp_path / "z", SECOND, "seed=2"))
    with pytest.raises(UserError, match=rf"^{tmp_path / 'x' / '0'} and {tmp_path / 'y' / '0'} are the same method\b"):
        compare.read_methods(sweeps)


NASTY: list[Any] = ["a|b_c", r"\input{x}", "50% & $x^2$ #~", "<b>"]


def test_names_stay_text_in_markdown_and_latex() -> None:
    table = Table([*NASTY], [[*NASTY]])
    names = (("md", markdown), ("tex", latex))
    titled = [("t_1", table)]
    pages = [render(f"cross_validation.{ending}", titled=titled, notes=[], text=text) for ending, text in names]
    assert all(markdown(cell) in pages[0] and latex(cell) in pages[1] for cell in NASTY)
    (row, *_) = [line for line in pages[0].splitlines() if line.startswith("| a")]
    assert row.replace(r"\|", "").count("|") == 5 and r"\<b\>" in pages[0]
    assert latex(r"\input{x}") == r"\textbackslash{}input\{x\}" and latex("50%") == r"50\%"
