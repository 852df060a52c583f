"""The 3D U-Net paper's experiments: their sweeps, and the script that sets their scores beside its tables."""

import importlib.util
import re
from pathlib import Path
from statistics import fmean

import pytest
from run_folders import write_run
from tables import cells
from training import ROOT, TINY, train

from unet3d.config import compose
from unet3d.report.compared_runs import find_runs, read_runs

SCRIPT = importlib.util.spec_from_file_location("cicek2016", ROOT / "examples" / "cicek2016.py")
assert SCRIPT is not None and SCRIPT.loader is not None
cicek2016 = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(cicek2016)
HEAD = "case,dice/gray,dice/white,iou/gray,iou/white\n"


def made(place: Path, experiment: str, table: str) -> None:
    """Run folders of an experiment: their words | the lines of scores.csv, divided by spaces."""
    for number, (words, scores) in enumerate(cells(table)):
        lines = HEAD + "\n".join(scores.split()) + "\n" if scores else ""
        write_run(place / str(number), [f"experiment={experiment}", *words.split()], lines)


@pytest.mark.parametrize(
    ("name", "means"), [("cicek2016_semi", [0.842, 0.863, 0.796]), ("cicek2016_full", [0.723, 0.704, 0.547])]
)
def test_the_papers_numbers_are_the_papers(name: str, means: list[float]) -> None:
    """The means that its tables print follow from the three that each row prints; Table 2 prints none."""
    assert [fmean(row) for row in cicek2016.TABLES[name].iou] == pytest.approx(means, abs=6e-4)


def test_every_table_is_an_experiments_and_varies_what_its_sweep_does() -> None:
    for name, table in cicek2016.TABLES.items():
        jobs = compose.sweep([f"experiment={name}", *added_sweep(f"experiment={name}")])
        values = {word.partition("=")[2] for job in jobs for word in job if word.startswith(f"{table.by}=")}
        assert values == set(table.names)
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


SLICES = """
data.sparse=[5,5,3]        | b,1,1,.8,.9 a,1,1,.4,
data.sparse=[5,5,3] seed=1 | b,1,1,.8,.9 a,1,1,.6,
data.sparse=[5,5,3] seed=2 |
data.sparse=[1,1,1]        | b,1,1,.25,.75 a,1,1,.25,.25
"""
FOLDS = """
model=cicek2016_2d data.fold=0 | a,1,1,.25,.75
model=cicek2016_2d data.fold=1 | b,1,1,.25,.25
data.fold=0                    | a,1,1,.5,.5
data.fold=1                    |
"""


@pytest.mark.slow
def test_iou_by_slices_has_a_column_a_case_and_a_cell_is_the_mean_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script prints them, and draws them."""
    made(tmp_path, "cicek2016_slices", SLICES)
    monkeypatch.setattr("sys.argv", ["cicek2016.py", str(tmp_path), "--picture", str(tmp_path / "table.png")])
    cicek2016.main()
    assert (tmp_path / "table.png").stat().st_size > 10**4
    assert [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["1,1,1", "0.250", "0.500", "0.375", "0.331", "0.483", "0.475", "0.430"],
        ["5,5,3", "0.500", "0.850", "0.675", "0.856", "0.849", "0.872", "0.859"],
    ]


@pytest.mark.slow
def test_iou_by_network_has_a_column_a_fold_and_no_mean_of_some(tmp_path: Path) -> None:
    made(tmp_path, "cicek2016_full", FOLDS)
    runs = read_runs(find_runs([tmp_path]))
    _, rows = cicek2016.beside(cicek2016.table_of(runs), runs)
    assert [row.name for row in rows] == ["3D with BN", "2D with BN"]
    assert [cicek2016.text(row.ours) for row in rows] == [["0.500", "", ""], ["0.500", "0.250", "0.375"]]


def test_runs_of_two_experiments_or_of_none_have_no_table(tmp_path: Path) -> None:
    words = (["experiment=cicek2016_full", "data.fold=0"], ["experiment=cicek2016_slices"], [])
    rows = read_runs([write_run(tmp_path / str(number), said) for number, said in enumerate(words)])
    for runs in (rows, rows[2:]):
        with pytest.raises(SystemExit, match="cicek2016_slices"):
            cicek2016.table_of(runs)


@pytest.mark.slow
def test_an_experiment_is_one_command_and_its_jobs_are_sweeps_of_one_each(tmp_path: Path) -> None:
    """`experiment=` alone asks for several runs; each of them names its values, and so is no sweep itself."""
    small = ("model=unet_tiny", "data.patch=[16,16,16]", "data.augment.elastic=0", "dry_run=true")
    done = train(tmp_path, *TINY, "experiment=cicek2016_slices", *small, "hydra.sweep.dir=sweep")
    assert done.code == 0, done.err
    words = [path.read_text().splitlines()[-1] for path in sorted(tmp_path.glob("sweep/*/overrides.yaml"))]
    assert [word.rpartition("=")[2] for word in words] == ["[1,1,1]", "[2,2,1]", "[3,3,2]", "[5,5,3]"]
