"""From cases to tensors: normalisation, what is kept in memory, what the options accept, and sparse annotation."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
import nibabel as nib
import numpy as np
import pytest
import torch
from guards import without
from hypothesis import given, settings
from nifti_files import FLIPPED, LPS, WARNING, case, checked, decathlon, image, label, told, write
from promises import promise
from tables import says, table
from training import TINY, face, records, train

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE
from unet3d.config.compose import compose
from unet3d.config.schema import Config, Data
from unet3d.data import prepare
from unet3d.data.intensity import Intensity, Seen, intensity_rules, normalise
from unet3d.data.patches import choose_centre, crop
from unet3d.data.prepare import prepare_data
from unet3d.run import checkpoint


def test_auto_treats_ct_as_ct_and_the_rest_by_z_score_which_needs_no_training_set() -> None:
    foreground = iter([np.array([[0.0, 1.0, 2.0], [-1000.0, 50.0, 3000.0]])])
    mri, ct = intensity_rules("auto", ("MRI", "ct"), foreground)
    assert (mri.kind, ct.kind) == ("zscore", "ct")
    assert -1000 < ct.low < ct.high < 3000

    def read() -> Iterator[np.ndarray]:
        yield pytest.fail("the training set is read")

    assert intensity_rules("auto", ("MRI",), read()) == (Intensity("zscore"),)


@promise("Data", "a constant image; values at both ends of float32", "finite once normalised")
def test_each_channel_is_normalised_by_its_rule_in_any_unit() -> None:
    """A diffusion coefficient in m^2/s is a ten-billionth; a constant channel becomes 0."""
    ct = Intensity("ct", low=-100, high=300, mean=100, std=50)
    voxels = [[1, 3], [1e-12, 3e-12], [-3e38, 3e38], [7, 7], [-2000, 100]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = normalise(np.float32(voxels).reshape(5, 2, 1, 1), [Intensity("zscore")] * 4 + [ct])
    assert found.dtype == np.float32
    assert np.allclose(found[..., 0, 0], [[-1, 1]] * 3 + [[0, 0], [-4, 0]])


@promise(
    "Data",
    "a foreground of one value under `data.intensity=ct`, an image that its rule makes constant, images "
    "without contrast",
    "refused with the rule to use; a warning where only some lack contrast",
)
@pytest.mark.parametrize(("ends", "words"), [((3071, 3071), " 3071"), ((3071, 3071.01), "nearly"), ((), "no training")])
def test_a_foreground_of_one_value_is_no_scale_of_ct(ends: tuple[float, ...], words: str) -> None:
    """As of a saturated scan: each image would become constant."""
    single = np.linspace(*ends, 60, dtype=np.float32)[None] if ends else np.zeros((1, 0))
    with pytest.raises(UserError, match=rf"^data\.intensity=ct: .*{words}.*\bzscore$"):
        intensity_rules("ct", ("CT",), iter([single]))
    if ends:
        with pytest.raises(UserError, match=r"\bchannel late\b"):
            intensity_rules("ct", ("early", "late"), iter([np.concatenate([image((1, 60)), single])]))


@promise("Data", "a foreground of one ...")
@pytest.mark.parametrize("cache", ["memory", "off"])
def test_an_image_that_its_rule_makes_constant_is_refused(tmp_path: Path, cache: str) -> None:
    data = decathlon(tmp_path)
    data.cache = cache
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


@promise(
    "Prediction",
    "an image unlike those of training: units, spacing, field of view",
    "one warning with both numbers",
)
@pytest.mark.parametrize(
    ("kind", "scale", "offset", "brightest", "words"),
    table("""
    ct     | 1      | 1024  |     | above ... in training ... other units
    none   | 1      | 1024  |     | above ... in training ... other units
    ct     | 1      | -1024 |     | below ... in training ... other units
    none   | 1      | -1024 |     | below ... in training ... other units
    none   | 0.0005 | 0     |     | in training ... other units
    ct     | 0      | 90    |     | span 0
    zscore | 0      | 90    |     | span 0
    none   | 0      | 90    |     | span 0
    zscore | 1      | 0     | 1e9 | span ... in training
    ct     | 1.01   | 1     |     |
    zscore | 1.01   | 1     |     |
    none   | 1.01   | 1     |     |
