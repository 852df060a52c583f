"""Regions of dataset.json and of data.regions: what they become, and one line for each that cannot be."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml
from brain import AFFINE, HELD, LABELS, NAMES, ORDER, make_brain
from nifti_files import WARNING, checked, decathlon, image, label, told, write
from promises import promise
from tables import says, table

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE, Regions
from unet3d.config import compose
from unet3d.config.schema import Config, Data
from unet3d.data.cases import read_dataset
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


def relabel(root: Path, values: list[int]) -> None:
    """Give the labels 0, 1, 2 ... of all label maps these values."""
    for path in (root / "brain" / "labelsTr").iterdir():
        voxels = np.array(values, np.uint8)[np.asanyarray(nib.load(path).dataobj)]
        nib.save(nib.Nifti1Image(voxels, AFFINE), path)


def test_a_dataset_json_has_regions_where_a_label_is_a_list(tmp_path: Path) -> None:
    dataset = read_dataset(brain(tmp_path, ignore=4))
    assert dataset.classes == ("background", *NAMES)
    assert (dataset.regions, dataset.label_count, dataset.ignore) == (TUMOUR, 4, 4)
    config = Config()
    config.model.kernels = 3
    options = build.model_options(config, dataset, (1, 1, 1))
    assert (options.in_channels, options.classes, options.output_regions) == (4, 3, TUMOUR)


def test_lists_of_one_are_labels_as_in_nnunet_and_the_background_may_be_called_otherwise(tmp_path: Path) -> None:
    labels = {"air": 0, "edema": [1], "core": 2, "rim": [3]}
    dataset = read_dataset(brain(tmp_path, labels=labels, regions_class_order=[9]))
    assert (dataset.classes, dataset.regions) == (("air", "edema", "core", "rim"), None)


# Changes of dataset.json, where `labels` are added to those of `make_brain`; and what the refusal says.
WRONG = r"""
    order: null                                  | "regions_class_order" is missing ... [1, 2, 3]
    order: [1, 2]                                | "regions_class_order" is [1, 2] ... 3 regions
    order: 1                                     | "regions_class_order" is 1 ... 3 regions
    order: [1, 1, 3]                             | 'tumor_core' as 1 ... [2, 3]
    order: [true, 2, 3]                          | 'whole_tumor' as True ... [1, 2, 3]
    labels: {tumor_core: []}                     | 'tumor_core' ... no label
    labels: {tumor_core: [0, 2]}                 | 'tumor_core' ... background ... not scored
    labels: {background: [0]}                    | add "background": 0
    labels: {background: 1}                      | add "background": 0
    labels: {core: 2, all: [1, 2, 3]}, order: [1, 2, 3, 2, 1] | is drawn over ... outer regions first
    labels: {'rim ': 3}, order: [1, 2, 3, 3]     | 'rim ' ... write 'rim'
    labels: {tumor_core: [2, '3']}               | 'tumor_core' ... '3' ... list of labels
    labels: {tumor_core: 2.0}                    | 'tumor_core' ... 2.0
    labels: {tumor_core: [2, -3]}                | 'tumor_core' ... 65535
    labels: {ignore: [4, 5]}                     | "ignore" ... [4, 5]
    labels: {ignore: 3}                          | 3 is the label to ignore ... region
    labels: {whole_tumor: [1, 2, 3, 5]}          | [0, 1, 2, 3, 5] ... data.label_map={1:1,2:2,3:3,4:5}
    labels: {"two\nlines": [1, 2]}, order: [1, 2, 3, 1] | regions ... one line
"""


@promise(
    "Data",
    "regions in dataset.json without `regions_class_order`, with one too short, without a label, with the background",
    "one line with file and remedy",
)
@promise("Data", "a region that a later one is drawn over; a label drawn as another region's", "refused; a warning")
@pytest.mark.parametrize(("changes", "words"), table(WRONG))
def test_a_dataset_json_with_wrong_regions_is_refused_in_one_line(tmp_path: Path, changes: str, words: str) -> None:
    asked = {"order": ORDER, "labels": {}} | yaml.safe_load(f"{{{changes}}}")
    data = brain(tmp_path, cases=1, labels=LABELS | asked["labels"], regions_class_order=asked["order"])
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    assert str(caught.value).startswith(str(tmp_path / "brain" / "dataset.json"))
    assert says(str(caught.value), words)


@promise("Data", "a region that a ...")
@pytest.mark.parametrize(
    ("labels", "order", "warning"),
    table("""
    a: [1, 2, 3], b: [2, 3], c: 3 | [1, 2, 3] |
    a: [1, 2, 3], b: [2, 3], c: 3 | [2, 2, 3] | 1 is drawn as 2: label maps show 'b' there too
    a: [1, 2], b: [2, 3]          | [1, 3]    | 2 is drawn as 3: label maps do not show 'a' there
    a: [1, 2], b: [1, 2], c: 3    | [1, 2, 3] |
