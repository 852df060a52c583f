"""Sparse annotation: which voxels are learned, which are scored, that none is both, and that runs keep to it."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from training import TINY, records, train

from unet3d import build
from unet3d.compose import compose
from unet3d.config import Config, Data
from unet3d.data import preprocess
from unet3d.data.patches import choose_centre, crop
from unet3d.errors import UserError
from unet3d.types import IGNORE


def label() -> torch.Tensor:
    """Foreground from 10 to 50, 4 to 24 and 2 to 12 in a volume of 60 x 30 x 15."""
    found = torch.zeros(60, 30, 15, dtype=torch.int16)
    found[10:51, 4:25, 2:13] = 1
    return found


def options(**changes: object) -> Data:
    return Data(**({"semi": True, "sparse": [5, 5, 3]} | changes))


def test_slices_are_spread_over_the_foreground() -> None:
    assert preprocess.extent(label()) == [(10, 50), (4, 24), (2, 12)]
    assert preprocess.learned_slices(label(), options(sparse=[1, 2, 0])) == [[30], [9, 19], []]
    assert preprocess.learned_slices(label(), options()) == [[14, 22, 30, 38, 46], [6, 10, 14, 18, 22], [4, 7, 10]]
    assert preprocess.scored_slices(label(), options(scored=[4, 1, 0])) == [[18, 26, 34, 42], [14], []]


def test_the_same_slices_are_scored_however_many_are_learned() -> None:
    found = [preprocess.scored_slices(label(), options(sparse=counts)) for counts in ([1, 1, 1], [5, 5, 3], [9, 0, 2])]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("changes", [{}, {"scored": [5, 5, 5]}, {"sparse": [40, 3, 9]}, {"sparse_fold": 1}])
def test_no_voxel_is_both_learned_and_scored(changes: dict) -> None:
    learned, scored = (
        preprocess.learned_mask(label(), options(**changes)),
        preprocess.scored_mask(label(), options(**changes)),
    )
    assert learned.any() and scored.any()
    assert not (learned & scored).any()


@pytest.mark.parametrize("high", [142, 71])
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 2, 1], [3, 3, 2], [5, 5, 3]])
def test_no_scored_slice_mirrors_a_learned_one(counts: list[int], high: int) -> None:
    """The MNI152 template is its own mirror image across x, with this extent at 1 and at 2 mm."""
    brain = torch.ones(high + 1, 9, 9, dtype=torch.int16)
    learned, scored = (
        find(brain, options(sparse=counts))[0] for find in (preprocess.learned_slices, preprocess.scored_slices)
    )
    assert not {*learned} & {high - index for index in scored}


def test_the_mask_holds_whole_slices_and_nothing_else() -> None:
    mask = preprocess.planes(torch.Size((4, 5, 6)), [[1], [], [0, 5]])
    expected = torch.zeros(4, 5, 6, dtype=torch.bool)
    expected[1], expected[:, :, 0], expected[:, :, 5] = True, True, True
    assert torch.equal(mask, expected)


def test_each_slice_is_scored_in_one_of_the_folds_and_learned_in_the_others() -> None:
    folds = [options(sparse=[7, 5, 21], sparse_fold=fold) for fold in range(3)]
    every = preprocess.learned_slices(label(), options(sparse=[7, 5, 21]))
    for axis in range(3):
        scored = [preprocess.scored_slices(label(), fold)[axis] for fold in folds]
        learned = [preprocess.learned_slices(label(), fold)[axis] for fold in folds]
        assert sorted(chain(*scored)) == sorted(every[axis])
        assert all(sorted(a + b) == sorted(every[axis]) for a, b in zip(scored, learned, strict=True))


def test_without_foreground_slices_are_spread_over_the_volume() -> None:
    nothing = torch.zeros(11, 11, 11, dtype=torch.int16)
    assert preprocess.learned_slices(nothing, options(sparse=[1, 1, 2])) == [[5], [5], [2, 8]]


def phantom(tmp_path: Path, *overrides: str) -> Config:
    size = ("data.phantom.cases=3", "data.phantom.shape=[24,20,16]", "data.patch=[16,16,16]")
    return compose([*size, f"data.root={tmp_path}", "data.sparse=[2,1,1]", *overrides])


def test_semi_automated_cases_are_learned_and_scored_in_parts(tmp_path: Path) -> None:
    data = build.data(phantom(tmp_path, "data.semi=true"))
    assert data.train == data.val and len(data.train) == 3
    for case in data.train:
        dense, learned, scored = data.read(case), data.read_train(case), data.read_val(case)
        assert learned.image is dense.image is scored.image, "one image in memory"
        for part in (learned.label, scored.label):
            seen = part != IGNORE
            assert 0 < seen.sum() < seen.numel() / 2 and torch.equal(part[seen], dense.label[seen])
        assert not ((learned.label != IGNORE) & (scored.label != IGNORE)).any()
        for voxels in learned.foreground:
            assert (learned.label[tuple(voxels.T)] > 0).all(), "patches are centred on what is annotated"


def test_patches_meet_what_is_annotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One slice in a volume of 24 x 20 x 16: a tile of 4 voxels anywhere would mostly miss it."""
    data = build.data(phantom(tmp_path, "data.semi=true", "data.sparse=[1,0,0]"))
    kept = sum(case.image.nbytes + 3 * case.label.nbytes for case in map(data.read, data.train))
    told = f"{len(data.train)} cases kept in memory: {kept / 2**20:,.1f} MiB (predicted)\n"
    assert told in capsys.readouterr().out, "each once, with the labels that are learned and scored"
    case = data.read_train(data.train[0])
    rng = np.random.default_rng(0)
    tiles = [crop(case.image, case.label, choose_centre(case, [4] * 3, 0, rng), [4] * 3, False)[1] for _ in range(60)]
    assert sum(bool((tile != IGNORE).any()) for tile in tiles) > 55