"""),
)
def test_intensities_unlike_those_of_training_are_told(
    tmp_path: Path, kind: str, scale: str, offset: str, brightest: str, words: str
) -> None:
    data = decathlon(tmp_path, shape=(12, 10, 8))
    data.intensity = kind
    ready = prepare_data(data)
    seen, rules, held_out = ready.read.seen, ready.read.intensity, ready.val[0]
    assert seen is not None
    voxels = ready.read.read_volume(held_out).image * float(scale) + float(offset)
    if brightest:
        voxels[voxels == voxels.max()] = float(brightest)
    grid = ready.headers[held_out.id].target
    lines = [*seen.differences(normalise(voxels.astype(np.float32), rules), rules, grid, False)]
    assert len(lines) == bool(words)
    assert says("".join(lines), words)


@promise("Prediction", "an image unlike ...")
@pytest.mark.parametrize(
    ("axis", "factor", "longer", "words"),
    [
        (1, 1.4, 1, ""),
        (1, 1.6, 1, "spacing is 1x2.4x2.5 mm ... in training 1x1.5x2.5"),
        (0, 0.6, 1, "spacing is 0.6x1.5x2.5 mm ... in training 1x1.5x2.5"),
        (0, 1.0, 40 / 12, "covers 40x15x20 mm ... in training 12x15x20"),
    ],
)
def test_another_spacing_or_field_of_view_is_told(
    tmp_path: Path, axis: int, factor: float, longer: float, words: str
) -> None:
    ready = prepare_data(decathlon(tmp_path, shape=(12, 10, 8)))
    seen, rules, held_out = ready.read.seen, ready.read.intensity, ready.val[0]
    assert seen is not None
    assert Seen.read(asdict(seen), 1) == seen == Seen.merged([seen, seen])
    grid = ready.headers[held_out.id].target
    shape, affine = [*grid.shape], grid.affine.copy()
    shape[axis] = round(shape[axis] * longer)
    affine[axis, axis] *= factor
    grid = grid._replace(shape=tuple(shape), affine=affine)
    lines = [*seen.differences(ready.read(held_out).image.numpy(), rules, grid, longer > 1)]
    assert len(lines) == bool(words)
    assert says("".join(lines), words)


def all_finite(values: np.ndarray) -> np.ndarray:
    """Take every number for a finite one."""
    return np.ones(np.shape(values), bool)


@promise(
    "Data",
    "voxels that are NaN or infinite",
    "an error; with `data.nonfinite=zero` counted, reported and 0, also in `predict`",
)
@without("unet3d.data.nifti.np.isfinite", all_finite, only="nan")
@pytest.mark.parametrize("value", [np.nan, -np.inf])
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
    assert volume.nonfinite_voxels == 2
    assert np.array_equal(volume.image[0], stored[::-1, ::-1])


@promise("Data", "voxels that are NaN ...")
@pytest.mark.slow
@pytest.mark.parametrize(("choice", "code"), [("error", 2), ("zero", 0)])
def test_predict_accepts_what_its_run_accepted_and_counts_it(
    finished: Path, tmp_path: Path, choice: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    state["config"]["data"]["nonfinite"] = choice
    checkpoint.save_checkpoint(tmp_path / "s.pt", state)
    stored = image()
    stored[1, 2, 3] = np.nan
    path = write(tmp_path / "a.nii.gz", stored)
    assert face("predict", tmp_path / "s.pt", path, "-o", tmp_path / "out", "--device", "cpu") == code
    words = f"a: {path}: 1 ... NaN" if code else "a: 1 ... NaN ... data.nonfinite=zero"
    assert any(says(line, words) for line in capsys.readouterr().err.splitlines())
    assert (tmp_path / "out" / "a.nii.gz").exists() == (code == 0)


@promise("Data", "a label map of ...")
@without("unet3d.data.volume.SAME_GRID", np.inf)
def test_with_affine_check_warn_label_and_image_are_paired_voxel_by_voxel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", label(), FLIPPED)
    data.affine_check = "warn"
    ready = prepare_data(data)
    assert told(capsys.readouterr().err.splitlines(), [[f"{WARNING}a: {path}: ", " 10 "]])
    volume = ready.read.read_volume(ready.train[0])
    assert np.array_equal(volume.image[0], image()[::-1, ::-1])
    assert np.array_equal(volume.label, label()[::-1, ::-1])


@promise("Data", "4D and 2D images ...")
def test_a_model_for_another_number_of_channels_is_refused(tmp_path: Path) -> None:
    ready = prepare_data(decathlon(tmp_path))
    with pytest.raises(UserError, match=r"^model\.in_channels=2, .*\b1\b"):
        build.model_options(compose(["model.in_channels=2"]), ready.dataset, ready.spacing)


@promise(
    "Data",
    "thick slices, volumes smaller than the patch or not divisible by 2^levels",
    "they train; predictions have the image's shape and affine",
)
@pytest.mark.slow
def test_thick_slices_and_sizes_that_fit_nothing_train_and_predict(tmp_path: Path) -> None:
    """1 x 1 x 5 mm; smaller than the patch, and no multiple of 2^levels."""
    decathlon(tmp_path, ("a", "b", "c"))
    for name, shape in {"a": (21, 13, 3), "b": (9, 9, 9), "c": (5, 40, 1)}.items():
        for folder, voxels in {"imagesTr": image(shape), "labelsTr": label(shape)}.items():
            write(tmp_path / folder / f"{name}.nii.gz", voxels, LPS @ np.diag([1, 1 / 1.5, 2, 1]))
    done = train(tmp_path, *TINY, "data=decathlon", "data.root=.", "steps=3", "hydra.run.dir=run")
    assert done.code == 0, done.err
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    assert face("predict", last, tmp_path / "imagesTr", "-o", tmp_path / "maps", "--device", "cpu") == 0
    for path in (tmp_path / "imagesTr").iterdir():
        source, found = nib.load(path), nib.load(tmp_path / "maps" / path.name)
        assert found.shape == source.shape
        assert np.array_equal(found.affine, source.affine)
        assert {0, 1, 2} >= set(np.unique(found.dataobj))


@promise("Data", "a file or an option that changed after cases were prepared", "the next run sees it")
def test_a_file_or_an_option_that_changed_is_seen_by_the_next_run(tmp_path: Path) -> None:
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
    data = decathlon(tmp_path, ("a", "b"), (64, 64, 64))
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
    assert build.model_config_from_headers(config) == whole
    assert whole.strides[0] == [2, 2, 1]


LABELS = torch.zeros(60, 30, 15, dtype=torch.int16)
LABELS[10:51, 4:25, 2:13] = 1  # The foreground runs from 10 to 50, 4 to 24 and 2 to 12.


def slices(is_scored: bool, label: torch.Tensor = LABELS, **changes: object) -> prepare.Slices:
    """Return the slices of some options that are scored, or learned."""
    return prepare.chosen_slices(label, Data(**({"semi": True} | changes)), is_scored)


def test_slices_are_spread_over_the_foreground_or_the_volume() -> None:
    assert slices(False, sparse=[1, 2, 0]) == [[30], [9, 19], []]
    assert slices(False, sparse=[5, 5, 3]) == [[14, 22, 30, 38, 46], [6, 10, 14, 18, 22], [4, 7, 10]]
    assert slices(True, sparse=[5, 5, 3], scored=[4, 1, 0]) == [[18, 26, 34, 42], [14], []]
    assert slices(False, torch.zeros(11, 11, 11), sparse=[1, 1, 2]) == [[5], [5], [2, 8]]


@settings(max_examples=10)
@given(st.lists(st.integers(1, 21), min_size=3, max_size=3))
def test_slices_are_learned_or_scored_and_in_each_fold_others_are_scored(counts: list[int]) -> None:
    assert slices(True, sparse=counts) == slices(True, sparse=[1, 1, 1]), "however many are learned"
    every = slices(False, sparse=counts)
    scored = [slices(True, sparse=counts, sparse_fold=fold) for fold in range(3)]
    learned = [slices(False, sparse=counts, sparse_fold=fold) for fold in range(3)]
    for axis in range(3):
        assert sorted(chain(*(of_fold[axis] for of_fold in scored))) == every[axis]
        for of_fold, others in zip(scored, learned, strict=True):
            assert sorted(of_fold[axis] + others[axis]) == every[axis]
    for fold in (None, 0):
        options = Data(semi=True, sparse=counts, sparse_fold=fold)
        learned_mask, scored_mask = (prepare.chosen_mask(LABELS, options, is_scored) for is_scored in (False, True))
        assert not (learned_mask & scored_mask).any()
        places = zip(np.indices(LABELS.shape), prepare.chosen_slices(LABELS, options, False), strict=True)
        assert np.array_equal(learned_mask, np.any([np.isin(*of_axis) for of_axis in places], axis=0)), "whole slices"


@pytest.mark.parametrize("high", [142, 71])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_scored_slice_mirrors_a_learned_one(count: int, high: int) -> None:
    """The MNI152 template is its own mirror image across x, with this extent at 1 and at 2 mm."""
    brain = torch.ones(high + 1, 9, 9, dtype=torch.int16)
    learned, scored = (slices(is_scored, brain, sparse=[count, 1, 1])[0] for is_scored in (False, True))
    assert {*learned}.isdisjoint(high - index for index in scored)


def phantom(tmp_path: Path, *overrides: str) -> Config:
    size = ("data.phantom.cases=3", "data.phantom.shape=[24,20,16]", "data.patch=[16,16,16]")
    return compose([*size, f"data.root={tmp_path}", "data.sparse=[2,1,1]", *overrides])


def test_semi_automated_cases_are_learned_and_scored_in_parts(tmp_path: Path) -> None:
    data = prepare_data(phantom(tmp_path, "data.semi=true").data)
    assert data.train == data.val
    for one in data.train:
        dense, learned, scored = data.read(one), data.read_train(one), data.read_val(one)
        assert learned.image is dense.image is scored.image, "one image in memory"
        for part in (learned.label, scored.label):
            seen = part != IGNORE
            assert 0 < seen.sum() < seen.numel() / 2
            assert torch.equal(part[seen], dense.label[seen])
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
    assert all((data.read_train(case).label == IGNORE).any() for case in data.train)
    assert not any((data.read_val(case).label == IGNORE).any() for case in data.val)


def test_scored_slices_that_are_all_learned_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^phantom_000: .*\bscored; .*data\.sparse .*data\.scored$"):
        prepare_data(phantom(tmp_path, "data.semi=true", "data.sparse=[1,1,1]", "data.scored=[1,1,1]").data)


@pytest.mark.slow
def test_a_run_learns_from_slices_and_scores_others(tmp_path: Path) -> None:
    words = ["data.semi=true", "data.sparse=[2,1,1]", "data.scored=[1,1,1]", "steps=2"]
    done = train(tmp_path, *TINY, *words, f"data.root={tmp_path / 'phantom'}", "hydra.run.dir=run")
    assert done.code == 0, done.err
    first = records(tmp_path / "run")[0]
    assert 0 < float.fromhex(first["data/labelled_share"]) < 0.3
    head, *rows = (tmp_path / "run" / "scores.csv").read_text().splitlines()
    assert "iou/" in head
    assert "hd95" not in head
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("words", "refusal"),
    table("""
    data.sparse=[1,1]                                     | data.sparse=[1
    data.sparse=[0,0,0]                                   | data.sparse=[0 ... 0
    data.sparse=[1,-1,1]                                  | data.sparse=[1 ... >= 0
    data.semi=true                                        | data.semi=true ... data.sparse=[yz,xz,xy]
    data.semi=true data.sparse=[3,3,3] data.fold=0        | data.semi=true ... data.fold
    data.sparse_fold=0                                    | data.sparse_fold ... data.semi=true
    optim.average=0.9 model.norm=batch                    | optim.average ... model.norm=batch
    data.semi=true data.sparse=[3,3,3] data.sparse_fold=3 | data.sparse_fold=3 ... 0 ... 2
    data.semi=true data.sparse=[2,2,2] data.sparse_fold=0 | data.sparse=[2, 2, 2] ... _folds=3
"""),
)
def test_options_of_sparse_annotation_that_do_not_fit_are_refused(words: str, refusal: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(words.split())
    assert says(str(caught.value), refusal)
