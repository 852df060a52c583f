"""Wrong options are answered in one line that names the key and the remedy."""

import re
import shlex
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from guards import none, nothing, without
from omegaconf import OmegaConf
from promises import promise

from unet3d.base import files
from unet3d.base.errors import UserError
from unet3d.config import compose, rules
from unet3d.config.compose import read_plan
from unet3d.config.schema import FACTS, Config
from unet3d.config.words import not_a_flag

# Words that the one line must hold, as often as they stand here.
WRONG = {
    "amp=maybe": ["amp", "maybe", "bool"],
    "ckpt=two": ["ckpt=two", "8", "0", "2"],
    "ckpt=-1": ["ckpt=-1", "0"],
    "ckpt=1": ["ckpt=1", "0", "2"],
    "ckpt=999": ["ckpt=999", "8"],
    "ckpt=auto": ["ckpt=auto", "recompute=auto", "budget="],
    "chkpt=2": ["chkpt", "ckpt"],
    "batch=0": ["batch=0", ">= 1"],
    "seed=-1": ["seed=-1", ">= 0"],
    "model=unet_smal": ["model=unet_smal", "unet_small", "unet_small", "cicek2016"],
    "modle=unet": ["modle", "model"],
    "experiment=hipocampus": ["experiment=hipocampus", "hippocampus", "hippocampus", "hippocampus_nnunet"],
    "data=decathlon": ["data=decathlon", "data.root=PATH"],
    "data.pach=[1,1,1]": ["data.pach", "data.patch"],
    "data.patch=[64,64]": ["data.patch=[64, 64]"],
    "data.patch=[1,1,1]": ["data.patch=[1, 1, 1]", "model.norm=instance", "model.norm=group"],
    "data.patch=3": ["data.patch", "data.patch=[1,2,3]"],
    "data.augment.scaling=[2,1]": ["data.augment.scaling=[2.0, 1.0]"],
    "data.fold=5": ["data.fold=5", "data.folds=5", "0", "4"],
    "model.features=[]": ["model.features=[]", "[16,32,64]"],
    "model.features=[8,x]": ["model.features[1]", "x", "Integer"],
    "model.decoder=[8]": ["model.decoder", "1", "4", "3"],
    "model.norm=bacth": ["model.norm=bacth", "instance", "batch", "batch", "group", "none"],
    "loss.name=dise": ["loss.name=dise", "dice_ce", "dice", "dice"],
    "loss.path=mypkg": ["loss.path=mypkg", "loss.path=mypkg.parts:mine"],
    "loggers=[a.b:C,d]": ["loggers=d", "loggers=mypkg.parts:mine"],
    "optim.betas=[0.9]": ["optim.betas=[0.9]"],
    "data.spacing=[1,1]": ["data.spacing=[1.0, 1.0]"],
    "data.phantom.shape=[32,32]": ["data.phantom.shape=[32, 32]"],
    "model.kernels=2": ["model.kernels=2"],
    "model.strides=[[2,2],2,2]": ["model.strides", "[2, 2]"],
    "optim.lr=fast": ["optim.lr", "fast", "Float"],
    "optim.lr=nan": ["optim.lr=nan", ">= 0"],
    "loss.weights=[1,-1]": ["loss.weights=[1.0, -1.0]", ">= 0"],
    "budget=lots": ["budget=lots"],
    "lr=1": ["lr", "optim.lr"],
    "data.batch_size=1": ["data.batch_size", "data", "root", "patch"],
    "+dataset.path=1": ["dataset.path", "--help"],
    "wandb.team=x": ["wandb.team", "mode", "project", "entity", "private"],
    "loss.dice=1": ["loss.dice", "name", "path", "weights", "batch_dice"],
    "data.q=1": ["data.q", "augment", "phantom", "format", "root", "transforms"],
    "output_dir=x": ["output_dir", "--help"],
    "data.root=~/a": ["data.root=~/a", "data.root=$HOME/a"],
    "resume=~": ["resume=~", "resume=$HOME"],
    "data.root=~other/a": ["data.root=~other/a", "\"data.root='~other/a'\""],
    "hydra.run.dir=/x/rss_slab=0": ["hydra.run.dir=/x/rss_slab=0", "\"hydra.run.dir='/x/rss_slab=0'\""],
    "data.classes=[a,1_2": ["data.classes=[a,1_2", "'data.classes=[a,b]'"],
    "data.patch=[16,16": ["data.patch=[16,16", "'data.patch=[1,2,3]'"],
    "+chkpt=2": ["chkpt", "ckpt"],
    "+model.depth=2": ["model.depth"],
    "model=foo": ["model=foo", "cicek2016", "unet_small"],
    "amp": ["amp", "amp=VALUE"],
    "/data/brats": ["/data/brats", "data.root=/data/brats"],
    "data.patch=64": ["data.patch", "data.patch=[1,2,3]"],
    "amp=true,false": ["amp=true,false"],
    "model.features=[" + "9" * 30 + "]": ["model.features", "4,294,967,296"],
    "budget=" + "9" * 5000 + "GiB": ["budget", "budget=8GiB"],
    "budget=8G": ["budget=8G", "KiB", "MiB", "GiB", "TiB"],
    "budget=1,5GiB": ["budget=1,5GiB", "point", "budget=1.5GiB"],
    "optim.lr=1,5": ["optim.lr=1,5", "point", "optim.lr=1.5", "-m"],
    "optim.betas=[0,9,0,999]": ["optim.betas", "two", "point"],
    "seed=0,1": ["seed=0,1", "-m"],
    "model.features=8,16": ["model.features=8,16", "model.features=[8,16]", "-m"],
    "data.root=/x/a,b": ["data.root=/x/a,b", "\"data.root='/x/a,b'\"", "-m"],
    "wandb=offline": ["wandb.mode=offline", "default"],
    "wandb=false": ["wandb.mode=disabled"],
    "data.augment=false": ["data.augment=False", "spatial_p", "mirror"],
    "hydra.run=x": ["hydra.run.dir"],
    "optim=0.01": ["optim=0.01", "optim.lr=0.01", "adamw"],
    "optim=null": ["optim=null", "adamw"],
    "model=SegResNet": ["model=SegResNet", "model.path=package.module:SegResNet", "unet_tiny"],
    "loss=mine:focal": ["loss=mine:focal", "loss.path=mine:focal", "dice_ce"],
    "model=batch_current": ["model.norm=batch_current"],
    "data=/x/a": ["data=/x/a", "data.root=PATH", "nnunet"],
    "data.label_map={'1':[1]}": ["'data.label_map={1:[1,2],2:4}'"],
    "data.regions={1_2:[1,2]}": ["data.regions", "1_2", "quote"],
}
# The option that is named for one that does not exist.
MEANT = {
    "learning_rate": None,
    "lr": "optim.lr",
    "model.lr": "optim.lr",
    "modle.norm": "model.norm",
    "num_workers": "workers",
    "seeds": "seed",
    "model.channels": "model.in_channels",
    "data.augment.rotate": "data.augment.rotation",
    "wandb.proj": "wandb.project",
    "name": None,  # of several groups
    "path": None,
}
CONFLICTS = {
    ("model.norm=group", "model.groups=3"): ["model.groups=3", "16"],
    ("model=cicek2016", "data.patch=[130,132,116]"): ["data.patch=[132, 132, 116]"],
    ("model.deep_supervision=true", "model.padding=valid"): ["model.deep_supervision=true", "model.padding=same"],
    ("model.deep_supervision=true", "model.features=[8,8]"): ["model.deep_supervision=true", "3", "2"],
    ("model=unet_tiny", "model.blocks=[1,2]"): ["model.blocks", "2", "3", "3"],
    ("model=unet_tiny", "model.blocks=[1,0,1]"): ["model.blocks=[1, 0, 1]", ">= 1", "<= 64"],
    ("model=unet_tiny", "model.blocks=[1,2,2]", "model.padding=valid"): ["model.blocks", "model.padding=same"],
    ("model=unet_tiny", "model.blocks=[1,2,2]", "model.widen=second"): ["model.blocks", "model.widen=first"],
    ("model=unet_tiny", "model.blocks=[1,2,2]", "model.downsampling=strided_conv", "data.patch=[16,1,16]"): [
        *("model.blocks", "data.patch=[16, 1, 16]", "[2, 2, 2]"),
    ],
    ("model=unet_tiny", "model.blocks=[1,2,2]", "device=cuda", "deterministic=true"): [
        *("deterministic=true", "model.blocks=[1, 2, 2]"),
    ],
    ("data=nnunet", "data.root=/no/such"): ["data.root=/no/such"],
    ("data=folders", "data.root=."): ["data.classes", "[background,organ]"],
    (
        *("model=unet_tiny", "model.padding=valid", "model.downsampling=strided_conv"),
        *("data.patch=[51,51,51]", "inference.mirror=true"),
    ): ["inference.mirror=true", "data.patch=[51, 51, 51]", "false"],
    ("experiment=cicek2016_semi", "data.sparse_fold=0", "data=mni152"): ["mni152", "data.sparse=[0,6,12]"],
    ("data.augment.mirror=[0,0]",): ["data.augment.mirror=[0, 0]"],
    (
        *("model.features=[8,16,32,64]", "model.strides=4", "model.deep_supervision=true"),
        "data.patch=[36,36,36]",
    ): ["model.deep_supervision=true", "[4, 4, 4]", "[9, 9, 9]", "data.patch"],
    ("model.norm=batch", "batch=1", "data.patch=[8,8,8]"): ["model.norm=batch", "data.patch=[8, 8, 8]"],
}
ONE_LEVEL_OF_3 = ("model.kernels=[[1,1,1],[3,3,3]]", "model.strides=2", "model.padding=valid", "data.patch=[10,10,10]")
ONE_VOXEL = [  # in a map that is normalised; how to mend it
    (("model.features=[8,8,8]", "data.patch=[4,4,4]"), ["data.patch=[8,8,8]"]),
    (("model.features=[8,8,8]", "data.patch=[4,4,4]"), ["model.norm=group", "model.groups=4"]),
    (("model.features=[8,8,8]", "data.patch=[4,4,3]", "model.norm=batch", "batch=1"), ["data.patch=[8,8,4]"]),
    (("model.features=[8,8,8]", "data.patch=[4,4,4]", "model.norm=group", "model.groups=8"), ["model.groups=4"]),
    (("model.features=[8,8,8]", "model.blocks=[1,1,1]", "data.patch=[4,4,4]"), ["data.patch=[8,8,8]"]),
    (("model.features=[8,8]", *ONE_LEVEL_OF_3), ["data.patch=[12,12,12]"]),
    (("model.features=[8,8]", *ONE_LEVEL_OF_3, "model.norm=batch_current"), ["model.norm=group", "model.groups=4"]),
    (("model.features=[8,8]", *ONE_LEVEL_OF_3, "model.norm=group", "model.groups=8"), ["data.patch=[12,12,12]"]),
    (
        ("model.features=[8]", "model.padding=valid", "data.patch=[5,5,5]", "model.norm=batch", "batch=1"),
        ["data.patch=[6,6,6]"],
    ),
]