"""),
)
def test_labels_that_are_drawn_as_another_regions_are_warned_of(
    tmp_path: Path, labels: str, order: str, warning: str
) -> None:
    named = yaml.safe_load(f"{{background: 0, {labels}}}")
    data = brain(tmp_path, cases=2, labels=named, regions_class_order=yaml.safe_load(order))
    assert told(checked(data, full=False), [[f"{WARNING}brain: label {warning};"]] if warning else [])


BODY = {"body": [1, 2, 3], "vessel": 2, "lesion": [3]}


@pytest.mark.parametrize("layout", ["phantom", "nnunet", "folders"])
def test_data_regions_are_of_any_layout(tmp_path: Path, layout: str) -> None:
    data = Data(format=layout, regions=BODY, regions_class_order=[1, 2, 3], root=str(tmp_path / "brain"))
    if layout == "nnunet":
        brain(tmp_path, labels={"background": 0, "a": 1, "b": 2, "c": 3}, regions_class_order=None)
    for name in "ab" if layout == "folders" else "":
        write(tmp_path / "brain" / "images" / f"{name}.nii.gz", image())
        write(tmp_path / "brain" / "labels" / f"{name}.nii.gz", label(classes=4))
    found = phantom_outline(data) if layout == "phantom" else read_dataset(data)
    assert found.classes == ("background", *BODY)
    assert found.regions == Regions(((1, 2, 3), (2,), (3,)), (1, 2, 3))


def test_data_regions_name_those_of_decathlons_layout_and_not_beside_dataset_json(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.regions, data.regions_class_order = {"all": [1, 2], "tumour": 2}, [1, 2]
    found = read_dataset(data)
    assert (found.classes, found.regions) == (("background", "all", "tumour"), Regions(((1, 2), (2,)), (1, 2)))
    data.format, data.root = "nnunet", brain(tmp_path).root
    with pytest.raises(UserError, match=r"leave data\.regions unset"):
        read_dataset(data)


@pytest.mark.parametrize(
    ("options", "words"),
    table("""
    regions: {body: [1, 2]}, order: [1]          | 'lesion' is in no region
    regions: {body: [1, 2, 3, 4]}, order: [1]    | 'body' ... label 4
    regions: {background: [1, 2, 3]}, order: [1] | background
    map: {0: 3, 1: 1, 2: 2}, regions: {core: [2, 3], whole: [1, 2]}, order: [2, 1] | 'whole' is drawn over 'core'
    map: {1: 2, 2: 3}, regions: {body: [1, 2, 3]}, order: [1] | drawn as 1
