"""The paper's experiments: their sweeps, and the tables that set a sweep's scores beside the paper's."""

import csv
import json
from pathlib import Path
from statistics import fmean

import pytest
from legibility import drawing
from training import TINY, train, yaml_of

from unet3d.config import compose
from unet3d.report import compare, comparison_plots, published
from unet3d.report.compared_runs import ComparedRun, read_runs
from unet3d.report.comparison_plots import PublishedRow
from unet3d.report.differences import mismatches

HEAD = "case,dice/gray,dice/white,iou/gray,iou/white\n"


def make(folder: Path, words: list[str], scores: str) -> Path:
    """A run folder of a published experiment, with these lines of scores.csv."""
    folder.mkdir(parents=True)
    (folder / "STATUS").write_text("done\nexit code 0\n")
    (folder / "overrides.yaml").write_text(json.dumps(words))
    (folder / "config.yaml").write_text(yaml_of(*words))
    if scores:
        (folder / "scores.csv").write_text(HEAD + scores)
    return folder


@pytest.mark.parametrize(
    ("name", "means"), [("cicek2016_semi", [0.842, 0.863, 0.796]), ("cicek2016_full", [0.723, 0.704, 0.547])]
)
def test_the_papers_numbers_are_the_papers(name: str, means: list[float]) -> None:
    """The means that its tables print follow from the three that each row prints; Table 2 prints none."""
    rows = published.published_tables()[name].rows.values()
    assert [fmean(row["iou"]) for row in rows] == pytest.approx(means, abs=6e-4)


def test_every_table_is_an_experiments_and_varies_what_its_sweep_does() -> None:
    for name, table in published.published_tables().items():
        jobs = compose.sweep([f"experiment={name}", *added_sweep(f"experiment={name}")])
        values = {word.partition("=")[2] for job in jobs for word in job if word.startswith(f"{table.by}=")}
        assert values == set(table.rows)
        assert table.across == "case" or any(word.startswith(f"{table.across}=") for word in jobs[0])


def added_sweep(*words: str) -> list[str]:
    """Return the words of the config's own sweep for a command line."""
    return compose.added_sweep(words, [compose.compose_tree(job) for job in compose.sweep(words)])


def test_what_the_command_line_names_is_not_swept() -> None:
    assert added_sweep("experiment=cicek2016_slices", "data.sparse=[5,5,3]") == []
    assert added_sweep("experiment=cicek2016_semi", "data.sparse_fold=0") == [
        "model=cicek2016_no_bn,cicek2016,cicek2016_2d"
    ]
    assert added_sweep("model=unet") == []
    with pytest.raises(compose.UserError, match="experiment"):
        added_sweep("experiment=cicek2016_slices,cicek2016_semi")


def test_iou_by_slices_has_a_column_a_case(tmp_path: Path) -> None:
    said = "experiment=cicek2016_slices"
    rows = read_runs(
        [
            make(tmp_path / "0", [said, "data.sparse=[5,5,3]"], "b,1,1,.8,.9\na,1,1,.5,\n"),
            make(tmp_path / "1", [said, "data.sparse=[1,1,1]"], "b,1,1,.25,.75\na,1,1,.25,.25\n"),
        ]
    )
    found = published.published_experiment(rows)
    assert found is not None
    table = found.table(rows)
    assert table.columns[1:3] == ["a", "b"]
    assert table.rows == [
        ["1,1,1", "0.250", "0.500", "0.375", "0.331", "0.483", "0.475", "0.430"],
        ["5,5,3", "0.500", "0.850", "0.675", "0.856", "0.849", "0.872", "0.859"],
    ]


def test_runs_that_differ_in_nothing_of_the_table_are_one_mean(tmp_path: Path) -> None:
    said = ["experiment=cicek2016_slices", "data.sparse=[5,5,3]"]
    scores = ("a,1,1,.5,\n", "a,1,1,.7,\n", "")
    rows = read_runs([make(tmp_path / str(seed), [*said, f"seed={seed}"], found) for seed, found in enumerate(scores)])
    found = published.published_experiment(rows)
    assert found is not None
    assert found.table(rows).rows[0][:3] == ["5,5,3", "0.600", "0.600"]


def test_iou_by_network_has_a_column_a_fold_and_no_mean_of_some(tmp_path: Path) -> None:
    said = "experiment=cicek2016_full"
    rows = read_runs(
        [
            make(tmp_path / "0", [said, "model=cicek2016_2d", "data.fold=0"], "a,1,1,.25,.75\n"),
            make(tmp_path / "1", [said, "model=cicek2016_2d", "data.fold=1"], "b,1,1,.25,.25\n"),
            make(tmp_path / "2", [said, "data.fold=0"], "a,1,1,.5,.5\n"),
            make(tmp_path / "3", [said, "data.fold=1"], ""),
        ]
    )
    found = published.published_experiment(rows)
    assert found is not None
    assert [row[:4] for row in found.table(rows).rows] == [
        ["3D with BN", "0.500", "", ""],
        ["2D with BN", "0.500", "0.250", "0.375"],
    ]


