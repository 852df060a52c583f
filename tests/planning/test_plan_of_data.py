"""Plans of three kinds of data: the largest patch within a budget, each decision named, and a step that runs."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from brain import make_brain
from phantoms import KINDS, Kind, fingerprint, write_data_set
from promises import promise
from training import face, train

from unet3d.base.errors import UserError
from unet3d.base.files import read_yaml
from unet3d.base.types import MIB
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.data.cases import Case
from unet3d.data.volume import target_grid
from unet3d.memory.prediction import preflight
from unet3d.model import geometry
from unet3d.planning import steps
from unet3d.planning.fingerprint import read_fingerprint
from unet3d.planning.for_budget import make_plan
from unet3d.planning.plan import Draft, choose_intensity, choose_spacing, like_nnunet, seconds_of
from unet3d.planning.steps import measured_step, sized_patches  # as it is without `quick`
from unet3d.report import report
from unet3d.run.record import read_run
from unet3d.run.run_folder import read_memory

SMALL = Kind((96, 96, 96), (1.0, 1.0, 1.0), ("MR",), ("background", "organ"), 0, 300)
NARROW = "model.features=[4,8]"


def planned(kind: Kind, budget: int, *words: str, seconds: float | None = None) -> Draft:
    """The plan of a kind of data, from its fingerprint alone."""
    config = compose.compose(["device=cpu", *words])
    given = {word.partition("=")[0] for word in words}
    return make_plan(config, given, fingerprint(kind), budget, seconds)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are predicted, none is taken."""
    monkeypatch.setattr(steps, "measured_step", lambda _: 0.5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_patches_have_the_volumes_proportions_and_suit_the_strides(kind: Kind) -> None:
    sizes = sized_patches(kind.spacing, kind.shape)
    assert all(larger.voxels > smaller.voxels for larger, smaller in pairwise(sizes))
    for size in sizes:
        assert all(length % unit == 0 for length, unit in zip(size.patch, size.levels.units, strict=True))
    large = [size for size in sizes if size.voxels > prod(kind.shape) / 8]
    for size in large:
        shares = [length / whole for length, whole in zip(size.patch, kind.shape, strict=True)]
        assert max(shares) < 2 * min(shares)


@cache
def in_megabytes(megabytes: int) -> Draft:
    """The plan of small volumes in a budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "measured_step", lambda _: 0.5)
        return planned(SMALL, megabytes * MIB, NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", (12, 400))
def test_a_plan_fits_its_budget_and_uses_most_of_it_or_says_why(megabytes: int) -> None:
    """More memory gives a larger patch and less recomputation. What is promised is what the run predicts."""
    draft = in_megabytes(megabytes)
    config, is_large = draft.config, megabytes == 400
    peak = max(draft.promise["peak_bytes"], draft.promise["validation_bytes"])
    assert peak <= megabytes * MIB
    reason = next(line for line in draft.decisions if line.startswith("peak: "))
    is_explained = "unused" in reason
    assert is_explained == (peak < 0.8 * megabytes * MIB)
    assert is_large or not is_explained
    assert (config.data.patch == [96, 96, 96]) is is_large
    assert config.batch * config.accumulate >= 2
    assert (config.recompute == "none") is is_large
    predicted = preflight(replace(config, dry_run=True), config.model).memory
    assert predicted["predicted"]["peak_bytes"] == draft.promise["peak_bytes"]
    assert predicted["predicted_validation_bytes"] == draft.promise["validation_bytes"]


@pytest.mark.slow
def test_whole_volumes_come_at_once_where_a_schedule_fits_them_and_more_fill_the_budget() -> None:
    """Two of them do not fit by the plain step."""
    draft = in_megabytes(150)
    assert draft.config.data.patch == [96, 96, 96] and draft.config.recompute == "lean"
    assert draft.config.batch > 2 and draft.config.accumulate == 1
    assert draft.promise["peak_bytes"] <= 150 * MIB


def taken(draft: Draft, folder: Path) -> Config:
    """The config of a run by a plan's file. Raises UserError where train refuses what plan has written."""
    plan = folder / "plan.yaml"
    plan.write_text(draft.as_yaml("python -m unet3d plan"))
    return compose.compose([f"plan={plan}"])


@promise(
    "Config",
    "volumes that are tiny, flat or longer than 2,048 voxels",
    "`plan` takes the volume as patch, up to 2,048 voxels an axis, with levels that suit it; one voxel is one line",
)
@pytest.mark.parametrize("shape", ((32, 32, 1), (32, 32, 2), (1, 1, 40), (2, 2, 2), (15, 15, 15), (4000, 3, 3)))
def test_a_small_thin_or_long_volume_is_the_first_patch(shape: tuple[int, int, int]) -> None:
    first = sized_patches((1.0, 1.0, 1.0), shape)[0].patch
    assert all(min(length, 2048) <= size < length + 4 for length, size in zip(shape, first, strict=True))


@pytest.mark.parametrize("shape", ((1, 1, 40), (15, 15, 15)))
def test_a_run_takes_the_plan_of_small_volumes(shape: tuple[int, int, int], quick: None, tmp_path: Path) -> None:
    draft = planned(Kind(shape, (1.0, 1.0, 1.0), ("MR", "CT"), ("background", "organ"), 0, 300), 400 * MIB)
    assert prod(taken(draft, tmp_path).data.patch) >= prod(shape)


@promise("Config", "volumes that are tiny ...")
def test_a_volume_of_one_voxel_is_one_line(quick: None) -> None:
    with pytest.raises(UserError, match="one voxel") as error:
        planned(Kind((1, 1, 1), (1.0, 1.0, 1.0), ("MR",), ("background", "organ"), 0, 300), 400 * MIB)
    assert "\n" not in str(error.value)


@promise(
    "Config",
    "spacings of nanometres to metres; a case that the planned spacing would make over 32 times as large",
    "what `plan` writes, `train` takes: a coarser spacing, and a line; `like=nnunet` is refused",
)
@pytest.mark.parametrize(
    ("spacings", "reason"),
    (
        ((0.001, 0.002, 0.004), "median"),
        ((4e-6, 5e-6, 9e-6), "median"),
        ((100, 250, 400), "median"),
        ((1, 1, 1, 1, 30), "32 times"),
    ),
)
def test_a_run_takes_the_spacing_that_is_planned(spacings: Sequence[float], reason: str, tmp_path: Path) -> None:
    config = compose.compose(["device=cpu"])
    cases = [(mm, mm, 2 * mm) for mm in spacings]
    read = replace(fingerprint(SMALL, len(cases)), shapes=[(24, 24, 12)] * len(cases), spacings=cases)
    draft = Draft(config, (), read, MIB, None)
    choose_spacing(draft)
    assert reason in draft.decisions[-1]
    spacing = taken(draft, tmp_path).data.spacing
    for x, y, z in cases:
        stored = nib.Nifti1Image(np.zeros((24, 24, 12), np.uint8), np.diag([x, y, z, 1]))
        assert target_grid(
            Case("a", (tmp_path / "a.nii",), None), stored, spacing
        ).shape  # which refuses too many voxels
    if "times" in reason:
        with pytest.raises(UserError, match="32 times"):
            like_nnunet(config, (), read)


@pytest.mark.parametrize("name", ("CT", "scan"))
def test_a_saturated_foreground_is_planned_with_z_scores(name: str) -> None:
    """A run refuses CT's scale of it."""
    read = fingerprint(KINDS["ct"])
    channels = [channel._replace(name=name, foreground=(1.0, 0.0)) for channel in read.channels]
    draft = Draft(compose.compose(["device=cpu"]), (), replace(read, channels=channels), MIB, None)
    choose_intensity(draft)
    assert draft.options["data.intensity"] == "zscore" and "one value" in draft.decisions[-1]


@promise(
    "Config",
    "a time or a budget that allows only few steps or a patch smaller than the foreground",
    "`plan` warns, with both sizes and what to give",
)
def test_a_patch_that_the_time_makes_smaller_than_the_foreground_is_warned_of(quick: None) -> None:
    draft = planned(SMALL, 400 * MIB, NARROW, seconds=60)
    patch, steps = draft.warnings
    assert "smaller than the foreground, 32x32x32" in patch and patch.endswith("give more time")
    assert "few" in steps


@promise("Config", "a plan's file whose name Hydra does not take", "the printed command quotes it")
def test_a_smaller_patch_and_odd_names_are_planned_and_the_printed_command_composes(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default network has too many levels for that patch, the planned one has not."""
    root = write_data_set(tmp_path / "set, (1)", SMALL, cases=4, scale=0.25)
    plan = tmp_path / "plan = {1}.yaml"
    words = ["data=decathlon", f"data.root='{root}'", "data.patch=[8,8,8]", "model.kernels=auto", "device=cpu"]
    assert face("plan", *words, "budget=64MiB", "-o", str(plan)) == 0
    (command,) = re.findall(r"train it: python train.py (.*)", capsys.readouterr().out)
    config = compose.compose(shlex.split(command))
    assert config.data.root == str(root) and config.data.patch == [8, 8, 8] and config.model.kernels == 3


def test_what_the_command_line_gives_stays(quick: None) -> None:
    words = [
        "data.patch=[32,32,32]",
        NARROW,
        "batch=3",
        "amp=false",
        "data.augment.mirror=[2]",
        "steps=7",
        "optim.lr=0.1",
    ]
    draft = planned(SMALL, 400 * MIB, *words)
    assert not {word.partition("=")[0] for word in words} & draft.options.keys()
    assert (draft.config.data.patch, draft.config.batch, draft.config.steps) == ([32, 32, 32], 3, 7)


def test_a_budget_too_small_for_any_patch_is_one_line(quick: None) -> None:
    with pytest.raises(UserError, match="no patch fits") as error:
        planned(SMALL, MIB // 16, NARROW)
    assert "\n" not in str(error.value)


def test_the_time_decides_how_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "measured_step", lambda _: 0.001)
    long = planned(SMALL, 400 * MIB, NARROW, "data.patch=[32,32,32]", seconds=600)
    short = planned(SMALL, 400 * MIB, NARROW, "data.patch=[32,32,32]", seconds=60)
    assert long.config.steps > short.config.steps
    assert long.promise["seconds"] <= 600 and short.promise["seconds"] <= 60


def test_steps_of_a_device_that_is_not_here_are_unknown() -> None:
    draft = planned(SMALL, 400 * MIB, NARROW, "data.patch=[32,32,32]", "device=cuda")
    assert "step_s" not in draft.promise and draft.promise["reserved_bytes"] > 0
    assert any("unknown" in line for line in draft.decisions if line.startswith("steps: "))


def test_a_step_that_is_measured_in_place_of_a_long_one_has_maps_to_normalise() -> None:
    """Of seven levels, the deepest map of a patch of few voxels would be one voxel."""
    words = ["model.features=[2,2,2,2,2,2,2]", "data.patch=[384,384,256]", "batch=1"]
    config = compose.compose(["device=cpu", *words])
    config.model.in_channels, config.model.classes = 1, 2
    smaller = steps.shrunk(config)
    assert prod(smaller.data.patch) < prod(config.data.patch) / 100
    assert geometry.level_sizes(smaller.data.patch, config.model)[-1] != (1, 1, 1)


@pytest.mark.parametrize("text", ("8", "h", "0h", "8 weeks", "-1h", "1e9h"))
def test_a_time_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="time="):
        seconds_of(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_planned_from_its_files_and_its_step_runs(name: str, tmp_path: Path, quick: None) -> None:
    kind = KINDS[name]
    root = write_data_set(tmp_path / name, kind, cases=4, scale=1.0 if name == "mr" else 0.25)
    words = ["data=decathlon", f"data.root={root}", "device=cpu"]
    config = compose.compose(words)
    read = read_fingerprint(config.data)
    assert len(read.shapes) == 4
    assert [name for name, *_ in read.classes] == list(kind.classes)
    assert all(channel.is_ct_like == (name == "ct") for channel in read.channels)
    levels = len(sized_patches(kind.spacing, read.shapes[0])[0].levels.kernels)
    features = f"model.features=[{','.join(['2'] * levels)}]"
    config = compose.compose([*words, features, "data.patch=[512,512,512]"])
    draft = make_plan(config, {"model.features"}, read, 4096 * MIB)
    assert max(draft.promise["peak_bytes"], draft.promise["validation_bytes"]) <= 4096 * MIB
    if name == "mr":
        assert geometry.kernels(draft.config.model)[0] == (3, 3, 1)
        assert geometry.strides(draft.config.model)[0] == (2, 2, 1)
    smaller = steps.shrunk(draft.config)
    assert measured_step(smaller) > 0


def test_data_behind_links_is_planned_by_the_command_that_check_data_prints(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_data_set(tmp_path / "data", SMALL, cases=4, scale=0.25)
    images = root / "imagesTr"
    images.rename(tmp_path / "elsewhere")
    images.symlink_to(tmp_path / "elsewhere")
    assert face("check-data", "data=decathlon", f"data.root={root}", "data.allow_outside=true", "steps=5") == 0
    (command,) = re.findall(r"python -m unet3d (plan data=.*)", capsys.readouterr().out)
    plan = tmp_path / "plan.yaml"
    assert face(*shlex.split(command), "device=cpu", "budget=64MiB", NARROW, "-o", str(plan)) == 0
    (train_command,) = re.findall(r"python train.py (.*)", capsys.readouterr().out)
    assert "allow_outside" not in read_yaml(plan)["options"]["data"]
    config = compose.compose(shlex.split(train_command))
    assert config.data.allow_outside and config.data.root == str(root)


def test_regions_of_more_labels_than_there_are_regions_are_read_and_each_has_its_share(tmp_path: Path) -> None:
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3]}
    root = make_brain(tmp_path / "brain", labels=labels, regions_class_order=[1, 2])
    read = read_fingerprint(compose.compose(["data=nnunet", f"data.root={root}"]).data)
    background, whole, core = read.classes
    assert (background[0], whole[0], core[0]) == ("background", "whole", "core")
    assert 0 < core[1] < whole[1] and background[1] + whole[1] == pytest.approx(1)
    assert whole[2] == core[2] == 1


@pytest.mark.slow
def test_a_plan_is_trained_and_its_receipt_is_exact(tmp_path: Path) -> None:
    """The data set has regions."""
    words = ["data=nnunet", f"data.root={make_brain(tmp_path / 'brain')}", "device=cpu", "model.features=[2,4]"]
    config = compose.compose(words)
    given = {"data.format", "data.root", "device", "model.features"}
    draft = make_plan(config, given, read_fingerprint(config.data), 64 * MIB)
    plan = tmp_path / "plan.yaml"
    plan.write_text(draft.as_yaml("python -m unet3d plan"))
    folder = tmp_path / "run"
    run = train(
        tmp_path, f"plan={plan}", "steps=3", "eval_every=0", "workers=0", f"hydra.run.dir={folder}", frills=True
    )
    assert run.code == 0, run.err
    memory = read_memory(folder)
    assert memory["plan"]["peak_bytes"] == memory["measured"]["peak_bytes"]
    assert sorted(memory["plan"]["changed"]) == ["eval_every", "steps"]
    assert report.RECEIPT in run.out
    assert read_yaml(folder / "config.yaml")["plan"] == str(plan)
    table = report.receipt(memory, read_run(folder).records)
    assert table is not None and table.rows[0][-1] == "+0.0%"
