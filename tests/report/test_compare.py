"""What a comparison of run folders says, in golden files, and what it forbids to compare; and of cross-validations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from promises import promise
from rendered import Page
from run_folders import write_run
from tables import cells

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.report import compare
from unet3d.report.compared_runs import ComparedRun, find_runs, methods, read_runs
from unet3d.report.report import PNG

MIB = 2**20
CLASS = r"r|ght_\input{x} 50% & $x^2$ #~ <b>"  # what Markdown and LaTeX would take for their own
HEAD = f"case,dice/left,dice/{CLASS},hd95_mm/left\n"
NASTY = "<script>alert('x')</script>&[bold]"
Golden = Callable[[str, str], None]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which runs each figure would show, in place of the figure."""
    lines: list[str] = []

    def note(shown: Any, *more: Any) -> None:
        *remarks, path = more
        labels = [label for label, _ in shown] if isinstance(shown, list) else shown
        lines.append(f"{path.name}: {' '.join([', '.join(labels), *remarks])}".strip())

    for name in ("comparison_plot", "curves_plot", "folds_plot"):
        monkeypatch.setattr(compare, name, note)
    return lines


def entry(peak: int, kind: str) -> dict[str, Any]:
    return {"peak_bytes": peak, "kind": kind, "phases": {"forward": {"first": peak, "steady": peak}}}


def make(name: str, *words: str, **changed: Any) -> Path:
    """A run folder of these words: a finished run, or one that only `predicts`; `changed`: numbers, files, env.json."""
    peak, seconds = changed.pop("peak", 3 * MIB), changed.pop("seconds", 0.5)
    memory = {"parameters": 1234, "predicted": entry(peak, "ledger")}
    if "fold" in changed:
        changed["scores"] = HEAD + SCORED[changed.pop("fold")]
    files = {key: changed.pop(key) for key in ("status", "scores", "config_yaml", "memory_json") if key in changed}
    if not changed.pop("predicts", False):
        error = changed.pop("error", 7)
        memory |= {"measured": entry(peak - error, changed.pop("kind", "ledger")), "error_bytes": error}
        steps = changed.pop("steps", 3)
        records = [{"step": step, "time/step_s": seconds * step} for step in range(1, steps + 1)]
        validations = [{"step": 2, "val/dice_mean": 0.25}, {"step": 3, "val/dice_mean": changed.pop("dice", None)}]
        records += [record for record in validations if record["step"] <= steps]
        files["metrics_jsonl"] = "".join(f"{json.dumps(record)}\n" for record in records)
        files["env_json"] = {"device": "cpu", "cpu": "AVX512", "torch": "2.13", "threads": 1} | changed
    return write_run(Path(name), words, **{"memory_json": memory} | files)


def made(table: str) -> list[ComparedRun]:
    """The runs of a table: the folder's name | its words | what is changed in it."""
    folders = []
    for name, words, changed in cells(table):
        folders.append(make(name, *words.split(), **yaml.safe_load(f"{{{changed}}}")))
    return read_runs(find_runs([Path(folder) for folder in folders]))


def compared(runs: list[ComparedRun], drawn: list[str], capsys: Capture) -> str:
    """What is printed, drawn and written to the tables. Figures of an earlier comparison go."""
    Path("out").mkdir()
    Path("out", "compare.png").write_bytes(PNG)
    compare.print_comparison(runs)
    page = compare.write_comparison(runs, Path("out"))
    tables = [path.read_text() for path in sorted(Path("out").glob("*.csv"))]
    parts = [capsys.readouterr().out, "\n".join(drawn), *tables, str(Page(page.read_text()))]
    lines = [line.rstrip() for part in parts for line in ("=" * 80, *part.splitlines())]
    return "\n".join(lines) + "\n"


