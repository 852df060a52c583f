"""Who is held out: by a file, a fold or a share; cases of one group, by a file or by names, stay in one part."""

import json
from pathlib import Path

import pytest
from guards import without
from hypothesis import given
from hypothesis import strategies as st
from nifti_files import decathlon, told
from promises import promise
from tables import table

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Data
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.splits import split, unused

IDS = [f"p{patient}_scan{scan}" for patient in range(7) for scan in range(1 + patient % 3)]  # 13 of 7 patients
BY_NAME = "^p[0-9]+"


def parts(data: Data, ids: list[str] = IDS) -> tuple[list[str], list[str]]:
    """The ids in train and val, of a data set that also has a case without a label."""
    cases = [Case(name, (Path(name),), Path(name)) for name in ids] + [Case("unlabelled", (Path("u"),), None)]
    train, val = split(DatasetInfo("T", ("CT",), tuple(cases), classes=("background", "organ")), data)
    return [case.id for case in train], [case.id for case in val]


def held_out(folds: int, groups: str | None = None) -> list[list[str]]:
    """The held-out cases of each fold."""
    return [parts(Data(fold=fold, folds=folds, groups=groups))[1] for fold in range(folds)]


def patients(ids: list[str]) -> set[str]:
    return {name.partition("_")[0] for name in ids}


def listed(folder: Path, content: dict | list, fold: int | None = 0) -> Data:
    (folder / "s.json").write_text(json.dumps(content))
    return Data(split=str(folder / "s.json"), fold=fold, folds=5, val_fraction=0.4)


# [val.tolist() for _, val in KFold(5, shuffle=True, random_state=12345).split(range(13))], scikit-learn 1.9.1
FOLDS = [[0, 7, 9], [3, 6, 10], [8, 11, 12], [1, 4], [2, 5]]


@without("unet3d.data.splits.FOLD_SEED", 0)
def test_folds_are_those_of_scikit_learn() -> None:
    assert held_out(5) == [[IDS[number] for number in fold] for fold in FOLDS]
    assert held_out(5, groups=".*") == held_out(5), "groups of one case"


@without("unet3d.data.splits.group_of_cases", lambda ids, _: {case: case for case in ids})
def test_folds_split_groups_and_hold_each_case_out_once() -> None:
    folds = held_out(5, BY_NAME)
    assert sorted(name for fold in folds for name in fold) == IDS
    assert sorted(len(patients(fold)) for fold in folds) == [1, 1, 1, 2, 2]


@given(
    st.permutations(IDS), st.sampled_from([None, *range(5)]), st.floats(0.01, 0.99), st.sampled_from([None, BY_NAME])
)
def test_a_split_has_each_case_once_tears_no_group_and_depends_on_the_ids_alone(
    ids: list[str], fold: int | None, share: float, groups: str | None
) -> None:
    data = Data(fold=fold, val_fraction=share, groups=groups)
    train, val = parts(data, ids)
    assert sorted([*train, *val]) == IDS and train and val
    assert (train, val) == parts(data)
    assert groups is None or not patients(train) & patients(val)
    if fold is None:
        count, whole = (len(val), 13) if groups is None else (len(patients(val)), 7)
        assert count == min(max(round(share * whole), 1), whole - 1)


def test_a_share_is_spread_evenly() -> None:
    assert parts(Data(val_fraction=0.25))[1] == [IDS[2], IDS[6], IDS[10]]


def test_a_split_file_goes_before_the_fold_and_the_fold_before_the_share(tmp_path: Path) -> None:
    data = listed(tmp_path, {"train": ["a"], "val": ["e", "b"]})
    assert parts(data, [*"abcde"]) == (["a"], ["b", "e"]), "it may leave cases out"
    data.split = None
    assert len(parts(data, [*"abcde"])[1]) == 1
    data.fold = None
    assert parts(data, [*"abcde"])[1] == ["b", "d"]


