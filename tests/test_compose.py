"""Wrong options are answered in one line that names the key and the remedy."""

from pathlib import Path

import pytest

from unet3d import checks, compose
from unet3d.compose import refuse_changes
from unet3d.config import Config
from unet3d.errors import UserError

WRONG = {
    "amp=maybe": r"^amp: .*'maybe'.*bool",
    "ckpt=two": r"^ckpt=two: this model has 8 stages; use 0 \(off\), 2 to 8 of segments, or auto",
    "ckpt=-1": r"^ckpt=-1: .*use 0 \(off\)",
    "ckpt=1": r"^ckpt=1: .*one segment saves nothing",
    "ckpt=999": r"^ckpt=999: this model has 8 stages; use",
    "chkpt=2": r"^chkpt: no such option; did you mean ckpt\?",
    "batch=0": r"^batch=0: must be >= 1",
    "seed=-1": r"^seed=-1: must be >= 0",
    "model=unet_smal": r"^model=unet_smal: no such config; did you mean unet_small\?",
    "modle=unet": r"^modle: no such option; did you mean model\?",
    "experiment=hipocampus": r"^experiment=hipocampus: .*did you mean hippocampus\?",
    "data=decathlon": r"^data.root is not set: .*add data.root=PATH",
    "data.pach=[1,1,1]": r"^data.pach: no such option; did you mean data.patch\?",
    "data.patch=[64,64]": r"^data.patch=\[64, 64\]: give three",
    "data.patch=[1,1,1]": r"^data.patch=\[1, 1, 1\] leaves one voxel",
    "data.patch=3": r"^data.patch: ",
    "data.augment.scaling=[2,1]": r"^data.augment.scaling=\[2.0, 1.0\]: give \[smallest, largest\]",
    "data.fold=5": r"^data.fold=5: with data.folds=5 it runs from 0 to 4",
    "model.features=[]": r"^model.features=\[\] has no level",
    "model.features=[8,x]": r"^model.features\[1\]: .*'x'.*Integer",
    "model.decoder=[8]": r"^model.decoder has 1 widths; 4 levels need 3",
    "model.norm=bacth": r"^model.norm=bacth: use one of instance.*; did you mean batch\?",
    "loss.name=dise": r"^loss.name=dise: use one of .*; did you mean dice\?",
    "loss.path=mypkg": r"^loss.path=mypkg: give package.module:name",
    "loggers=[a.b:C,d]": r"^loggers=d: give package.module:name",
    "optim.betas=[0.9]": r"^optim.betas=\[0.9\]: give two",
    "data.spacing=[1,1]": r"^data.spacing=\[1.0, 1.0\]: give three",
    "data.phantom.shape=[32,32]": r"^data.phantom.shape=\[32, 32\]: give three",
    "model.kernels=2": r"^model.kernels=2: kernels must be odd",
    "model.strides=[[2,2],2,2]": r"^model.strides: \[2, 2\] is neither",
    "optim.lr=fast": r"^optim.lr: .*'fast'.*Float",
    "optim.lr=nan": r"^optim.lr=nan: must be",
    "loss.weights=[1,-1]": r"^loss.weights=\[1.0, -1.0\]: must be >= 0",
    "budget=lots": r"^budget=lots: give an amount and a unit",
    "lr=1": r"^lr: no such option; did you mean optim.lr\?$",
    "learning_rate=1": r"^learning_rate: .*; did you mean optim.lr\?$",
    "optim.learning_rate=1": r"^optim.learning_rate: .*; did you mean optim.lr\?$",
    "epochs=1": r"^epochs: .*; did you mean steps\?$",
    "max_epochs=1": r"^max_epochs: .*; did you mean steps\?$",
    "batch_size=1": r"^batch_size: .*; did you mean batch\?$",
    "bs=1": r"^bs: .*; did you mean batch\?$",
    "data.batch_size=1": r"^data.batch_size: .*; did you mean batch\?$",
    "num_workers=1": r"^num_workers: .*; did you mean workers\?$",
    "patch_size=1": r"^patch_size: .*; did you mean data.patch\?$",
    "seeds=1": r"^seeds: .*; did you mean seed\?$",
    "model.channels=1": r"^model.channels: .*; did you mean model.features or model.in_channels\?$",
    "data.path=1": r"^data.path: .*; did you mean data.root\?$",
    "+dataset.path=1": r"^dataset.path: .*; did you mean data.root\?$",
    "data.augment.rotate=1": r"^data.augment.rotate: .*; did you mean data.augment.rotation\?$",
    "model.lr=1": r"^model.lr: .*; did you mean optim.lr\?$",
    "wandb.proj=x": r"^wandb.proj: .*; did you mean wandb.project\?$",
    "wandb.team=x": r"^wandb.team: no such option; wandb has mode, project, entity, .*, private$",
    "loss.dice=1": r"^loss.dice: no such option; loss has name, path, weights, batch_dice$",
    "data.q=1": r"^data.q: no such option; data has augment, phantom, format, root, .*, transforms$",
    "name=x": r"^name: no such option; python train.py --help lists them all$",
    "path=x": r"^path: no such option; python train.py --help lists them all$",
    "output_dir=x": r"^output_dir: no such option; python train.py --help lists them all$",
    "data.root=~/a": r"^data.root=~/a: a shell replaces ~ only where a word begins; write data.root=\$HOME/a$",
    "resume=~": r"^resume=~: .*; write resume=\$HOME$",
    "data.root=~other/a": r"write key=value, in quotes if",
    "+chkpt=2": r"^chkpt: no such option; did you mean ckpt\?",
    "+model.depth=2": r"^model.depth: no such option",
    "model=foo": r"^model=foo: no such config; choose from cicek2016",
    "amp": "^amp: is no option=value; write amp=VALUE$",
    "/data/brats": "^/data/brats: is no option=value; did you mean data.root=/data/brats[?]$",
    "data.patch=64": r"^data.patch: is a list; write it in brackets, as in data.patch=\[1,2,3\]",
    "amp=true,false": r"amp=true,false",
}
CONFLICTS = {
    ("model.norm=group", "model.groups=3"): r"^model.groups=3 does not divide",
    ("model=cicek2016", "data.patch=[130,132,116]"): r"nearest that fits: data.patch=\[132, 132, 116\]",
    ("model.deep_supervision=true", "model.padding=valid"): r"^model.deep_supervision=true needs",
    ("model.deep_supervision=true", "model.features=[8,8]"): r"^model.deep_supervision=true needs 3 levels",
    ("data=nnunet", "data.root=/no/such"): r"^data.root=/no/such: no such folder",
    ("data=folders", "data.root=."): r"^data.classes is not set",
    (
        *("model=unet_tiny", "model.padding=valid", "model.downsampling=strided_conv"),
        *("data.patch=[51,51,51]", "inference.mirror=true"),
    ): r"^inference.mirror=true: .* an odd number of voxels less",
    ("experiment=cicek2016_semi", "data.sparse_fold=0", "data=mni152"): r"mirror image across x.*sparse=\[0,6,12\]",
    ("data.augment.mirror=[0,0]",): r"^data.augment.mirror=\[0, 0\]: name each axis once",
    (
        *("model.features=[8,16,32,64]", "model.strides=4", "model.deep_supervision=true"),
        "data.patch=[36,36,36]",
    ): r"^model.deep_supervision=true: strides of \[4, 4, 4\] do not divide maps of \[9, 9, 9\] voxels",
    ("model.norm=batch", "batch=1", "data.patch=[8,8,8]"): r"model.norm=batch has nothing to normalise",
}