SEMI = ("data.semi=true", "data.sparse=[3,3,3]")
IDLE = {
    ("model.activation=prelu", "model.inplace=true"): ["model.inplace=True", "model.activation"],
    ("model.activation=silu", "model.inplace=true"): ["model.inplace=True", "model.activation"],
    ("model=unet_tiny", "model.blocks=[1,2,2]", "model.residual=true"): ["model.residual=True", "model.blocks"],
    ("data.classes=[a,b]",): ["data.classes=['a', 'b']", "data.format", "files name the classes"],
    ("data.fold=1", "data.val_fraction=0.3"): ["data.val_fraction=0.3", "data.fold", "data.split"],
    (*SEMI, "data.val_fraction=0.5"): ["data.val_fraction=0.5", "data.semi=true"],
    ("loss=dice", "loss.weights=[1,1,1,1]"): ["loss.weights=[1.0, 1.0, 1.0, 1.0]", "cross-entropy"],
    ("loss=ce", "loss.path=a:b"): ["loss.name=ce", "loss.path"],
    ("inference.mirror=true", "data.augment.mirror=[]"): ["inference.mirror=True", "data.augment.mirror=[]"],
    ("data.scored=[2,2,2]",): ["data.scored=[2, 2, 2]", "data.semi=true"],
    (*SEMI, "data.sparse_fold=0", "data.scored=[8,8,8]"): ["data.scored=[8, 8, 8]", "data.sparse_fold"],
    ("data.sparse_folds=4",): ["data.sparse_folds=4", "data.sparse_fold"],
    ("data.folds=10",): ["data.folds=10", "data.fold"],
    ("model=cicek2016", "data.patch=[108,108,108]", "inference.overlap=0.7"): [
        "inference.overlap=0.7",
        "model.padding=valid",
    ],
    ("model=unet_tiny", "model.path=a:B", "model.norm=batch"): ["model.features", "model.norm", "model.path"],
}


