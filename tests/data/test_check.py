"""Every fault of a data set is listed at once, with case and path; a sound data set gets no line."""

import gzip
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from guards import without
from nifti_files import (
    FLIPPED,
    LPS,
    NOISY,
    SHIFTED,
    WARNING,
    case,
    changed,
    checked,
    decathlon,
    doubtful_places,
    errors,
    holds,
    image,
    label,
    nnunet,
    rewrite,
    told,
    write,
    write_header,
)
from promises import promise
from tables import table
from training import PLAIN, TINY, face, train

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import read_dataset
from unet3d.data.check import mostly_padding, read_grids
from unet3d.data.nifti import OpenFile
from unet3d.data.prepare import prepare_data

IMAGE, LABEL = "imagesTr/a.nii.gz", "labelsTr/a.nii.gz"
PAGE = b"<!DOCTYPE html>" + b"not found " * 100
Golden = Callable[[str, str], None]


def damaged(root: Path) -> Data:
    """A data set with a fault in every case; those of b and e are beneath sound headers."""
    data = decathlon(root, tuple("abcdefg"))
    case(root, image((20, 20, 20)), label((20, 20, 20)), "e")
    images, labels = root / "imagesTr", root / "labelsTr"
    (images / "a.nii.gz").unlink()
    (labels / "a.nii.gz").write_bytes(b"")
    write(images / "b.nii.gz", changed(np.full((6, 5, 4), 1e300), np.nan))  # infinite as float32
    write(labels / "b.nii.gz", np.full((6, 5, 4), 7, np.uint8))
    write(labels / "c.nii.gz", label((6, 5, 3)))
    write(images / "d.nii.gz", image((6, 5, 4, 2)))
    for name, size in (("e.nii.gz", -9), ("g.nii.gz", 30)):
        (images / name).write_bytes((images / name).read_bytes()[:size])
    (images / "f.nii.gz").write_bytes(PAGE)
    (labels / "f.nii.gz").write_bytes(gzip.compress(PAGE))
    return data


@promise("Data", "a file that is truncated, empty, missing, or a web page called .nii.gz", "listed; exit 2")
def test_check_data_lists_every_problem_of_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged(Path("set"))
    assert face("check-data", "data=decathlon", "data.root=set") == 2
    golden("check_damaged.txt", capsys.readouterr().out)


def test_check_data_says_what_a_sound_data_set_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"data.root={decathlon(Path('set')).root}", "data.ignore=255", "data.patch=[8,8,8]", "model=unet_tiny"]
    write(Path("set/imagesTr/b.nii.gz"), image((8, 9, 7)), np.diag([1, 1, 3, 1]))
    write(Path("set/labelsTr/b.nii.gz"), label((8, 9, 7)), np.diag([1, 1, 3, 1]))
    assert face("check-data", "data=decathlon", *words) == 0
    golden("check_sound.txt", capsys.readouterr().out)
    shutil.rmtree("set/imagesTr")
    assert face("check-data", "data=decathlon", *words) == 2
    out = capsys.readouterr().out
    assert holds(out, ["\norientation: unknown;", "\nsize x, y, z (voxels): unknown\n"])


@promise("Data", "a file that is ...")
def test_a_run_lists_what_headers_show_before_anything_else(tmp_path: Path) -> None:
    data = damaged(tmp_path)
    wanted = [line for line in errors(checked(data)) if line[0] not in "be"]
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert sorted(str(caught.value).splitlines()) == wanted


@promise("Data", "a file that is ...")
@pytest.mark.parametrize("intensity", ["zscore", "ct"])
def test_a_run_lists_all_that_is_damaged_beneath_sound_headers(tmp_path: Path, intensity: str) -> None:
    """For CT, while the scale is measured."""
    data = replace(decathlon(tmp_path), intensity=intensity)
    a, b = (tmp_path / f"imagesTr/{name}.nii.gz" for name in "ab")
    a.write_bytes(a.read_bytes()[:-1])
    write(b, np.full((6, 5, 4), np.nan, np.float32))
    with pytest.raises(UserError, match=f"^a: {a}: [^\n]*\nb: {b}: [^\n]*$"):
        prepare_data(data)


