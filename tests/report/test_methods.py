"""The paragraph for a methods section says what the run's files say."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from training import yaml_of

from unet3d.config import compose
from unet3d.config.schema import FACTS, Config, Model
from unet3d.report.report import methods_paragraph
from unet3d.run.record import read_run

MIB = 2**20
RECIPE = (
    *("model=unet_tiny", "optim=sgd", "data.patch=[24,16,16]", "batch=2", "accumulate=3", "amp=true", "ckpt=2"),
    *("optim.average=0.9", "data.fold=1", "inference.mirror=true", "inference.overlap=0.25", "loss=ce", "seed=7"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path)
    return tmp_path


def write_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml_of(*RECIPE))
    env = {"python": "3.12.1", "torch": "9.8.7", "monai": "1.2", "unet3d": "0.5", "commit": "ab" * 20, "gpu": "H100"}
    (tmp_path / "env.json").write_text(json.dumps(env))
    (tmp_path / "metrics.jsonl").write_text('{"step": 40, "train/loss": 1.0}\n')
    (tmp_path / "split.json").write_text(json.dumps({"train": ["a", "b", "c"], "val": ["d"]}))
    peak = {"peak_bytes": 1500 * MIB, "kind": "ledger", "phases": {"forward": {"first": 1, "steady": 2}}}
    allocated = peak | {"peak_bytes": 1501 * MIB, "kind": "cuda allocated", "reserved_bytes": 1600 * MIB}
    memory = {"parameters": 1402803, "predicted": peak, "measured": allocated, "error_bytes": 5}
    (tmp_path / "memory.json").write_text(json.dumps(memory))


def test_it_names_network_patch_recipe_versions_and_peaks(folder: Path) -> None:
    text = methods_paragraph(read_run(folder))
    named = [
        *(
            "1,402,803 parameters",
            "on 3 cases",
            "1 other was held out",
            "the second of 5 folds",
            "24x16x16",
            "40 of 150 planned optimizer steps",
            "6 patches",
        ),
        *("cross-entropy", "SGD", "mixed precision", "ckpt=2", "decay 0.9", "25%", "mirrorings", "seed 7"),
        *(
            "1,500.0 MiB predicted (ledger)",
            "1,501.0 MiB measured (cuda allocated)",
            "1,600.0 MiB measured as reserved",
        ),
        *("unet3d 0.5 (commit abababababab)", "PyTorch 9.8.7", "MONAI 1.2", "Python 3.12.1", "H100"),
    ]
    assert not [word for word in named if word not in text] and "\n" not in text


@pytest.mark.parametrize("name", ["env.json", "split.json", "memory.json"])
def test_what_is_missing_is_left_out(folder: Path, name: str) -> None:
    (folder / name).unlink()
    text = methods_paragraph(read_run(folder))
    assert "24x16x16" in text and "None" not in text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_folder_of_no_training_has_none(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    assert methods_paragraph(read_run(folder)) == ""


BESIDE: dict[str, dict[str, Any]] = {  # what else an option needs to count
    "model.regions": {"model.regions": [[1], [2]], "model.regions_class_order": [1, 2]},
    "model.regions_class_order": {"model.regions": [[1, 2, 3], [2, 3]], "model.regions_class_order": [1, 2]},
    "model.blocks": {"model.downsampling": "strided_conv"},
    "model.padding": {"data.patch": [44, 44, 44]},
    "model.groups": {"model.norm": "group"},
    "model.negative_slope": {"model.activation": "leaky_relu"},
    "data.regions": {"data.regions": {"all": [1, 2], "core": [2]}, "data.regions_class_order": [1, 2]},
    "data.regions_class_order": {
        "data.regions": {"whole": [1, 2, 3], "core": [2, 3]},
        "data.regions_class_order": [1, 2],
    },
    "data.label_map": {"data.classes": ["b", "x", "y"]},
    "data.folds": {"data.fold": 0},
    "data.semi": {"data.sparse": [5, 5, 3]},
    "data.scored": {"data.sparse": [5, 5, 3], "data.semi": True},
    "data.sparse_folds": {"data.sparse": [5, 5, 3], "data.semi": True, "data.sparse_fold": 0},
    "data.sparse_fold": {"data.sparse": [5, 5, 3], "data.semi": True},
    "data.augment.elastic_grid": {"data.augment.elastic": 4.0},
    "data.augment.low_resolution": {"data.augment.low_resolution_p": 0.2},
    "optim.betas": {"optim.name": "adam"},
    "optim.momentum": {"optim.name": "sgd"},
    "optim.warmup": {"optim.schedule": "one_cycle"},
    "optim.init_lr": {"init": "net.pt"},
    "optim.init_names": {"init": "net.pt", "optim.init_lr": 0.1},
    "inference.mirror": {"data.augment.mirror": [0]},
    "data.augment.rotation": {"data.augment.spatial_p": 0.3},
    "amp_dtype": {"amp": True},
}
OTHERS: dict[str, Any] = {  # values that no rule of the schema gives
    "model.path": "mine:Net",
    "model.regions": [[1, 2], [2]],
    "model.decoder": [8, 8],
    "model.blocks": [1, 1, 1],
    "model.kernels": [3, 3, 1],
    "model.strides": [2, 2, 1],
    "data.classes": ["b", "x", "y"],
    "data.label_map": {1: [1, 2], 2: 4},
    "data.regions": {"whole": [1, 2], "core": [2]},
    "data.sparse": [5, 5, 3],
    "data.transforms": ["mine:darken"],
    "loss.path": "mine:loss",
    "loggers": ["mine:Logger"],
    "optim.init_names": ["inc"],
    "inference.batch": 2,
    "ckpt": 2,
    "workers": 1,
    "budget": "8GiB",
    "data.cache": "off",
    "data.split": "split.json",
    "data.patch": [32, 32, 32],
    "model.features": [4, 8, 16],
    "data.augment.mirror": [1],
    "data.regions_class_order": [1, 3],
    "model.regions_class_order": [1, 3],
    "model.groups": 4,
    "data.spacing": [1.0, 1.0, 2.5],
    "data.augment.low_resolution": [0.6, 1.0],
    "loss.weights": [1.0, 2.5],
    "sweep": ["seed=1,2"],
}


def other_value(name: str, value: Any) -> Any:
    """Return another value that the option may have."""
    if name in OTHERS:
        return OTHERS[name]
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


@pytest.fixture(scope="module")
def told() -> Callable[[str], str]:
    """Return a function that returns the paragraph of a run with these options, as JSON."""
    with tempfile.TemporaryDirectory() as place:
        write_folder(Path(place))
        run = read_run(Path(place))

    @functools.cache
    def paragraph(options: str) -> str:
        settings = compose.to_plain(Config(steps=40, model=Model(features=[8, 16, 32])))
        for key, value in json.loads(options).items():
            *parts, last = key.split(".")
            functools.reduce(dict.__getitem__, parts, settings)[last] = value
        text = methods_paragraph(dataclasses.replace(run, settings=settings))
        assert text and "None" not in text
        return text

    return paragraph


@pytest.mark.parametrize("name", FACTS)
def test_an_option_changes_it_or_is_none_of_its_business(name: str, told: Callable[[str], str]) -> None:
    beside = BESIDE.get(name, {})
    default = compose.flat(compose.to_plain(Config())).get(name)
    changed = beside | {name: other_value(name, beside.get(name, default))}
    is_told = told(json.dumps(beside)) != told(json.dumps(changed))
    assert is_told is not bool(FACTS[name].get("untold")), "say it in methods.txt, or why not in UNTOLD"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("model.path=mine:Net",), "The network mine:Net"),
        (("data.spacing=[1,1,2.5]", "data.groups='^p'"), "1x1x2.5 mm"),
        (("data.groups='^p'",), "all cases of a group in one part"),
        (("recompute=tiles",), "recompute=tiles"),
        (("data.sparse=[5,5,3]", "data.semi=true"), "labels of 5, 5 and 3 slices across x, y and z"),
        (("model.kernels=[[3,3,1],[3,3,3]]", "model.features=[4,8]", "data.patch=[16,16,16]"), "3x3x1 3x3x3"),
    ],
)
def test_it_follows_the_options(folder: Path, words: tuple[str, ...], wanted: str) -> None:
    (folder / "config.yaml").write_text(yaml_of("model=unet_tiny", *words))
    assert wanted in methods_paragraph(read_run(folder))


def test_it_names_residual_blocks_and_regions(folder: Path) -> None:
    words = [
        "model=nnunet_resenc_m",
        "data.patch=[64,64,64]",
        "data.regions={organ:[1,2],lesion:[2]}",
        "data.regions_class_order=[1,2]",
    ]
    (folder / "config.yaml").write_text(yaml_of(*RECIPE[1:], *words))
    text = methods_paragraph(read_run(folder))
    assert "1-3-4-6-6-6 blocks" in text and "regions" in text


def test_it_names_regions_that_the_options_do_not(folder: Path) -> None:
    """They come from nnU-Net's dataset.json, and memory.json counts them."""
    assert "regions" not in methods_paragraph(read_run(folder))
    memory = json.loads((folder / "memory.json").read_text())
    (folder / "memory.json").write_text(json.dumps(memory | {"regions": 3}))
    assert "cross-entropy of overlapping regions" in methods_paragraph(read_run(folder))


