"""Regions of dataset.json and of data.regions: what they become, and one line for each that cannot be."""

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from brain import AFFINE, HELD, LABELS, NAMES, ORDER, make_brain
from nifti_files import WARNING, checked, decathlon, image, label, rewrite, told, write
from promises import promise

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE, Regions
from unet3d.config import compose
from unet3d.config.schema import Config, Data
from unet3d.data.cases import DatasetInfo, read_dataset
from unet3d.data.check import check_cases, summary
from unet3d.data.labels import written_words
from unet3d.data.layouts.generated import phantom_outline
from unet3d.data.prepare import prepare_data
from unet3d.data.splits import split
from unet3d.data.volume import ImageFiles, drawn
from unet3d.training.metrics import score_case, summarise

TUMOUR = Regions(HELD, tuple(ORDER))


def brain(root: Path, **changes: Any) -> Data:
    return Data(format="nnunet", root=str(make_brain(root / "brain", **changes)))


def refusal(data: Data) -> str:
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    return str(caught.value)


def test_a_dataset_json_has_regions_where_a_label_is_a_list(tmp_path: Path) -> None:
    dataset = read_dataset(brain(tmp_path, ignore=4))
    assert dataset.classes == ("background", *NAMES)
    assert (dataset.regions, dataset.label_count, dataset.ignore) == (TUMOUR, 4, 4)
    config = Config()
    config.model.kernels = 3
    options = build.model_options(config, dataset, (1, 1, 1))
    assert (options.in_channels, options.classes, options.output_regions) == (4, 3, TUMOUR)


@pytest.mark.parametrize("changes", [{"regions_class_order": None}, {"regions_class_order": [9]}])
def test_lists_of_one_are_labels_as_in_nnunet(tmp_path: Path, changes: dict) -> None:
    labels = {"background": 0, "edema": [1], "core": 2, "rim": [3]}
    dataset = read_dataset(brain(tmp_path, labels=labels, **changes))
    assert (dataset.classes, dataset.regions) == (("background", "edema", "core", "rim"), None)