@promise(
    "Data",
    "labels, in dataset.json or `data.label_map`, that make no classes",
    "`check-data` lists them; a run is refused",
)
@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["data.label_map={1:[1,9]}"], {}, "data.label_map={1: [1, 9]}: "),
        ([], {"labels": {"0": "background", "1": "organ", "4": "tumour"}}, "JSON: labels are numbered [0, 1, 4]; "),
        (["data.ignore=1"], {}, "JSON: 1 is the label to ignore"),
    ],
    ids=["map", "gap", "ignored"],
)
def test_labels_that_make_no_classes_are_listed_with_all_other_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], changes: dict[str, Any], said: str
) -> None:
    words = ["data=decathlon", f"data.root={decathlon(tmp_path).root}", *words]
    (tmp_path / IMAGE).unlink()
    rewrite(tmp_path, **changes)
    said = said.replace("JSON", str(tmp_path / "dataset.json"))
    assert face("check-data", *words) == 2
    parts = ["\nclasses: unknown", f"\n{said}", f"\na: {tmp_path / IMAGE}: ", "\n2 problems"]
    assert holds(capsys.readouterr().out, parts)
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        read_dataset(compose.compose(words).data)


def test_the_quick_pass_reads_no_voxel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = decathlon(tmp_path)
    monkeypatch.setattr(nifti, "read_array", lambda *_: 1 / 0)
    assert checked(data, full=False) == []
    with pytest.raises(ZeroDivisionError):
        checked(data, full=True)


@promise("Data", "dataset.json with thousands of ...")
def test_a_thousand_problems_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, training=[{"image": f"imagesTr/x{n}.nii", "label": f"imagesTr/y{n}.nii"} for n in range(600)])
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1001 and lines[-1] == "and 200 more"


def test_a_split_that_cannot_be_made_is_listed_with_the_rest(tmp_path: Path) -> None:
    data = replace(decathlon(tmp_path), split=str(tmp_path / "split.json"))
    (tmp_path / "imagesTr/a.nii.gz").unlink()
    assert [line.split(": ")[0] for line in checked(data)] == ["a", data.split]


def unchecked(file: OpenFile, values: object) -> np.ndarray:
    """Return labels whatever they are."""
    return nifti.read_array(file).astype(np.uint8)


OTHER_AXES = LPS @ np.array([[1, 0, 0, 0], [0, -1, 0, 4], [0, 0, 1, 0], [0, 0, 0, 1]])  # the grid of LPS, 5 voxels in y
VALUES = {"above": 7, "negative": -1, "fraction": 1.5, "nan": np.nan, "254": 254, "255": 255}
LABEL_MAPS = {name: (changed(label(), value), LPS) for name, value in VALUES.items()} | {
    "one-hot": (np.stack([label() == k for k in range(3)], -1).astype(np.uint8), LPS),
    "size": (label((6, 5, 3)), LPS),
    "shifted": (label(), SHIFTED),
    "flipped": (label(), FLIPPED),
    "other axes": (label(), OTHER_AXES),
    "turned": (label((5, 6, 4)), LPS[:, [1, 0, 2, 3]]),
    "rounded": (label(), NOISY),
}
FIELDS = {
    "announced": {"numTraining": 99},
    "Ignore": {"labels": {"0": "background", "1": "organ", "2": "Ignore"}},
}


def spoil(root: Path, fault: str) -> None:
    """Give case a of a data set this label map, dataset.json these fields, or the header of an image this oddity."""
    if fault in LABEL_MAPS:
        write(root / LABEL, *LABEL_MAPS[fault])
    elif fault in FIELDS:
        rewrite(root, **FIELDS[fault])
    else:
        odd(root / IMAGE, fault)
        write(root / LABEL, label(), nib.load(root / IMAGE).affine)