SEMI = ("data.semi=true", "data.sparse=[3,3,3]")
IDLE = {
    ("model.activation=prelu", "model.inplace=true"): "model.inplace=True does nothing for this model.activation",
    ("model.activation=silu", "model.inplace=true"): "model.inplace=True does nothing for this model.activation",
    (
        "data.classes=[a,b]",
    ): "data.classes=['a', 'b'] does nothing for this data.format: dataset.json names the classes",
    ("data.fold=1", "data.split=x.json"): "data.fold=1 does nothing beside data.split",
    ("data.fold=1", "data.val_fraction=0.3"): "data.val_fraction=0.3 does nothing beside data.fold or data.split",
    (*SEMI, "data.val_fraction=0.5"): "data.val_fraction=0.5 does nothing with data.semi=true, which holds no case out",
    ("loss=dice", "loss.weights=[1,1,1,1]"): "loss.weights=[1.0, 1.0, 1.0, 1.0] does nothing for loss=dice",
    ("loss=ce", "loss.path=a:b"): "loss.name=ce does nothing beside loss.path",
    (
        "inference.mirror=true",
        "data.augment.mirror=[]",
    ): "inference.mirror=True does nothing with data.augment.mirror=[]",
    ("data.scored=[2,2,2]",): "data.scored=[2, 2, 2] does nothing without data.semi=true",
    (*SEMI, "data.sparse_fold=0", "data.scored=[8,8,8]"): "data.scored=[8, 8, 8] does nothing beside data.sparse_fold, "
    "which scores that part",
    ("data.sparse_folds=4",): "data.sparse_folds=4 does nothing without data.sparse_fold",
    ("data.folds=10",): "data.folds=10 does nothing without data.fold",
    ("model=cicek2016", "data.patch=[108,108,108]", "inference.overlap=0.7"): "inference.overlap=0.7 does nothing for "
    "model.padding=valid, whose tiles do not overlap",
    ("model=unet_tiny", "model.path=a:B", "model.norm=batch"): "model.features, model.norm: does nothing beside "
    "model.path, which is called with channels and classes",
}


