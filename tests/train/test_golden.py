"""A training whose course is known: what changes it changes results."""

import json
from pathlib import Path

import pytest
from promises import promise
from training import train

RUN = [
    *("model=unet_tiny", "model.features=[8,16]", "data.patch=[24,24,16]", "data.phantom.shape=[32,32,20]"),
    *("data.phantom.cases=6", "batch=2", "steps=60", "eval_every=0", "device=cpu", "workers=0"),
]
FIRST = [2.8547201, 2.7626638, 2.8384435]  # losses, the same on every CPU but for the order of sums
LATER = {20: 1.77118, 40: 1.59962, 60: 1.53201}  # whose effect grows from step to step


@promise("Training", "a change of code that changes results", "losses of a known training differ from the stored ones")
@pytest.mark.slow
def test_a_training_takes_the_course_it_always_took(tmp_path: Path) -> None:
    done = train(tmp_path, *RUN, "hydra.run.dir=run")
    assert done.code == 0, done.err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    assert [losses[step] for step in (1, 2, 3)] == pytest.approx(FIRST, abs=1e-5)
    assert {step: losses[step] for step in LATER} == pytest.approx(LATER, abs=1e-3)
    (dice,) = [record["val/dice_mean"] for record in records if "val/dice_mean" in record]
    assert dice == pytest.approx(0.4278, abs=5e-3)