COMPARISONS = {
    "options": """
        0 | amp=true data.patch=[32,32,32] optim.lr=0.01 | dice: 0.5
        1 | seed=7 wandb.mode=disabled data.phantom.seed=3 |
        """,
    "what_tells_them_apart": """
        0 | ckpt=2 eval_every=5                | error: 0, dice: 0.5
        1 | budget=8GiB wandb.mode=disabled    | error: 0, dice: 0.75, seconds: 3
        """,
    "of_no_method": """
        0 | eval_every=5  |
        1 | eval_every=10 |
        """,
    "predictions": """
        0 | ckpt=2 | predicts: true
        1 |        | predicts: true, peak: 1048576
        """,
    "kinds": """
        0 | ckpt=2   |
        1 | amp=true | kind: cuda allocated
        2 |          | predicts: true
        """,
    "names": """
        0 | model=unet                          |
        1 | model=unet_tiny                     |
        2 | model=unet_tiny model.dropout=0.1   |
        """,
    "names_that_some_lack": """
        0 | model=unet           |
        1 | model.features=[2,4] |
        """,
    "endings": r"""
        0 | ckpt=2 |
        1 | | status: "stopped by SIGTERM after step 3 of 9; to go on: python train.py resume=x\nexit code 75\n"
        2 | | status: "interrupted; to go on: python train.py resume=x\nexit code 130\n"
        3 | | status: "failed: stopped before it began\nexit code 75\n"
        4 | | status: "error: loss nan, 'a, b'\nmore\nexit code 4\n", memory_json: ''
        5 | | status: "running\n"
        6 | ckpt=3 | status: "failed: killed by SIGKILL\nexit code 137\n", predicts: 1, memory_json: "", config_yaml: ""
        """,
    "unlike": """
        0  |                      |
        1  | amp=true             | seconds: 3
        2  | data.patch=[32,32,32] |
        3  | data.phantom.cases=9 |
        4  | seed=5               |
        5  |                      | device: cuda
        6  |                      | torch: "2.9"
        7  |                      | threads: 8
        8  |                      | threads: [8]
        9  |                      | cpu: "AVX2, bf16 emulated"
        """,
    "steps": """
        0 | |
        1 | | steps: 1
        """,
    "no_peak": """
        0 | | memory_json: '', metrics_jsonl: '', predicts: true
        """,
    "grids": r"""
        0 | data.spacing=[1,1,1] | scores: "case,dice/a,hd95_mm/a,network_dice/a\nx,0.25,3.5,0.5\ny,0.75,,0.5\n"
        1 | data.spacing=[1,1,1] | dice: 0.5
        """,
    "without_config": """
        0 | data=folders data.root=/gone data.classes=[a,b] amp=true | config_yaml: '', predicts: true
        1 | data=folders data.root=/gone data.classes=[a,b]          | config_yaml: '', predicts: true
        """,
    "experiments": """
        0 | experiment=hippocampus data.root=. seed=1      |
        1 | experiment=hippocampus data.root=. seed=2      |
        2 | experiment=hippocampus_full data.root=. seed=1 |
        """,
    "experiments_and_more": """
        0 | experiment=hippocampus data.root=. optim.lr=0.1      |
        1 | experiment=hippocampus_full data.root=. optim.lr=0.2 |
        2 | model=unet_tiny                                      |
        """,
    "many_words": """
        a_run_with_a_name_a_run_with_a_name_a_run_with_a_name | ckpt=2 model=unet | dice: 0.5
        1 | data.patch=[32,32,32] optim.lr=0.01 seed=7 |
        """,
}

SCORED = (  # of folds 0, 1 and 2 of two methods
    *("a,.5,.7,1\nb,.7,,2\n", "c,.8,.9,\n", "d,.1,.4,3\n"),
    *("a,.6,.8,1\nb,.7,,1.5\n", "c,.9,.6,\n", "d,.3,.5,2\n"),
)
FOLDS = {
    "of_two_methods": """
        0 | data.fold=0 optim.lr=0.1 wandb.name=n0 | fold: 0
        1 | data.fold=0 optim.lr=0.2 wandb.name=n1 | fold: 3
        2 | data.fold=1 optim.lr=0.1 wandb.name=n2 | fold: 1
        3 | data.fold=1 optim.lr=0.2 wandb.name=n3 | fold: 4
        4 | data.fold=2 optim.lr=0.1 wandb.name=n4 | fold: 2
        5 | data.fold=2 optim.lr=0.2 wandb.name=n5 | fold: 5
        """,
    "that_failed": r"""
        0 | data.fold=0 amp=true | fold: 0
        1 | data.fold=1 amp=true | fold: 1
        2 | data.fold=2 amp=True | config_yaml: '', status: "failed: killed\nexit code 137\n"
        3 | data.fold=0          | fold: 0
        4 | data.fold=1          | fold: 1
        5 | data.fold=2          | fold: 2
        """,
    "of_others": """
        0 | data.fold=0          | fold: 0
        1 | data.fold=1          | fold: 1
        2 | data.fold=0 amp=true | fold: 0
        3 | data.fold=2 amp=true | fold: 2
        """,
    "and_a_run": """
        0 | data.fold=0 | fold: 0
        1 | data.fold=1 | fold: 1
        2 | amp=true    |
        """,
}


