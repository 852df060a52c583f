"""What a comparison of run folders says, on folders made by hand, and what it forbids to compare."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from legibility import assert_legible
from matplotlib.figure import Figure
from PIL import Image
from promises import promise
from training import yaml_of

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.report import compare
from unet3d.report.compared_runs import differing, find_runs, not_comparable, read_runs, setting_columns, short
from unet3d.report.plots import comparison_plot, pareto

MIB = 2**20
NASTY = "<script>alert('x')</script>&[bold]"
Make = Callable[..., Path]


def entry(peak: int, kind: str) -> dict[str, Any]:
    return {"peak_bytes": peak, "kind": kind, "phases": {"forward": {"first": peak, "steady": peak}}}


@pytest.fixture(autouse=True)
def small_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of one pixel, which take no time, but where a test looks at what is `saved`."""
    if "saved" not in request.fixturenames:
        for name in ("comparison_plot", "curves_plot"):
            monkeypatch.setattr(compare, name, one_pixel)


def one_pixel(*drawn: object) -> None:
    path = drawn[-1]
    assert isinstance(path, Path)
    Image.new("RGB", (1, 1)).save(path, "PNG")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a run folder as a run of these overrides leaves it: a finished one, or one that only `predicts`."""

    def run(
        name: str, *words: str, peak: int = 3 * MIB, seconds: float = 0.5, kind: str = "ledger", **changed: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "STATUS").write_text(changed.get("status", "done\nexit code 0\n"))
        (folder / "overrides.yaml").write_text(json.dumps(words))
        memory = {"parameters": 1234, "predicted": entry(peak, "ledger")}
        if changed.get("has_config", True):
            (folder / "config.yaml").write_text(yaml_of(*words))
        if not changed.get("predicts"):
            memory |= {"measured": entry(peak - 7, kind), "error_bytes": 7}
            (folder / "env.json").write_text(
                json.dumps({"device": "cpu", "cpu": "AVX512", "torch": "2.13", "threads": 1} | changed)
            )
            steps = [{"step": step, "time/step_s": seconds * step} for step in (1, 2, 3)]
            records = [*steps, {"step": 2, "val/dice_mean": 0.25}, {"step": 3, "val/dice_mean": changed.get("dice")}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "memory.json").write_text(json.dumps(memory))
        return folder

    return run


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "compare.csv").open() as file:
        return list(csv.DictReader(file))


# --- what differs


def test_only_what_differs_is_shown_in_short_words(make: Make) -> None:
    rows = read_runs([make("0", "amp=true", "data.patch=[32,32,32]"), make("1", "optim.lr=0.01")])
    assert differing(rows) == ["data.patch", "optim.lr", "amp"]
    table = compare.comparison_table(rows)
    assert table.columns[1:4] == ["patch", "lr", "amp"]
    assert [row[:4] for row in table.rows] == [
        ["0", "[32,32,32]", "0.003", "true"],
        ["1", "[64,64,32]", "0.01", "false"],
    ]


def test_words_that_two_keys_share_stay_whole() -> None:
    assert short(["seed", "data.phantom.seed", "ckpt"]) == ["seed", "data.phantom.seed", "ckpt"]


def test_a_groups_name_stands_for_its_options_but_not_for_those_changed_besides(make: Make) -> None:
    rows = read_runs(
        [make("0", "model=unet"), make("1", "model=unet_tiny"), make("2", "model=unet_tiny", "model.dropout=0.1")]
    )
    assert differing(rows) == ["model", "model.features", "model.dropout"]
    assert setting_columns(rows) == ["model", "model.dropout"]
    unnamed = [*rows[:2], *read_runs([make("3", "model.features=[2,4]")])]
    assert setting_columns(unnamed) == ["model", "model.features"], "run 3 has no name for it"


def test_an_experiments_name_stands_for_all_that_it_sets(make: Make) -> None:
    words = [("hippocampus", 1), ("hippocampus", 2), ("hippocampus_full", 1)]
    given = [(f"experiment={name}", "data.root=.", f"seed={seed}") for name, seed in words]
    rows = read_runs([make(str(number), *options) for number, options in enumerate(given)])
    assert setting_columns(rows) == ["experiment", "seed"]
    assert {"model.features", "steps", "optim.average"} <= {*differing(rows)}
    own = read_runs([make("3", *given[0], "optim.lr=0.1"), make("4", *given[2], "optim.lr=0.2")])
    assert setting_columns(own) == ["experiment", "optim.lr"], "what a command line sets follows from no name"
    without = read_runs([make("5", "model=unet_tiny"), make("6", *given[0])])
    assert {"data.patch", "model.features"} <= {*setting_columns(without)}


def test_runs_that_only_predict_have_the_same_columns_as_runs_that_ran(make: Make) -> None:
    rows = read_runs([make("0", "ckpt=2", predicts=True), make("1", "amp=true"), make("2", predicts=True)])
    assert setting_columns(rows) == ["amp", "ckpt"]
    assert [row[1:4] for row in compare.comparison_table(rows).rows] == [
        ["false", "2", "predicted"],
        ["true", "0", "done"],
        ["false", "0", "predicted"],
    ]


def test_a_command_line_without_a_config_is_shown_as_it_was(make: Make) -> None:
    """Of a run that was killed as it began; nothing is composed from it."""
    gone = ["data=folders", "data.root=/gone", "data.classes=[a,b]"]
    rows = read_runs(
        [make(name, *gone, *more, has_config=False, predicts=True) for name, more in (("0", ["amp=true"]), ("1", []))]
    )
    assert setting_columns(rows) == ["amp"]
    assert [row[1] for row in compare.comparison_table(rows).rows] == ["true", ""]
    assert setting_columns([*rows, *read_runs([make("2", "ckpt=2")])]) == ["data.root", "data.classes", "amp"]


# --- numbers


@promise(
    "What scripts rely on",
    "compare.csv, folds.csv",
    "plain numbers with units in their columns, empty cells where there is none",
)
def test_the_csv_has_plain_numbers_with_units_and_empty_cells(make: Make, tmp_path: Path) -> None:
    line = "error: loss nan, 'a, b'\nmore\nexit code 4\n"
    folders = [make("0", "ckpt=2", dice=0.5), make("1", predicts=True), make("2", "amp=true", status=line)]
    (folders[2] / "memory.json").unlink()
    compare.write_comparison(read_runs(folders), tmp_path / "out")
    first, second, third = rows_of(tmp_path / "out")
    assert first == {
        **{"run": "0", "amp": "false", "ckpt": "2", "status": "done", "parameters": "1234", "measured_kind": "ledger"},
        **{"peak_predicted_bytes": str(3 * MIB), "peak_measured_bytes": str(3 * MIB - 7), "error_bytes": "7"},
        **{"steps_done": "3", "step_median_s": "1.0", "dice_mean": "0.5", "dice_grid": "", "labelled_share": ""},
    }
    assert second["status"] == "predicted" and second["peak_predicted_bytes"] == str(3 * MIB)
    assert {second[key] for key in ("peak_measured_bytes", "error_bytes", "step_median_s", "dice_mean")} == {""}
    assert third["status"].startswith("failed") and "loss nan, 'a, b', more" in third["status"]
    assert third["dice_mean"] == "", "n/a at the last validation is not the value of the one before"


def test_the_table_has_mib_and_no_columns_without_numbers(make: Make) -> None:
    table = compare.comparison_table(read_runs([make("0", "ckpt=2", predicts=True), make("1", predicts=True)]))
    assert ["(MiB)" in column for column in table.columns] == [False, False, False, True, False]
    assert table.rows[0] == ["0", "2", "predicted", "3.0", "1,234"]


def test_the_printed_table_leaves_out_what_does_not_tell_the_runs_apart(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Options of no method, statuses that are all done, errors that are all 0: compare.csv has them all."""
    folders = [make("0", "ckpt=2", "eval_every=5", dice=0.5), make("1", "budget=8GiB", "wandb.mode=disabled")]
    for folder in folders:
        memory = json.loads((folder / "memory.json").read_text())
        memory["measured"]["peak_bytes"] += 7
        (folder / "memory.json").write_text(json.dumps(memory | {"error_bytes": 0}))
    rows = read_runs(folders)
    compare.print_comparison(rows)
    out = capsys.readouterr().out
    heads = " ".join(out.split("─")[0].split())
    assert heads == "Comparison of 2 runs run ckpt peak, measured (MiB) step (s) Dice, last validation"
    assert "predicted minus measured: 0 bytes in each" in out
    compare.write_comparison(rows, tmp_path / "out")
    assert {"eval_every", "budget", "wandb.mode", "status", "error_bytes", "parameters"} <= rows_of(tmp_path / "out")[
        0
    ].keys()
    alike = read_runs([make("2", "eval_every=5"), make("3", "eval_every=10")])
    assert compare.comparison_table(alike).columns[:2] == ["run", "eval_every"], "nothing else tells them apart"


