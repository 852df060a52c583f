"""From cases to tensors: normalisation, what is kept in memory, what the options accept, and sparse annotation."""

import dataclasses
import os
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from guards import without
from nifti_files import FLIPPED, LPS, WARNING, case, checked, decathlon, image, label, told, write
from promises import promise
from training import TINY, face, records, train

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.compose import compose, to_plain
from unet3d.config.schema import Config, Data
from unet3d.data import prepare
from unet3d.data.intensity import Intensity, Seen, checked_intensity, intensity_rules, normalise
from unet3d.data.patches import Patches, PatchIndex, choose_centre, crop
from unet3d.data.prepare import prepare_data
from unet3d.run import checkpoint
from unet3d.run.predict import Segmenter
from unet3d.training.policy import MemoryPolicy


def test_auto_treats_ct_as_ct_and_the_rest_by_z_score() -> None:
    foreground = iter([np.array([[0.0, 1.0, 2.0], [-1000.0, 50.0, 3000.0]])])
    found = intensity_rules("auto", ("MRI", "ct"), foreground)
    assert [r.kind for r in found] == ["zscore", "ct"]
    assert -1000 < found[1].low < found[1].high < 3000


def test_z_score_needs_no_training_set() -> None:
    def read() -> Iterator[np.ndarray]:
        yield pytest.fail("the training set is read")

    assert intensity_rules("auto", ("MRI",), read()) == (Intensity("zscore"),)


def test_z_score_is_per_volume_and_channel() -> None:
    image = np.stack([np.arange(27.0).reshape(3, 3, 3), 1e4 + 5 * np.arange(27.0).reshape(3, 3, 3)]).astype(np.float32)
    found = normalise(image, (Intensity("zscore"), Intensity("zscore")))
    assert found.mean((1, 2, 3)) == pytest.approx([0, 0], abs=1e-5)
    assert found.std((1, 2, 3)) == pytest.approx([1, 1], abs=1e-5)


def test_z_score_does_not_depend_on_the_unit() -> None:
    """A diffusion coefficient in m^2/s is a ten-billionth."""
    image = np.random.default_rng(0).normal(7, 1, (1, 4, 4, 4)).astype(np.float32)
    found = [normalise(image * scale, (Intensity("zscore"),)) for scale in (1, np.float32(1e-12))]
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_a_constant_channel_becomes_zero() -> None:
    found = normalise(np.full((1, 2, 2, 2), 7, np.float32), (Intensity("zscore"),))
    assert (found == 0).all()


def test_ct_clips_and_uses_the_training_sets_scale() -> None:
    image = np.array([-2000, 0, 100, 9000], np.float32).reshape(1, 4, 1, 1)
    found = normalise(image, (Intensity("ct", low=-100, high=300, mean=100, std=50),))
    assert found.ravel().tolist() == [-4, -2, 0, 4]
    assert found.dtype == np.float32


def test_ct_without_foreground_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data\.intensity=ct: .*\bzscore$"):
        intensity_rules("ct", ("CT",), iter([np.zeros((1, 0), np.float32)]))


@promise(
    "Data",
    "a foreground of one value under `data.intensity=ct`, an image that its rule makes constant, images "
    "without contrast",
    "refused with the rule to use; a warning where only some lack contrast",
)
@pytest.mark.parametrize("ends", [(3071, 3071), (3071, 3071.01)])
def test_a_foreground_of_one_value_is_no_scale_of_ct(ends: tuple[float, float]) -> None:
    """As of a saturated scan: each image would become constant."""
    single = np.linspace(*ends, 60, dtype=np.float32)[None]
    with pytest.raises(UserError, match=r"^data\.intensity=ct: .*\b3071\b.*\bzscore$"):
        intensity_rules("ct", ("CT",), iter([single]))
    with pytest.raises(UserError, match=r"\bchannel late\b"):
        intensity_rules("ct", ("early", "late"), iter([np.concatenate([image((1, 60)), single])]))
    whole = np.array([[-1e30, 2e30, 3e30]], np.float32)
    assert 1e30 < intensity_rules("ct", ("CT",), iter([whole]))[0].std < 3e30, "whose square is no float32"