@promise(
    "Data",
    "regions in dataset.json without `regions_class_order`, with one too short, without a label, with the background",
    "one line with file and remedy",
)
@promise("Data", "a region that a later one is drawn over; a label drawn as another region's", "refused; a warning")
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"regions_class_order": None}, ['"regions_class_order" is missing', "[1, 2, 3]"]),
        ({"regions_class_order": [1, 2]}, ['"regions_class_order" is [1, 2]', "3 regions"]),
        ({"regions_class_order": 1}, ['"regions_class_order" is 1', "3 regions"]),
        ({"regions_class_order": [1, 1, 3]}, ["'tumor_core' as 1", "[2, 3]"]),
        ({"regions_class_order": [True, 2, 3]}, ["'whole_tumor' as True", "[1, 2, 3]"]),
        ({"labels": LABELS | {"tumor_core": []}}, ["'tumor_core'", "no label"]),
        ({"labels": LABELS | {"tumor_core": [0, 2]}}, ["'tumor_core'", "background", "not scored"]),
        ({"labels": LABELS | {"background": [0]}}, ['add "background": 0']),
        ({"labels": {"whole": [1, 2], "core": 2}, "regions_class_order": [1, 2]}, ['add "background": 0']),
        (
            {"labels": {"background": 0, "core": 2, "whole": [1, 2]}, "regions_class_order": [2, 1]},
            ["'whole' is drawn over 'core'", "outer regions first", "whole as 1, core as 2"],
        ),
        ({"labels": LABELS | {"rim ": 3}, "regions_class_order": [1, 2, 3, 3]}, ["'rim '", "write 'rim'"]),
        ({"labels": LABELS | {"tumor_core": [2, "3"]}}, ["'tumor_core'", "'3'", "list of labels"]),
        ({"labels": LABELS | {"tumor_core": 2.0}}, ["'tumor_core'", "2.0"]),
        ({"labels": LABELS | {"tumor_core": [2, -3]}}, ["'tumor_core'", "65535"]),
        ({"labels": LABELS | {"ignore": [4, 5]}}, ['"ignore"', "[4, 5]"]),
        ({"labels": LABELS | {"ignore": 3}}, ["3 is the label to ignore", "region"]),
        ({"labels": LABELS | {"whole_tumor": [1, 2, 3, 5]}}, ["[0, 1, 2, 3, 5]", "data.label_map={1:1,2:2,3:3,4:5}"]),
        ({"labels": LABELS | {"a" * 300: [1, 2]}}, ["300 letters"]),
        ({"labels": LABELS | {"two\nlines": [1, 2]}, "regions_class_order": [1, 2, 3, 1]}, ["regions", "one line"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_dataset_json_with_wrong_regions_is_refused_in_one_line(tmp_path: Path, changes: dict, parts: list) -> None:
    data = brain(tmp_path, cases=1, **changes)
    text = refusal(data)
    assert told([text], [[str(tmp_path / "brain" / "dataset.json"), *parts]]) and len(text) < 600
    assert "\n" not in text


@promise("Data", "a region that a ...")
@pytest.mark.parametrize(
    ("labels", "order", "wanted"),
    [
        (LABELS, [1, 2, 3], None),
        (LABELS, [1, 3, 3], "2 is drawn as 3: label maps show 'enhancing' there too"),
        (LABELS, [2, 2, 3], "1 is drawn as 2: label maps show 'tumor_core' there too"),
        (
            {"background": 0, "a": [1, 2], "b": [2, 3]},
            [1, 3],
            "2 is drawn as 3: label maps do not show 'a' there",
        ),
        ({"background": 0, "a": [1, 2], "b": [1, 2], "c": 3}, [1, 2, 3], None),
    ],
)
def test_labels_that_are_drawn_as_another_regions_are_warned_of(
    tmp_path: Path, labels: dict, order: list[int], wanted: str | None
) -> None:
    data = brain(tmp_path, cases=2, labels=labels, regions_class_order=order)
    lines = [[f"{WARNING}brain: label {wanted};"]] if wanted else []
    assert told(checked(data, full=False), lines)


def test_an_entry_of_another_name_can_hold_the_background(tmp_path: Path) -> None:
    labels = {"air": 0} | {name: LABELS[name] for name in NAMES}
    assert read_dataset(brain(tmp_path, labels=labels)).classes == ("air", *NAMES)


def phantom(**options: Any) -> Data:
    regions = {"body": [1, 2, 3], "vessel": 2, "lesion": [3]}
    return Data(**({"regions": regions, "regions_class_order": [1, 2, 3]} | options))


def test_data_regions_are_of_any_layout(tmp_path: Path) -> None:
    named = DatasetInfo("", (), (), classes=("background", "body", "vessel", "lesion"))
    expected = Regions(((1, 2, 3), (2,), (3,)), (1, 2, 3))
    of_phantom = phantom_outline(phantom())
    of_decathlon = phantom(regions={"all": [1, 2], "tumour": 2}, regions_class_order=[1, 2])
    of_decathlon.format = "decathlon"
    of_decathlon.root = decathlon(tmp_path / "decathlon").root
    make_brain(tmp_path / "plain", labels={"background": 0, "a": 1, "b": 2, "c": 3}, regions_class_order=None)
    of_nnunet = phantom(format="nnunet", root=str(tmp_path / "plain"))
    for folder in ("images", "labels"):
        for name in ("a", "b"):
            voxels = image() if folder == "images" else label(classes=4)
            write(tmp_path / "folders" / folder / f"{name}.nii.gz", voxels)
    of_folders = phantom(format="folders", root=str(tmp_path / "folders"))
    for found in (of_phantom, read_dataset(of_nnunet), read_dataset(of_folders)):
        assert (found.classes, found.regions) == (named.classes, expected)
    found = read_dataset(of_decathlon)
    assert (found.classes, found.regions) == (("background", "all", "tumour"), Regions(((1, 2), (2,)), (1, 2)))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"regions": {"body": [1, 2]}, "regions_class_order": [1]}, ["'lesion' is in no region"]),
        ({"regions": {"body": [1, 2, 3, 4]}, "regions_class_order": [1]}, ["'body'", "label 4"]),
        ({"regions": {"background": [1, 2, 3]}, "regions_class_order": [1]}, ["background"]),
        (
            {
                "label_map": {0: 3, 1: 1, 2: 2},
                "regions": {"core": [2, 3], "whole": [1, 2]},
                "regions_class_order": [2, 1],
            },
            ["'whole' is drawn over 'core'"],
        ),
        ({"label_map": {1: 2, 2: 3}, "regions": {"body": [1, 2, 3]}, "regions_class_order": [1]}, ["drawn as 1"]),
    ],
    ids=str,
)
def test_data_regions_that_do_not_fit_the_labels_are_refused(options: dict, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        phantom_outline(phantom(**options))
    assert all(part in str(caught.value) for part in parts)


def test_data_regions_beside_those_of_dataset_json_are_refused(tmp_path: Path) -> None:
    data = brain(tmp_path)
    data.regions = {"whole": [1, 2, 3]}
    data.regions_class_order = [1]
    assert "leave data.regions unset" in refusal(data)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["data.regions={a:[1,2]}"], "data.regions_class_order is missing"),
        (["data.regions_class_order=[1]"], "data.regions is not"),
        (["data.regions={a:[1,2]}", "data.regions_class_order=[1,2]"], "1 regions"),
        (["data.regions=[1,2]", "data.regions_class_order=[1]"], "{whole:"),
        (["data.regions={a:[]}", "data.regions_class_order=[1]"], "no label"),
        (["data.regions={}", "data.regions_class_order=[]"], "no region"),
        (["data.regions={core:2,whole:[1,2]}", "data.regions_class_order=[2,1]"], "drawn over 'core'"),
        (["data.regions={a:[1,2]}", "data.regions_class_order=[1]", "data.classes=[b,c]"], "data.classes"),
        (["model.classes=1"], "model.classes=1"),
        (["model.regions=[[1,2],[2]]"], "model.regions_class_order is missing"),
        (["model.regions_class_order=[1,2]"], "model.regions is not"),
        (["model.regions=[[1,2],[2]]", "model.regions_class_order=[1,2]", "model.classes=3"], "model.classes=3"),
        (["model.regions=3", "model.regions_class_order=[1,2]"], "model.regions=3"),
    ],
)
def test_options_of_regions_at_odds_are_one_line(words: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        compose.compose(words)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_data_regions_go_through_yaml_and_plain_values_in_their_order() -> None:
    words = ["data.regions={whole:[3,1,2],core:2,a:3}", "data.regions_class_order=[1,2,3]"]
    config = compose.compose(words)
    again = compose.from_plain(json.loads(json.dumps(compose.to_plain(config))))
    assert [*again.data.regions.items()] == [("whole", [3, 1, 2]), ("core", 2), ("a", 3)]
    assert compose.flat(compose.to_plain(config))["data.regions"] == config.data.regions
    with pytest.raises(UserError, match=r"data\.regions=null before it"):
        compose.compose([*words, "data.regions={core:2}"])
    alone = compose.compose([*words, "data.regions=null", "data.regions={x:[1,2,3]}", "data.regions_class_order=[2]"])
    assert alone.data.regions == {"x": [1, 2, 3]}


def test_a_label_map_makes_labels_of_which_the_regions_are_written_back_as_the_files(tmp_path: Path) -> None:
    """BraTS's labels are 0, 1, 2 and 4."""
    labels = {"background": 0, "whole": [1, 2, 4], "core": [1, 4], "rim": 4}
    data = brain(tmp_path, labels=labels, regions_class_order=[2, 1, 4])
    for path in (tmp_path / "brain" / "labelsTr").iterdir():
        voxels = np.array([0, 2, 1, 4], np.uint8)[np.asanyarray(nib.load(path).dataobj)]
        nib.save(nib.Nifti1Image(voxels, AFFINE), path)
    data.label_map = {1: 1, 2: 2, 3: 4}
    dataset = read_dataset(data)
    assert dataset.regions == Regions(((1, 2, 3), (1, 3), (3,)), (2, 1, 3))
    assert dataset.regions is not None
    words = written_words(data, dataset.classes, dataset.regions)
    assert words == "0 background, 2 for whole, 1 for core, 4 for rim, later ones over earlier ones"
    data.intensity = "zscore"
    prepared = prepare_data(data)
    assert set(prepared.read(prepared.train[0]).label.unique().tolist()) == {0, 1, 2, 3}


def test_the_check_of_a_data_set_names_regions_and_what_is_absent(tmp_path: Path) -> None:
    data = brain(tmp_path, ignore=4)
    assert checked(data) == []
    for path in (tmp_path / "brain" / "labelsTr").iterdir():
        voxels = np.asanyarray(nib.load(path).dataobj).clip(0, 2)
        nib.save(nib.Nifti1Image(voxels, AFFINE), path)
    lines = checked(data)
    assert len(lines) == 2 and all("enhancing in no" in line for line in lines)
    dataset = read_dataset(data)
    train, val = split(dataset, data)
    headers = check_cases(dataset, dataset.cases, data, ImageFiles()).sound_headers()
    (line,) = (line for line in summary(dataset, train, val, headers) if line.startswith("classes"))
    assert "1+2+3 whole_tumor (a region, drawn as 1)" in line and line.endswith("4 is ignored")


def test_a_label_of_no_region_is_an_error_of_its_file(tmp_path: Path) -> None:
    data = brain(tmp_path)
    path = tmp_path / "brain" / "labelsTr" / "brain_0.nii.gz"
    voxels = np.asanyarray(nib.load(path).dataobj).copy()
    voxels[0, 0, 0] = 7
    nib.save(nib.Nifti1Image(voxels, AFFINE), path)
    assert any("brain_0" in line and "label 7" in line for line in checked(data))


def test_later_regions_are_drawn_over_earlier_ones_where_above_a_half() -> None:
    maps = np.array([[[[0.9, 0.9, 0.9, 0.4, 0.5]]], [[[0.1, 0.6, 0.9, 0.9, 0.5]]], [[[0.1, 0.1, 0.7, 0.1, 0.51]]]])
    assert drawn(zip((5, 300, 2), maps, strict=True)).ravel().tolist() == [5, 300, 2, 300, 2]


def test_scores_of_regions_are_those_of_their_masks() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, (9, 8, 7)).astype(np.int16)
    prediction = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, 4, truth.shape)).astype(np.uint8)
    truth[0] = IGNORE
    score = score_case("a", prediction, truth, 4, (1, 1, 2), IGNORE, hd95=True, regions=TUMOUR)
    is_known = truth != IGNORE
    for region, labels in enumerate(HELD):
        made = np.isin(prediction, labels)[is_known]
        true = np.isin(truth, labels)[is_known]
        both = (made & true).sum()
        assert score.dice[region] == pytest.approx(2 * both / (made.sum() + true.sum()))
        assert score.iou[region] == pytest.approx(both / (made | true).sum())
    assert summarise([score], ("background", *NAMES)).keys() >= {f"val/dice/{name}" for name in NAMES}
    whole = score_case("a", prediction > 0, (truth > 0).astype(int), 2, (1, 1, 2), hd95=True)
    regions = score_case("a", prediction, truth.clip(0), 4, (1, 1, 2), hd95=True, regions=TUMOUR)
    assert whole.dice[0] == regions.dice[0] and whole.hd95_mm[0] == regions.hd95_mm[0]