def test_fully_automated_cases_are_scored_whole(tmp_path: Path) -> None:
    data = build.data(phantom(tmp_path, "data.folds=3", "data.fold=0"))
    assert not {case.id for case in data.train} & {case.id for case in data.val}
    assert all((data.read_train(case).label == IGNORE).any() for case in data.train)
    assert not any((data.read_val(case).label == IGNORE).any() for case in data.val)


def test_scored_slices_that_are_all_learned_are_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"to be scored; choose other numbers"):
        build.data(phantom(tmp_path, "data.semi=true", "data.sparse=[1,1,1]", "data.scored=[1,1,1]"))


def test_a_run_learns_from_slices_and_scores_others(tmp_path: Path) -> None:
    words = ["data.semi=true", "data.sparse=[2,1,1]", "data.scored=[1,1,1]", "steps=2"]
    done = train(tmp_path, *TINY, *words, f"data.root={tmp_path / 'phantom'}", "hydra.run.dir=run", frills=True)
    assert done.code == 0, done.err
    (first, *_), folder = records(tmp_path / "run"), tmp_path / "run"
    assert first["step"] == 0 and 0 < float.fromhex(first["data/labelled_share"]) < 0.3
    head, *rows = (folder / "scores.csv").read_text().splitlines()
    assert "iou/" in head and "hd95" not in head and len(rows) == len([*(folder / "predictions").iterdir()]) == 4
    assert (folder / "figures" / "prediction.png").stat().st_size > 10_000


def test_a_label_map_that_is_sparse_already_can_leave_nothing(tmp_path: Path) -> None:
    config = phantom(tmp_path, "data.semi=true")
    data = build.data(config)
    case = data.train[0]
    nothing = preprocess.SparseReader(data.read, config.data, lambda label, _: torch.zeros_like(label) > 0, None)
    with pytest.raises(UserError, match=case.id):
        nothing(case)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.sparse=[1,1]"], "give three"),
        (["data.sparse=[0,0,0]"], "not all 0"),
        (["data.sparse=[1,-1,1]"], "must be >= 0"),
        (["data.semi=true"], "add data.sparse"),
        (["data.semi=true", "data.sparse=[3,3,3]", "data.fold=0"], "set data.fold"),
        (["data.sparse_fold=0"], "data.semi=true"),
        (["optim.average=0.9", "model.norm=batch"], "another norm"),
        (["data.semi=true", "data.sparse=[3,3,3]", "data.sparse_fold=3"], "runs from 0 to 2"),
        (["data.semi=true", "data.sparse=[2,2,2]", "data.sparse_fold=0"], "too few slices"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compose(overrides)