@pytest.mark.parametrize(("overrides", "warning"), IDLE.items())
def test_an_option_that_does_nothing_is_one_warning(overrides: tuple[str, ...], warning: str) -> None:
    assert checks.warnings(compose.compose(overrides)) == [warning]


def test_no_config_of_the_package_sets_what_does_nothing(tmp_path: Path) -> None:
    for name in configs("experiment"):
        assert checks.warnings(compose.compose([f"experiment={name}", f"data.root={tmp_path}"])) == [], name


@pytest.mark.parametrize(("override", "message"), WRONG.items())
def test_a_wrong_option_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compose.compose([override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", [word for word in WRONG if word.startswith(("chkpt", "amp", "optim.lr", "modle"))])
def test_a_wrong_option_is_the_same_line_under_a_debugger(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There OmegaConf chains its errors in another way, as this variable asks it to do."""
    monkeypatch.setenv("OC_CAUSE", "1")
    with pytest.raises(UserError, match=WRONG[override]):
        compose.compose([override])
    for key in ("_target_", "loss._target_"):
        group, _, name = key.rpartition(".")
        with pytest.raises(UserError, match=f"^{key}: no such option"):
            compose.from_plain({group: {name: "x"}} if group else {name: "x"})


@pytest.mark.parametrize(("overrides", "message"), CONFLICTS.items())
def test_options_at_odds_are_one_line(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose.compose(overrides)


def configs(group: str) -> list[str]:
    return sorted(path.stem for path in (compose.config_folder() / group).glob("*.yaml"))


@pytest.mark.parametrize("group", ["model", "data", "loss", "optim", "experiment"])
def test_every_yaml_composes(group: str, tmp_path: Path) -> None:
    patch = {f"cicek2016{kind}": "data.patch=[132,132,116]" for kind in ("", "_no_bn", "_2d")}
    assert configs(group)
    for name in configs(group):
        overrides = [f"{group}={name}", patch.get(name, "seed=0")]
        overrides.append(f"data.root={tmp_path}")
        if name == "folders":
            overrides.append("data.classes=[background,organ]")
        assert isinstance(compose.compose(overrides), Config), name


def test_the_command_line_overrides_an_experiment(tmp_path: Path) -> None:
    root = f"data.root={tmp_path}"
    assert compose.compose([root]).amp is False
    found = compose.compose(["experiment=hippocampus", root])
    assert found.amp is True and found.data.format == "decathlon"
    beaten = compose.compose(["experiment=hippocampus", "amp=false", "model=unet_tiny", root])
    assert beaten.amp is False and beaten.model.features == [8, 16, 32]


def test_plain_values_round_trip() -> None:
    config = compose.compose(["model=forum_large", "seed=7", "optim=sgd"])
    assert compose.from_plain(compose.to_plain(config)) == config


def test_a_snapshots_config_is_checked_and_cannot_add_keys() -> None:
    plain = compose.to_plain(Config())
    with pytest.raises(UserError, match="_target_"):
        compose.from_plain(plain | {"model": {"_target_": "os.system"}})
    with pytest.raises(UserError, match="batch=0"):
        compose.from_plain(plain | {"batch": 0})


def test_a_run_without_an_option_of_a_newer_version_can_resume() -> None:
    now = compose.to_plain(compose.compose([]))
    before = compose.to_plain(compose.compose([]))
    del before["data"]["nonfinite"]
    refuse_changes(before, now)
    before["data"]["affine_check"], before["data"]["allow_outside"] = "warn", True
    with pytest.raises(UserError, match=r"to change data\.affine_check: warn -> error$"):
        refuse_changes(before, now)


def test_sweep_lists_every_job() -> None:
    assert compose.sweep(["amp=true,false", "ckpt=2,4", "seed=1"]) == [
        ["amp=True", "ckpt=2", "seed=1"],
        ["amp=True", "ckpt=4", "seed=1"],
        ["amp=False", "ckpt=2", "seed=1"],
        ["amp=False", "ckpt=4", "seed=1"],
    ]
