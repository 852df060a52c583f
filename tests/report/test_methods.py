"""The paragraph for a methods section says what the run's files say. test_report.py has whole ones."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import cells

from unet3d.config import compose
from unet3d.config.schema import FACTS, Config, Model
from unet3d.report.report import methods_paragraph
from unet3d.run.record import RunRecord, read_run

RUN = Path(__file__).parents[1] / "golden" / "runs" / "finished"
# What else an option needs to count.
BESIDE = """
model.regions: {model.regions: [[1], [2]], model.regions_class_order: [1, 2]}
model.regions_class_order: {model.regions: [[1, 2, 3], [2, 3]], model.regions_class_order: [1, 2]}
model.blocks: {model.downsampling: strided_conv}
model.padding: {data.patch: [44, 44, 44]}
model.groups: {model.norm: group}
model.negative_slope: {model.activation: leaky_relu}
data.regions: {data.regions: {all: [1, 2], core: [2]}, data.regions_class_order: [1, 2]}
data.regions_class_order: {data.regions: {whole: [1, 2, 3], core: [2, 3]}, data.regions_class_order: [1, 2]}
data.label_map: {data.classes: [b, x, y]}
data.folds: {data.fold: 0}
data.semi: {data.sparse: [5, 5, 3]}
data.scored: {data.sparse: [5, 5, 3], data.semi: true}
data.sparse_folds: {data.sparse: [5, 5, 3], data.semi: true, data.sparse_fold: 0}
data.sparse_fold: {data.sparse: [5, 5, 3], data.semi: true}
data.augment.elastic_grid: {data.augment.elastic: 4.0}
data.augment.low_resolution: {data.augment.low_resolution_p: 0.2}
optim.betas: {optim.name: adam}
optim.momentum: {optim.name: sgd}
optim.warmup: {optim.schedule: one_cycle}
optim.init_lr: {init: net.pt}
optim.init_names: {init: net.pt, optim.init_lr: 0.1}
inference.mirror: {data.augment.mirror: [0]}
data.augment.rotation: {data.augment.spatial_p: 0.3}
amp_dtype: {amp: true}
"""
# Values that no rule of the schema gives.
OTHERS = """
model.path: mine:Net
model.regions: [[1, 2], [2]]
model.decoder: [8, 8]
model.blocks: [1, 1, 1]
model.kernels: [3, 3, 1]
model.strides: [2, 2, 1]
data.classes: [b, x, y]
data.label_map: {1: [1, 2], 2: 4}
data.regions: {whole: [1, 2], core: [2]}
data.sparse: [5, 5, 3]
data.transforms: ["mine:darken"]
loss.path: mine:loss
loggers: ["mine:Logger"]
optim.init_names: [inc]
inference.batch: 2
ckpt: 2
workers: 1
budget: 8GiB
data.cache: "off"
data.split: split.json
data.patch: [32, 32, 32]
model.features: [4, 8, 16]
data.augment.mirror: [1]
data.regions_class_order: [1, 3]
model.regions_class_order: [1, 3]
model.groups: 4
data.spacing: [1.0, 1.0, 2.5]
data.augment.low_resolution: [0.6, 1.0]
loss.weights: [1.0, 2.5]
sweep: ["seed=1,2"]
"""
# Options | what the paragraph says of them.
SAID = """
model.path: mine:Net                                | The network mine:Net (
data.spacing: [1.0, 1.0, 2.5], data.groups: ^p      | resampled to 1x1x2.5 mm
data.groups: ^p                                     | all cases of a group in one part
recompute: tiles                                    | recompute=tiles
data.sparse: [5, 5, 3], data.semi: true             | labels of 5, 5 and 3 slices across x, y and z
model.kernels: [[3, 3, 1], [3, 3, 3], [3, 3, 3]]    | kernels 3x3x1 3x3x3 3x3x3
"""


@functools.cache
def finished() -> RunRecord:
    """A run on a GPU, of data without rules of their own."""
    run = read_run(RUN)
    return dataclasses.replace(run, data={}, environment={**run.environment, "gpu": "H100"})


@functools.cache
def said(options: str) -> str:
    """The paragraph of a run with these options, as JSON."""
    settings = compose.to_plain(Config(steps=40, model=Model(features=[8, 16, 32])))
    for key, value in json.loads(options).items():
        *parts, last = key.split(".")
        functools.reduce(dict.__getitem__, parts, settings)[last] = value
    text = methods_paragraph(dataclasses.replace(finished(), settings=settings))
    assert text and "None" not in text
    return text


def other_value(name: str, value: Any) -> Any:
    """Return another value that the option may have."""
    others = yaml.safe_load(OTHERS)
    if name in others:
        return others[name]
    about = FACTS[name]
    if about["among"]:
        return next(choice for choice in about["among"] if choice != value)
    if isinstance(value, list):
        return [*map(functools.partial(other_number, about), value)] if value else ["x"]
    if isinstance(value, bool):
        return not value
    return other_number(about, value) if about["low"] is not None or isinstance(value, float) else "x"


def other_number(about: Mapping[str, Any], value: Any) -> Any:
    if value is None:
        return 0.5 if about["high"] is not None and about["high"] <= 1 else 2
    more = value + 1 if isinstance(value, int) else value * 1.1 + 0.01
    return more if about["high"] is None or more <= about["high"] else value / 2


@pytest.mark.parametrize("name", FACTS)
def test_an_option_changes_it_or_is_none_of_its_business(name: str) -> None:
    beside = yaml.safe_load(BESIDE).get(name, {})
    default = compose.flat(compose.to_plain(Config())).get(name)
    changed = beside | {name: other_value(name, beside.get(name, default))}
    is_told = said(json.dumps(beside)) != said(json.dumps(changed))
    assert is_told is not bool(FACTS[name].get("untold")), "say it in methods.txt, or why not in UNTOLD"


@pytest.mark.parametrize(("options", "words"), cells(SAID))
def test_it_follows_the_options(options: str, words: str) -> None:
    assert words in said(json.dumps(yaml.safe_load(f"{{{options}}}")))


@pytest.mark.parametrize("missing", ["environment", "split", "memory"])
def test_what_is_missing_is_left_out(missing: str) -> None:
    text = methods_paragraph(dataclasses.replace(finished(), **{missing: {}}))
    assert "64x64x32" in text and "None" not in text