def test_scores_on_two_grids_are_not_comparable_and_neither_is_called_the_others(make: Make) -> None:
    folders = [make(name, "data.spacing=[1,1,1]", dice=0.5) for name in ("0", "1")]
    (folders[0] / "scores.csv").write_text("case,dice/a,hd95_mm/a,network_dice/a\nx,0.25,3.5,0.5\ny,0.75,,0.5\n")
    rows = read_runs(folders)
    assert [row.numbers["dice_grid"] for row in rows] == ["files", "network"]
    assert any("files (run 0), network (run 1)" in line for line in not_comparable(rows))
    assert "Dice" in compare.comparison_table(rows).columns
    assert "Dice (files' grids)" in compare.comparison_table(rows[:1]).columns
    assert "Dice, last validation" in compare.comparison_table(rows[1:]).columns
    assert (rows[0].numbers["hd95_mm/a"], rows[0].numbers["hd95_mm_cases/a"]) == (3.5, 1)


def test_a_run_that_wrote_nothing_but_how_it_ended_is_a_row(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture
) -> None:
    folders = [make("0", "ckpt=2"), make("1"), tmp_path / "2"]
    folders[2].mkdir()
    (folders[2] / "STATUS").write_text("failed: killed by SIGKILL\nexit code 137\n")
    (folders[2] / "overrides.yaml").write_text("- ckpt=3\n")
    compare.print_comparison(read_runs(folders))
    printed = capsys.readouterr().out
    assert re.search(r"2 +3 +failed *\n", printed) and re.search(r"\b2 failed\b.*SIGKILL\n", printed)


