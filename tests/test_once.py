"""A run does each of these once: it draws a figure, and reads memory.json."""

import json
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from training import TINY, status, train

from unet3d.report import report
from unet3d.run.record import RunRecord, read_run


def count() -> None:
    """Note each file that is replaced and each text like memory.json that is parsed; keep the record of the page."""
    replace = os.replace
    loads = json.loads
    write_page = report.write_page

    def note(line: str) -> None:
        with Path("calls.txt").open("a") as file:
            file.write(f"{line}\n")

    def noted_replace(source: Any, target: Any, **named: Any) -> None:
        replace(source, target, **named)
        note(f"write {Path(target).name}")

    def noted_loads(text: Any, **named: Any) -> Any:
        if '"peak_bytes"' in str(text):
            note("parse memory.json")
        return loads(text, **named)

    def noted_page(record: RunRecord) -> Path:
        Path("record.pickle").write_bytes(pickle.dumps(record))
        return write_page(record)

    os.replace = noted_replace
    json.loads = noted_loads
    report.write_page = noted_page


def counts(place: Path) -> Counter[str]:
    return Counter((place / "calls.txt").read_text().splitlines())


@pytest.mark.slow
def test_a_run_draws_each_figure_once_and_parses_no_memory_json(tmp_path: Path) -> None:
    done = train(tmp_path, *TINY, "data.phantom.cases=6", "hydra.run.dir=run", hook=count, frills=True)
    assert done.code == 0, done.err
    calls = counts(tmp_path)
    figures = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert {"curves.png", "scores.png", "memory_phases.png", "memory_layers.svg", "memory_timeline.png"} <= figures
    assert {name: calls[f"write {name}"] for name in figures} == dict.fromkeys(figures, 1)
    assert calls["write memory.json"] > 1 and calls["parse memory.json"] == 0
    assert calls["write report.html"] == 1
    record = pickle.loads((tmp_path / "record.pickle").read_bytes())
    assert record == read_run(tmp_path / "run"), "what is handed on is what the files say"


def test_a_resumed_run_parses_memory_json_once_and_keeps_its_first_step(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished.parent / "data", tmp_path / "data")
    done = train(tmp_path, "resume=run", "steps=6", hook=count)
    assert done.code == 0 and status(tmp_path / "run").startswith("done"), done.err
    assert counts(tmp_path)["parse memory.json"] == 1
    before, after = (read_run(folder).memory["measured"] for folder in (finished, tmp_path / "run"))
    first, again = ([peaks["first"] for peaks in entry["phases"].values()] for entry in (before, after))
    assert first == again
