"""Options from words and files: what is refused, in one line that names the option and the remedy, and what is read."""

import re
import shlex
from itertools import cycle
from pathlib import Path
from typing import Any

import hydra
import pytest
from guards import no, none, nothing, without
from omegaconf import OmegaConf
from promises import promise
from tables import cases, missing
from training import face, planned

from unet3d.base import files, ranks
from unet3d.base.errors import UserError
from unet3d.cli import commands
from unet3d.config import compose, rules, schema
from unet3d.config.schema import FACTS, Config
from unet3d.config.words import not_a_flag, path_option

# Words, and what their one line must hold, as often as it stands here.
REFUSED = """
# no such option, group or choice
chkpt=2 | chkpt | ckpt
+model.depth=2 | model.depth
modle=unet | modle | model
lr=1 | lr | optim.lr
output_dir=x | output_dir | --help
+dataset.path=1 | dataset.path | --help
data.pach=[1,1,1] | data.pach | data.patch
data.batch_size=1 | data.batch_size | data | root | patch
wandb.team=x | wandb.team | mode | project | entity | private
data.q=1 | data.q | augment | phantom | format | root | transforms
model=unet_smal | model=unet_smal | unet_small | unet_small | cicek2016
model=foo | model=foo | cicek2016 | unet_small
experiment=hipocampus | experiment=hipocampus | hippocampus | hippocampus | hippocampus_nnunet
model.norm=bacth | model.norm=bacth | instance | batch | batch | group | none
loss.name=dise | loss.name=dise | dice_ce | dice | dice
model=SegResNet | model=SegResNet | model.path=package.module:SegResNet | unet_tiny
loss=mine:focal | loss=mine:focal | loss.path=mine:focal | dice_ce
data=/x/a | data=/x/a | data.root=PATH | nnunet
model=batch_current | model.norm=batch_current
wandb=offline | wandb.mode=offline | default
wandb=false | wandb.mode=disabled
optim=0.01 | optim=0.01 | optim.lr=0.01 | adamw
data.augment=false | data.augment=False | spatial_p | mirror
hydra.run=x | hydra.run.dir
optim=null | optim=null | adamw
~model | ~model
+model._target_=os.system | model._target_
++data.augment._target_=os.system | data.augment._target_
# a type
amp=maybe | amp | maybe | bool
ckpt=two | ckpt=two | 8 | 0 | 2
ckpt=auto | ckpt=auto | recompute=auto | budget=
optim.lr=fast | optim.lr | fast | Float
model.features=[8,x] | model.features[1] | x | Integer
data.patch=64 | data.patch | data.patch=[1,2,3]
loss.path=mypkg | loss.path=mypkg | loss.path=mypkg.parts:mine
loggers=[a.b:C,d] | loggers=d | loggers=mypkg.parts:mine
workers=few | workers=few
workers=1.5 | workers=1.5
data.images=null | data.images | "data.images='null'"
# a range
batch=0 | batch=0 | >= 1
seed=-1 | seed=-1 | >= 0
ckpt=-1 | ckpt=-1 | 0
ckpt=1 | ckpt=1 | 0 | 2
ckpt=999 | ckpt=999 | 8
workers=-1 | workers=-1
workers=257 | workers=257
optim.lr=nan | optim.lr=nan | >= 0
optim.betas=[0.9] | optim.betas=[0.9]
loss.weights=[1,-1] | loss.weights=[1.0, -1.0] | >= 0
data.fold=5 | data.fold=5 | data.folds=5 | 0 | 4
data.patch=[64,64] | data.patch=[64, 64]
data.spacing=[1,1] | data.spacing=[1.0, 1.0]
data.phantom.shape=[32,32] | data.phantom.shape=[32, 32]
data.augment.scaling=[2,1] | data.augment.scaling=[2.0, 1.0]
data.augment.mirror=[0,0] | data.augment.mirror=[0, 0]
model.features=[] | model.features=[] | [16,32,64]
model.decoder=[8] | model.decoder | 1 | 4 | 3
model.kernels=2 | model.kernels=2
model.strides=[[2,2],2,2] | model.strides | [2, 2]
model.features=[999999999999999999999999999999] | model.features | 4,294,967,296
budget=NINES | budget | budget=8GiB
budget=8G | budget=8G | KiB | MiB | GiB | TiB
# commas
amp=true,false | amp=true,false
seed=0,1 | seed=0,1 | -m
budget=1,5GiB | budget=1,5GiB | point | budget=1.5GiB
optim.lr=1,5 | optim.lr=1,5 | point | optim.lr=1.5 | -m
optim.betas=[0,9,0,999] | optim.betas | two | point
model.features=8,16 | model.features=8,16 | model.features=[8,16] | -m
data.root=/x/a,b | data.root=/x/a,b | "data.root='/x/a,b'" | -m
-m optim.lr=0,001 | optim.lr=0,001 | point: optim.lr=0.001
-m budget=8GiB,1,5GiB | budget=8GiB,1,5GiB | point: budget=1.5GiB
# grammar
amp | amp | amp=VALUE
/data/brats | /data/brats | data.root=/data/brats
data.root=~/a | data.root=~/a | data.root=$HOME/a
resume=~ | resume=~ | resume=$HOME
data.root=~other/a | data.root=~other/a | "data.root='~other/a'"
hydra.run.dir=/x/rss_slab=0 | hydra.run.dir=/x/rss_slab=0 | "hydra.run.dir='/x/rss_slab=0'"
data.classes=[a,1_2 | data.classes=[a,1_2 | 'data.classes=[a,b]'
data.patch=[16,16 | data.patch=[16,16 | 'data.patch=[1,2,3]'
data.label_map={'1':[1]} | 'data.label_map={1:[1,2],2:4}'
data.regions={1_2:[1,2]} | data.regions | 1_2 | quote
data.root=${oc.env:HOME} | data.root=${oc.env:HOME} | data.root=$PLACE/a
# folders
data=decathlon | data=decathlon | data.root=PATH
data=nnunet data.root=no/such | data.root=no/such: no such folder in
data=folders data.root=. | data.classes | [background,organ]
resume= | resume=FOLDER
hydra.run.dir='' | hydra.run.dir=FOLDER
resume=nowhere | resume=nowhere
resume=auto | resume=auto | hydra.run.dir=runs/a
resume=auto hydra.run.dir=${now:%Y} | resume=auto | hydra.run.dir=runs/a
-m ckpt=0,999 | ckpt=999
-m seed=0,1 resume=auto | resume=auto | hydra.sweep.dir=runs/a
-m seed=0,1 resume=runs/a | resume=FOLDER | resume=auto hydra.sweep.dir=FOLDER
-m seed=0,1 requeue=true | requeue=true | hydra/launcher=slurm
-m seed=0,1 hydra.sweep.subdir=a | the folder of two jobs | hydra.sweep.subdir
# flags
--step 10 | --step | steps=10
seed=1 --lr=0.1 | --lr=0.1 | optim.lr=0.1
--save-evry 4 | --save-evry | save_every=4
--model seed=1 | --model | model=VALUE
-b 4 | -b | --help
--cfg | batch=4
seed=1 -cd | batch=4
--cfg job chkpt=2 | chkpt | ckpt
--config-name=mine | --config-name | experiment=NAME
--config-path=. | --config-path | experiment=NAME
--experimental-rerun=job.pickle | --experimental-rerun | experiment=NAME
--config-dir=nowhere | --config-dir=nowhere
# options at odds
data.patch=[1,1,1] | data.patch=[1, 1, 1] | model.norm=instance | model.norm=group
model.norm=group model.groups=3 | model.groups=3 | 16
model=cicek2016 data.patch=[130,132,116] | data.patch=[132, 132, 116]
model.deep_supervision=true model.padding=valid | model.deep_supervision=true | model.padding=same
model.deep_supervision=true model.features=[8,8] | model.deep_supervision=true | 3 | 2
model=unet_tiny model.blocks=[1,2] | model.blocks | 2 | 3 | 3
model=unet_tiny model.blocks=[1,0,1] | model.blocks=[1, 0, 1] | >= 1 | <= 64
model=unet_tiny model.blocks=[1,2,2] model.padding=valid | model.blocks | model.padding=same
model=unet_tiny model.blocks=[1,2,2] model.widen=second | model.blocks | model.widen=first
model=unet_tiny model.blocks=[1,2,2] model.downsampling=strided_conv data.patch=[16,1,16] | model.blocks | [2, 2, 2]
model=unet_tiny model.blocks=[1,2,2] device=cuda deterministic=true | deterministic=true | model.blocks=[1, 2, 2]
model=unet_tiny model.padding=valid model.downsampling=strided_conv data.patch=[51,51,51] inference.mirror=true | false
experiment=cicek2016_semi data.sparse_fold=0 data=mni152 | mni152 | data.sparse=[0,6,12]
model.features=[8,16,32,64] model.strides=4 model.deep_supervision=true data.patch=[36,36,36] | [4, 4, 4] | [9, 9, 9]
model.norm=batch batch=1 data.patch=[8,8,8] | model.norm=batch | data.patch=[8, 8, 8]
loss.weights=[0,0,0] | loss.weights=[0.0, 0.0, 0.0] | loss=dice
loss=ce loss.weights=[0,0] | loss.weights=[0.0, 0.0] | no class | above 0
loss=ce loss.weights=[0,2,0] | loss.weights=[0.0, 2.0, 0.0] | one class | two classes
loss.weights=[inf,1] | finite
deterministic=true cuda.benchmark=true | deterministic=true | cuda.benchmark=true
deterministic=true device=cuda | deterministic=true | model.downsampling=max_pool | strided_conv
deterministic=true device=cuda model.downsampling=strided_conv model.upsampling=trilinear | model.upsampling=trilinear
compile=true ckpt=2 | compile=true and ckpt=2
compile=true recompute=lean | compile=true and recompute=lean
channels_last=true recompute=tiles | channels_last=true and recompute=tiles
channels_last=true model.norm=group | channels_last=true and model.norm=group
# what wandb refuses
wandb.project=a/b | wandb.project=a/b: holds /
wandb.project='a:b#c' | wandb.project=a:b#c: holds # :
wandb.project='' | wandb.project= | 128
wandb.entity=a%b | wandb.entity=a%b: holds %
wandb.name=NAME | wandb.name | at most 128
wandb.tags=[a,NAME] | wandb.tags | at most 64
wandb.tags=[''] | 1 to 64
"""