@promise("Data", "a foreground of one ...")
@pytest.mark.parametrize("cache", ["memory", "disk", "off"])
def test_an_image_that_its_rule_makes_constant_is_refused(tmp_path: Path, cache: str) -> None:
    data = decathlon(tmp_path)
    data.cache, data.cache_root = cache, str(tmp_path / "cache")
    case(tmp_path, 5000 + image(), np.zeros((6, 5, 4), np.uint8), "a")
    with pytest.raises(UserError, match=r"^a: .*a\.nii\.gz: .*\bconstant\b.*\bzscore$"):
        prepare_data(data)
    data.intensity = "zscore"
    prepare_data(data)


@promise("Data", "a foreground of one ...")
def test_images_without_contrast_are_warned_of_and_refused_where_none_has_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    data.intensity = "zscore"
    for number, name in enumerate("abd"):
        prepare_data(data)
        warned = [line for line in capsys.readouterr().err.splitlines() if "one value" in line]
        assert told(warned, [["warning: channel CT ", f" {number} of 3 "]] if number else [])
        case(tmp_path, np.full((6, 5, 4), number, np.int16), label(), name)
    with pytest.raises(UserError, match=r"\bone value\b"):
        prepare_data(data)


UNLIKE = {  # what is done to an image, by what is said of it under each rule: numbers of it and of training
    "more": (lambda voxels: voxels + 1024, {"ct": ("above", "other units"), "none": ("above", "other units")}),
    "less": (lambda voxels: voxels - 1024, {"ct": ("below", "other units"), "none": ("below", "other units")}),
    "of 0 to 1": (lambda voxels: voxels / 2000, {"ct": ("below", "other units"), "none": ("other units",)}),
    "of one value": (lambda voxels: voxels * 0 + 90, {kind: ("span 0",) for kind in ("ct", "zscore", "none")}),
    "with an outlier": (lambda voxels: np.where(voxels == voxels.max(), 1e9, voxels), {"zscore": ("span",)}),
    "alike": (lambda voxels: voxels * 1.01 + 1, {}),
}


@promise(
    "Prediction",
    "an image unlike those of training: units, spacing, field of view",
    "one warning with both numbers",
)
@pytest.mark.parametrize("kind", ["ct", "zscore", "none"])
@pytest.mark.parametrize("cache", ["memory", "disk", "off"])
def test_an_image_unlike_those_of_training_is_told(tmp_path: Path, kind: str, cache: str) -> None:
    data = decathlon(tmp_path, shape=(12, 10, 8))
    data.intensity, data.cache, data.cache_root = kind, cache, str(tmp_path / "cache")
    ready = prepare_data(data)
    seen, rules, held_out = ready.read.seen, ready.read.intensity, ready.val[0]
    assert seen is not None and Seen.read(dataclasses.asdict(seen), 1) == seen == Seen.merged([seen, seen])
    raw, grid = ready.read.read_volume(held_out).image, ready.headers[held_out.id].target
    for change, said in UNLIKE.values():
        lines = list(seen.differences(normalise(change(raw).astype(np.float32), rules), rules, grid, False))
        expected = said.get(kind, ()) if cache != "off" or kind != "zscore" else ()
        assert len(lines) == bool(expected) and all(word in lines[0] for word in expected), lines
    image = normalise(raw, rules)
    for axis, factor, is_resampled, said in (
        (1, 1.4, False, ""),
        (1, 1.6, False, "spacing"),
        (0, 0.6, False, "spacing"),
    ):
        affine = grid.affine @ np.diag([factor if axis == n else 1 for n in range(4)])
        lines = list(seen.differences(image, rules, grid._replace(affine=affine), is_resampled))
        assert (
            told(lines, [["its spacing is ", "in training 1x1.5x2.5 mm"]] if said else [])
            or "in training 1x" in lines[0]
        )
        assert bool(said) == bool(lines)
    wide = grid._replace(shape=(40, 10, 8))
    assert told(list(seen.differences(image, rules, wide, True)), [["it covers 40x15x20 mm", " 12x15x20"]])


