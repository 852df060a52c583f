"""The report says what the files say, whatever of them is missing, and depends on nothing else."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from guards import without, yes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from promises import promise
from rendered import Page
from tables import cells
from training import face

from unet3d.base.errors import UserError
from unet3d.report import compare, compared_runs, held_out, plots, report
from unet3d.report.held_out import score_title
from unet3d.report.report import print_summary, what_ran
from unet3d.run import run_folder
from unet3d.run.record import headline, read_run
from unet3d.training.metrics import CaseScore, both_csv_text, csv_text

RUNS = Path(__file__).parents[1] / "golden" / "runs"
FILES = ("STATUS", "config.yaml", "env.json", "split.json", "metrics.jsonl", "scores.csv", "memory.json")
# A text of the page that only this file of the finished run has.
SHOWN = dict(zip(FILES, ("exit code 0", "seed: 7", "9.8.7", "a, b, c", "0.25 s", "0.533", "1,402,803"), strict=True))
SHOWN["overrides.yaml"] = "amp=true hydra.run.dir=finished"
NEVER = re.compile("(?!)")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a folder of their own. Figures are drawn, but saved as one pixel, which takes no time."""
    monkeypatch.chdir(tmp_path)
    for module in (plots, held_out):
        monkeypatch.setattr(module, "save_picture", lambda figure, path, *_: one_pixel(path))


def one_pixel(path: Path) -> None:
    Image.new("RGB", (1, 1)).save(path, "PNG")


def copied(name: str) -> Path:
    """A copy of a golden run folder; it is relative, as paths are that users give."""
    run = Path(name)
    if (RUNS / name).is_dir():
        shutil.copytree(RUNS / name, run)
    (run / "figures").mkdir(parents=True)
    return run


@pytest.fixture
def folder(place: None) -> Path:
    """The folder of a finished run."""
    return copied("finished")


def written(folder: Path) -> Page:
    html = report.write_report(read_run(folder)).read_text(encoding="utf-8")
    assert not re.search(r"https?:|<link|@import|url\(", html) and "prefers-color-scheme: dark" in html
    return Page(html)


# --- what a page and a terminal show


@promise("What scripts rely on", "metrics.csv", "metrics.jsonl as a table")
@pytest.mark.parametrize("name", ["finished", "dry", "gpu", "died", "empty"])
def test_a_run_is_reported_on_its_page_and_on_the_terminal(
    name: str, capsys: Capture, golden: Callable[[str, str], None]
) -> None:
    """A finished run on the CPU; a dry one; one on a GPU, resampled, by a plan; a killed one; an empty folder."""
    folder = copied(name)
    for role in {"finished": [""], "gpu": ["_best", "_median", "_worst"]}.get(name, []):
        one_pixel(folder / "figures" / f"prediction{role}.png")
    page = written(folder)
    print_summary(read_run(folder))
    table = folder / "metrics.csv"
    parts = [str(page), capsys.readouterr().out, table.read_text() if table.exists() else ""]
    lines = [line.rstrip() for part in parts for line in ("=" * 80, *part.splitlines())]
    golden(f"report_{name}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", SHOWN)
def test_a_missing_file_costs_what_it_holds_and_nothing_else(name: str, folder: Path) -> None:
    (folder / name).unlink()
    page = report.write_page(read_run(folder)).read_text()
    assert [file for file, text in SHOWN.items() if text not in page] == [name]
    print_summary(read_run(folder))


def test_a_page_is_whole_or_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "report.html").write_text("as it was")
    run = dataclasses.replace(read_run(folder), records=[])  # without metrics.csv, which is written first
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write_page(run)
    assert (folder / "report.html").read_text() == "as it was"


# The Dice of validations at steps 2 and 4 | the last step | the title of the scores.
TITLES = """
0.5 0.7 | 4 | Scores, last checkpoint (step 4; also the best)
0.7 0.7 | 4 | Scores, last checkpoint (step 4)
0.7 n/a | 4 | Scores, last checkpoint (step 4)
0.7 0.5 | 5 | Scores, checkpoint (step 4)
        | 5 | Scores
"""


@pytest.mark.parametrize(("dice", "last", "title"), cells(TITLES))
def test_scores_are_named_after_their_weights(dice: str, last: str, title: str) -> None:
    """The file best.pt is written for a higher Dice only."""
    folder = copied("died")
    records = [{"step": 2 * at, "val/dice_mean": mean} for at, mean in enumerate(dice.split(), 1)]
    records.append({"step": int(last), "train/loss": 0.5})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert score_title(read_run(folder), "Scores") == title