def test_a_run_that_was_asked_to_stop_has_not_failed(make: Make, capsys: pytest.CaptureFixture) -> None:
    line = "stopped by SIGTERM after step 3 of 9; to go on: python train.py resume=x\nexit code 75\n"
    compare.print_comparison(read_runs([make("0", "ckpt=2"), make("1", status=line)]))
    printed = capsys.readouterr().out
    assert re.search(r"\b1 stopped by SIGTERM after step 3 of 9$", printed, re.M) and "failed" not in printed
    assert re.search(r"\b1 +0 +stopped +\d", printed)


@pytest.mark.parametrize(
    ("status", "word", "line"),
    [
        ("interrupted; to go on: python train.py resume=x\nexit code 130\n", "stopped", "stopped: interrupted"),
        ("failed: stopped before it began\nexit code 75\n", "stopped", "stopped before it began"),
        ("error: no room; make room\nexit code 2\n", "failed", "failed: no room; make room"),
        ("running\n", "running", None),
    ],
)
def test_how_a_run_ended_is_a_word_and_a_line(
    make: Make, capsys: pytest.CaptureFixture, status: str, word: str, line: str | None
) -> None:
    rows = read_runs([make("0", "ckpt=2"), make("1", status=status)])
    assert compare.comparison_table(rows).rows[1][2] == word
    compare.print_comparison(rows)
    lines = [found for found in capsys.readouterr().out.splitlines() if found.startswith("run 1 ")]
    assert lines == ([] if line is None else [f"run 1 {line}"])


@pytest.mark.parametrize(
    "name", ["memory.json", "config.yaml", "env.json", "metrics.jsonl", "overrides.yaml", "STATUS"]
)
@pytest.mark.parametrize("left", ['{"torn', None])
def test_a_file_that_a_kill_cut_short_ends_no_comparison(
    make: Make, tmp_path: Path, name: str, left: str | None
) -> None:
    folders = [make("0", "ckpt=2"), make("1")]
    (folders[0] / name).write_text(left) if left else (folders[0] / name).unlink()
    rows = read_runs(folders)
    compare.write_comparison(rows, tmp_path / "out")
    assert len(rows_of(tmp_path / "out")) == 2


# --- what forbids to compare