@pytest.mark.parametrize("values", [{"kind": "odd"}, {"kind": "ct", "std": 0.0}, {"kind": "ct", "mean": np.nan}])
def test_a_checkpoints_rule_is_checked(values: dict) -> None:
    assert checked_intensity({"kind": "zscore"}) == Intensity("zscore")
    with pytest.raises(ValueError, match=rf"'kind': '{values['kind']}'"):
        checked_intensity(values)


def all_finite(values: np.ndarray) -> np.ndarray:
    """Take every number for a finite one."""
    return np.ones(np.shape(values), bool)


@promise(
    "Data",
    "voxels that are NaN or infinite",
    "an error; with `data.nonfinite=zero` counted, reported and 0, also in `predict`",
)
@without("unet3d.data.nifti.np.isfinite", all_finite, only="nan")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_voxels_that_are_not_finite_are_an_error_or_counted_and_zero(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    stored = image()
    stored[1, 2, 3] = stored[0, 0, 0] = value
    path = write(tmp_path / "imagesTr/a.nii.gz", stored)
    assert told(checked(data), [[f"a: {path}: 2 ", "NaN"]])
    with pytest.raises(UserError, match=r"^a: .*: 2 .*NaN"):
        prepare_data(data)
    data.nonfinite = "zero"
    assert told(checked(data), [[f"{WARNING}a: {path}: 2 ", "NaN", "data.nonfinite=zero"]])
    ready = prepare_data(data)
    printed = capsys.readouterr().err.splitlines()
    assert told(printed, [[f"{WARNING}a: 2 ", "NaN", "data.nonfinite=zero"]]), "once"
    volume = ready.read.read_volume(ready.train[0])
    stored[1, 2, 3] = stored[0, 0, 0] = 0
    assert volume.nonfinite_voxels == 2 and np.array_equal(volume.image[0], stored[::-1, ::-1])


@promise("Data", "voxels that are NaN ...")
@pytest.mark.slow
def test_predict_accepts_what_its_run_accepted_and_counts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(["model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]"])
    config.model.in_channels, config.model.classes = 1, 3
    state = {
        **{"model_options": dataclasses.asdict(config.model), "intensity": [dataclasses.asdict(Intensity("zscore"))]},
        **{"model": build.model(config.model, 0).state_dict(), "average": {}, "seen": None},
        **{"classes": ["background", "a", "b"], "channels": ["MR"], "step": 1},
    }
    stored = image()
    stored[1, 2, 3] = np.nan
    path = write(tmp_path / "a.nii.gz", stored)
    for config.data.nonfinite, code, line in (
        ("error", 2, [f"error: a: {path}: 1 ", "NaN"]),
        ("zero", 0, ["warning: a: 1 ", "NaN", "data.nonfinite=zero"]),
    ):
        checkpoint.save_checkpoint(tmp_path / "s.pt", state | {"config": to_plain(config)})
        assert face("predict", tmp_path / "s.pt", path, "-o", tmp_path / "out", "--device", "cpu") == code
        assert told(capsys.readouterr().err.splitlines(), [line])
    assert (tmp_path / "out" / "a.nii.gz").exists()


@promise("Data", "a label map of ...")
@without("unet3d.data.volume.SAME_GRID", np.inf)
def test_with_affine_check_warn_label_and_image_are_paired_voxel_by_voxel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", label(), FLIPPED)
    with pytest.raises(UserError, match=rf"^a: {path}: .* 10 "):
        prepare_data(data)
    data.affine_check = "warn"
    ready = prepare_data(data)
    assert told(capsys.readouterr().err.splitlines(), [[f"{WARNING}a: {path}: ", " 10 "]])
    volume = ready.read.read_volume(ready.train[0])
    assert np.array_equal(volume.image[0], image()[::-1, ::-1])
    assert np.array_equal(volume.label, label()[::-1, ::-1])


@promise("Data", "4D and 2D images ...")
def test_a_model_for_another_number_of_channels_is_refused(tmp_path: Path) -> None:
    ready = prepare_data(decathlon(tmp_path))
    config = compose([f"data.root={tmp_path}", "data=decathlon", "model.in_channels=2"])
    with pytest.raises(UserError, match=r"^model\.in_channels=2, .*\b1\b"):
        build.model_options(config, ready.dataset, ready.spacing)


@promise(
    "Data",
    "thick slices, volumes smaller than the patch or not divisible by 2^levels",
    "they train; predictions have the image's shape and affine",
)
@pytest.mark.parametrize("shape", [(21, 13, 3), (9, 9, 9), (5, 40, 1)], ids=str)
def test_thick_slices_and_sizes_that_fit_nothing_train_and_predict(tmp_path: Path, shape: tuple) -> None:
    """1 x 1 x 5 mm; smaller than the patch, and no multiple of 2^levels."""
    data = decathlon(tmp_path, ("a", "b"))
    thick = LPS @ np.diag([1, 1 / 1.5, 2, 1])
    for name in "ab":
        write(tmp_path / f"imagesTr/{name}.nii.gz", image(shape, seed=ord(name)), thick)
        write(tmp_path / f"labelsTr/{name}.nii.gz", label(shape, seed=ord(name)), thick)
    config = compose(["model=unet_tiny", f"data.root={tmp_path}", "data=decathlon", "data.patch=[16,16,16]"])
    ready = prepare_data(config.data)
    options = build.model_options(config, ready.dataset, ready.spacing)
    patches = Patches(lambda index: ready.read(ready.train[index]), config.data, 0, config.data.patch)
    patch, target, _ = patches[PatchIndex(0, 0, 0)]
    assert patch.shape == (1, 16, 16, 16) and torch.isfinite(patch).all() and target.shape == (16, 16, 16)
    predictor = build.predictor(config, [build.model(options, 0)], options, MemoryPolicy())
    Segmenter(predictor, ready.read.intensity, data).to_file(ready.val[0], tmp_path / "out.nii.gz")
    source, found = nib.load(ready.val[0].images[0]), nib.load(tmp_path / "out.nii.gz")
    assert found.shape == shape and np.array_equal(found.affine, source.affine)
    assert found.header.get_zooms() == source.header.get_zooms() and set(np.unique(found.dataobj)) <= {0, 1, 2}


@promise("Data", "a constant image; values at both ends of float32", "finite once normalised")
def test_a_constant_image_is_finite_once_normalised(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    case(tmp_path, np.full((6, 5, 4), 7, np.int16), label(), "a")
    for data.intensity in ("auto", "zscore", "none"):
        ready = prepare_data(data)
        assert all(torch.isfinite(ready.read(one).image).all() for one in (*ready.train, *ready.val))


@promise("Data", "a constant image; values ...")
def test_values_at_both_ends_of_float32_are_normalised_without_a_warning() -> None:
    image = np.array([-3e38, 3e38], np.float32).reshape(1, 2, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = normalise(image, [Intensity("zscore")])
    assert found.ravel().tolist() == [-1, 1]


@promise("Data", "a file or an option that changed after cases were prepared", "the next run sees it")
def test_a_file_that_changed_is_seen_by_the_next_run(tmp_path: Path) -> None:
    """Without data.cache=disk, nothing on disk could be out of date."""
    data = decathlon(tmp_path)
    data.intensity = "none"
    before = sorted(tmp_path.rglob("*"))
    first = prepare_data(data)
    old = first.read(first.train[0]).image
    write(tmp_path / "imagesTr/a.nii.gz", image(seed=9))
    assert first.read(first.train[0]).image is old
    second = prepare_data(data)
    assert np.array_equal(second.read(second.train[0]).image[0], image(seed=9)[::-1, ::-1])
    data.spacing = [1.0, 1.0, 1.0]
    third = prepare_data(data)
    assert third.read(third.train[0]).image.shape == (1, 6, 8, 10)
    assert sorted(tmp_path.rglob("*")) == before


def damage_voxels(root: Path) -> None:
    """Leave sound headers, and voxels that cannot be read."""
    for path in root.glob("imagesTr/*"):
        path.write_bytes(path.read_bytes()[:-1])


def endless() -> int:
    """Return more bytes than there are."""
    return 2**60


@promise("Disk and limits", "the cases need more than the memory", "refused before any voxel is read")
@without("unet3d.data.prepare.host_bytes", endless)
def test_cases_that_need_more_than_the_memory_are_refused_before_any_voxel_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path, ("a", "b"))
    data.intensity = "zscore"
    for name in "ab":
        case(tmp_path, image((64, 64, 64), seed=ord(name)), label((64, 64, 64)), name)
    prepare_data(data)
    assert told(capsys.readouterr().out.splitlines(), [["2 ", " 3.0 MiB "]])
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 2**20}[name])
    damage_voxels(tmp_path)
    with pytest.raises(UserError, match=r"^2 .* 3\.0 MiB .* 3\.0 MiB; .*data\.cache=disk"):
        prepare_data(data)
    data.cache = "off"
    with pytest.raises(UserError, match=r"^a: .*damaged"):  # none is kept: they are read, to be compared
        prepare_data(data)