def odd(path: Path, kind: str) -> None:
    stored, slanted = nib.Nifti1Image(image(), LPS), LPS.copy()
    slanted[0, 1] = 0.1
    if kind == "sheared":
        stored.set_sform(slanted, code=1)
        stored.set_qform(None, code=0)
    elif kind == "unplaced":
        stored.set_sform(None, code=0)
        stored.set_qform(None, code=0)
    elif kind == "twofold":
        stored.set_qform(FLIPPED, code=1)
    elif kind != "bent":
        stored.header["xyzt_units"] = {"metres": 1, "yards": 0xFF}[kind]
    nib.save(stored, path)
    if kind == "bent":  # b, c, d of a unit quaternion have squares that sum to 1 at most
        write_header(write_header(path, "qform_code", 1), "quatern", 0.6, 0.6, 0.6)


# The fault, options, what a run does, and the one line of `check-data`, which the run says, too, unless it is silent.
SAID = """
above | {} | refused | a: LABEL: 1 | label 7; | 0 to 2; | data.label_map
negative | {} | refused | a: LABEL: 1 | label -1; | 0 to 2;
fraction | {} | refused | a: LABEL: 1 | label 1.5; | 0 to 2;
nan | {"nonfinite": "zero"} | refused | a: LABEL: 1 | label nan; | 0 to 2;
254 | {"ignore": 255} | refused | a: LABEL: 1 | label 254; | 0 to 2 and 255
255 | {"ignore": 255} | silent
one-hot | {} | refused | a: LABEL: | (6, 5, 4, 3) | X,Y,Z
size | {} | refused | a: LABEL: | (6, 5, 3) | (6, 5, 4) | IMAGE
size | {"affine_check": "warn"} | refused | a: LABEL: | (6, 5, 3) | (6, 5, 4) | IMAGE
shifted | {} | refused | a: LABEL: | up to 1 voxels | IMAGE
shifted | {"affine_check": "warn"} | warned | warning: a: LABEL: | up to 1 voxels | IMAGE
flipped | {} | refused | a: LABEL: | up to 10 voxels | IMAGE
other axes | {} | refused | a: LABEL: | LAS | LPS | reorient it to LPS | IMAGE
other axes | {"affine_check": "warn"} | warned | warning: a: LABEL: | LAS | LPS | reorient it to LPS | IMAGE
turned | {} | refused | a: LABEL: | PLS | LPS | reorient it to LPS | IMAGE
turned | {"affine_check": "warn"} | refused | a: LABEL: | PLS | LPS | reorient it to LPS | IMAGE
rounded | {} | silent
sheared | {} | silent | warning: a: IMAGE: | sheared
unplaced | {} | warned | warning: a: IMAGE: | sform | qform
twofold | {} | silent | warning: a: IMAGE: | place voxels up to 10 mm apart | LPS and RPS | data.affine=
bent | {} | silent | warning: a: IMAGE: | qform | sform
metres | {} | warned | warning: a: IMAGE: | meter | mm | data.spacing
yards | {} | warned | warning: a: IMAGE: | 7; | mm | data.spacing
announced | {} | silent | warning: Small: numTraining is 99, but 4 cases
Ignore | {} | warned | warning: Small: Ignore is learned | data.ignore=2
Ignore | {"ignore": 2} | silent
"""