"""),
)
def test_data_regions_that_do_not_fit_the_labels_are_refused(options: str, words: str) -> None:
    asked = yaml.safe_load(f"{{{options}}}")
    data = Data(regions=asked["regions"], regions_class_order=asked["order"], label_map=asked.get("map"))
    with pytest.raises(UserError) as caught:
        phantom_outline(data)
    assert says(str(caught.value), words)


@pytest.mark.parametrize(
    ("words", "refusal"),
    table("""
    data.regions={a:[1,2]}                                       | data.regions_class_order is missing
    data.regions_class_order=[1]                                 | data.regions is not
    data.regions={a:[1,2]} data.regions_class_order=[1,2]        | 1 regions
    data.regions=[1,2] data.regions_class_order=[1]              | {whole:
    data.regions={a:[]} data.regions_class_order=[1]             | no label
    data.regions={} data.regions_class_order=[]                  | no region
    data.regions={core:2,whole:[1,2]} data.regions_class_order=[2,1] | drawn over 'core'
    data.regions={a:[1,2]} data.regions_class_order=[1] data.classes=[b,c] | data.classes
    data.regions={a:[1,2],b:2} data.regions_class_order=[1,2] data.regions={b:2} | data.regions=null before it
    model.classes=1                                              | model.classes=1
    model.regions=[[1,2],[2]]                                    | model.regions_class_order is missing
    model.regions_class_order=[1,2]                              | model.regions is not
    model.regions=[[1,2],[2]] model.regions_class_order=[1,2] model.classes=3 | model.classes=3
    model.regions=3 model.regions_class_order=[1,2]              | model.regions=3
"""),
)
def test_options_of_regions_at_odds_are_one_line(words: str, refusal: str) -> None:
    with pytest.raises(UserError) as caught:
        compose.compose(words.split())
    assert says(str(caught.value), refusal)


def test_data_regions_go_through_plain_values_in_their_order() -> None:
    words = ["data.regions={whole:[3,1,2],core:2,a:3}", "data.regions_class_order=[1,2,3]"]
    again = compose.from_plain(compose.to_plain(compose.compose(words)))
    assert [*again.data.regions.items()] == [("whole", [3, 1, 2]), ("core", 2), ("a", 3)]


def test_a_label_map_makes_labels_of_which_the_regions_are_written_back_as_the_files(tmp_path: Path) -> None:
    """BraTS's labels are 0, 1, 2 and 4."""
    labels = {"background": 0, "whole": [1, 2, 4], "core": [1, 4], "rim": 4}
    data = brain(tmp_path, labels=labels, regions_class_order=[2, 1, 4])
    relabel(tmp_path, [0, 2, 1, 4])
    data.label_map = {1: 1, 2: 2, 3: 4}
    data.intensity = "zscore"
    prepared = prepare_data(data)
    regions = prepared.dataset.regions
    assert regions == Regions(((1, 2, 3), (1, 3), (3,)), (2, 1, 3))
    words = written_words(data, prepared.dataset.classes, regions)
    assert words == "0 background, 2 for whole, 1 for core, 4 for rim, later ones over earlier ones"
    assert set(prepared.read(prepared.train[0]).label.unique().tolist()) == {0, 1, 2, 3}


def test_the_check_of_a_data_set_names_regions_what_is_absent_and_a_label_of_none(tmp_path: Path) -> None:
    data = brain(tmp_path, ignore=4)
    assert checked(data) == []
    relabel(tmp_path, [0, 1, 2, 2, 4])
    assert ["enhancing in no" in line for line in checked(data)] == [True, True]
    dataset = read_dataset(data)
    headers = check_cases(dataset, dataset.cases, data, ImageFiles()).sound_headers()
    (line,) = (line for line in summary(dataset, *split(dataset, data), headers) if line.startswith("classes"))
    assert says(line, "1+2+3 whole_tumor (a region, drawn as 1) ... 4 is ignored")
    relabel(tmp_path, [0, 1, 7, 0, 4])
    assert any(says(line, "brain_0 ... label 7") for line in checked(data))


def test_later_regions_are_drawn_over_earlier_ones_where_above_a_half() -> None:
    maps = np.array([[[[0.9, 0.9, 0.9, 0.4, 0.5]]], [[[0.1, 0.6, 0.9, 0.9, 0.5]]], [[[0.1, 0.1, 0.7, 0.1, 0.51]]]])
    assert drawn(zip((5, 300, 2), maps, strict=True)).ravel().tolist() == [5, 300, 2, 300, 2]


def test_scores_of_regions_are_those_of_their_masks() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, (9, 8, 7)).astype(np.int16)
    prediction = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, 4, truth.shape)).astype(np.uint8)
    truth[0] = IGNORE
    score = score_case("a", prediction, truth, 4, (1, 1, 2), IGNORE, hd95=True, regions=TUMOUR)
    assert summarise([score], ("background", *NAMES)).keys() >= {f"val/dice/{name}" for name in NAMES}
    for region, labels in enumerate(HELD):
        true = np.where(truth == IGNORE, IGNORE, np.isin(truth, labels))
        alone = score_case("a", np.isin(prediction, labels), true, 2, (1, 1, 2), IGNORE, hd95=True)
        for kind in ("dice", "iou", "hd95_mm"):
            assert getattr(score, kind)[region] == getattr(alone, kind)[0]


@pytest.mark.parametrize("more", [[], ["model.in_channels=4", "model.classes=3"]], ids=("unset", "set"))
def test_a_prediction_of_memory_is_of_the_regions_in_the_headers(tmp_path: Path, more: list[str]) -> None:
    words = ["data=nnunet", f"data.root={brain(tmp_path).root}", *more]
    assert build.model_config_from_headers(compose.compose(words)).output_regions == TUMOUR


def test_data_sets_that_do_not_overlap_refuse_regions_of_a_network() -> None:
    config = compose.compose(["model.regions=[[1,2,3],[2,3],[3]]", "model.regions_class_order=[1,2,3]"])
    with pytest.raises(UserError, match=r"model\.regions="):
        build.model_options(config, phantom_outline(config.data), (1, 1, 1))