@promise(
    "What scripts rely on",
    "compare.csv, folds.csv",
    "plain numbers with units in their columns, empty cells where there is none",
)
@promise(
    "Training",
    "a fold of a cross-validation that failed, never began or ran twice, folds whose runs differ in "
    "more, methods with other folds",
    "a mean over the others that says so; no mean; not comparable, with the reason",
)
@pytest.mark.parametrize("name", [*COMPARISONS, *(f"folds_{name}" for name in FOLDS)])
def test_runs_are_compared(name: str, drawn: list[str], capsys: Capture, golden: Golden) -> None:
    table = COMPARISONS[name] if name in COMPARISONS else FOLDS[name.removeprefix("folds_")]
    text = compared(made(table), drawn, capsys)
    assert max(len(line) for line in text.partition("\n====")[0].splitlines() if "─" in line) <= 80
    golden(f"compare_{name}.txt", text)


def test_a_data_set_is_known_by_its_name_in_any_folder() -> None:
    roots = ["a/Task04", "b/Task04", "a/Task05"]
    for root in roots:
        Path(root).mkdir(parents=True)
    runs = made("\n".join(f"{at} | data=decathlon data.root={root} |" for at, root in enumerate(roots)))
    (line,) = compare.compared_runs.not_comparable(runs)
    assert line == "data.root: Task04 (runs 0, 1), Task05 (run 2)"


def test_a_private_table_of_a_sweep_names_no_folder(monkeypatch: pytest.MonkeyPatch, drawn: list[str]) -> None:
    """The last part of a data set's path is no path, but may be a patient's name."""
    jobs = {}
    for number, name in enumerate(("Smith_John", "Doe_Jane")):
        Path(name).mkdir()
        words = ["data=decathlon", f"data.root={name}", f"seed={number}"]
        jobs[make(str(number), *words)] = compose.compose([*words, "wandb.mode=offline"])
    logger = Mock()
    monkeypatch.setattr(compare, "wandb_loggers", lambda config, folder: [logger])
    for is_private in (True, False):
        for config in jobs.values():
            config.wandb.private = is_private
        compare.finish_sweep(jobs, Path())
    private, public = map(repr, logger.table.mock_calls)
    assert "seed" in private and "Smith_John" not in private and "Doe_Jane" not in private
    assert "Smith_John" in public and "Doe_Jane" in public


def test_the_page_escapes_what_it_shows_and_needs_no_network() -> None:
    folders = [make("0", f'wandb.notes="{NASTY}"'), make("1", status=f"error: {NASTY}\nexit code 2\n")]
    html = compare.write_comparison(read_runs(folders), Path("out")).read_text()
    page = Page(html)
    assert not {"script", "bold"} & {*page.tags} and "http" not in html and "href" not in html
    assert str(page).count(NASTY) >= 2 and page.tags.count("img") == 2


def test_a_sweeps_folder_stands_for_its_numbered_children_in_their_order() -> None:
    for name in ("sweep/10", "sweep/2", "sweep/0", "sweep/other", "alone/0"):
        make(name)
    found = find_runs([Path("sweep"), Path("alone/0"), Path("sweep/2")])
    assert [path.name for path in found] == ["0", "2", "10", "0"]
    assert [row.name for row in read_runs(found)] == ["sweep/0", "sweep/2", "sweep/10", "alone/0"]


