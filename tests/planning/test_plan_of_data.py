"""Plans of data: the largest patch within a budget, each decision named, and a step that runs."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
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
from unet3d.planning.fingerprint import Fingerprint, read_fingerprint
from unet3d.planning.for_budget import make_plan
from unet3d.planning.plan import Draft, choose_intensity, choose_rotation, choose_spacing, like_nnunet, seconds_of
from unet3d.planning.steps import measured_step, sized_patches  # as it is without `quick`
from unet3d.report import report
from unet3d.run.record import read_run
from unet3d.run.run_folder import read_memory

NARROW = "model.features=[4,8]"


SMALL = Kind((96, 96, 96), (1.0, 1.0, 1.0), ("MR",), ("background", "organ"), 0, 300)


def draft_of(read: Fingerprint, *words: str, budget: int = 64 * MIB) -> Draft:
    """Return a plan without a decision, of a fingerprint and a command line."""
    given = {word.partition("=")[0] for word in words}
    return Draft(compose.compose(["device=cpu", *words]), given, read, budget, None)


def planned(kind: Kind, *words: str, budget: int = 400 * MIB, seconds: float | None = None) -> Draft:
    """Return the plan of a kind of data, from its fingerprint alone."""
    draft = draft_of(fingerprint(kind), *words)
    return make_plan(draft.config, draft.given, draft.fingerprint, budget, seconds)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are predicted, none is taken."""
    monkeypatch.setattr(steps, "measured_step", lambda _: 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("megabytes", "schedules"), [(12, "lean auto tiles"), (150, "lean"), (400, "none")])
def test_a_plan_fits_its_budget_and_uses_most_of_it_or_says_why(megabytes: int, schedules: str) -> None:
    """More memory gives a larger patch, less recomputation and a larger batch.

    With 150 MiB two patches fit by no plain step. What is promised is what the run predicts.
    """
    draft = planned(SMALL, NARROW, budget=megabytes * MIB)
    config = draft.config
    peak = max(draft.promise["peak_bytes"], draft.promise["validation_bytes"])
    assert peak <= megabytes * MIB
    reason = next(line for line in draft.decisions if line.startswith("peak: "))
    assert ("unused" in reason) == (peak < 0.8 * megabytes * MIB)
    assert (config.data.patch == [96, 96, 96]) == (megabytes > 12)
    assert config.recompute in schedules.split()
    assert config.batch * config.accumulate >= (3 if megabytes == 150 else 2)
    if megabytes == 12:
        predicted = preflight(replace(config, dry_run=True), config.model).memory
        assert predicted["predicted"]["peak_bytes"] == draft.promise["peak_bytes"]
        assert predicted["predicted_validation_bytes"] == draft.promise["validation_bytes"]


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
@pytest.mark.parametrize("shape", ((32, 32, 1), (1, 1, 40), (2, 2, 2), (15, 15, 15), (4000, 3, 3)))
def test_a_small_thin_or_long_volume_is_the_first_patch(shape: tuple[int, int, int]) -> None:
    first = sized_patches((1.0, 1.0, 1.0), shape)[0].patch
    assert all(min(length, 2048) <= size < length + 4 for length, size in zip(shape, first, strict=True))


@promise("Config", "volumes that are tiny ...")
def test_a_run_takes_the_plan_of_small_volumes_and_one_voxel_is_one_line(quick: None, tmp_path: Path) -> None:
    assert prod(taken(planned(SMALL._replace(shape=(1, 1, 40))), tmp_path).data.patch) >= 40
    with pytest.raises(UserError, match=r"\A.*one voxel.*\Z"):
        planned(SMALL._replace(shape=(1, 1, 1)))


@promise(
    "Config",
    "spacings of nanometres to metres; a case that the planned spacing would make over 32 times as large",
    "what `plan` writes, `train` takes: a coarser spacing, and a line; `like=nnunet` is refused",
)
@pytest.mark.parametrize(
    ("spacings", "reason"),
    (((4e-6, 5e-6, 9e-6), "median"), ((100, 250, 400), "median"), ((1, 1, 1, 1, 30), "32 times")),
)
def test_a_run_takes_the_spacing_that_is_planned(spacings: Sequence[float], reason: str, tmp_path: Path) -> None:
    cases = [(mm, mm, 2 * mm) for mm in spacings]
    read = replace(fingerprint(SMALL, len(cases)), shapes=[(24, 24, 12)] * len(cases), spacings=cases)
    draft = draft_of(read)
    choose_spacing(draft)
    assert reason in draft.decisions[-1]
    spacing = taken(draft, tmp_path).data.spacing
    for sizes in cases:
        stored = nib.Nifti1Image(np.zeros((24, 24, 12), np.uint8), np.diag([*sizes, 1]))
        assert target_grid(Case("a", (tmp_path / "a.nii",), None), stored, spacing).shape, "or it refuses the voxels"
    if reason == "32 times":
        with pytest.raises(UserError, match="32 times"):
            like_nnunet(draft.config, (), read)