@promise("Prediction", "scores of resampled volumes ...")
def test_scores_on_the_files_own_grids_are_those_by_which_runs_are_compared() -> None:
    run = read_run(copied("gpu"))
    assert run.dice_mean == headline(run)["own_grid/dice_mean"] == pytest.approx(0.56)


def test_scores_on_both_grids_that_are_made_again_as_after_a_kill_are_the_same() -> None:
    names = ("background", "organ")
    of_files, of_network = ([CaseScore(case, (0.5,), (0.25,), (7.0,)) for case in cases] for cases in ("ab", "ba"))
    text = both_csv_text(of_files, names, csv_text(of_network, names))
    assert both_csv_text(of_files, names, text) == text


def test_the_closing_lines_need_no_more_than_ascii(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    print_summary(read_run(folder))
    sys.stdout.flush()
    assert b"run folder: finished" in file.getvalue()


# --- what strangers may have written


escaping = report.environment


def unescaped() -> Any:
    return escaping().overlay(autoescape=False)


@promise("checkpoints and run folders", "a report shows a run folder's content as text, never as HTML")
@without("unet3d.report.report.environment", unescaped)
def test_everything_that_is_shown_is_escaped(folder: Path) -> None:
    attack = "<script>alert('&')</script>"
    for name in FILES:
        text = (folder / name).read_text()
        for word in ("done", "seed", "python", "left", "forward", "inc.conv1"):
            text = text.replace(word, attack)
        (folder / name).write_text(text)
    page = written(folder.rename("<script>"))
    assert not {"script", "b"} & {*page.tags}
    assert str(page).count(attack) > 10 and "unet3d run <script>" in str(page)


CODES = "\x1b[2J\x07\x9b\u202e\u2028"  # clear a terminal, ring, begin another command, reverse, break the line
FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@promise("what is printed and written", "names and values from ...")
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@pytest.mark.slow
def test_control_codes_in_a_run_folder_reach_no_terminal_page_or_table(capsys: Capture) -> None:
    """With a name that is not UTF-8. Figures warn of letters without a shape: here that is an error."""
    folder = copied("gpu").rename(f"run{CODES}" + os.fsdecode(b"\xff"))
    for name in FILES:
        text = (folder / name).read_text()
        for word in (
            "done",
            "python",
            "organ",
            "c00",
            "forward",
            "cuda allocated",
            "inc.conv1",
            "backward of up1.conv2",
        ):
            text = text.replace(word, json.dumps(CODES)[1:-1] if name.endswith((".json", "l")) else CODES)
        (folder / name).write_text(text)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": CODES, CODES: "$\\frac{"}) + f"# {CODES}\n")
    out = Path(f"out{CODES}")
    for words in (["report", folder], ["compare", folder, "-o", out]):
        assert face(*words) == 0
        shown = capsys.readouterr()
        assert shown.err == "" and r"\x1b[2J\x07\x9b\u202e" in shown.out and not FORBIDDEN.search(shown.out)
    print_summary(read_run(folder))
    shown = capsys.readouterr()
    assert shown.err == "" and "Workspaces" in shown.out and not FORBIDDEN.search(shown.out)
    for path in (folder / "report.html", folder / "metrics.csv", out / "compare.html", out / "compare.csv"):
        text = path.read_bytes().decode()
        assert r"\x1b[2J\x07\x9b\u202e\u2028" in text and not FORBIDDEN.search(text), path.name


NO_JSON = [b"", b"{}", b"[]", b"[[", b"\xff", b"[" * 9999, b'{"a":' * 9999, b'{"step": ' + b"1" * 5000 + b"}"]
JUNK: list[Any] = [None, True, -1, 0, 2.5, 10**400, "x", "x" * 1000, [], {}, [{}], [7] * 600, {"a": {}}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys of all values within a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file that was cut short, that is something else, or in one value of which another one stands."""
    way = draw(st.sampled_from(["cut", "other", "value", "value", "value"]))
    if way == "cut":
        return content[: draw(st.integers(0, len(content)))] + "é".encode()[:1]
    lines = content.splitlines()
    if way == "value" and content.startswith(b"{"):
        is_lines = len(lines) > 1 and lines[0].endswith(b"}")
        value = json.loads(lines[-1] if is_lines else content)
        path = draw(st.sampled_from([*places(value)]))
        new = json.dumps(replaced(value, path, draw(st.sampled_from(JUNK)))).encode()
        return b"\n".join([*lines[:-1], new]) if is_lines else new
    return draw(st.sampled_from(NO_JSON))


@promise(
    "Run folders and checkpoints of strangers",
    "memory.json, metrics.jsonl or env.json that is empty, cut short, of other types, huge numbers or any depth",
    "passed over, or shown as text",
)
@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from([*SHOWN, "memory.json", "memory.json"]))
def test_a_file_that_is_damaged_anywhere_ends_no_report(folder: Path, data: st.DataObject, name: str) -> None:
    sound = (folder / name).read_bytes()
    (folder / name).write_bytes(data.draw(damaged(sound)))
    try:
        run = read_run(folder)
        assert "unet3d run finished" in report.write_page(run).read_text()
        report.draw_figures(run)
        print_summary(run)
        rows = compared_runs.read_runs([folder])
        compare.print_comparison(rows)
        assert [row.name for row in rows] == [folder.name]
    finally:
        (folder / name).write_bytes(sound)


LINES = b"""
{}
[]
7

\xff
{"step": null}
{"step": "x"}
{"step": true}
{"step": -5}
{"step": 2.5}
{"step": 9, "train/loss": [1]}
{"step": 9, "train/loss": {"a": 1}}
{"step": 9, "train
"""
DEEP = (
    b'{"step": '
    + b"9" * 5000
    + b'}\n{"step": 1'
    + b"0" * 400
    + b'}\n{"step": 9, "a":'
    + b"[" * 9999
    + b"\n"
    + b"[" * 99999
)
ODD = b"""
{"step": 9, "train/loss": "x", "time/step_s": null, "val/dice_mean": "x", "val/dice/left": "x"}
{"step": 9, "train/loss": 1e308, "time/step_s": 1e308}
"""


@promise("Run folders and checkpoints of strangers", "memory.json, metrics.jsonl or env.json ...")
@without("unet3d.run.run_folder.fits", yes, only="no records")
@pytest.mark.parametrize(("lines", "read"), [(LINES + DEEP, []), (ODD, [9, 9])], ids=["no records", "odd values"])
def test_a_damaged_record_is_passed_over(folder: Path, lines: bytes, read: list[int]) -> None:
    path = folder / "metrics.jsonl"
    sound = path.read_bytes()
    path.write_bytes(sound + lines + b"\n" + sound)
    assert [record["step"] for record in read_run(folder).records] == [1, 2, 2, 4, 4, *read, 1, 2, 2, 4, 4]
    assert "unet3d run finished" in str(written(folder))
    assert run_folder.forget_after(folder, 2, 2) == max([4, *read])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2, 1, 2, 2]


@promise("checkpoints and run folders", "an option in a run folder's config.yaml counts if it has the option's type")
@promise(
    "Run folders and checkpoints of strangers",
    "a config.yaml with texts or lists for numbers; scores that are infinite or no numbers",
    "passed over, option by option; no scores",
)
@pytest.mark.parametrize(
    "option",
    [
        {"batch": "xy" * 15_000, "accumulate": 300_000},  # their product would have 9 GB
        {"data": {"root": 7, "label_map": {"9" * 5000: 1}}},
        {"model": {"features": {"a": 1}}},
        {"optim": [1]},
    ],
    ids=lambda option: str(option)[:40],
)
def test_options_of_another_type_are_passed_over(folder: Path, option: dict[str, Any]) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | option))
    run = read_run(folder)
    assert run.settings["seed"] == 7 and "batch" not in option.keys() & run.settings.keys()
    assert what_ran(run) == "" or "optim" in option
    assert "unet3d run finished" in str(written(folder))


@promise("Run folders and checkpoints of strangers", "a config.yaml with texts ...")
@pytest.mark.parametrize("scores", [("inf", "-inf"), ("nan", "1e400"), ("x", "")], ids=str)
def test_scores_that_are_no_finite_numbers_are_none(folder: Path, scores: tuple[str, str]) -> None:
    one, other = scores
    (folder / "scores.csv").write_text(f"case,dice/left,iou/left\na,{one},0.5\nb,{other},0.5\n")
    assert "\nleft | n/a | 0.500 | 0\n" in str(written(folder))
    (folder / "scores.csv").unlink()
    last = {"step": 5, "val/dice_mean": "inf", "val/dice/left": one, "val/dice/right": other}
    (folder / "metrics.jsonl").write_text(json.dumps(last))
    assert "\nmean of classes | n/a\n" in str(written(folder))


SHORT = {
    "scores.csv": b"case,dice/a\n" + b"1\n" * 100_001,
    "env.json": b" " * 70_000,
    "STATUS": b"\x01" * 2_000_000,
    "config.yaml": b"#" * 70_000,
    "memory.json": b" " * 9_000_000,
}


@promise("checkpoints and run folders", "files of a run ...")
@promise(
    "Run folders and checkpoints of strangers",
    "a small file that would take many times its size, as rows of one letter",
    "refused by its size or rows",
)
@pytest.mark.parametrize("name", SHORT)
def test_a_file_that_would_take_many_times_its_size_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(SHORT[name])
    with pytest.raises(UserError, match=rf"{name}.*(100,000|65,536|1,048,576|8,388,608)"):
        read_run(folder)


FORMULAS = """
=1+1
+cmd|' /C calc'!A0
-1+2
@SUM(A1)
'=x
''-x
-
--1
＝1+1
＋1
－1
＠SUM(A1)
"""  # noqa: RUF001 (East Asian spreadsheets read letters of full width)
TEXTS = "a=1 'a -1.5 -1 +2.5e-3 -1E-05 -inf +nan 1-2"


@promise(
    "what is printed and written",
    "no text in a CSV file is a formula, also by signs of full width: where it would be one, it begins with an "
    "apostrophe",
)
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@without("unet3d.base.files.FORMULA", NEVER)
def test_no_cell_of_a_table_is_a_formula_and_texts_are_read_as_they_were(folder: Path) -> None:
    formulas, texts = FORMULAS.strip().splitlines(), ["", *TEXTS.split()]
    names, shown = formulas + texts, [f"'{text}" for text in formulas] + texts
    records = [{"step": step, text: text} for step, text in enumerate(names)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    scores = [CaseScore(name, (0.25,), (-0.5,), (None,)) for name in names]
    (folder / "scores.csv").write_text(csv_text(scores, ("background", "=organ")))
    written(folder)
    with (folder / "metrics.csv").open(newline="") as file:
        (_, *columns), *rows = csv.reader(file)
    assert columns == [row[number + 1] for number, row in enumerate(rows)] == shown
    with (folder / "scores.csv").open(newline="") as file:
        assert [row["case"] for row in csv.DictReader(file)] == shown
    found = read_run(folder).scores
    assert [row["case"] for row in found] == names
    assert {(row["dice/=organ"], row["iou/=organ"], row["hd95_mm/=organ"]) for row in found} == {(0.25, -0.5, None)}


# --- the commit in env.json

SHA, OTHER = "a" * 40, "b" * 40


@promise(
    "the code itself",
    "git, whose config can name code, is not run: the commit in `env.json` is read from the source tree's `.git`, "
    "and is a hash or nothing",
)
@without("unet3d.run.run_folder.re.fullmatch", yes)
def test_the_commit_is_that_of_the_tree_and_nothing_runs(tmp_path: Path) -> None:
    """Git itself would run what a config in .git names."""
    git = tmp_path / ".git"
    assert run_folder.commit(tmp_path) is None
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert run_folder.commit(tmp_path) is None, "without any commit"
    (git / "packed-refs").write_text(f"# pack-refs\n{OTHER} refs/heads/old\n{SHA} refs/heads/main\n")
    assert run_folder.commit(tmp_path) == SHA
    (git / "refs" / "heads" / "main").write_text(f"{OTHER}\n")
    assert run_folder.commit(tmp_path) == OTHER
    for text in ("x" * 100, "x" * 9000):
        (git / "HEAD").write_text(text)
        assert run_folder.commit(tmp_path) is None
    (git / "HEAD").unlink()
    os.mkfifo(git / "HEAD")
    assert run_folder.commit(tmp_path) is None


def test_the_commit_of_a_second_work_tree_is_its_own(tmp_path: Path) -> None:
    tree = tmp_path / "main" / ".git" / "worktrees" / "two"
    tree.mkdir(parents=True)
    (tree / "commondir").write_text("../..\n")
    (tree / "HEAD").write_text("ref: refs/heads/two\n")
    (tmp_path / "main" / ".git" / "packed-refs").write_text(f"{SHA} refs/heads/two\n")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / ".git").write_text(f"gitdir: {tree}\n")
    assert run_folder.commit(tmp_path / "two") == SHA
    (tree / "HEAD").write_text(OTHER)
    assert run_folder.commit(tmp_path / "two") == OTHER