def test_like_runs_are_comparable(make: Make) -> None:
    assert not_comparable(read_runs([make("0", "model=unet", "batch=1"), make("1", "amp=true", seconds=3)])) == []


@promise(
    "Run folders and checkpoints of strangers",
    "memory.json, metrics.jsonl or env.json that is empty, cut short, of other types, huge numbers or any depth",
    "passed over, or shown as text",
)
@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        (["data.patch=[32,32,32]"], {}, ["data.patch", "[64,64,32]", "[32,32,32]"]),
        (["data.fold=1"], {}, ["data.fold", "null", "1"]),
        (["data.phantom.cases=9"], {}, ["data.phantom.cases", "16", "9"]),
        (["steps=7"], {}, ["steps", "150", "7"]),
        (["seed=5"], {}, ["seed", "0", "5"]),
        ([], {"device": "cuda"}, ["device", "cpu", "cuda"]),
        ([], {"torch": "2.9"}, ["torch", "2.13", "2.9"]),
        ([], {"threads": 8}, ["threads", "1", "8"]),
        ([], {"threads": [8]}, ["threads", "1", "[8]"]),  # of a damaged file
        ([], {"cpu": "AVX2, bf16 emulated"}, ["cpu", "AVX512", "AVX2, bf16 emulated"]),
        ([], {"predicts": True}, ["peak", "measured", "predicted"]),
        ([], {"kind": "cuda allocated"}, ["", "ledger", "cuda allocated"]),
    ],
    ids=str,
)
def test_what_is_not_comparable_is_printed_with_key_and_values(
    make: Make, capsys: pytest.CaptureFixture, words: list[str], changed: dict[str, Any], said: list[str]
) -> None:
    rows = read_runs([make("0"), make("1"), make("2", *words, **changed)])
    (line,) = not_comparable(rows)
    key, most, other = map(re.escape, said)
    assert re.match(rf"{key}\b.*?: {most} \(.*0, 1\), {other} \(.*2\)$", line)
    compare.print_comparison(rows)
    assert f"{line}\n" in capsys.readouterr().out


def test_a_data_set_is_known_by_its_name_in_any_folder(make: Make, tmp_path: Path) -> None:
    roots = [tmp_path / "a" / "Task04", tmp_path / "b" / "Task04", tmp_path / "a" / "Task05"]
    for root in roots:
        root.mkdir(parents=True)
    words = [["data=decathlon", f"data.root={root}"] for root in roots]
    rows = read_runs([make(str(index), *said) for index, said in enumerate(words)])
    (line,) = not_comparable(rows)
    assert re.match(r"data\.root: Task04 \(.*0, 1\), Task05 \(.*2\)$", line)