@pytest.mark.parametrize("more", [[], ["model.in_channels=4", "model.classes=3"]], ids=("unset", "set"))
def test_a_prediction_of_memory_is_of_the_regions_in_the_headers(tmp_path: Path, more: list[str]) -> None:
    words = ["data=nnunet", f"data.root={make_brain(tmp_path / 'brain')}", *more]
    assert build.model_config_from_headers(compose.compose(words)).output_regions == TUMOUR
    words = ["model.in_channels=1", "model.classes=2", "data.regions={body:[1,2,3],core:3}"]
    config = compose.compose([*words, "data.regions_class_order=[1,3]"])
    assert build.model_config_from_headers(config).output_regions == Regions(((1, 2, 3), (3,)), (1, 3))


def test_data_sets_that_do_not_overlap_refuse_regions_of_a_network() -> None:
    words = ["model.regions=[[1,2,3],[2,3],[3]]", "model.regions_class_order=[1,2,3]"]
    config = compose.compose(words)
    with pytest.raises(UserError, match=r"model\.regions="):
        build.model_options(config, phantom_outline(config.data), (1, 1, 1))


def test_rewriting_regions_changes_what_they_hold(tmp_path: Path) -> None:
    data = brain(tmp_path)
    rewrite(tmp_path / "brain", labels={"background": 0, "a": [1, 2, 3]}, regions_class_order=[2])
    dataset = read_dataset(data)
    assert dataset.regions == Regions(((1, 2, 3),), (2,))
    options = build.model_options(compose.compose([]), dataset, (1, 1, 1))
    assert options.classes == 1
