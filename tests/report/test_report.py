"""The report says what the files say, whatever of them is missing, and depends on nothing else."""

import base64
import csv
import io
import json
import os
import re
import sys
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from guards import without, yes
from PIL import Image
from promises import promise
from training import face, yaml_of

from unet3d.base.errors import UserError
from unet3d.report import compared_runs, held_out, memory_plots, plots, report
from unet3d.report.held_out import other_scores, score_table, score_title
from unet3d.report.report import methods_paragraph, print_summary, what_ran
from unet3d.run import run_folder
from unet3d.run.record import headline, read_run
from unet3d.training.metrics import CaseScore, both_csv_text, csv_text

MIB = 2**20
SHOWN = {  # on the page, by the file that it is in
    "STATUS": "exit code 0",
    "config.yaml": "seed: 7",
    "env.json": "9.8.7",
    "metrics.jsonl": "0.25 s",
    "scores.csv": "0.650",
    "memory.json": "1,402,803",
}
FILES = (*SHOWN, "figures/prediction.png")
PICTURES = {
    "training_curves": plots,
    "score_plot": held_out,
    "phase_plot": memory_plots,
    "layer_plot": memory_plots,
}
NEVER = re.compile("(?!)")
NASTY = "<b>&'x'</b>"


def write_scores(folder: Path, *names: str) -> None:
    scores = [
        CaseScore("a", (0.9, None, 0.5), (0.8, None, 0.4), (1.0, None, None)),
        CaseScore("b", (0.7, None, None), (0.6, None, None), (2.0, None, None)),
    ]
    (folder / "scores.csv").write_text(csv_text(scores, ("background", *names)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder as a finished run leaves it."""
    run = tmp_path / "12-30-05-ab12cd"
    (run / "figures").mkdir(parents=True)
    (run / "STATUS").write_text("done\nexit code 0\n")
    (run / "config.yaml").write_text(yaml_of("model=unet_tiny", "seed=7"))
    (run / "env.json").write_text(json.dumps({"torch": "9.8.7", "gpu": None}))
    train = {"train/loss": 0.5, "time/step_s": 0.25, "time/data_wait_s": 0.025}
    last = {
        "val/dice_mean": 0.55,
        "val/dice/left": 0.61,
        "val/dice/none": None,
        "val/iou/left": 0.52,
        "time/val_s": 4.0,
    }
    records = [{"step": 1, **train}, {"step": 2, **train, "train/loss": "nan"}, {"step": 2, **last}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_scores(run, "left", "none", NASTY)
    peaks = {phase: {"first": MIB, "steady": 1234 * MIB + MIB // 2} for phase in ("data", "forward")}
    measured = {"peak_bytes": 1500 * MIB, "kind": "ledger", "phases": peaks, "categories": {"params": 7 * MIB}}
    (run / "memory.json").write_text(json.dumps({"parameters": 1402803, "measured": measured}))
    Image.new("RGB", (4, 4)).save(run / "figures" / "prediction.png")
    return run


class Reader(HTMLParser):
    """Tables as lists of rows, other text, values of facts, sources of pictures; an unclosed element fails."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self.facts: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.rows += [[]] if tag == "tr" else []
        self.sources += [str(value) for name, value in attrs if name == "src"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)
        elif data.strip() and self.open[-1] != "style":
            self.text.append(data)
            if self.open[-1] == "dd":
                self.facts.append(data)

    @property
    def all(self) -> str:
        return " | ".join([*self.text, *(cell for row in self.rows for cell in row)])

    @property
    def pictures(self) -> list[bytes]:
        return [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in self.sources]


def one_pixel(_: object, path: Path) -> None:
    Image.new("RGB", (1, 1)).save(path, "PNG")


def written(folder: Path, draws: Collection[str] = ()) -> Reader:
    """Return the report. Its pictures but those that it `draws` are of one pixel: they take longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in PICTURES.items():
            if name not in draws:
                patch.setattr(module, name, one_pixel)
        path = report.write_report(read_run(folder))
    assert path == folder / "report.html"
    return Reader(path.read_text(encoding="utf-8"))


def test_the_report_says_what_ran_and_how_it_went(folder: Path) -> None:
    found = written(folder)
    assert what_ran(read_run(folder)) in found.text
    parts = [
        "12-30-05-ab12cd",
        "8-16-32",
        "phantom",
        "64x64x32",
        "AMP",
        "recompute",
        "done",
        "exit code 0",
        "seed: 7",
    ]
    assert [part for part in parts if part not in found.all] == []
    assert {"0.650", "1,500.0 MiB", "1,402,803", "2", "9.8.7"} <= {*found.facts}
    assert "gpu" not in found.all


def test_what_ran_names_the_ways_that_are_on(folder: Path) -> None:
    config, off = yaml.safe_load((folder / "config.yaml").read_text()), what_ran(read_run(folder))
    for way, value, shown in (("amp", True, "on"), ("ckpt", 2, "2"), ("recompute", "lean", "lean")):
        (folder / "config.yaml").write_text(yaml.safe_dump(config | {way: value}))
        parts = zip(off.split(", "), what_ran(read_run(folder)).split(", "), strict=True)
        ((before, after),) = [pair for pair in parts if pair[0] != pair[1]]
        assert after.split()[:-1] == before.split()[:-1] and after.split()[-1] == shown


def test_scores_are_means_over_cases_that_have_them_and_n_a_stays_n_a(folder: Path) -> None:
    head, *rows, means = written(folder).rows[:5]
    assert head[1:4] == ["Dice", "IoU", "HD95 (mm)"]
    assert rows == [
        ["left", "0.800", "0.700", "1.50", "2"],
        ["none", "n/a", "n/a", "n/a", "0"],
        [NASTY, "0.500", "0.400", "n/a", "1"],
    ]
    assert means[1:] == ["0.650", "0.550", "1.50"]


def test_a_distance_that_some_cases_lack_says_how_many_have_it(folder: Path) -> None:
    """A class missed throughout has no distance: without them, the worst network would look best."""
    scores = [CaseScore(case, (dice,), (dice,), (mm,)) for case, dice, mm in (("a", 0.9, 1.0), ("b", 0.0, None))]
    (folder / "scores.csv").write_text(csv_text(scores, ("background", "organ")))
    assert score_table(read_run(folder)).rows == [["organ", "0.450", "0.450", "1.00 (1)", "2"]]


def validated(folder: Path, *dice: float | None, last: int = 0) -> Reader:
    """The report of a run whose validations, at steps 2, 4 .., have these means; and its last step."""
    values = [{"val/dice_mean": mean, "val/dice/left": mean, "val/iou/left": 0.4} for mean in dice]
    found = [{"step": 2 * number, **value} for number, value in enumerate(values, 1)]
    found.append({"step": last or 2 * len(dice), "train/loss": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    return written(folder)


def title_of(folder: Path, *dice: float | None, last: int = 0) -> str:
    """The title of the scores, which stands on the page."""
    found, title = validated(folder, *dice, last=last), score_title(read_run(folder))
    assert title in found.text
    return title


def test_the_scores_are_named_after_their_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, last = title_of(folder, 0.5, 0.7), title_of(folder, 0.7, 0.5)
    assert best.startswith(last.removesuffix(")")) and best != last and "step 4" in last
    assert title_of(folder, 0.7, 0.7) == last, "best.pt is written for a higher Dice only"
    assert title_of(folder, 0.7, None) == last, "n/a is no Dice"
    assert title_of(folder, None) == last.replace("4", "2")
    stopped = title_of(folder, 0.7, 0.5, last=5)
    assert "step 4" in stopped and stopped != last, "after a step that was not validated"
    print_summary(read_run(folder))
    assert capsys.readouterr().out.startswith(f"{stopped}\n")


def test_scores_name_the_grid_that_they_are_of(folder: Path) -> None:
    (folder / "config.yaml").write_text(yaml_of("model=unet_tiny", "data.spacing=[1.5,1.5,3.75]"))
    found = written(folder)
    assert "1.5x1.5x3.75 mm" in score_title(read_run(folder))
    titles = [text for text in found.text if "1.5x1.5x3.75 mm" in text and text != methods_paragraph(read_run(folder))]
    assert len(titles) == 2, "of the scores and of the cases"


@promise("Prediction", "scores of resampled volumes ...")
def test_scores_on_the_files_own_grids_come_before_those_on_the_networks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And are the ones by which cases are shown, runs are compared and wandb sorts them."""
    (folder / "config.yaml").write_text(yaml_of("model=unet_tiny", "data.spacing=[1.5,1.5,3.75]"))
    names = ("background", "organ")
    found = [CaseScore("a", (0.5,), (0.25,), (7.0,)), CaseScore("b", (0.7,), (0.55,), (3.0,))]
    on_network_grid = csv_text([CaseScore("b", (0.9,), (0.8,), (1.0,)), CaseScore("a", (0.8,), (0.7,), ())], names)
    text = both_csv_text(found, names, on_network_grid)
    assert both_csv_text(found, names, text) == text, "made again, as after a kill, it is the same"
    (folder / "scores.csv").write_text(text)
    run = read_run(folder)
    assert "on the files' own grids" in score_title(run) and "1.5x1.5x3.75" not in score_title(run)
    assert run.dice_mean == headline(run)["own_grid/dice_mean"] == pytest.approx(0.6)
    page = written(folder)
    own = page.rows.index(["organ", "0.600", "0.400", "5.00", "2"])
    assert page.rows[own + 2] == ["organ", "0.850", "0.750", "1.00 (1)", "2"]
    assert ["a", "0.500", "0.500", "0.250", "7.00"] in page.rows
    print_summary(read_run(folder))
    printed = " ".join(capsys.readouterr().out.split())
    assert 0 < printed.index("0.600") < printed.index("the network's grid, 1.5x1.5x3.75 mm") < printed.index("0.850")


def test_an_average_of_the_weights_is_named(folder: Path) -> None:
    own = score_title(read_run(folder))
    (folder / "config.yaml").write_text(yaml_of("model=unet_tiny", "optim.average=0.9"))
    average = score_title(read_run(folder))
    assert "average" in average and "average" not in own and average in written(folder).text


def test_the_best_weights_are_shown_beside_the_last_if_they_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = validated(folder, 0.7, 0.5)
    assert ["left", "0.700", "0.400"] in found.rows
    assert "step 2" in found.all and "best.pt" not in found.all, "there is no file"
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.pt").write_bytes(b"")
    (best,) = other_scores(read_run(folder))
    assert "step 2" in best[0] and "checkpoints/best.pt" in best[0]
    assert best[0] in written(folder).text
    print_summary(read_run(folder))
    printed = capsys.readouterr().out.split(f"{best[0]}\n")[1]
    assert ["left", "0.700", "0.400"] in [line.split() for line in printed.splitlines()]
    assert "best.pt" not in validated(folder, 0.5, 0.7).all and other_scores(read_run(folder)) == []


def test_without_scores_the_last_validation_is_shown(folder: Path) -> None:
    (folder / "scores.csv").unlink()
    head, *rows, means = written(folder).rows[:4]
    assert head[1:] == ["Dice", "IoU"]
    assert rows == [["left", "0.610", "0.520"], ["none", "n/a", "n/a"]]
    assert means[1:] == ["0.610", "0.520"]


def test_memory_is_shown_per_phase_in_mib_with_its_kind(folder: Path) -> None:
    found = written(folder)
    at = found.rows.index(["data", "1.0", "1,234.5"])
    assert found.rows[at + 1] == ["forward", "1.0", "1,234.5"]
    assert ["(MiB)" in cell for cell in found.rows[at - 1]] == [False, True, True]
    assert ["7.0", "0.5%"] in [row[1:] for row in found.rows]
    assert any({"measured", "ledger"} <= {*re.findall(r"\w+", text.lower())} for text in found.text)


def test_the_report_has_step_time_and_the_share_of_waiting(folder: Path) -> None:
    facts = written(folder).facts
    assert {"0.25 s", "4 s"} <= {*facts} and sum(fact.startswith("10.0%") for fact in facts) == 1


def test_the_page_is_complete_in_itself(folder: Path) -> None:
    names = ("prediction", "scores", "curves", "memory_phases")
    assert written(folder).pictures == [(folder / "figures" / f"{name}.png").read_bytes() for name in names]
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html


escaping = report.environment


def unescaped() -> Any:
    return escaping().overlay(autoescape=False)


@promise("checkpoints and run folders", "a report shows a run folder's content as text, never as HTML")
@without("unet3d.report.report.environment", unescaped)
def test_everything_that_is_shown_is_escaped(folder: Path) -> None:
    attack = "<script>alert('&')</script>"
    (folder / "STATUS").write_text(attack)
    (folder / "config.yaml").write_text(f"{attack}\n")
    (folder / "env.json").write_text(json.dumps({attack: attack}))
    write_scores(folder, attack, "b", "c")
    for name in ("phases", "categories"):
        memory = json.loads((folder / "memory.json").read_text())
        values = memory["measured"][name]
        memory["measured"][name] = {attack: next(iter(values.values()))}
        (folder / "memory.json").write_text(json.dumps(memory))
    found = written(folder.rename(folder.with_name("<script>")))
    assert not {"script", "b"} & set(found.tags)
    assert sum(attack in cell for row in found.rows for cell in row) >= 6
    assert sum(attack in text for text in found.text) >= 4
    assert sum("<script>" in text and attack not in text for text in found.text) >= 2


CODES = "\x1b[2J\x07\x9b\u202e\u2028"  # clear a terminal, ring, begin another command, reverse, break the line
FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@promise("what is printed and written", "names and values from ...")
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@pytest.mark.slow
def test_control_codes_in_a_run_folder_reach_no_terminal_page_or_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a name that is not UTF-8. Pictures warn of letters without a shape: here that is an error."""
    folder = folder.rename(folder.with_name(f"run{CODES}" + os.fsdecode(b"\xff")))
    (folder / "STATUS").write_text(f"failed: {CODES}\nexit code 1\n")
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": CODES, CODES: "$\\frac{"}) + f"# {CODES}\n")
    (folder / "env.json").write_text(json.dumps({CODES: CODES}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "val/dice_mean": 0.4, f"val/dice/{CODES}": 0.5, f"a{CODES}": CODES}) + "\n")
    write_scores(folder, f"a{CODES}", "b", "c")
    memory = json.loads((folder / "memory.json").read_text())
    measured = memory["measured"] | {"kind": CODES, "moment": {"words": CODES, "operation": CODES}}
    measured["phases"][CODES] = measured["phases"]["forward"]
    sizes = dict.fromkeys(("params", "optimizer", "inputs", "grads", "activations", "temporaries", "bytes"), MIB)
    measured["layers"] = measured["levels"] = [{"module": CODES, "level": level} | sizes for level in (0, CODES)]
    measured["workspaces"] = [{"module": CODES, "phase": CODES, "bytes": MIB}]
    (folder / "memory.json").write_text(json.dumps(memory | {"measured": measured}))
    out = folder.with_name(f"out{CODES}")
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


def test_a_report_keeps_every_language(folder: Path) -> None:
    (folder / "STATUS").write_text("übung 日本語 🧠 שלום")
    assert any("übung 日本語 🧠 שלום" in text for text in written(folder).text)


def test_a_run_on_a_gpu_shows_workspaces_and_how_sizes_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = json.loads((folder / "memory.json").read_text())
    sizes = {"up1.up": 16 * MIB, "inc.conv1": 2 * MIB, "outc": 0}
    memory["measured"]["workspaces"] = [{"module": m, "phase": "backward", "bytes": size} for m, size in sizes.items()]
    memory["measured"] |= {"kind": "cuda allocated", "reserved_bytes": 2000 * MIB}
    (folder / "memory.json").write_text(json.dumps(memory))
    page = written(folder)
    rows = [row for row in page.rows if row[1:2] == ["backward"]]
    assert rows[0] == ["up1.up", "backward", "16.0"] and len(rows) == len(sizes)
    print_summary(read_run(folder))
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("\n".join(page.text), shown):
        assert "16.0 MiB in backward of up1.up, 2.0 MiB in backward of inc.conv1." in text
        assert text.count("nvidia-smi") == 1


def test_a_run_on_the_cpu_says_nothing_of_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(read_run(folder))
    for text in ("\n".join(written(folder).text), capsys.readouterr().out):
        assert "nvidia-smi" not in text and "orkspace" not in text


def test_a_first_step_that_was_not_measured_is_unknown(folder: Path) -> None:
    """As in a run on CUDA, where a ledger observed it."""
    memory = json.loads((folder / "memory.json").read_text())
    memory["measured"]["phases"] = {"forward": {"steady": 3 * MIB}}
    (folder / "memory.json").write_text(json.dumps(memory))
    (row,) = [row for row in written(folder).rows if row[0] == "forward"]
    assert row[2] == "3.0" and not re.search(r"\d", row[1])


PEAK = {"first": 1, "steady": 7}
ENTRY = {"peak_bytes": 7, "kind": "ledger", "phases": {"data": {"first": 1, "steady": 7}}}
ROW = {"bytes": 7, "params": 7, "grads": 0, "optimizer": 0, "activations": 0, "temporaries": 0, "inputs": 0}
DAMAGED_MEMORY = [
    *("", "{}", "[]", "[[", "\xff", "[" * 9999, '{"a":' * 9999, '{"parameters": ' + "1" * 5000 + "}"),
    *({"measured": value} for value in (None, {}, [], 7, "x", ENTRY | {"phases": {}}, ENTRY | {"phases": []})),
    *({"measured": ENTRY | {"peak_bytes": value}} for value in (None, "x", -1, 0, True, 2.5, 10**400)),
    *(
        {"measured": ENTRY | {"phases": {"data": value}}}
        for value in (None, 7, {}, {"first": 1}, PEAK | {"first": "x"})
    ),
    *({"measured": ENTRY | {"levels": value}} for value in ([], 7, [{}], [{"level": 0}], [ROW], [ROW | {"level": []}])),
    *({"measured": ENTRY | {"layers": value}} for value in ([], 7, [ROW | {"level": 0, "module": 7}])),
    {"measured": ENTRY | {"layers": [ROW | {"level": 0, "module": "inc"}]}},
    *({"measured": ENTRY | {"phase_ends": value}} for value in ({"other": PEAK}, 7)),
    *({"measured": ENTRY | {"phase_categories": value}} for value in ({"data": {}}, {"other": ROW}, [])),
    *({"measured": ENTRY | {name: value}} for name in ("state", "moment", "ledger", "categories") for value in (7, {})),
    *({"parameters": value} for value in (None, "x", 0, -1)),
    {"measured": ENTRY | {"kind": "x" * 1000}},
    {"measured": ENTRY | {"phases": {f"phase {number}": PEAK for number in range(30)}}},
    {"measured": ENTRY | {"layers": [ROW | {"level": 0, "module": "inc"}] * 600}},
    *({"predicted": ENTRY, "error_bytes": value} for value in (None, "x")),
    *({"predicted": ENTRY, "advice": value} for value in (7, {}, {"level": 0, "bytes": 7, "mostly": "x"})),
    {"predicted": ENTRY, "advice": {"level": 0, "bytes": 7, "mostly": "params", "halved_peak_bytes": "x"}},
    *(
        {"predicted": ENTRY, "measured": ENTRY | {"rank_peak_bytes": value}, "error_bytes": 0}
        for value in (7, "x", [None], [10**400], [7] * 10**5)
    ),
]


@promise("Run folders and checkpoints of strangers", "memory.json, metrics.jsonl or env.json ...")
def test_a_damaged_memory_json_ends_no_report(folder: Path) -> None:
    """Of files that are read alike, one is drawn: pictures take long."""
    sound = json.loads((folder / "memory.json").read_text())
    for drawn in ("metrics.jsonl", "scores.csv"):
        (folder / drawn).unlink()
    read = []
    for damage in DAMAGED_MEMORY:
        content = damage if isinstance(damage, str) else json.dumps(sound | damage)
        (folder / "memory.json").write_text(content, encoding="latin-1")
        run = read_run(folder)
        if run.memory not in read:
            read.append(run.memory)
            assert folder.name in written(folder, draws=PICTURES).all, damage
            print_summary(run)
    assert {} in read and len(read) < 20


LINES = [
    "{}",
    "[]",
    "7",
    "",
    "\xff",
    '{"step": null}',
    '{"step": "x"}',
    '{"step": true}',
    '{"step": -5}',
    '{"step": 2.5}',
]
LINES += ['{"step": ' + "9" * 5000 + "}", '{"step": 1' + "0" * 400 + "}", '{"step": 9, "a":' + "[" * 9999, "[" * 99999]
LINES += ['{"step": 9, "train/loss": [1]}', '{"step": 9, "train/loss": {"a": 1}}', '{"step": 9, "train']
ODD_VALUES = ['{"step": 9, "train/loss": "x", "time/step_s": null, "val/dice_mean": "x", "val/dice/left": "x"}']
ODD_VALUES += ['{"step": 9, "train/loss": 1e308, "time/step_s": 1e308}', '{"step": 9, "train/loss": ' + "9" * 400 + "}"]


@promise("Run folders and checkpoints of strangers", "memory.json, metrics.jsonl or env.json ...")
@pytest.mark.parametrize(("lines", "read"), [(LINES, []), (ODD_VALUES, [9, 9, 9])], ids=["no records", "odd values"])
@without("unet3d.run.run_folder.fits", yes, only="no records")
def test_a_damaged_record_is_passed_over(folder: Path, lines: list[str], read: list[int]) -> None:
    path = folder / "metrics.jsonl"
    for drawn in ("memory.json", "scores.csv"):  # their figures take long
        (folder / drawn).unlink()
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, *lines, *others]), encoding="latin-1")
    assert [record["step"] for record in read_run(folder).records] == [1, *read, 2, 2]
    assert folder.name in written(folder, draws=PICTURES if read else ()).all
    print_summary(read_run(folder))
    assert run_folder.forget_after(path.parent, 2, 2) == max([2, *read])
    assert [json.loads(one)["step"] for one in path.read_text().splitlines()] == [1, 2, 2]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_costs_what_it_holds_and_nothing_else(folder: Path, name: str) -> None:
    before = len(written(folder).pictures)
    for path in (folder / name, *folder.glob("figures/[!p]*")):
        path.unlink()
    found = written(folder)
    assert [file for file, text in SHOWN.items() if text not in found.all] == ([name] if name in SHOWN else [])
    drawn = ("metrics.jsonl", "scores.csv", "memory.json", "figures/prediction.png")
    assert len(found.pictures) == before - (name in drawn)
    print_summary(read_run(folder))


@promise("Run folders and checkpoints of strangers", "memory.json, metrics.jsonl or env.json ...")
@pytest.mark.parametrize(("share", "names"), [(0.0, FILES[:-1]), *((0.7, (name,)) for name in FILES[:-1])])
def test_files_that_a_kill_cut_short_end_no_report(folder: Path, names: tuple[str, ...], share: float) -> None:
    half_a_letter = "é".encode()[:1]
    for name in names:
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)] + half_a_letter)
    assert folder.name in written(folder, draws=["score_plot"] if names == ("scores.csv",) else ()).all
    print_summary(read_run(folder))


def test_a_run_that_died_before_its_memory_was_written_has_run(folder: Path) -> None:
    memory = json.loads((folder / "memory.json").read_text())
    (folder / "memory.json").write_text(json.dumps({"parameters": 7, "predicted": memory["measured"]}))
    paragraph = methods_paragraph(read_run(folder))
    died = {text for text in written(folder).text if "predicted" in text.lower()} - {paragraph}
    (folder / "metrics.jsonl").unlink()
    without_a_step = {text for text in written(folder).text if "predicted" in text.lower()}
    assert len(died - without_a_step) == len(without_a_step - died) == 1, "another sentence"


def test_a_run_that_measured_no_step_has_a_report_without_memory(folder: Path) -> None:
    (folder / "memory.json").write_text(
        json.dumps({"parameters": 5, "measured": {"peak_bytes": 0, "kind": "ledger", "phases": {}}})
    )
    found = written(folder)
    assert "MiB" not in found.all and len(found.pictures) == 3


def test_an_empty_run_folder_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(tmp_path).rows == []
    print_summary(read_run(tmp_path))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(str(tmp_path)) and second.endswith(" report.html")


@pytest.mark.parametrize("config", ["a: [1", "- a list", "model: 1", "model: {features: 3}"])
def test_a_damaged_config_is_shown_as_it_is(folder: Path, config: str) -> None:
    (folder / "config.yaml").write_text(config)
    assert what_ran(read_run(folder)) == ""
    assert config in written(folder).text


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
        {"batch": [1, 2], "accumulate": 2**40},
        {"data": {"format": "phantom", "patch": "16x16"}},
        {"data": {"root": 7, "label_map": {"9" * 5000: 1}}},
        {"model": {"features": {"a": 1}}},
        {"optim": [1]},
    ],
    ids=lambda option: str(option)[:40],
)
def test_options_of_another_type_are_passed_over(folder: Path, option: dict[str, Any]) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load((folder / "config.yaml").read_text()) | option))
    run = read_run(folder)
    assert run.settings["seed"] == 7 and "batch" not in option.keys() & run.settings.keys()
    assert folder.name in written(folder).all
    assert what_ran(run) == "" or "optim" in option
    assert [row.name for row in compared_runs.read_runs([folder])] == [folder.name]


@promise("Run folders and checkpoints of strangers", "a config.yaml with texts ...")
@pytest.mark.parametrize("scores", [("inf", "-inf"), ("inf", "inf"), ("nan", "1e400"), ("x", "")], ids=str)
def test_scores_that_are_no_finite_numbers_are_none(folder: Path, scores: tuple[str, str]) -> None:
    rows = [f"{name},{score},0.5" for name, score in zip("ab", scores, strict=True)]
    (folder / "scores.csv").write_text("\n".join(["case,dice/left,iou/left", *rows]))
    found = written(folder, draws=["score_plot"])
    assert ["left", "n/a", "0.500", "0"] in found.rows
    (folder / "scores.csv").unlink()
    last = {"step": 3, "val/dice_mean": "inf", "val/dice/left": scores[0], "val/dice/right": scores[1]}
    (folder / "metrics.jsonl").write_text(json.dumps(last))
    assert ["mean of classes", "n/a"] in [row[:2] for row in written(folder).rows]


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


def test_a_network_of_the_users_own_is_named_by_its_path(folder: Path) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"] |= {"path": "mine.nets:small", "features": []}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    what = what_ran(read_run(folder))
    assert "mine.nets:small" in what and "phantom" in what and what in written(folder).text


ADVICE = {"level": 1, "bytes": 600 * MIB, "mostly": "activations"}


@pytest.mark.parametrize("half", [{}, {"halved_peak_bytes": 900 * MIB, "override": "model.features=[8,8]"}])
def test_advice_is_shown_with_and_without_what_half_the_width_needs(folder: Path, half: dict[str, Any]) -> None:
    memory = json.loads((folder / "memory.json").read_text())
    memory |= {"predicted": memory["measured"], "advice": {"halved_peak_bytes": None} | ADVICE | half}
    (folder / "memory.json").write_text(json.dumps(memory))
    (line,) = [text for text in written(folder).text if "40%" in text]
    assert all(part in line for part in ("600.0", "1,500.0 MiB", "level 1", "activations"))
    assert ("model.features=[8,8]" in line) == bool(half)


@promise("What scripts rely on", "metrics.csv", "metrics.jsonl as a table")
def test_metrics_csv_is_metrics_jsonl_as_a_table(folder: Path) -> None:
    written(folder)
    with (folder / "metrics.csv").open(newline="") as file:
        first, second, third = csv.DictReader(file)
    assert list(first)[:4] == ["step", "train/loss", "time/step_s", "time/data_wait_s"]
    assert (first["step"], first["train/loss"], first["val/dice/left"]) == ("1", "0.5", "")
    assert second["train/loss"] == "nan"
    assert (third["train/loss"], third["val/dice/left"], third["val/dice/none"]) == ("", "0.61", "")


FORMULAS = ("=1+1", "+cmd|' /C calc'!A0", "-1+2", "@SUM(A1)", "'=x", "''-x", "-", "--1")
FORMULAS += ("＝1+1", "＋1", "－1", "＠SUM(A1)")  # noqa: RUF001 (East Asian spreadsheets read letters of full width)
TEXTS = ("a=1", "'a", "", "-1.5", "-1", "+2.5e-3", "-1E-05", "-inf", "+nan", "1-2")


@promise(
    "what is printed and written",
    "no text in a CSV file is a formula, also by signs of full width: where it would be one, it begins with an "
    "apostrophe",
)
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@without("unet3d.base.files.FORMULA", NEVER)
def test_no_cell_of_a_table_is_a_formula_and_numbers_are_as_they_were(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, text: text}) + "\n" for step, text in enumerate((*FORMULAS, *TEXTS)))
    )
    written(folder)
    with (folder / "metrics.csv").open(newline="") as file:
        (_, *columns), *rows = csv.reader(file)
    assert columns == [row[number + 1] for number, row in enumerate(rows)]
    assert columns == [f"'{text}" for text in FORMULAS] + list(TEXTS)


@promise("what is printed and written", "no text in a ...")
@without("unet3d.base.files.FORMULA", NEVER)
def test_names_of_cases_are_read_from_a_table_of_scores_as_they_were(folder: Path) -> None:
    names = (*FORMULAS, *TEXTS)
    scores = [CaseScore(name, (0.25,), (-0.5,), (None,)) for name in names]
    (folder / "scores.csv").write_text(csv_text(scores, ("background", "=organ")))
    with (folder / "scores.csv").open(newline="") as file:
        assert [row["case"] for row in csv.DictReader(file)] == [f"'{text}" for text in FORMULAS] + list(TEXTS)
    found = read_run(folder).scores
    assert [row["case"] for row in found] == list(names)
    assert {(row["dice/=organ"], row["iou/=organ"], row["hd95_mm/=organ"]) for row in found} == {(0.25, -0.5, None)}


@pytest.mark.slow
def test_the_report_is_a_function_of_the_folder(folder: Path) -> None:
    before = {name: (folder / name).read_bytes() for name in FILES}
    first = report.write_report(read_run(folder)).read_bytes()
    assert report.write_report(read_run(folder)).read_bytes() == first
    assert {name: (folder / name).read_bytes() for name in FILES} == before


def test_a_report_is_whole_or_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "report.html").write_text("as it was")

    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if target.name == "report.html":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written(folder)
    assert (folder / "report.html").read_text() == "as it was"


# --- the terminal


def test_the_closing_lines_fit_80_columns_without_colours(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    write_scores(folder, "left_hippocampus_" * 8, "[red]none[/red]", "right")
    folder = folder.rename(folder.with_name("[red]" + "a_long_name" * 9))
    print_summary(read_run(folder))
    *lines, last, there = capsys.readouterr().out.splitlines()
    assert there.endswith(" scores.csv, memory.json, figures")
    assert max(map(len, lines)) <= 80
    assert not re.search(r"\x1b", "".join(lines))
    cells = [line.split() for line in lines]
    assert ["[red]none[/red]", "n/a", "n/a", "n/a", "0"] in cells
    assert ["right", "0.500", "0.400", "n/a", "1"] in cells
    assert ["0.650", "0.550", "1.50"] in [line[-3:] for line in cells]
    assert ["data", "1.0", "1,234.5"] in cells
    assert any("ledger" in line for line in lines)
    assert last.endswith(f" {folder}")


def test_the_closing_lines_cannot_command_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(read_run(folder.rename(folder.with_name(f"run{CODES}\udcff"))))
    printed = capsys.readouterr().out
    assert r"run\x1b[2J\x07\x9b\u202e\u2028\udcff" in printed and not FORBIDDEN.search(printed)


def test_the_closing_lines_need_no_more_than_ascii(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    print_summary(read_run(folder))
    sys.stdout.flush()
    assert str(folder).encode() in file.getvalue()


# --- cases, the split, and where all of it comes from


def test_each_case_is_shown_and_where_there_are_many_they_are_folded(folder: Path) -> None:
    found = written(folder)
    (at,) = [number for number, row in enumerate(found.rows) if row[0] == "a"]
    assert [row[:3] for row in found.rows[at : at + 2]] == [["a", "0.700", "0.900"], ["b", "0.700", "0.700"]]
    names = [f"{metric} {name}" for metric in ("Dice", "IoU", "HD95 (mm)") for name in ("left", "none", NASTY)]
    assert found.rows[at - 1][2:] == names
    head, *rows = (folder / "scores.csv").read_text().splitlines()
    (folder / "scores.csv").write_text("\n".join([head, *(f"{number}{rows[0]}" for number in range(13))]))
    many = written(folder)
    assert many.tags.count("details") == found.tags.count("details") + 1
    assert any(re.match(r"13\b", text) for text in many.text)


def test_the_report_says_how_the_run_was_made(folder: Path) -> None:
    (folder / "overrides.yaml").write_text('["data.root=my data", "amp=true", "resume=auto", "steps=9"]')
    (folder / "split.json").write_text(json.dumps({"train": ["a", "b"], "val": ["<c>"], "x": 7}))
    text = written(folder).text
    command = next(line for line in text if "data.root=my data" in line)
    began, resumed = command.splitlines()
    assert began == f"python -m unet3d train 'data.root=my data' amp=true hydra.run.dir={folder.name}"
    assert resumed == f"python -m unet3d train resume={folder.name} steps=9"
    for names, parts in (("a, b", ("2", "training")), ("<c>", ("1", "validation"))):
        title = text[text.index(names) - 1]
        assert all(part in title.split() for part in parts)


def test_the_best_worst_and_median_case_are_shown_from_the_folder_alone(folder: Path) -> None:
    paths = [folder / "figures" / f"prediction_{role}.png" for role in ("best", "median", "worst")]
    for number, path in enumerate(paths):
        Image.new("RGB", (4, 4 + number)).save(path)
    (folder / "figures" / "prediction.png").unlink()
    assert written(folder).pictures[:3] == [path.read_bytes() for path in paths]


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
    (git / "HEAD").write_text(SHA)
    assert run_folder.commit(tmp_path) == SHA
    for text in ("x" * 100, "x" * 9000):
        (git / "HEAD").write_text(text)
        assert run_folder.commit(tmp_path) is None
    (git / "HEAD").unlink()
    os.mkfifo(git / "HEAD")
    assert run_folder.commit(tmp_path) is None


def test_the_commit_of_a_second_work_tree_is_its_own(tmp_path: Path) -> None:
    main = tmp_path / "main" / ".git"
    (main / "worktrees" / "two").mkdir(parents=True)
    (main / "worktrees" / "two" / "commondir").write_text("../..\n")
    (main / "worktrees" / "two" / "HEAD").write_text("ref: refs/heads/two\n")
    (main / "packed-refs").write_text(f"{SHA} refs/heads/two\n")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / ".git").write_text(f"gitdir: {main / 'worktrees' / 'two'}\n")
    assert run_folder.commit(tmp_path / "two") == SHA