@promise(
    "Data",
    "labels above the classes, negative, 255 without `data.ignore`, fractions, one-hot",
    "refused; 255 with `data.ignore=255` and whole floats are read",
)
@promise(
    "Data",
    "a label map of another size, flipped or shifted, or with other axes on the same grid",
    "an error with the remedy; with `data.affine_check=warn` a shift or flip is a warning; rounding is none",
)
@promise("Data", "sheared grids, sform beside qform, lengths not in mm", "a warning with the rule followed")
@promise("Data", "images without a label ...")
@without("unet3d.data.check.read_classes", unchecked, only="254")
@without("unet3d.data.volume.SAME_GRID", math.inf, only="shifted")
@without("unet3d.data.nifti.SHEAR", 2.0, only="sheared")
@without("unet3d.data.nifti.MM", range(8), only="yards")
@pytest.mark.parametrize(("fault", "options", "run", "parts"), table(SAID, 3))
def test_a_fault_is_said_by_a_check_and_by_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, options: str, run: str, parts: list[str]
) -> None:
    data = replace(decathlon(tmp_path), **json.loads(options))
    spoil(tmp_path, fault)
    places = {"IMAGE": str(tmp_path / IMAGE), "LABEL": str(tmp_path / LABEL)}
    wanted = [re.sub("IMAGE|LABEL", lambda found: places[found[0]], part) for part in parts]
    assert told(checked(data), [wanted] if wanted else [])
    if run == "refused":
        with pytest.raises(UserError) as caught:
            prepare_data(data)
        said = str(caught.value)
    else:
        prepare_data(data)
        said = capsys.readouterr().err
    assert told(said.splitlines(), [wanted] * (run != "silent"))


@promise(
    "Data",
    "voxel sizes of sform and pixdim that differ by more than 1 %",
    "every command warns once, with both, the one taken and the number of files, unless `data.affine` decides",
)
@without("unet3d.data.nifti.SAME_SIZE", 10.0)
def test_files_that_state_two_voxel_sizes_are_one_warning_or_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    for path in tmp_path.glob("*/*.nii.gz"):
        doubtful_places(path)
    parts = ["1 x 1 x 1 mm by its sform", "1 x 1.5 x 2.5 mm by its qform and pixdim", "sform is taken"]
    wanted = [[f"{WARNING}a: {tmp_path / 'imagesTr/a.nii.gz'}: ", *parts, "(8 such files)", "data.affine="]]
    assert told(checked(data), wanted)
    assert prepare_data(data).spacing == (1, 1, 1)
    assert told(capsys.readouterr().err.splitlines(), wanted)
    for data.affine, spacing in (("sform", (1, 1, 1)), ("pixdim", (1, 1.5, 2.5)), ("qform", (1, 1.5, 2.5))):
        assert checked(data) == []
        assert prepare_data(data).spacing == pytest.approx(spacing)
    for path in tmp_path.glob("*/b.nii.gz"):
        write_header(path, "qform_code", 0)
    parts = ["by its sform", "mm by its pixdim", "sform is taken", "(2 such files)"]
    assert told(checked(data), [[f"{WARNING}b: {tmp_path / 'imagesTr/b.nii.gz'}: ", *parts]]), "it has no qform"


@promise(
    "Data",
    "a label map that lies elsewhere by its sform alone; a sform or qform that maps no volume",
    "an error that names a `data.affine` that works",
)
def test_headers_alone_put_a_label_map_elsewhere(tmp_path: Path) -> None:
    """As where a program has read the image by its qform."""
    data = decathlon(tmp_path)
    for path in tmp_path.glob("imagesTr/*"):
        doubtful_places(path)
    lines = errors(checked(data))
    assert len(lines) == 4 and all("by their qform both have one grid: add data.affine=qform" in line for line in lines)
    assert checked(replace(data, affine="qform")) == []