@pytest.mark.parametrize("path", [Path(), Path("nowhere")])
def test_a_folder_without_a_run_is_refused_in_one_line(path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{path}: .*outputs/DATE/TIME-ID.*$"):
        find_runs([path])


# --- cross-validations


@promise("Training", "a fold of a ...")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("data.fold=0 optim.lr=0.1 | fold: 0", "data.fold=1 optim.lr=0.2 | fold: 1"),
        ("data.fold=0 data.folds=3 | fold: 0", "data.fold=1 data.folds=5 | fold: 1"),
        ("data.fold=0 | fold: 0", "data.fold=0 | fold: 1"),
        ("data.fold=0 | fold: 0", "data.fold=1 | fold: 0"),  # another data set: it holds out the same case
    ],
    ids=["another rate", "other folds", "a fold twice", "the same cases"],
)
def test_runs_that_only_look_like_folds_stay_rows_of_their_own(one: str, other: str) -> None:
    assert [row.name for row in methods(made(f"a | {one}\nb | {other}"))] == ["a", "b"]


@pytest.fixture
def two_methods() -> list[ComparedRun]:
    for at, scores in enumerate(SCORED):
        words = (f"data.fold={at % 3}", "data.folds=3", f"optim.lr=0.{1 + at // 3}")
        make(f"{'xy'[at // 3]}/{at % 3}", *words, scores=f"{HEAD}{scores}")
    return compare.read_methods([Path("x"), Path("y")])


def test_tables_of_a_cross_validation_are_for_papers_and_for_programs(
    two_methods: list[ComparedRun], golden: Golden
) -> None:
    """By hand: of left three pairs differ, all upwards, so that W+ is 6 and p is 2 of 2^3 orders of signs.

    Of right they differ by +.1, -.3 and +.1: ranks 1.5, 3, 1.5.
    """
    tables = compare.titled_tables(two_methods)
    path = compare.write_tables(two_methods, tables, ["a fold is missing"], Path("out"))
    assert path == Path("out", "cross_validation.md")
    texts = [f"{'=' * 20} {path.name}\n{path.read_text()}" for path in sorted(Path("out").iterdir())]
    golden("cross_validation.txt", "".join(texts))


def test_equal_methods_have_no_p(two_methods: list[ComparedRun]) -> None:
    tests = compare.paired_tests(two_methods[0], two_methods[0])
    assert tests and {(test["that differ"], test["p"], test["effect"]) for test in tests} == {(0, None, None)}
    assert compare.paired_table(tests).rows[0][-2:] == ["", ""]


@pytest.mark.parametrize(
    ("last", "line"),
    [("", "fold 2 has no scores"), ("stopped by SIGTERM\nexit code 75\n", "fold 2 is not finished")],
)
def test_a_fold_that_is_missing_or_not_finished_is_said(two_methods: list[ComparedRun], last: str, line: str) -> None:
    status = Path("x", "2", "STATUS")
    status.write_text(last) if last else Path("x", "2", "scores.csv").unlink()
    (method,) = compare.read_methods([Path("x")])
    (problem,) = compare.problems(method)
    assert line in problem


@promise("Training", "two sweeps of equal options in one table of folds", "refused with the two runs")
def test_two_sweeps_of_one_method_are_refused_also_beside_another(
    two_methods: list[ComparedRun], tmp_path: Path
) -> None:
    for fold in range(2):
        make(f"z/{fold}", f"data.fold={fold}", "data.folds=3", "optim.lr=0.1", scores=f"{HEAD}q,1,1,1\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/x/0 and {tmp_path}/z/0 are the same method\b"):
        compare.read_methods([Path("x"), Path("y"), Path("z")])


@pytest.mark.parametrize("word", ["data.fold=0", "amp=true"])
def test_runs_that_are_no_cross_validation_are_refused(word: str) -> None:
    make("0", word, scores=f"{HEAD}{SCORED[0]}")
    with pytest.raises(UserError, match=r"data\.fold.*experiment=five_folds"):
        compare.read_methods([Path("0")])
