"""Golden folds from scikit-learn, and the rule of the share."""

import pytest

from unet3d.data import cases
from unet3d.errors import UserError

IDS = [f"case_{n:03d}" for n in range(13)]

# [val.tolist() for _, val in KFold(5, shuffle=True, random_state=12345).split(range(n))], scikit-learn 1.9.1
FOLDS_OF_13 = [[0, 7, 9], [3, 6, 10], [8, 11, 12], [1, 4], [2, 5]]
STARTS_OF_260 = [[9, 10, 16, 18], [1, 14, 15, 17], [2, 4, 8, 13], [0, 3, 6, 12], [5, 7, 11, 23]]


@pytest.mark.parametrize("index", range(5))
def test_folds_are_those_of_scikit_learn(index: int) -> None:
    train, val = cases.fold_split(IDS, 5, index)
    assert val == [IDS[n] for n in FOLDS_OF_13[index]]
    assert sorted(train + val) == IDS
    hippocampus = [f"{n:03d}" for n in range(260)]
    _, val = cases.fold_split(hippocampus, 5, index)
    assert len(val) == 52
    assert [int(name) for name in val[:4]] == STARTS_OF_260[index]


def test_more_folds_than_cases_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.folds=14 is more than the 13 labelled cases"):
        cases.fold_split(IDS, 14, 0)


def test_the_share_is_spread_evenly() -> None:
    train, val = cases.fraction_split(IDS, 0.25)
    assert val == ["case_002", "case_006", "case_010"]
    assert sorted(train + val) == IDS


@pytest.mark.parametrize(("count", "share", "held_out"), [(2, 0.01, 1), (2, 0.9, 1), (10, 0.9, 9), (1000, 0.5, 500)])
def test_each_part_of_a_share_has_a_case(count: int, share: float, held_out: int) -> None:
    train, val = cases.fraction_split([f"{n:04d}" for n in range(count)], share)
    assert len(val) == len({*val}) == held_out
    assert len(train) == count - held_out


def test_a_list_is_followed_and_may_leave_cases_out() -> None:
    assert cases.listed_split(IDS, {"train": IDS[2:0:-1], "val": IDS[5:6]}, "s.json") == (IDS[1:3], IDS[5:6])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"train": IDS[:2]}, '"val" must list one case id or more'),
        ({"train": [], "val": IDS[:1]}, '"train" must list one case id or more'),
        ({"train": "case_001", "val": IDS[:1]}, '"train" must list'),
        ({"train": ["case_1", 7], "val": IDS[:1]}, '"train" names case_1, 7: no labelled case'),
        ({"train": [f"x{n}" for n in range(7)], "val": IDS[:1]}, "x0, x1, x2, x3, x4 and 2 more: no labelled case"),
        ({"train": IDS[:2], "val": IDS[1:3]}, 'case_001 in both "train" and "val"'),
        ({"train": [IDS[0], IDS[0]], "val": IDS[1:2]}, '"train" names case_000 more than once'),
    ],
)
def test_a_list_that_cannot_be_followed_is_refused(content: dict, what: str) -> None:
    with pytest.raises(UserError) as caught:
        cases.listed_split(IDS, content, "s.json")
    assert str(caught.value).startswith("s.json: ")
    assert what in str(caught.value)
