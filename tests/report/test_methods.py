"""The paragraph for a methods section says what the run's files say."""

import json
from pathlib import Path

import pytest
from training import yaml_of

from unet3d.report.methods import methods_paragraph
from unet3d.report.record import read_run

MIB = 2**20
RECIPE = (
    *("model=unet_tiny", "optim=sgd", "data.patch=[24,16,16]", "batch=2", "accumulate=3", "amp=true", "ckpt=2"),
    *("optim.average=0.9", "data.fold=1", "inference.mirror=true", "inference.overlap=0.25", "loss=ce", "seed=7"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(yaml_of(*RECIPE))
    env = {"python": "3.12.1", "torch": "9.8.7", "monai": "1.2", "unet3d": "0.5", "commit": "ab" * 20, "gpu": "H100"}
    (tmp_path / "env.json").write_text(json.dumps(env))
    (tmp_path / "metrics.jsonl").write_text('{"step": 40, "train/loss": 1.0}\n')
    (tmp_path / "split.json").write_text(json.dumps({"train": ["a", "b", "c"], "val": ["d"]}))
    peak = {"peak_bytes": 1500 * MIB, "kind": "ledger", "phases": {"forward": {"first": 1, "steady": 2}}}
    allocated = peak | {"peak_bytes": 1501 * MIB, "kind": "cuda allocated", "reserved_bytes": 1600 * MIB}
    memory = {"parameters": 1402803, "predicted": peak, "measured": allocated, "error_bytes": 5}
    (tmp_path / "memory.json").write_text(json.dumps(memory))
    return tmp_path


def test_it_names_network_patch_recipe_versions_and_peaks(folder: Path) -> None:
    text = methods_paragraph(read_run(folder))
    named = [
        *(
            "1,402,803 parameters",
            "on 3 cases",
            "1 others",
            "fold 1 of 5",
            "24x16x16",
            "40 optimizer steps",
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


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("model.path=mine:Net",), "The network mine:Net"),
        (("data.spacing=[1,1,2.5]", "data.groups='^p'"), "1.0x1.0x2.5 mm"),
        (("data.groups='^p'",), "all cases of a group in one part"),
        (("recompute=tiles",), "recompute=tiles"),
        (("data.sparse=[5,5,3]", "data.semi=true"), "labels of some slices"),
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