def test_runs_of_two_experiments_have_no_published_table(tmp_path: Path) -> None:
    rows = read_runs(
        [
            make(tmp_path / "0", ["experiment=cicek2016_full", "data.fold=0"], ""),
            make(tmp_path / "1", ["experiment=cicek2016_slices"], ""),
            make(tmp_path / "2", [], ""),
        ]
    )
    assert published.published_experiment(rows) is None and published.published_experiment(rows[2:]) is None
    assert published.published_experiment(rows[:1]) is published.published_tables()["cicek2016_full"]


def test_the_comparison_holds_table_and_picture_and_calls_what_is_meant_comparable(tmp_path: Path) -> None:
    words = [[f"data.sparse={counts}"] for counts in ("[1,1,1]", "[2,2,1]", "[5,5,3]")]
    rows = read_runs(
        [
            make(tmp_path / str(i), ["experiment=cicek2016_slices", *word], f"a,1,1,.{i + 4},.5\n")
            for i, word in enumerate(words)
        ]
    )
    found = published.published_experiment(rows)
    assert found is not None and [line.partition(":")[0] for line in mismatches(rows)] == ["data.sparse"]
    compare.write_comparison(rows, tmp_path / "out")
    with (tmp_path / "out" / "published.csv").open() as file:
        assert [line[:3] for line in csv.reader(file)][1:] == [
            ["1,1,1", "0.450", "0.450"],
            ["2,2,1", "0.500", "0.500"],
            ["5,5,3", "0.550", "0.550"],
        ]
    page = (tmp_path / "out" / "compare.html").read_text()
    assert found.title in page and "0.859" in page and page.count("<img") == 1
    assert not any(line in page for line in mismatches(rows)), "its slices are meant to differ"


@pytest.mark.parametrize("name", list(published.published_tables()))
def test_the_picture_is_legible(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = published.published_tables()[name]
    lines = [PublishedRow(row["name"], [0.4, None, 0.6], row["iou"]) for row in table.rows.values()]
    figure = drawing(tmp_path, monkeypatch)(lambda path: comparison_plots.published_plot(lines, table.title, path))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == [line.name for line in lines]
    means = [line.get_ydata().tolist() for line in axes.lines if line.get_linestyle() == "-"]
    assert means[0] == [0.5] * len(lines), "ours, without the one that is missing"
    assert means[1] == pytest.approx([fmean(line.paper) for line in lines])


@pytest.mark.slow
def test_an_experiment_is_one_command_and_its_jobs_are_sweeps_of_one_each(tmp_path: Path) -> None:
    """`experiment=` alone asks for several runs; each of them names its values, and so is no sweep itself."""
    small = (
        "model=unet_tiny",
        "data.patch=[16,16,16]",
        "data.augment.elastic=0",
        "dry_run=true",
        "hydra.sweep.dir=sweep",
    )
    done = train(tmp_path, *TINY, "experiment=cicek2016_slices", *small)
    assert done.code == 0, done.err
    words = [path.read_text().splitlines()[-1] for path in sorted(tmp_path.glob("sweep/*/overrides.yaml"))]
    assert [word.rpartition("=")[2] for word in words] == ["[1,1,1]", "[2,2,1]", "[3,3,2]", "[5,5,3]"]


def test_a_cell_of_runs_that_differ_in_more_than_their_seed_is_not_comparable(tmp_path: Path) -> None:
    said = ["experiment=cicek2016_semi", "data.sparse_fold=0"]
    wide, scores = "model.features=[32,64,128,256]", "a,1,1,.5,.5\n"
    jobs = {"0": [], "1": ["seed=1"], "2": [wide], "3": ["model=cicek2016_2d", wide], "4": [wide, "data.sparse_fold=1"]}
    rows = read_runs(
        [make(tmp_path / name, list(dict.fromkeys([*said, *words])), scores) for name, words in jobs.items()]
    )
    found = published.published_experiment(rows)
    assert found is not None
    assert found.unlike([rows[0], rows[1], *rows[3:]]) == []
    (line,) = found.unlike(rows)
    assert line.startswith("model.features: ") and line.endswith("3D with BN")


def test_folds_are_in_the_order_of_their_numbers() -> None:
    rows = [ComparedRun(str(n), {"data.fold": str(n)}, True, {}, None, {}, {}) for n in (10, 2, 0)]  # type: ignore[arg-type]
    assert published.published_tables()["cicek2016_full"].columns(rows) == ["0", "2", "10"]