def missing(text: str, words: Sequence[str]) -> list[str]:
    """Return the words that a text does not hold as often as they are given, each as a word of its own."""
    counts = {word: len(re.findall(rf"(?<![\w.]){re.escape(word)}(?!\w)", text)) for word in words}
    return [word for word, count in counts.items() if count < words.count(word)]


def read(overrides: Sequence[str]) -> Config:
    """Return the config of these; without Hydra, which takes longer, where all are values of options."""
    words = [override.partition("=") for override in overrides]
    if not all(name in FACTS and re.fullmatch(r"\[.*\]|[\w.-]+", value) for name, _, value in words):
        return compose.compose(overrides)
    values = OmegaConf.create()
    for name, _, value in words:
        OmegaConf.update(values, name, yaml.safe_load(value))
    return compose.from_plain(OmegaConf.to_container(values))


@promise(
    "Resume",
    "one voxel left in a normalised map, with any norm, padding or `recompute`",
    "one line, with a patch and groups that work",
)
@pytest.mark.parametrize(("overrides", "advice"), ONE_VOXEL)
def test_one_voxel_is_refused_with_advice_that_helps(overrides: tuple[str, ...], advice: list[str]) -> None:
    """Plain and with recompute alike: a step or a window would normalise one number at a time."""
    for way in ("recompute=none", "recompute=lean", "recompute=tiles"):
        with pytest.raises(UserError) as caught:
            read([*overrides, way])
        text = str(caught.value)
        assert "\n" not in text and "one voxel" in text and all(word in text.replace(", ", ",") for word in advice), (
            text
        )
        config = read([*overrides, *advice, way])
        assert config.model.features