@promise("Data", "JSON and tables with ...")
def test_of_a_list_of_splits_that_of_the_fold_is_taken(tmp_path: Path) -> None:
    """As of nnU-Net's splits_final.json."""
    splits = [{"train": IDS[fold + 1 :], "val": [IDS[fold]]} for fold in range(3)]
    data = listed(tmp_path, splits)
    data.folds = 3
    for data.fold in range(3):
        assert parts(data) == (IDS[data.fold + 1 :], [IDS[data.fold]])
    for data.fold, data.folds, wanted in ((None, 5, "data.fold, from 0 to 2"), (1, 5, "add data.folds=3")):
        with pytest.raises(UserError, match=f"a list of 3 splits.*{wanted}"):
            parts(data)
    data = listed(tmp_path, splits[:1], fold=None)
    assert parts(data)[1] == IDS[:1]
    compose.compose(["data.fold=0", f"data.split={data.split}"])


def test_a_split_may_name_files_and_numbers(tmp_path: Path) -> None:
    data = listed(tmp_path, {"train": ["imagesTr/12_0000.nii.gz", "13.nii"], "val": [14, " 15 "]})
    assert parts(data, ["12", "13", "14", "15"]) == (["12", "13"], ["14", "15"])


@promise("Data", "images without a label ...")
def test_cases_that_a_split_leaves_out_are_counted(tmp_path: Path) -> None:
    dataset, data = read_dataset(decathlon(tmp_path)), listed(tmp_path, {"train": ["a"], "val": ["c"]})
    idle = [f"data.fold=0 does nothing beside data.split={data.split}"]
    wanted = [idle, [f"{data.split}: 2 of 4 ", "not used (b, d)"]]
    assert told([*unused(dataset, data, *split(dataset, data))], wanted)


WRONG = """
[] | holds no split; | {"train": [ids], "val": [ids]}
[1] | entry 0 | 1;
{"training": ["p0_scan0"]} | "train" | ['training']
{"train": ["p0_scan0"]} | "val" | {"train": [ids], "val": [ids]}
{"train": [], "val": ["p0_scan0"]} | "train" | {"train": [ids], "val": [ids]}
{"train": "p0_scan0", "val": ["p1_scan0"]} | "train" | {"train": [ids], "val": [ids]}
{"train": ["p9", 7], "val": ["p1_scan0"]} | "train" | p9, 7
{"train": ["p0_scan0"], "val": ["unlabelled"]} | "val" | unlabelled
{"train": ["p0_scan0"], "val": ["LONG", "LONG", "LONG"]} | "val" | xxx...xxx
{"train": ["a", "b", "c", "d", "e", "f", "g"], "val": ["p0_scan0"]} | "train" | a, b, c, d, e and 2 more
{"train": ["p0_scan0", "p1_scan0"], "val": ["p1_scan0"]} | p1_scan0 | "train" | "val"
{"train": ["p0_scan0", "p0_scan0"], "val": ["p1_scan0"]} | "train" | p0_scan0
"""