def test_a_prediction_of_memory_reads_no_voxel(tmp_path: Path) -> None:
    """Unset fields come from the data set's names and one header."""
    decathlon(tmp_path, ("a", "b"))
    words = [f"data.root={tmp_path}", "data=decathlon", "model=unet_tiny", "data.spacing=[1,1,4]"]
    config = compose([*words, "data.patch=[32,32,32]", "model.strides=auto"])
    ready = prepare_data(config.data)
    whole = build.model_options(config, ready.dataset, ready.spacing)
    assert ready.read(ready.train[0]).spacing == (1, 1, 4)
    damage_voxels(tmp_path)
    assert build.model_config_from_headers(config) == whole and [1, 1, 1] != whole.strides[0] != [2, 2, 2]


def labels() -> torch.Tensor:
    """Foreground from 10 to 50, 4 to 24 and 2 to 12 in a volume of 60 x 30 x 15."""
    found = torch.zeros(60, 30, 15, dtype=torch.int16)
    found[10:51, 4:25, 2:13] = 1
    return found


def options(**changes: object) -> Data:
    return Data(**({"semi": True, "sparse": [5, 5, 3]} | changes))


def test_slices_are_spread_over_the_foreground() -> None:
    assert prepare.extent(labels()) == [(10, 50), (4, 24), (2, 12)]
    assert prepare.chosen_slices(labels(), options(sparse=[1, 2, 0]), False) == [[30], [9, 19], []]
    assert prepare.chosen_slices(labels(), options(), False) == [
        [14, 22, 30, 38, 46],
        [6, 10, 14, 18, 22],
        [4, 7, 10],
    ]
    assert prepare.chosen_slices(labels(), options(scored=[4, 1, 0]), True) == [[18, 26, 34, 42], [14], []]