def named(value: object) -> str | None:
    """Return the id of a parameter: options, not the words of their line."""
    return " ".join(value) if isinstance(value, tuple) else "" if isinstance(value, list) else None


@promise("Config", "options at odds; an ...")
@pytest.mark.parametrize(("overrides", "words"), IDLE.items(), ids=named)
@without("unet3d.config.rules._idle", none, only="data.folds=10")
def test_an_option_that_does_nothing_is_one_warning(overrides: tuple[str, ...], words: list[str]) -> None:
    (line,) = rules.warnings(read(overrides))
    assert "\n" not in line and not missing(line, words), line


def test_what_a_group_says_is_true_of_its_options_unless_they_say_otherwise() -> None:
    root = FACTS["data.root"]
    noise = FACTS["data.augment.noise"]
    assert noise["fixed"] and not noise["same"] and FACTS["data.fold"]["same"]
    assert root["same"] and not root["fixed"] and root["untold"] == "place"
    assert FACTS["wandb.name"]["untold"] == "course"


@promise("Config", "a wrong key, group ...")
@promise(
    "Config",
    "a value with a comma where one is wanted, a decimal comma, a group with one value",
    "one line that names point, brackets, quotes or `-m`, and the option that is meant",
)
@promise(
    "Config",
    "a value that Hydra's grammar refuses, as a path with `=`; a number of thirty digits, a budget of thousands",
    "one line with the option, and how to quote it or the largest number",
)
@pytest.mark.parametrize(("override", "words"), WRONG.items(), ids=named)
@without("unet3d.config.compose.check", nothing, only="batch=0")
def test_a_wrong_option_is_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read([override])
    text = str(caught.value)
    assert "\n" not in text and not missing(text, words), text