@promise("Data", "a training image among ...")
@promise("Data", "dataset.json with thousands of ...")
@pytest.mark.parametrize(("content", "wanted"), table(WRONG, 1))
def test_a_split_file_that_cannot_be_followed_is_refused(tmp_path: Path, content: str, wanted: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parts(listed(tmp_path, json.loads(content.replace("LONG", "x" * 10**6))))
    start, *rest = wanted
    assert told([str(caught.value)], [[f"{tmp_path / 's.json'}: {start}", *rest]])
    assert len(str(caught.value)) < 2000


IMPOSSIBLE = r"""
13 | {"fold": 0, "folds": 14} | ^data\.folds=14 .*\b13 labelled cases.*data\.folds=13$
13 | {"fold": 0, "folds": 8, "groups": "^p[0-9]+"} | ^data\.folds=8 .*7 groups.*data\.folds=7$
1 | {} | ^T: 1 .*data\.semi=true
13 | {"split": "no.json"} | ^no\.json: .*data/README\.md
13 | {"split": "splits_final.pkl"} | ^data\.split=splits_final\.pkl: a pickle .*JSON
13 | {"groups": "("} | ^data\.groups=\(: .*case,group
13 | {"groups": "^q"} | ^data\.groups=\^q: .*p0_scan0
13 | {"groups": "^p"} | ^data\.groups=\^p: .*one group
13 | {"groups": "g.txt"} | g\.txt: no such file.*p0_scan0.*case,group
13 | {"groups": "g.csv"} | g\.csv: no such file.*case,group
"""


@pytest.mark.parametrize(("count", "options", "wanted"), table(IMPOSSIBLE, 2))
def test_a_split_that_cannot_be_made_is_refused(count: str, options: str, wanted: list[str]) -> None:
    with pytest.raises(UserError, match=wanted[0]):
        parts(Data(**json.loads(options)), IDS[: int(count)])


@promise(
    "Data",
    "JSON and tables with a byte order mark or in UTF-16, semicolons, capital heads, names with endings; a list of "
    "splits",
    "read",
)
@pytest.mark.parametrize(
    ("name", "head", "row", "encoding"),
    [
        ("g.csv", "age,case,group", "7,{},{}", "utf-8-sig"),
        ("g.csv", "case;group", "{};{}", "utf-16"),
        ("g.csv", 'sep=;\nCase;"Group"', '{};"{}"', "utf-8"),
        ("G.TSV", "GROUP\tCase", "{1}\t{0}_0000.nii.gz", "utf-8"),
        ("g.txt", " case, group", "images/{}.nii.gz, {} ", "utf-8"),
        ("g.json", None, "{}.nii.gz", "utf-8-sig"),
        ("g.JSON", None, "{}", "utf-16"),
    ],
)
def test_a_file_and_an_expression_with_the_same_groups_make_the_same_folds(
    tmp_path: Path, name: str, head: str | None, row: str, encoding: str
) -> None:
    groups = {case: case.partition("_")[0] for case in IDS} | {"unlabelled": "p9"}
    if head is None:
        text = json.dumps({row.format(case): group for case, group in groups.items()})
    else:
        text = "\n".join([head, *(row.format(*pair) for pair in groups.items()), "", ";;" * (";" in head)])
    (tmp_path / name).write_text(text, encoding=encoding)
    assert held_out(4, str(tmp_path / name)) == held_out(4, BY_NAME)


# The name of a file, its text with / between lines, and what is said of it.
WRONG_GROUPS = r"""
g.json | {"p0_scan0": "a"} | p1_scan0.* and 7 more
g.json | {"p0_scan0": [1]} | p0_scan0.*\[1\]
g.json | {"p0_scan0": ""} | p0_scan0
g.json | [] | JSON object
g.csv | p0_scan0,a/ | 'p0_scan0,a'.* no column case and no group.*case,group
g.csv | case,group/ | 'case,group'.* no row
g.csv | case,group/sub-p0_scan0,a/ | p0_scan0, .* and 8 more.*sub-p0_scan0
g.csv | case,group/p0_scan0/ | p0_scan0
g.csv | case,group/a,1/a,2/ | \ba\b.*twice, in two groups
g.xlsx | PK | 'PK.* no column case
"""


@pytest.mark.parametrize(("name", "text", "wanted"), table(WRONG_GROUPS, 2))
def test_a_file_of_groups_that_cannot_be_followed_is_refused(
    tmp_path: Path, name: str, text: str, wanted: list[str]
) -> None:
    (tmp_path / name).write_text(text.replace("/", "\n"))
    with pytest.raises(UserError, match=rf"{name}: .*{wanted[0]}"):
        parts(Data(groups=str(tmp_path / name)))


def test_a_split_file_that_tears_a_group_is_refused(tmp_path: Path) -> None:
    content = {"train": ["p2_scan0", "p3_scan0"], "val": ["p1_scan0", "p2_scan1"]}
    data = listed(tmp_path, content, fold=None)
    assert parts(data)[1] == content["val"]
    data.groups = BY_NAME
    with pytest.raises(UserError, match=r"s\.json: .*p2_scan0.*p2_scan1.*p2.*data\.groups"):
        parts(data)


@pytest.mark.parametrize("names", [("Müller", "Mu\u0308ller"), ("Müller", "MÜLLER"), ("1", "1.0")], ids=ascii)
def test_one_name_written_in_two_ways_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    groups = dict.fromkeys(IDS, "p") | dict(zip(IDS, names, strict=False))
    (tmp_path / "g.json").write_text(json.dumps(groups))
    with pytest.raises(UserError, match=r"g\.json: .*are two groups"):
        parts(Data(groups=str(tmp_path / "g.json")))


def test_an_expression_can_be_written_on_the_command_line() -> None:
    assert compose.compose(["data.groups='^([^_]+)_'"]).data.groups == "^([^_]+)_"