def test_the_same_slices_are_scored_however_many_are_learned() -> None:
    found = [
        prepare.chosen_slices(labels(), options(sparse=counts), True) for counts in ([1, 1, 1], [5, 5, 3], [9, 0, 2])
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("changes", [{}, {"scored": [5, 5, 5]}, {"sparse": [40, 3, 9]}, {"sparse_fold": 1}])
def test_no_voxel_is_both_learned_and_scored(changes: dict) -> None:
    learned, scored = (prepare.chosen_mask(labels(), options(**changes), part) for part in (False, True))
    assert learned.any() and scored.any() and not (learned & scored).any()


@pytest.mark.parametrize("high", [142, 71])
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 2, 1], [3, 3, 2], [5, 5, 3]])
def test_no_scored_slice_mirrors_a_learned_one(counts: list[int], high: int) -> None:
    """The MNI152 template is its own mirror image across x, with this extent at 1 and at 2 mm."""
    brain = torch.ones(high + 1, 9, 9, dtype=torch.int16)
    learned, scored = (prepare.chosen_slices(brain, options(sparse=counts), part)[0] for part in (False, True))
    assert not {*learned} & {high - index for index in scored}


def test_the_mask_holds_whole_slices_and_nothing_else() -> None:
    mask = prepare.planes(torch.Size((4, 5, 6)), [[1], [], [0, 5]])
    expected = torch.zeros(4, 5, 6, dtype=torch.bool)
    expected[1], expected[:, :, 0], expected[:, :, 5] = True, True, True
    assert torch.equal(mask, expected)