@pytest.mark.parametrize("name", ("CT", "scan"))
def test_a_saturated_foreground_is_planned_with_z_scores(name: str) -> None:
    """A run refuses CT's scale of it."""
    read = fingerprint(KINDS["ct"])
    draft = draft_of(replace(read, channels=[read.channels[0]._replace(name=name, foreground=(1.0, 0.0))]))
    choose_intensity(draft)
    assert draft.options["data.intensity"] == "zscore"
    assert "one value" in draft.decisions[-1]


SIDE = 16


def balls(rng: np.random.Generator, is_cut: bool) -> np.ndarray:
    """Return labels of a ball near the middle, cut in two across y, or with a ball of another class within."""
    grid = np.indices((SIDE, SIDE, SIDE))
    centre = SIDE / 2 + rng.uniform(-1, 1, (3, 1, 1, 1))
    distance = np.linalg.norm(grid - centre, axis=0)
    is_first = grid[1] < rng.integers(7, 10) if is_cut else distance > 4
    return np.where(distance <= 6, np.where(is_first, 1, 2), 0)


@pytest.mark.parametrize("is_cut", [True, False])
def test_patches_are_not_rotated_where_classes_meet_in_a_plane(is_cut: bool, tmp_path: Path) -> None:
    """Annotators cut there, and a rotated patch would show another cut."""
    rng = np.random.default_rng(0)
    for number in range(10):
        label = balls(rng, is_cut)
        for folder, voxels in (("images", 100 * label + rng.normal(0, 10, label.shape)), ("labels", label)):
            (tmp_path / folder).mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(voxels.astype(np.int16), np.eye(4)), tmp_path / folder / f"case{number}.nii")
    words = ["data=folders", f"data.root={tmp_path}", "data.classes=[background,front,back]", "data.fold=0"]
    read = read_fingerprint(compose.compose(words).data)
    assert read.cut_axes == ((1,) if is_cut else ())
    for given, rotation in (((), 0 if is_cut else 30), (("data.augment.rotation=30",), 30)):
        draft = draft_of(read, *given)
        choose_rotation(draft)
        assert draft.config.data.augment.rotation == rotation


@promise(
    "Config",
    "a time or a budget that allows only few steps or a patch smaller than the foreground",
    "`plan` warns, with both sizes and what to give",
)
def test_a_patch_that_the_time_makes_smaller_than_the_foreground_is_warned_of(quick: None) -> None:
    patch, steps = planned(SMALL, NARROW, seconds=60).warnings
    assert "smaller than the foreground, 32x32x32" in patch
    assert patch.endswith("give more time")
    assert "few" in steps