@promise("Training", "weights of classes that leave nothing to learn, or are infinite", "refused")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["loss.weights=[0,0,0]"], r"loss\.weights=\[0\.0, 0\.0, 0\.0\]: .*\bloss=dice\b"),
        (["loss=ce", "loss.weights=[0,0]"], r"loss\.weights=\[0\.0, 0\.0\]: no class\b.*\babove 0\b"),
        (["loss=ce", "loss.weights=[0,2,0]"], r"loss\.weights=\[0\.0, 2\.0, 0\.0\]: one class\b.*\btwo classes\b"),
        (["loss.weights=[inf,1]"], r"loss\.weights=\[inf, 1\.0\]: .*\bfinite\b"),
    ],
)
def test_weights_that_leave_nothing_to_learn_are_refused(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=rf"^{line}[^\n]*$"):
        compose.compose(words)
    compose.compose(["loss=ce", "loss.weights=[0,1,2]"])
    compose.compose(["loss.weights=[0,2,0]"])


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
def test_an_option_is_meant_by_its_last_word_or_one_like_it(name: str, meant: str | None) -> None:
    text = str(not_a_flag(f"--{name}=1", []))
    assert not missing(text, meant.split() if meant else ["--help"]), text


@pytest.mark.parametrize("override", ["chkpt=2", "amp=maybe", "optim.lr=fast", "modle=unet"])
def test_a_wrong_option_is_the_same_line_under_a_debugger(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There OmegaConf chains its errors in another way, as this variable asks it to do."""
    monkeypatch.setenv("OC_CAUSE", "1")
    test_a_wrong_option_is_one_line(override, WRONG[override])


@pytest.mark.parametrize("is_debugged", [False, True])
def test_a_target_is_no_option(is_debugged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_debugged:
        monkeypatch.setenv("OC_CAUSE", "1")
    for values, key in (({"_target_": "x"}, "_target_"), ({"loss": {"_target_": "x"}}, "loss._target_")):
        with pytest.raises(UserError, match=rf"^{key}(?!\w)[^\n]*$"):
            compose.from_plain(values)


@promise("Config", "options at odds; an option that does nothing", "one line; one warning")
@pytest.mark.parametrize(("overrides", "words"), CONFLICTS.items(), ids=named)
@without("unet3d.config.compose.check", nothing, only="model.groups=3")
def test_options_at_odds_are_one_line(overrides: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(overrides)
    text = str(caught.value)
    assert "\n" not in text and not missing(text, words), text


@promise(
    "Resume",
    "an option that makes a resumed run another one, or contradicts one of the run",
    "one line with the given option and the run's",
)
def test_a_resumed_run_names_no_option_that_was_never_given(tmp_path: Path) -> None:
    """`init_names` is what the run has noted of its start; `recompute` is the run's own, and is called so."""
    given = ["model=unet_tiny", f"init={__file__}", "optim.init_lr=0.1", "optim.init_names=[inc]"]
    path = tmp_path / "config.yaml"
    path.write_text(compose.to_yaml(compose.compose(given)))
    with pytest.raises(UserError, match=r"^resume: .*\binit: ") as caught:
        compose.resumed(tmp_path, compose.compose_tree(["steps=999", "init=null"]))
    assert "init_names" not in str(caught.value)
    path.write_text(compose.to_yaml(compose.compose(["model=unet_tiny", "recompute=lean"])))
    with pytest.raises(UserError, match=r"^recompute=lean and ckpt=2: .*; the run that goes on has recompute=lean$"):
        compose.resumed(tmp_path, compose.compose_tree(["ckpt=2"]))
    with pytest.raises(UserError, match=r"^ckpt=99: [^;]*; [^;]*; [^;]*$"):
        compose.resumed(tmp_path, compose.compose_tree(["ckpt=99", "recompute=none"]))


def configs(group: str) -> list[str]:
    return sorted(path.stem for path in (compose.config_folder() / group).glob("*.yaml"))


@promise("Config", "a YAML file or a documented command that no longer works", "found by composing each")
@pytest.mark.parametrize("group", ["model", "data", "experiment"])
def test_every_yaml_composes(group: str, tmp_path: Path) -> None:
    patch = {f"cicek2016{kind}": "data.patch=[132,132,116]" for kind in ("", "_no_bn", "_2d")}
    losses, optimizers = cycle(configs("loss")), cycle(configs("optim"))
    if group == "model":
        assert len(configs(group)) >= max(len(configs("loss")), len(configs("optim"))), "or some would be left out"
    for name in configs(group):
        overrides = [f"{group}={name}", patch.get(name, "seed=0"), f"data.root={tmp_path}"]
        if group == "data":
            overrides.append("data.classes=[background,organ]")
        if group == "model":  # with each loss and each optimizer, too
            overrides += [f"loss={next(losses)}", f"optim={next(optimizers)}"]
        config = compose.compose(overrides)
        if group == "experiment":
            assert rules.warnings(config) == [], f"{name} sets what does nothing"


COMPOSE = hydra.compose


def compose_half(name: str, overrides: list[str], **named: Any) -> Any:
    """Compose without every second option."""
    return COMPOSE(name, overrides[::2], **named)


@promise("Config", "an experiment with options beside it; a config read back", "the command line wins; the same config")
@without("unet3d.config.compose.hydra.compose", compose_half)
def test_the_command_line_overrides_an_experiment(tmp_path: Path) -> None:
    root = f"data.root={tmp_path}"
    assert compose.compose([root]).amp is False
    found = compose.compose(["experiment=hippocampus", root])
    assert found.amp is True and found.data.format == "decathlon"
    beaten = compose.compose(["experiment=hippocampus", "amp=false", "model=unet_tiny", root])
    assert beaten.amp is False and beaten.model.features == [8, 16, 32]


WORDS = (  # that Hydra or YAML take for numbers, truth values, times or nothing
    *("1_2", "3e2", "1e3", "1.10", "2024_10", "true", "False", "yes", "on", "off", "null", "NULL", "12:30:00"),
    *("2024-10-05", "0x10", "007", "1.0", "inf", "nan", ".5", "1.", "+5", "1_000", "0b1", "0o7", ".inf"),
)


@promise(
    "Config",
    "words that Hydra or YAML take for a number, truth value or time, as `1_2`, `1e3`, `on`, `12:30:00`, "
    "for a text option",
    "on a command line the word as written; in a YAML file or plan one line that says to quote it",
)
def test_a_text_is_the_word_that_was_written(tmp_path: Path) -> None:
    """On a command line, in a list, alone and in a sweep, and in the file of a run that goes on."""
    listed = ",".join(WORDS)
    names = ("wandb.name", "wandb.group", "wandb.notes", "resume", "hydra.run.dir", "data.images", "data.groups")
    composed = compose.compose_tree([f"data.classes=[{listed}]", f"wandb.tags=[{listed}]", "steps=1_0"])
    config = compose.load(composed.options)
    assert tuple(config.data.classes or ()) == tuple(config.wandb.tags) == WORDS and config.steps == 10
    (tmp_path / "config.yaml").write_text(compose.to_yaml(config))
    assert compose.from_plain(files.read_yaml(tmp_path / "config.yaml")) == config
    scalars = [word for word in WORDS if word.lower() != "null"]
    for first in range(0, len(scalars), len(names)):
        given = dict(zip(names, scalars[first:], strict=False))
        tree = compose.compose_tree([f"{name}={word}" for name, word in given.items()]).tree
        assert {name: OmegaConf.select(tree, name) for name in given} == given
    jobs = compose.sweep(["wandb.name=1_2,true,null", "seed=1"])
    assert [compose.compose(job).wandb.name for job in jobs] == ["1_2", "true", None]
    jobs = compose.sweep(["wandb.name=sort(3e2,1_2,reverse=true)"])
    assert [compose.compose(job).wandb.name for job in jobs] == ["3e2", "1_2"]
    with pytest.raises(UserError, match=r"^data\.images: .*\"data\.images='null'\""):
        compose.compose(["data.images=null"])


@promise("Config", "words that Hydra or ...")
def test_a_text_of_a_file_is_the_word_that_stands_there_or_is_refused(tmp_path: Path) -> None:
    """Also of a file that another names, and of a plan; `off` is an answer of data.cache."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "1e3.yaml").write_text("# @package _global_\ndefaults: [named]\n")
    named = tmp_path / "experiment" / "named.yaml"
    words = [compose.search_path(str(tmp_path)), "experiment=1e3"]
    refused = {"wandb: {name: 1_2}": "1_2", "hydra: {run: {dir: 12:30:00}}": "12:30:00", "sweep: [on]": "on"}
    refused["data: {regions: {1e3: [1]}, regions_class_order: [1]}"] = "1e3"
    for text, word in refused.items():
        named.write_text(f"# @package _global_\n{text}\n")
        with pytest.raises(UserError, match=rf"^{named}: .*\b{word} .*; quote it: '{word}'$"):
            compose.compose(words)
    named.write_text("# @package _global_\ndefaults: [1_2]\n")
    with pytest.raises(UserError, match=r"quote the name in the file's defaults$"):
        compose.compose(words)
    named.write_text("# @package _global_\nwandb: {name: '1_2', tags: [1.5, 2024-10-05]}\ndata: {cache: off}\n")
    config = compose.compose(words)
    assert (config.wandb.name, config.wandb.tags) == ("1_2", ["1.5", "2024-10-05"]) and config.data.cache == "off"
    named.write_text("# @package _global_\n# nothing\n")
    assert compose.compose(words) == compose.compose([])
    named.write_text("# @package _global_\ndata: {patch: &p [16, 16, 16], phantom: {shape: *p}}\n")
    assert compose.compose(words).data.phantom.shape == [16, 16, 16]
    path = tmp_path / "plan.yaml"
    for word in WORDS:
        path.write_text(f"options: {{data: {{classes: [background, {word}]}}}}\n")
        try:
            assert str(read_plan(str(path)).options["data.classes"][1]) == word
        except UserError as error:
            assert re.search(r"quote (it: '|a date)", str(error)), error


@promise("Config", "a value with a ...")
@pytest.mark.parametrize("place", ['/x/"q"', 'it\'s "q"', "/x/(1),b", '"a" b"'])
def test_the_quotes_that_are_advised_give_the_folder(place: str) -> None:
    with pytest.raises(UserError, match="quote it, once for Hydra and once for the shell: ") as caught:
        compose.compose([f"data.root={place}"])
    advice = str(caught.value).rpartition("for the shell: ")[2]
    assert compose.compose(shlex.split(advice)).data.root == place


def test_a_relative_folder_is_looked_for_where_the_line_says() -> None:
    with pytest.raises(UserError, match=rf"^data\.root=no/such: no such folder in {Path.cwd()};"):
        compose.compose(["data=nnunet", "data.root=no/such"])


@promise(
    "Training",
    "a project, tag or name that wandb refuses, also in its variables",
    "one line and exit 2 before the run",
)
@pytest.mark.parametrize(
    ("word", "most"),
    [
        ("wandb.project=a/b", "holds /"),
        ("wandb.project='a:b#c'", "holds # :"),
        ("wandb.entity=a%b", "holds %"),
        ("wandb.project=''", "128"),
        (f"wandb.name={'x' * 129}", "at most 128"),
        (f"wandb.job_type={'x' * 65}", "at most 64"),
        (f"wandb.tags=[a,{'x' * 65}]", "at most 64"),
        ("wandb.tags=['']", "1 to 64"),
    ],
    ids=str,
)
def test_what_wandb_refuses_is_refused_before_a_run(word: str, most: str) -> None:
    name = word.partition("=")[0]
    with pytest.raises(UserError, match=rf"^{name}=[^\n]*{most}"):
        compose.compose([word])


@promise("Training", "a project, tag or ...")
@without("unet3d.config.rules.WANDB_VARIABLES", {})
def test_variables_of_wandb_are_checked_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_PROJECT", "a#b")
    rules.check(Config())
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match=r"^WANDB_PROJECT=a#b: "):
        rules.check(Config())
    monkeypatch.setenv("WANDB_PROJECT", "a")
    monkeypatch.setenv("WANDB_TAGS", f"a tag,{65 * 'b'}")
    with pytest.raises(UserError, match=r"^WANDB_TAGS=b+.* 65 letters"):
        rules.check(Config())
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(UserError, match=r"^WANDB_MODE=of: .*\boffline\b"):
        rules.check(Config())


@promise("Config", "an experiment with options ...")
def test_plain_values_round_trip() -> None:
    config = compose.compose(["model=forum_large", "seed=7", "optim=sgd"])
    assert compose.from_plain(compose.to_plain(config)) == config


@promise("Config", "`_target_` in a config ...")
@without("unet3d.config.compose.check", nothing)
def test_a_checkpoints_config_is_checked_and_cannot_add_keys() -> None:
    plain = compose.to_plain(Config())
    with pytest.raises(UserError, match="_target_"):
        compose.from_plain(plain | {"model": {"_target_": "os.system"}})
    with pytest.raises(UserError, match="batch=0"):
        compose.from_plain(plain | {"batch": 0})


def test_a_run_without_an_option_of_a_newer_version_can_resume() -> None:
    now = compose.to_plain(compose.compose([]))
    before = compose.to_plain(compose.compose([]))
    del before["data"]["nonfinite"]
    compose.refuse_changes(before, now)
    before["data"]["affine_check"], before["data"]["allow_outside"] = "warn", True
    with pytest.raises(UserError, match=r"data\.affine_check\b.*\bwarn\b.*\berror$"):
        compose.refuse_changes(before, now)


@promise("Config", "a value with a ...")
@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("budget=1,5GiB", "budget=1.5GiB"),
        ("budget=8GiB,1,5 GiB", "budget=1.5GiB"),
        ("optim.lr=0,001", "optim.lr=0.001"),
        ("optim.clip=2,03", "optim.clip=2.03"),
    ],
)
def test_a_decimal_comma_is_no_sweep(word: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"^{word}: .*\bpoint: {meant}$"):
        compose.sweep([word])
    assert len(compose.sweep(["budget=1GiB,5GiB", "optim.lr=0,0.1,1"])) == 6


def test_sweep_lists_every_job() -> None:
    assert compose.sweep(["amp=true,false", "ckpt=2,4", "seed=1"]) == [
        ["amp=True", "ckpt=2", "seed=1"],
        ["amp=True", "ckpt=4", "seed=1"],
        ["amp=False", "ckpt=2", "seed=1"],
        ["amp=False", "ckpt=4", "seed=1"],
    ]