def test_each_slice_is_scored_in_one_of_the_folds_and_learned_in_the_others() -> None:
    folds = [options(sparse=[7, 5, 21], sparse_fold=fold) for fold in range(3)]
    every = prepare.chosen_slices(labels(), options(sparse=[7, 5, 21]), False)
    for axis in range(3):
        scored = [prepare.chosen_slices(labels(), fold, True)[axis] for fold in folds]
        learned = [prepare.chosen_slices(labels(), fold, False)[axis] for fold in folds]
        assert sorted(chain(*scored)) == sorted(every[axis])
        assert all(sorted(a + b) == sorted(every[axis]) for a, b in zip(scored, learned, strict=True))


def test_without_foreground_slices_are_spread_over_the_volume() -> None:
    nothing = torch.zeros(11, 11, 11, dtype=torch.int16)
    assert prepare.chosen_slices(nothing, options(sparse=[1, 1, 2]), False) == [[5], [5], [2, 8]]


def phantom(tmp_path: Path, *overrides: str) -> Config:
    size = ("data.phantom.cases=3", "data.phantom.shape=[24,20,16]", "data.patch=[16,16,16]")
    return compose([*size, f"data.root={tmp_path}", "data.sparse=[2,1,1]", *overrides])


def test_semi_automated_cases_are_learned_and_scored_in_parts(tmp_path: Path) -> None:
    data = prepare_data(phantom(tmp_path, "data.semi=true").data)
    assert data.train == data.val and len(data.train) == 3
    for one in data.train:
        dense, learned, scored = data.read(one), data.read_train(one), data.read_val(one)
        assert learned.image is dense.image is scored.image, "one image in memory"
        for part in (learned.label, scored.label):
            seen = part != IGNORE
            assert 0 < seen.sum() < seen.numel() / 2 and torch.equal(part[seen], dense.label[seen])
        assert not ((learned.label != IGNORE) & (scored.label != IGNORE)).any()
        for voxels in map(learned.centres_of, range(learned.classes)):
            assert (learned.label[tuple(voxels.T)] > 0).all(), "patches are centred on what is annotated"