@promise("Config", "a plan's file whose name Hydra does not take", "the printed command quotes it")
def test_odd_names_and_links_are_checked_planned_and_composed_by_the_commands_that_are_printed(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default network has too many levels for a patch of 8 voxels, the planned one has not."""
    root = write_data_set(tmp_path / "set, (1)", SMALL, cases=4, scale=0.25)
    (root / "imagesTr").rename(tmp_path / "elsewhere")
    (root / "imagesTr").symlink_to(tmp_path / "elsewhere")
    words = ["data=decathlon", f"data.root='{root}'", "data.allow_outside=true", "steps=5"]
    assert face("check-data", *words) == 0
    (command,) = re.findall(r"python -m unet3d (plan data=.*)", capsys.readouterr().out)
    more = ["data.patch=[8,8,8]", "model.kernels=auto", "device=cpu", "budget=64MiB"]
    plan = tmp_path / "plan = {1}.yaml"
    assert face(*shlex.split(command), *more, "-o", str(plan)) == 0
    (command,) = re.findall(r"train it: python train.py (.*)", capsys.readouterr().out)
    assert "allow_outside" not in read_yaml(plan)["options"]["data"]
    config = compose.compose(shlex.split(command))
    assert (config.data.root, config.data.allow_outside) == (str(root), True)
    assert (config.data.patch, config.model.kernels) == ([8, 8, 8], 3)


def test_what_the_command_line_gives_stays(quick: None) -> None:
    words = ["data.patch=[32,32,32]", "batch=3", "amp=false", "data.augment.mirror=[2]", "steps=7", "optim.lr=0.1"]
    draft = planned(SMALL, NARROW, *words)
    assert draft.given.isdisjoint(draft.options)
    assert (draft.config.data.patch, draft.config.batch, draft.config.steps) == ([32, 32, 32], 3, 7)


def test_a_budget_too_small_for_any_patch_is_one_line(quick: None) -> None:
    with pytest.raises(UserError, match=r"\A.*no patch fits.*\Z"):
        planned(SMALL, NARROW, budget=MIB // 16)


def test_the_time_decides_how_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "measured_step", lambda _: 0.001)
    drafts = [planned(SMALL, NARROW, "data.patch=[32,32,32]", seconds=seconds) for seconds in (60, 600)]
    assert drafts[0].config.steps < drafts[1].config.steps
    assert drafts[0].promise["seconds"] <= 60
    assert drafts[1].promise["seconds"] <= 600


def test_steps_of_a_device_that_is_not_here_are_unknown() -> None:
    draft = planned(SMALL, NARROW, "data.patch=[32,32,32]", "device=cuda")
    assert "step_s" not in draft.promise
    assert draft.promise["reserved_bytes"] > 0
    assert any("unknown" in line for line in draft.decisions if line.startswith("steps: "))


def test_a_step_that_is_measured_in_place_of_a_long_one_has_maps_to_normalise() -> None:
    """Of seven levels, the deepest map of a patch of few voxels would be one voxel."""
    config = compose.compose(["model.features=[2,2,2,2,2,2,2]", "data.patch=[384,384,256]", "model.in_channels=1"])
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
    read = read_fingerprint(compose.compose(words).data)
    assert len(read.shapes) == 4
    assert [name for name, *_ in read.classes] == list(kind.classes)
    assert all(channel.is_ct_like == (name == "ct") for channel in read.channels)
    levels = len(sized_patches(kind.spacing, read.shapes[0])[0].levels.kernels)
    features = f"model.features=[{','.join(['2'] * levels)}]"
    config = compose.compose([*words, features, "data.patch=[512,512,512]"])
    draft = make_plan(config, {"model.features"}, read, 4096 * MIB)
    assert max(draft.promise["peak_bytes"], draft.promise["validation_bytes"]) <= 4096 * MIB
    if name == "mr":
        model = draft.config.model
        assert (geometry.kernels(model)[0], geometry.strides(model)[0]) == ((3, 3, 1), (2, 2, 1))
    assert measured_step(steps.shrunk(draft.config)) > 0


def test_regions_of_more_labels_than_there_are_regions_are_read_and_each_has_its_share(tmp_path: Path) -> None:
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3]}
    root = make_brain(tmp_path / "brain", labels=labels, regions_class_order=[1, 2])
    background, whole, core = read_fingerprint(compose.compose(["data=nnunet", f"data.root={root}"]).data).classes
    assert (background[0], whole[0], core[0]) == ("background", "whole", "core")
    assert 0 < core[1] < whole[1]
    assert background[1] + whole[1] == pytest.approx(1)
    assert whole[2] == core[2] == 1


@pytest.mark.slow
def test_a_plan_is_trained_and_its_receipt_is_exact(tmp_path: Path) -> None:
    """The data set has regions."""
    words = ["data=nnunet", f"data.root={make_brain(tmp_path / 'brain')}", "device=cpu", "model.features=[2,4]"]
    plan, folder = tmp_path / "plan.yaml", tmp_path / "run"
    assert face("plan", *words, "budget=64MiB", "-o", str(plan)) == 0
    more = ["steps=3", "eval_every=0", "workers=0", f"hydra.run.dir={folder}"]
    run = train(tmp_path, f"plan={plan}", *more, frills=True)
    assert run.code == 0, run.err
    memory = read_memory(folder)
    assert memory["plan"]["peak_bytes"] == memory["measured"]["peak_bytes"]
    assert sorted(memory["plan"]["changed"]) == ["eval_every", "steps"]
    assert report.RECEIPT in run.out
    assert read_yaml(folder / "config.yaml")["plan"] == str(plan)
    table = report.receipt(memory, read_run(folder).records)
    assert table is not None
    assert table.rows[0][-1] == "+0.0%"
