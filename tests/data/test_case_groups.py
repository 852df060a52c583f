"""Cases of one group stay in one part, whatever makes the split; groups come from a file or from names."""

import json
from pathlib import Path

import pytest
from guards import without
from promises import promise

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Data
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.splits import split

IDS = [f"p{patient}_scan{scan}" for patient in range(7) for scan in range(1 + patient % 3)]
BY_NAME = "^p[0-9]+"


def parts(data: Data, ids: list[str] = IDS) -> tuple[list[str], list[str]]:
    cases = tuple(Case(name, (Path(name),), Path("label")) for name in sorted(ids))
    train, val = split(DatasetInfo("T", ("MRI",), cases, classes=("background", "a")), data)
    return [case.id for case in train], [case.id for case in val]


def patients(ids: list[str]) -> set[str]:
    return {name.partition("_")[0] for name in ids}


def every(data: Data) -> list[list[str]]:
    """The held-out cases of each fold."""
    held_out = []
    for fold in range(data.folds):
        data.fold = fold
        train, val = parts(data)
        assert sorted([*train, *val]) == sorted(IDS) and not patients(train) & patients(val)
        held_out.append(val)
    return held_out


@without("unet3d.data.splits.group_of_cases", lambda ids, _: {case: case for case in ids})
def test_folds_split_groups_and_hold_each_case_out_once() -> None:
    folds = every(Data(folds=5, groups=BY_NAME))
    assert sorted(name for fold in folds for name in fold) == sorted(IDS)
    assert sorted(len(patients(fold)) for fold in folds) == [1, 1, 1, 2, 2]


def test_groups_of_one_case_are_the_folds_without_groups() -> None:
    assert every_case(Data(folds=3, groups=".*")) == every_case(Data(folds=3))
    assert parts(Data(groups=".*", val_fraction=0.3)) == parts(Data(val_fraction=0.3))


def every_case(data: Data) -> list[tuple[list[str], list[str]]]:
    found = []
    for fold in range(data.folds):
        data.fold = fold
        found.append(parts(data))
    return found


def test_a_share_is_of_groups() -> None:
    train, val = parts(Data(groups=BY_NAME, val_fraction=0.3))
    assert len(patients(val)) == 2 and not patients(train) & patients(val)


@promise("Data", "JSON and tables with ...")
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
    assert every(Data(folds=4, groups=str(tmp_path / name))) == every(Data(folds=4, groups=BY_NAME))


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("g.json", '{"p0_scan0": "a"}', r"g\.json: .*p1_scan0.* and 7 more"),
        ("g.json", '{"p0_scan0": [1]}', r"g\.json: .*p0_scan0.*\[1\]"),
        ("g.json", '{"p0_scan0": ""}', r"g\.json: .*p0_scan0"),
        ("g.json", "[]", r"g\.json: .*JSON object"),
        ("g.csv", "p0_scan0,a\n", r"g\.csv: .*'p0_scan0,a'.* no column case and no group.*case,group"),
        ("g.csv", "case,group\n", r"g\.csv: .*'case,group'.* no row"),
        ("g.xlsx", "PK\x03\x04", r"g\.xlsx: .*'PK.* no column case"),
        ("g.csv", "case,group\nsub-p0_scan0,a\n", r"g\.csv: .*p0_scan0, .* and 8 more.*sub-p0_scan0"),
        ("g.txt", None, r"g\.txt: no such file.*p0_scan0.*case,group"),
        ("g.csv", "case,group\np0_scan0\n", r"g\.csv: .*p0_scan0"),
        ("g.csv", "case,group\na,1\na,2\n", r"g\.csv: .*\ba\b.*twice, in two groups"),
        ("g.csv", None, r"g\.csv: no such file.*case,group"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(tmp_path: Path, name: str, text: str | None, wanted: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=wanted) as caught:
        parts(Data(groups=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("(", r"^data\.groups=\(: .*case,group"),
        ("^q", r"^data\.groups=\^q: .*p0_scan0"),
        ("^p", r"^data\.groups=\^p: .*one group"),
    ],
)
def test_an_expression_that_makes_no_groups_is_refused(groups: str, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        parts(Data(groups=groups))


def test_more_folds_than_groups_are_refused() -> None:
    with pytest.raises(UserError, match=r"^data\.folds=8 .*7 groups.*data\.folds=7$"):
        parts(Data(groups=BY_NAME, folds=8, fold=0))


def test_a_split_file_that_tears_a_group_is_refused(tmp_path: Path) -> None:
    content = {"train": ["p2_scan0", "p3_scan0"], "val": ["p1_scan0", "p2_scan1"]}
    (tmp_path / "s.json").write_text(json.dumps(content))
    data = Data(split=str(tmp_path / "s.json"))
    assert parts(data)[1] == content["val"]
    data.groups = BY_NAME
    with pytest.raises(UserError, match=r"s\.json: .*p2_scan0.*p2_scan1.*p2.*data\.groups"):
        parts(data)


@pytest.mark.parametrize("other", ["m\u00fcller", "Mu\u0308ller", "M\u00dcLLER"])
def test_one_name_written_in_two_ways_is_refused(tmp_path: Path, other: str) -> None:
    names = ["M\u00fcller", other, *("p" * len(IDS))]
    rows = "\n".join(f"{case},{name}" for case, name in zip(IDS, names, strict=False))
    (tmp_path / "g.csv").write_text(f"case,group\n{rows}\nunlabelled,p\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"g\.csv: .*are two groups"):
        every(Data(folds=2, groups=str(tmp_path / "g.csv")))


def test_an_expression_can_be_written_on_the_command_line() -> None:
    assert compose.compose(["data.groups='^([^_]+)_'"]).data.groups == "^([^_]+)_"