@promise(
    "Data",
    "images without a label map, cases that a split leaves out, another `numTraining`, a class called Ignore",
    "counted or named in one warning",
)
def test_a_case_without_a_label_map_is_counted(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    unlabelled = [f"{WARNING}{tmp_path.name}: 1 of 3 cases have no label map: not used (c);"]
    alone = [f"{WARNING}c: {tmp_path / 'imagesTr/c_0000.nii.gz'}: has no label map"]
    for full, wanted in ((True, [alone, unlabelled]), (False, [unlabelled])):
        assert told([line for line in checked(data, full) if "no label map" in line], wanted)


ORGAN = (np.indices((6, 5, 4))[0] < 4).astype(np.uint8)
RARE = ORGAN.copy()
RARE[5, 4, 3] = 2  # the only voxel of a tumour
SHOWN = {"organ": ORGAN, "rare": RARE, "healthy": np.zeros_like(ORGAN), "ignored": np.full_like(ORGAN, 9)}


def labelled(root: Path, learned: str, held_out: str, **options: Any) -> Data:
    """Cases of which c is held out."""
    data = replace(decathlon(root), cache_root=str(root / "cache"), intensity="zscore", ignore=9, **options)
    for name in "abcd":
        write(root / f"labelsTr/{name}.nii.gz", SHOWN[held_out if name == "c" else learned])
    return data


UNLEARNED = """
held out | organ rare | {"cache": "disk"} | tumour in no training case, | held-out ones;
absent | organ organ | {} | tumour in no training case, | check the label maps,
resampled | rare rare | {"spacing": [4, 4, 4]} | tumour in no training case at data.spacing=[4, 4, 4], | finer
sparse | rare rare | {"cache": "disk", "sparse": [1, 0, 0]} | tumour in no slice that is learned from, | held-out
ignored | rare ignored | {} | every held-out voxel is ignored: | no best.pt;
healthy | rare healthy | {} | no foreground in any held-out case: | 0, or n/a
sound | rare rare | {}
"""


@promise(
    "Data",
    "a case, a part or all of training without a class, also by ignoring, resampling or slices; held-out "
    "cases without a voxel to score",
    "a warning, a warning with the class, an error; undefined scores are n/a, a 0 for want of the class has a note",
)
@pytest.mark.parametrize(("_", "shown", "options", "parts"), table(UNLEARNED, 3))
def test_a_run_says_before_its_first_step_which_classes_it_cannot_learn_or_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], _: str, shown: str, options: str, parts: list[str]
) -> None:
    prepare_data(labelled(tmp_path, *shown.split(), **json.loads(options)))
    wanted = [[f"{WARNING}Small: {parts[0]}", *parts[1:]]] if parts else []
    assert told(capsys.readouterr().err.splitlines(), wanted)


@promise("Data", "a case, a part ...")
def test_a_check_says_which_classes_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "labelsTr/a.nii.gz"
    data = labelled(tmp_path, "organ", "rare")
    write(path, SHOWN["healthy"])
    lines = [[f"{WARNING}a: {path}: has no foreground"], [f"{WARNING}Small: tumour ", " training ", " held-out ones;"]]
    assert told(checked(data), lines)
    write(tmp_path / "labelsTr/c.nii.gz", ORGAN)
    absent = [f"{WARNING}Small: tumour ", " training ", " leave the class out"]
    assert told(checked(data), [lines[0], absent, [f"{WARNING}Small: tumour ", " held-out "]])
    found = checked(labelled(tmp_path, "rare", "rare", spacing=[4, 4, 4]))
    assert told(found[:1], [[f"{WARNING}Small: tumour ", "all voxels are lost by resampling; give a finer"]])


@promise("Data", "a case, a part ...")
def test_a_training_part_without_any_foreground_is_an_error(tmp_path: Path) -> None:
    data = labelled(tmp_path, "healthy", "rare")
    write(tmp_path / LABEL, SHOWN["ignored"])
    wanted = ["Small: no foreground in any training case; there is nothing to learn"]
    assert told(errors(checked(data)), [wanted])
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert told([str(caught.value)], [wanted])