def test_it_names_the_rule_that_was_used_and_what_dataset_json_gave(folder: Path) -> None:
    zscore = {"kind": "zscore", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}
    ct = {"kind": "ct", "low": -950.5, "high": 300.0, "mean": 40.0, "std": 100.0}
    about = {"classes": ["background", "x", "y"], "channels": ["MR"], "intensity": [zscore], "ignore": 3}
    (folder / "split.json").write_text(json.dumps({"train": ["a"], "val": ["b"], "data": about}))
    text = methods_paragraph(read_run(folder))
    said = [
        "1 input channel, 3 outputs",
        "in each volume; ",
        "The classes were background, x and y.",
        "the label 3 were",
    ]
    assert not [words for words in said if words not in text] and "CT" not in text
    both = about | {"channels": ["CT", "PET"], "intensity": [ct, zscore]}
    (folder / "split.json").write_text(json.dumps({"train": ["a"], "val": ["b"], "data": both}))
    text = methods_paragraph(read_run(folder))
    assert "clipped to -950.5 to 300" in text and "foreground (CT) and" in text and "in each volume (PET)" in text
    (folder / "split.json").write_text(json.dumps({"train": ["a"], "data": both | {"intensity": [{"kind": 1}]}}))
    assert "others: to mean 0" in methods_paragraph(read_run(folder))


def test_it_says_that_a_network_was_pretrained_and_what_of_it_was_frozen(folder: Path) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"init": "/home/name/net.pt", "optim": config["optim"] | {"init_lr": 0.0, "init_names": ["inc", "down1"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert "pre-trained weights, of net.pt; inc and down1 were frozen." in methods_paragraph(read_run(folder))
    record = {"init": "x", "loaded": ["t"] * 44, "by class": {"outc.weight": [0, 1], "outc.bias": [0, 1]}, "new": []}
    (folder / "init.json").write_text(json.dumps(record))
    text = methods_paragraph(read_run(folder))
    assert "44 of 46 tensors, and 2 of the output layers by the names of classes" in text and "/home" not in text