def test_a_private_table_of_a_sweep_names_no_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part of a data set's path is no path, but may be a patient's name."""
    jobs = {}
    for number, name in enumerate(("Smith_John", "Doe_Jane")):
        (tmp_path / name).mkdir()
        words = ["data=decathlon", f"data.root={tmp_path / name}", f"seed={number}"]
        jobs[make(str(number), *words)] = compose.compose([*words, "wandb.mode=offline"])
    tables: list[tuple] = []
    logger = SimpleNamespace(table=lambda *table: tables.append(table))
    monkeypatch.setattr(compare, "wandb_loggers", lambda config, folder: [logger])
    compare.finish_sweep(jobs, tmp_path)
    for config in jobs.values():
        config.wandb.private = False
    compare.finish_sweep(jobs, tmp_path)
    private, public = map(repr, tables)
    assert "seed" in private and "Smith_John" not in private and "Doe_Jane" not in private
    assert "Smith_John" in public and "Doe_Jane" in public


def test_runs_that_ended_at_other_steps_are_not_comparable(make: Make) -> None:
    folders = [make("0"), make("1")]
    (folders[1] / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 1}\n')
    (line,) = not_comparable(read_runs(folders))
    assert re.match(r"steps\b.*: 3 \(.*0\), 1 \(.*1\)$", line)


# --- which runs


def test_a_sweeps_folder_stands_for_its_numbered_children_in_their_order(make: Make, tmp_path: Path) -> None:
    for name in ("sweep/10", "sweep/2", "sweep/0", "sweep/other", "alone"):
        make(name)
    found = find_runs([tmp_path / "sweep", tmp_path / "alone", tmp_path / "sweep" / "2"])
    assert [path.name for path in found] == ["0", "2", "10", "alone"]


def test_runs_of_two_sweeps_keep_names_of_their_own(make: Make) -> None:
    assert [row.name for row in read_runs([make("a/0"), make("b/0")])] == ["a/0", "b/0"]


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="outputs/DATE/TIME-ID") as caught:
            find_runs([path])
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# --- the picture


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([(1, 5), (2, 5), (2, 3), (9, 3), (4, 1)], [0, 2, 4]),
        ([(3, 1), (1, 3), (2, 2)], [1, 2, 0]),
        ([(1, 1), (1, 1), (1, 2)], [0, 1]),
        ([(1, 1), (0, 1)], [1]),
        ([(5, 5)], [0]),
        ([], []),
    ],
)
def test_the_best_trade_offs_are_those_that_no_other_beats(points: list, best: list[int]) -> None:
    assert pareto(points) == best


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from now on, legible throughout."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *given: Any, **named: Any) -> None:
        if named["format"] == "png":
            save(figure, *given, **named, dpi=20)  # for the page
            assert_legible(figure)
            figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def measured(peak: int, seconds: float | None, dice: float | None = None, kind: str = "ledger", **more: Any) -> dict:
    """The numbers of a measured run whose peak has so many MiB."""
    numbers = {"peak_measured_bytes": peak * MIB, "measured_kind": kind, "step_median_s": seconds, "dice_mean": dice}
    return numbers | more


def joined(figure: Figure, panel: int) -> list[list[tuple[float, float]]]:
    lines = figure.axes[panel].lines
    return [[(x, y) for x, y in line.get_xydata()] for line in lines if line.get_linestyle() == "--"]


def test_the_best_are_joined_less_time_and_more_dice(saved: list[Figure], tmp_path: Path) -> None:
    """Peak, seconds, Dice; the third loses to the first in time and wins in Dice."""
    numbers = [(1, 5.0, 0.2), (2, 3.0, 0.1), (3, 6.0, 0.9), (2, 4.0, None)]
    points = {f"{i}: x={i}": measured(*values) for i, values in enumerate(numbers)}
    comparison_plot(points, "", tmp_path / "x.png")
    assert joined(saved[0], 0) == [[(1, 5.0), (2, 3.0)]]
    assert joined(saved[0], 1) == [[(1, 0.2), (3, 0.9)]]
    assert saved[0].axes[0].get_xlabel().endswith("(MiB)") and "measured, ledger" in saved[0].get_suptitle()


@pytest.mark.parametrize("grids", [("files", "files"), (None, None), ("files", "network")])
def test_the_axis_of_dice_names_its_grid_and_is_not_zoomed_to_noise(
    saved: list[Figure], tmp_path: Path, grids: tuple[str | None, str | None]
) -> None:
    kind = "exact count of tensor bytes"
    points = {f"{i}": measured(i, 1.0, 0.038 + i / 1e4, kind, dice_grid=grids[i]) for i in range(2)}
    comparison_plot(points, "", tmp_path / "x.png")
    axes = saved[0].axes[1]
    low, high = axes.get_ylim()
    assert 0 <= low < 0.038 < high and high - low > 0.0499 and kind in saved[0].get_suptitle()
    wanted = {("files", "files"): "Dice (files' grids)", (None, None): "Dice, last validation"}.get(grids, "Dice")
    assert axes.get_ylabel() == wanted


def test_peaks_of_two_kinds_are_not_joined(saved: list[Figure], tmp_path: Path) -> None:
    kinds = ["ledger", "cuda allocated"]
    points = {f"{i}": measured(i + 1, 9.0 - i, kind=kinds[i % 2]) for i in range(4)}
    comparison_plot(points, "Not comparable: the runs differ in device, kind of peak", tmp_path / "x.png")
    assert joined(saved[0], 0) == [[(1, 9.0), (3, 7.0)], [(2, 8.0), (4, 6.0)]]
    texts = [text.get_text() for text in saved[0].axes[-1].get_legend().texts]
    assert texts[:2] == ["0 (measured, ledger)", "1 (measured, cuda allocated)"]


@pytest.mark.parametrize(("count", "seconds"), [(2, None), pytest.param(24, 0.1, marks=pytest.mark.slow)])
def test_the_picture_is_legible_of_few_runs_and_many_with_names_long_and_strange(
    saved: list[Figure], tmp_path: Path, count: int, seconds: float | None
) -> None:
    label = f"model=unet_small $x_{{$ {NASTY} " + "optimizer=adamw " * 5
    predicted = {"peak_predicted_bytes": 5000 * MIB}
    points = {f"{i}: {label}": measured(5000, seconds, seconds) if seconds else predicted for i in range(count)}
    comparison_plot(points, "Not comparable: the runs differ in " + "data.patch, " * 20, tmp_path / "x.png")
    assert len(saved[0].axes) == (2 if seconds else 1)


def test_runs_that_only_predict_are_bars(make: Make, saved: list[Figure], tmp_path: Path) -> None:
    rows = read_runs([make("0", "ckpt=2", predicts=True, peak=MIB), make("1", predicts=True, peak=2 * MIB)])
    compare.write_comparison(rows, tmp_path / "out")
    assert [bar.get_width() for bar in saved[0].axes[0].patches] == [1, 2]
    assert saved[0].axes[0].get_xlabel().endswith("(MiB)") and saved[0].get_suptitle() == "Peak: predicted"
    assert [text.get_text() for text in saved[0].axes[0].get_yticklabels()] == ["0: ckpt=2", "1: ckpt=0"]


def test_a_predicted_peak_is_not_drawn_among_measured_ones(make: Make, saved: list[Figure], tmp_path: Path) -> None:
    rows = read_runs([make("0", "ckpt=2"), make("1"), make("2", "ckpt=3", predicts=True)])
    compare.write_comparison(rows, tmp_path / "out")
    assert [text.get_text() for text in saved[0].axes[-1].get_legend().texts][:2] == ["0: ckpt=2", "1: ckpt=0"]
    assert saved[0].get_suptitle() == "Peak: measured, ledger"
    page = (tmp_path / "out" / "compare.html").read_text()
    assert all(line in page for line in not_comparable(rows)) and len(not_comparable(rows)) == 1


# --- the page


def test_the_page_escapes_what_it_shows_and_needs_no_network(make: Make, tmp_path: Path) -> None:
    folders = [make("0", f'wandb.notes="{NASTY}"'), make("1", status=f"error: {NASTY}\nexit code 2\n")]
    page = compare.write_comparison(read_runs(folders), tmp_path / "out").read_text()
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;[bold]" in page
    assert "<script" not in page and "http" not in page
    assert re.findall(r"(?:src|href)=\"(.{10})", page) == ["data:image"] * 2
    assert re.search(r"\b1 failed: &lt;script", page)


def test_runs_without_any_peak_have_a_table_and_no_picture(make: Make, tmp_path: Path) -> None:
    folders = [make("0"), make("1")]
    for folder in folders:
        (folder / "memory.json").unlink()
        (folder / "metrics.jsonl").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.png").write_bytes(b"of an earlier one")
    page = compare.write_comparison(read_runs(folders), tmp_path / "out").read_text()
    assert not (tmp_path / "out" / "compare.png").exists() and "<img" not in page


def test_curves_of_the_runs_lie_over_each_other(make: Make, saved: list[Figure], tmp_path: Path) -> None:
    folders = [make("0", "ckpt=2", dice=0.5), make("1", dice=0.75), make("2", "amp=true", predicts=True)]
    compare.write_comparison(read_runs(folders), tmp_path / "out")
    (axes,) = saved[1].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[2, 0.25], [3, 0.5]], [[2, 0.25], [3, 0.75]]]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"curves.png", "curves.svg", "compare.svg"}


@pytest.mark.slow
def test_the_printed_table_fits_80_columns_and_breaks_no_number(
    make: Make, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "a_run_with_a_name_" * 5
    folders = [
        make(long, "ckpt=2", "model=unet", dice=0.5),
        make("1", "data.patch=[32,32,32]", "optim.lr=0.01", "seed=7"),
    ]
    compare.print_comparison(read_runs(folders))
    reasons = not_comparable(read_runs(folders))
    table = [line for line in capsys.readouterr().out.splitlines() if not line.endswith(tuple(reasons))]
    assert max(map(len, table)) <= 80 and "a_run_with_a_name_" in "".join(table)
    cells = " ".join(table).split()
    assert {"[32,32,32]", "0.01", "0.500", "7"} <= {*cells}