@promise("Data", "a case, a part ...")
def test_a_file_that_is_a_cases_image_and_label_is_read_as_both(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    paths = [f"./labelsTr/{name}.nii.gz" for name in "abcd"]
    rewrite(tmp_path, training=[{"image": path, "label": path} for path in paths])
    assert checked(data) == []
    for path in paths:
        write(tmp_path / path, SHOWN["healthy"])
    assert told(errors(checked(data)), [["c: ", " is held out"], ["Small: "]])


def test_check_data_names_the_plan_that_its_data_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data=decathlon", f"data.root={decathlon(tmp_path).root}"]
    for path in (tmp_path / "labelsTr").iterdir():
        write(path, np.array([0, 1, 4], np.uint8)[label()])
    command = f"\nnext: python -m unet3d plan {' '.join(words)} 'data.label_map={{1:1,2:4}}'\n"
    assert face("check-data", *words, "data.patch=[8,8,4]", "model=unet_tiny") == 2
    assert holds(capsys.readouterr().out, [command, "\n1 problem,"])
    rewrite(tmp_path, labels={"0": "background", "1": "organ", "4": "tumour"})
    assert face("check-data", *words) == 2
    assert command in capsys.readouterr().out
    (tmp_path / "imagesTr" / "a.nii.gz").unlink()
    assert face("check-data", *words) == 2
    assert "next: " not in capsys.readouterr().out, "no plan mends that"


PADDED = """
thin | 80x72x8 | data.patch=[64,64,32] | 25% | 80x72x8
valid | 64x64x32 | model=cicek2016 data.patch=[108,108,108]
valid and thin | 40x40x8 | data.patch=[116,116,116] model.padding=valid model.features=[4,8,16] | 3% | 76x76x76
own network | 40x40x8 | data.patch=[64,64,64] model.path=own.nets:mine | 5%
resampled | 80x72x8 | data.patch=[64,64,32] data.spacing=[1,1,0.25]
"""


@without("unet3d.data.check.MIN_PATCH_FILL", 0.0, only="thin")
@pytest.mark.parametrize(("_", "size", "words", "parts"), table(PADDED, 3))
def test_a_patch_that_is_mostly_padding_is_said(
    tmp_path: Path, _: str, size: str, words: str, parts: list[str]
) -> None:
    decathlon(tmp_path)
    for path in tmp_path.glob("imagesTr/*"):
        write(path, np.zeros([*map(int, size.split("x"))], np.uint8), np.eye(4))
    config = compose.compose(["data=decathlon", f"data.root={tmp_path}", *words.split()])
    grids = read_grids(read_dataset(config.data).cases, config.data.spacing)
    line = mostly_padding(config.model, config.data.patch, grids)
    assert (line is None) == (parts == []) and holds(line or "", parts)


def test_a_run_says_that_a_patch_does_not_suit(tmp_path: Path) -> None:
    given = ["data=decathlon", f"data.root={decathlon(tmp_path / 'set').root}", "data.patch=[32,32,32]"]
    ended = train(tmp_path, *given, "model=unet_tiny", "dry_run=true")
    wanted = [f"{WARNING}data.patch=[32, 32, 32]: ", "6x5x4", " 0% "]
    assert ended.code == 0
    assert told([line for line in ended.err.splitlines() if line.startswith(f"{WARNING}data.patch")], [wanted])


def count_reads() -> None:
    """Note how often this process reads the voxels of each file of the data set, in a file beside it."""
    root, reads, read_array = Path("../set").resolve(), Counter[str](), nifti.read_array

    def counted(file: OpenFile) -> np.ndarray:
        if file.path.is_relative_to(root):
            reads[str(file.path.relative_to(root))] += 1
            (root.parent / "reads.json").write_text(json.dumps(reads))
        return read_array(file)

    nifti.read_array = counted


@pytest.mark.slow
def test_a_run_reads_each_volume_once(tmp_path: Path) -> None:
    """Four steps on six CT cases, whose scale follows from all training cases; also by the report and its pictures."""
    decathlon(tmp_path / "set", tuple("abcdef"), shape=(20, 20, 16))
    words = [word for word in TINY if not word.startswith("data.phantom")]
    words += [*PLAIN, "data=decathlon", "data.intensity=ct", f"data.root={tmp_path / 'set'}"]
    done = train(tmp_path / "run", *words, hook=count_reads, frills=True)
    assert done.code == 0, done.err
    files = {f"{kind}sTr/{name}.nii.gz": 1 for kind in ("image", "label") for name in "abcdef"}
    assert json.loads((tmp_path / "reads.json").read_text()) == files