@promise("What scripts rely on", "exit code 2 ...")
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
@promise("Config", "options at odds; an option that does nothing", "one line; one warning")
@promise("Config", "a flag that does not exist", "one line that says how to write it as an option")
@promise("Config", "`_target_` in a config, on the command line or in a checkpoint", "no such option")
@promise("Config", "a value with `${...}` from the command line or a YAML file of one's own", "refused before the run")
@promise("Training", "weights of classes that leave nothing to learn, or are infinite", "refused")
@promise(
    "Training",
    "a project, tag or name that wandb refuses, also in its variables",
    "one line and exit 2 before the run",
)
@pytest.mark.parametrize(("words", "parts"), cases(REFUSED))
@without("unet3d.config.compose.check", nothing, only="batch=0")
@without("unet3d.config.compose.check", nothing, only="model.groups=3")
def test_what_is_refused_is_one_line(
    words: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        planned([word.replace("NINES", "9" * 5000).replace("NAME", "x" * 129) for word in words])
    assert not missing(str(caught.value), parts), caught.value
    assert list(tmp_path.iterdir()) == []


@promise("What scripts rely on", "exit code 2", "what a user can correct, in one line")
@promise(
    "Config",
    "a wrong key, group, value, type or range",
    "exit 2 before torch loads: one line with the key and the nearest name; no folder",
)
@pytest.mark.parametrize("command", ["train", "memory"])
@without("unet3d.config.words.describe", lambda error: str(error), only="train")
def test_a_mistake_is_exit_2_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert face(command, "optim.lr=fast") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: optim.lr: ") and printed.err.count("\n") == 1


@pytest.mark.parametrize("word", ["chkpt=2", "amp=maybe", "optim.lr=fast", "modle=unet"])
def test_a_wrong_option_is_the_same_line_under_a_debugger(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There OmegaConf chains its errors in another way, as this variable asks it to do."""
    lines = []
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            compose.compose([word])
        lines.append(str(caught.value))
        monkeypatch.setenv("OC_CAUSE", "1")
    assert lines[0] == lines[1]


MEANT = """
learning_rate | --help
lr | optim.lr
model.lr | optim.lr
modle.norm | model.norm
num_workers | workers
seeds | seed
model.channels | model.in_channels
data.augment.rotate | data.augment.rotation
name | --help
"""


@pytest.mark.parametrize(("words", "parts"), cases(MEANT))
def test_an_option_is_meant_by_its_last_word_or_one_like_it(words: list[str], parts: list[str]) -> None:
    """Where several groups have it, none is named."""
    text = str(not_a_flag(f"--{words[0]}=1", []))
    assert not missing(text, parts), text


THREE = "model.kernels=[[1,1,1],[3,3,3]] model.strides=2 model.padding=valid data.patch=[10,10,10] model.features=[8,8]"
ONE_VOXEL = f"""
model.features=[8,8,8] data.patch=[4,4,4] | data.patch=[8,8,8]
model.features=[8,8,8] data.patch=[4,4,4] | model.norm=group | model.groups=4
model.features=[8,8,8] data.patch=[4,4,3] model.norm=batch batch=1 | data.patch=[8,8,4]
model.features=[8,8,8] data.patch=[4,4,4] model.norm=group model.groups=8 | model.groups=4
model.features=[8,8,8] model.blocks=[1,1,1] data.patch=[4,4,4] | data.patch=[8,8,8]
{THREE} | data.patch=[12,12,12]
{THREE} model.norm=batch_current | model.norm=group | model.groups=4
model.features=[8] model.padding=valid data.patch=[5,5,5] model.norm=batch batch=1 | data.patch=[6,6,6]
"""


@promise(
    "Resume",
    "one voxel left in a normalised map, with any norm, padding or `recompute`",
    "one line, with a patch and groups that work",
)
@pytest.mark.parametrize(("words", "advice"), cases(ONE_VOXEL))
def test_one_voxel_is_refused_with_advice_that_helps(words: list[str], advice: list[str]) -> None:
    """A step or a window would normalise one number at a time, also with recompute."""
    words = [*words, "recompute=lean"]
    with pytest.raises(UserError, match=r"^[^\n]*one voxel[^\n]*$") as caught:
        compose.compose(words)
    assert not missing(str(caught.value).replace(", ", ","), advice)
    assert compose.compose([*words, *advice]).model.features


IDLE = """
model.activation=prelu model.inplace=true | model.inplace=True | model.activation
model=unet_tiny model.blocks=[1,2,2] model.residual=true | model.residual=True | model.blocks
data.classes=[a,b] | data.classes=['a', 'b'] | data.format | files name the classes
data.fold=1 data.val_fraction=0.3 | data.val_fraction=0.3 | data.fold | data.split
data.semi=true data.sparse=[3,3,3] data.val_fraction=0.5 | data.val_fraction=0.5 | data.semi=true
loss=dice loss.weights=[1,1,1,1] | loss.weights=[1.0, 1.0, 1.0, 1.0] | cross-entropy
loss=ce loss.path=a:b | loss.name=ce | loss.path
inference.mirror=true data.augment.mirror=[] | inference.mirror=True | data.augment.mirror=[]
data.scored=[2,2,2] | data.scored=[2, 2, 2] | data.semi=true
data.semi=true data.sparse=[3,3,3] data.sparse_fold=0 data.scored=[8,8,8] | data.scored=[8, 8, 8] | data.sparse_fold
data.sparse_folds=4 | data.sparse_folds=4 | data.sparse_fold
data.folds=10 | data.folds=10 | data.fold
model=cicek2016 data.patch=[108,108,108] inference.overlap=0.7 | inference.overlap=0.7 | model.padding=valid
model=unet_tiny model.path=a:B model.norm=batch | model.features | model.norm | model.path
"""


@promise("Config", "options at odds; an ...")
@pytest.mark.parametrize(("words", "parts"), cases(IDLE))
@without("unet3d.config.rules._idle", none, only="data.folds=10")
def test_an_option_that_does_nothing_is_one_warning(words: list[str], parts: list[str]) -> None:
    (line,) = rules.warnings(compose.compose(words))
    assert not missing(line, parts), line


def test_classes_may_weigh_nothing_while_others_do() -> None:
    compose.compose(["loss=ce", "loss.weights=[0,1,2]"])
    compose.compose(["loss.weights=[0,2,0]"])


def test_what_repeats_itself_is_not_refused() -> None:
    config = compose.compose(["deterministic=true", "device=cuda", "model.downsampling=strided_conv"])
    assert rules.switches_of(config) == "deterministic=true"
    compose.compose(["deterministic=true", "device=cuda", "model.path=package.module:name"])
    with pytest.raises(UserError, match=r"model\.downsampling=max_pool"):  # on a GPU that device=auto finds
        rules.refuse_indeterminate(compose.compose(["deterministic=true"]))


@pytest.mark.parametrize("word", ["compile=true", "channels_last=true"])
def test_what_is_of_one_process_is_refused_over_several_ranks(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SIZE", 2)
    with pytest.raises(UserError, match=f"^{word}: .*\\b2\\b"):
        compose.compose([word])


@promise("Training", "a project, tag or ...")
@without("unet3d.config.rules.WANDB_VARIABLES", {})
def test_variables_of_wandb_are_checked_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "a#b")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    rules.check(Config())
    for name, value, said in (
        ("WANDB_MODE", "offline", r"^WANDB_PROJECT=a#b: "),
        ("WANDB_PROJECT", "a", ""),
        ("WANDB_TAGS", f"a tag,{65 * 'b'}", r"^WANDB_TAGS=b+.* 65 letters"),
        ("WANDB_MODE", "of", r"^WANDB_MODE=of: .*\boffline\b"),
    ):
        monkeypatch.setenv(name, value)
        if said:
            with pytest.raises(UserError, match=said):
                rules.check(Config())


def test_what_a_group_says_is_true_of_its_options_unless_they_say_otherwise() -> None:
    root, noise = FACTS["data.root"], FACTS["data.augment.noise"]
    assert noise["fixed"] and not noise["same"] and FACTS["data.fold"]["same"]
    assert root["same"] and not root["fixed"] and root["untold"] == "place"
    assert FACTS["wandb.name"]["untold"] == "course"


def configs(group: str) -> list[str]:
    return sorted(path.stem for path in (compose.config_folder() / group).glob("*.yaml"))


@promise("Config", "a YAML file or a documented command that no longer works", "found by composing each")
@pytest.mark.parametrize("group", ["model", "data", "experiment"])
@without("unet3d.config.rules.stages", no, only="model")
def test_every_yaml_composes(group: str, tmp_path: Path) -> None:
    """A network in segments, with each loss and each optimizer, too."""
    patch = {f"cicek2016{kind}": "data.patch=[132,132,116]" for kind in ("", "_no_bn", "_2d")}
    losses, optimizers = cycle(configs("loss")), cycle(configs("optim"))
    assert len(configs("model")) >= max(len(configs("loss")), len(configs("optim"))), "or some would be left out"
    more = {"data": ["data.classes=[background,organ]"]}
    for name in configs(group):
        if group == "model":
            more = {"model": ["ckpt=2", f"loss={next(losses)}", f"optim={next(optimizers)}"]}
        words = [f"{group}={name}", patch.get(name, "seed=0"), f"data.root={tmp_path}", *more.get(group, [])]
        config = compose.compose(words)
        assert group != "experiment" or rules.warnings(config) == [], f"{name} sets what does nothing"


COMPOSE = hydra.compose


def compose_half(name: str, overrides: list[str], **named: Any) -> Any:
    """Compose without every second option."""
    return COMPOSE(name, overrides[::2], **named)


@promise("Config", "an experiment with options beside it; a config read back", "the command line wins; the same config")
@without("unet3d.config.compose.hydra.compose", compose_half)
def test_the_command_line_overrides_an_experiment_and_a_config_can_be_read_back(tmp_path: Path) -> None:
    root = f"data.root={tmp_path}"
    found = compose.compose(["experiment=hippocampus", root])
    assert found.amp is True and found.data.format == "decathlon"
    beaten = compose.compose(["experiment=hippocampus", "amp=false", "model=unet_tiny", root])
    assert beaten.amp is False and beaten.model.features == [8, 16, 32]
    assert compose.from_plain(compose.to_plain(beaten)) == beaten


# Hydra or YAML would take them for numbers, truth values, times or nothing.
READ_AS_OTHERS = """1_2 3e2 1e3 1.10 2024_10 true False yes on off null NULL 12:30:00 2024-10-05 0x10 007 1.0 inf nan
    .5 1. +5 1_000 0b1 0o7 .inf"""
WORDS = READ_AS_OTHERS.split()


@promise(
    "Config",
    "words that Hydra or YAML take for a number, truth value or time, as `1_2`, `1e3`, `on`, `12:30:00`, "
    "for a text option",
    "on a command line the word as written; in a YAML file or plan one line that says to quote it",
)
def test_a_text_is_the_word_that_was_written(tmp_path: Path) -> None:
    """On a command line, in a list, alone and in a sweep, and in the file of a run that goes on."""
    listed = ",".join(WORDS)
    config = compose.compose([f"data.classes=[{listed}]", f"wandb.tags=[{listed}]", "steps=1_0"])
    assert config.data.classes == config.wandb.tags == WORDS and config.steps == 10
    (tmp_path / "config.yaml").write_text(compose.to_yaml(config))
    assert compose.from_plain(files.read_yaml(tmp_path / "config.yaml")) == config
    names = ("wandb.name", "wandb.group", "resume", "hydra.run.dir", "data.images", "data.groups")
    given = dict(zip(names, WORDS, strict=False))
    tree = compose.compose_tree([f"{name}={word}" for name, word in given.items()]).tree
    assert {name: OmegaConf.select(tree, name) for name in given} == given
    for word, values in (("1_2,true,null", ["1_2", "true", None]), ("sort(3e2,1_2,reverse=true)", ["3e2", "1_2"])):
        jobs = compose.sweep([f"wandb.name={word}"])
        assert [compose.compose(job).wandb.name for job in jobs] == values


MISREAD = """
wandb: {name: 1_2} | 1_2
hydra: {run: {dir: 12:30:00}} | 12:30:00
sweep: [on] | on
data: {regions: {1e3: [1]}, regions_class_order: [1]} | 1e3
"""


@promise("Config", "words that Hydra or ...")
def test_a_text_of_a_file_is_the_word_that_stands_there_or_is_refused(tmp_path: Path) -> None:
    """Also of a file that another names, and of a plan; `off` is an answer of data.cache."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "1e3.yaml").write_text("# @package _global_\ndefaults: [named]\n")
    named = tmp_path / "experiment" / "named.yaml"
    words = [compose.search_path(str(tmp_path)), "experiment=1e3"]
    for line in MISREAD.strip().splitlines():
        text, _, word = line.partition(" | ")
        named.write_text(f"# @package _global_\n{text}\n")
        with pytest.raises(UserError, match=rf"^{named}: .*\b{word} .*; quote it: '{word}'$"):
            compose.compose(words)
    named.write_text("# @package _global_\ndefaults: [1_2]\n")
    with pytest.raises(UserError, match=r"quote the name in the file's defaults$"):
        compose.compose(words)
    named.write_text("# @package _global_\nwandb: {name: '1_2', tags: [1.5, 2024-10-05]}\ndata: {cache: off}\n")
    config = compose.compose(words)
    assert (config.wandb.name, config.wandb.tags, config.data.cache) == ("1_2", ["1.5", "2024-10-05"], "off")
    named.write_text("# @package _global_\ndata: {patch: &p [16, 16, 16], phantom: {shape: *p}}\n")
    assert compose.compose(words).data.phantom.shape == [16, 16, 16]
    named.write_text("# @package _global_\n# nothing\n")
    assert compose.compose(words) == compose.compose([])
    path = tmp_path / "plan.yaml"
    for word in WORDS:
        path.write_text(f"options: {{data: {{classes: [background, {word}]}}}}\n")
        try:
            assert str(compose.read_plan(str(path)).options["data.classes"][1]) == word
        except UserError as error:
            assert re.search(r"quote (it: '|a date)", str(error)), error


@promise("Config", "a value with a ...")
@pytest.mark.parametrize("place", ['/x/"q"', 'it\'s "q"', "/x/(1),b"])
def test_the_quotes_that_are_advised_give_the_folder(place: str) -> None:
    with pytest.raises(UserError, match="quote it, once for Hydra and once for the shell: ") as caught:
        compose.compose([f"data.root={place}"])
    advice = str(caught.value).rpartition("for the shell: ")[2]
    assert compose.compose(shlex.split(advice)).data.root == place


@promise(
    "Config",
    "a folder for `--config-dir`, or to resume, with quotes, backslashes, brackets or `${...}` in its name",
    "it is that folder",
)
@pytest.mark.parametrize("name", ["q'uote=back\\", "br]acket[\\'q", "${oc.env:HOME}\\${x}"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "optim").mkdir(parents=True)
    (folder / "optim" / "mine.yaml").write_text("lr: 0.5\n")
    words = [compose.search_path(str(folder)), "optim=mine", path_option("hydra.sweep.dir", folder)]
    composed = compose.compose_tree(words)
    assert (composed.options.optim.lr, composed.sweep_folder) == (0.5, folder)


@promise("Config", "a file of `--config-dir` that is no YAML, or has a tag of Python's", "one line with its place")
@promise("Config", "a value with `${...}` ...")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lr: [1\nb: 2\n", r'mine\.yaml", line 1'),
        ("lr: !!python/object/apply:os.getcwd []\n", r'mine\.yaml", line 1'),
        ('# @package _global_\nwandb: {notes: "costs \\\\${USD} 5"}\n', r"^wandb\.notes=costs \$\{USD\} 5"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        compose.compose([compose.search_path(str(tmp_path)), "optim=mine"])
    assert "\n" not in str(caught.value)


@promise("Config", "`_target_` in a config ...")
@without("unet3d.config.compose.check", nothing)
def test_a_checkpoints_config_is_checked_and_cannot_add_keys() -> None:
    plain = compose.to_plain(Config())
    for change, line in (
        ({"_target_": "x"}, r"^_target_: "),
        ({"loss": {"_target_": "x"}}, r"^loss\._target_: "),
        ({"batch": 0}, "batch=0"),
    ):
        with pytest.raises(UserError, match=line):
            compose.from_plain(plain | change)


def test_a_sweep_lists_every_job_and_takes_configs_by_pattern() -> None:
    jobs = compose.sweep(["amp=true,false", "ckpt=2,4", "seed=1"])
    assert [" ".join(job) for job in jobs] == [f"amp={a} ckpt={c} seed=1" for a in (True, False) for c in (2, 4)]
    assert len(compose.sweep(["budget=1GiB,5GiB", "optim.lr=0,0.1,1"])) == 6
    names = [name for name in compose.choices("model") if name.startswith("unet")]
    assert {"unet", "unet_tiny"} < {*names} < {*compose.choices("model")}
    assert compose.sweep(["model=glob(unet*)"]) == [[f"model={name}"] for name in names]


def test_help_shows_every_option_with_type_range_default_and_meaning() -> None:
    text = commands.help_text()
    shown = " ".join(text.split())
    for name, _, metadata in schema.options(Config()):
        assert f" {name}=" in shown and " ".join(metadata["about"].split()) in shown, name
    for head in (
        r"steps=150 .*int.*>= 1",
        r"model\.norm=instance .*instance, batch, batch_current, group, none",
        r"data\.patch=\[64,64,32\] .*list\[int\].*>= 1.*<= 2048",
    ):
        assert re.search(rf"^ +{head}", text, re.MULTILINE), head