@without("unet3d.data.patches.TRIES", 0)
def test_patches_meet_what_is_annotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One slice in a volume of 24 x 20 x 16: a tile of 4 voxels anywhere would mostly miss it."""
    data = prepare_data(phantom(tmp_path, "data.semi=true", "data.sparse=[1,0,0]").data)
    kept = sum(case.image.nbytes + 3 * case.label.nbytes for case in map(data.read, data.train))
    line = [f"{len(data.train)} ", f" {kept / 2**20:,.1f} MiB "]
    assert told(capsys.readouterr().out.splitlines(), [line]), "each once, with the labels that are learned and scored"
    case = data.read_train(data.train[0])
    rng = np.random.default_rng(0)
    tiles = [crop(case.image, case.label, choose_centre(case, [4] * 3, 0, rng), [4] * 3, False)[1] for _ in range(60)]
    assert sum(bool((tile != IGNORE).any()) for tile in tiles) > 55


def test_fully_automated_cases_are_scored_whole(tmp_path: Path) -> None:
    data = prepare_data(phantom(tmp_path, "data.folds=3", "data.fold=0").data)
    assert not {case.id for case in data.train} & {case.id for case in data.val}
    assert all((data.read_train(case).label == IGNORE).any() for case in data.train)
    assert not any((data.read_val(case).label == IGNORE).any() for case in data.val)


def test_scored_slices_that_are_all_learned_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^phantom_000: .*\bscored; .*data\.sparse .*data\.scored$"):
        prepare_data(phantom(tmp_path, "data.semi=true", "data.sparse=[1,1,1]", "data.scored=[1,1,1]").data)


def test_a_run_learns_from_slices_and_scores_others(tmp_path: Path) -> None:
    words = ["data.semi=true", "data.sparse=[2,1,1]", "data.scored=[1,1,1]", "steps=2"]
    done = train(tmp_path, *TINY, *words, f"data.root={tmp_path / 'phantom'}", "hydra.run.dir=run")
    assert done.code == 0, done.err
    (first, *_), folder = records(tmp_path / "run"), tmp_path / "run"
    assert first["step"] == 0 and 0 < float.fromhex(first["data/labelled_share"]) < 0.3
    head, *rows = (folder / "scores.csv").read_text().splitlines()
    assert "iou/" in head and "hd95" not in head and len(rows) == len([*(folder / "predictions").iterdir()]) == 4
    drawn = sorted(path.stem for path in (folder / "figures").glob("prediction*.png"))
    assert drawn == [f"prediction_{role}" for role in ("best", "median", "worst")]


def test_a_label_map_without_any_label_is_refused(tmp_path: Path) -> None:
    config = phantom(tmp_path)
    data = prepare_data(config.data)
    case = data.train[0]
    found = data.read(case)
    unlabelled = dataclasses.replace(found, label=torch.full_like(found.label, IGNORE))
    read = dataclasses.replace(data.read, cache={case.id: unlabelled})
    with pytest.raises(UserError, match=rf"^{case.id}: .*\blearned; .*data\.sparse$"):
        prepare.SparseReader(read, config.data, False, None)(case)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["data.sparse=[1,1]"], r"^data\.sparse=\[1, ?1\]: "),
        (["data.sparse=[0,0,0]"], r"^data\.sparse=\[0, ?0, ?0\]: .*\b0$"),
        (["data.sparse=[1,-1,1]"], r"^data\.sparse=\[1, ?-1, ?1\]: .*>= 0"),
        (["data.semi=true"], r"^data\.semi=true .*data\.sparse=\[yz,xz,xy\]"),
        (["data.semi=true", "data.sparse=[3,3,3]", "data.fold=0"], r"data\.semi=true.*data\.fold"),
        (["data.sparse_fold=0"], r"^data\.sparse_fold .*data\.semi=true"),
        (["optim.average=0.9", "model.norm=batch"], r"^optim\.average .*model\.norm=batch"),
        (["data.semi=true", "data.sparse=[3,3,3]", "data.sparse_fold=3"], r"^data\.sparse_fold=3: .*\b0\b.*\b2\b"),
        (["data.semi=true", "data.sparse=[2,2,2]", "data.sparse_fold=0"], r"^data\.sparse=\[2, 2, 2\]: .*_folds=3"),
    ],
)
def test_options_of_sparse_annotation_that_do_not_fit_are_refused(overrides: list[str], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        compose(overrides)
