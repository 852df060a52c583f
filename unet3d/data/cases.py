"""A data set on disk as one typed `DatasetInfo`, whatever its layout: names and JSON, no voxels."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config.schema import Data
from unet3d.data import dataset_json, nifti, synthetic
from unet3d.data.dataset_json import (
    DatasetJson,
    UnnumberedLabels,
    class_names,
    in_sequence,
    is_plain,
    refuse_odd_names,
    shown,
)
from unet3d.data.file_names import (
    by_stem,
    images_by_case,
    in_order,
    left_out,
    other_volumes,
    refuse_channel_names,
    refuse_long,
    shown_files,
    volumes_in,
    without_channel,
)
from unet3d.data.labels import Relabel, relabelling
from unet3d.data.regions import NamedRegions, as_classes, asked_regions, read_regions

# Times the files that are there: where dataset.json asks for more, its channels are wrong, not the files.
MAX_ABSENT = 10


class Labels(NamedTuple):
    """The meaning of labels: the classes' names, the map of the files' labels, and the error of wrong ones."""

    classes: tuple[str, ...] = ()
    relabel: Relabel = None
    problem: str = ""
    regions: Regions | None = None
    options: tuple[str, ...] = ()  # that would mend the problem


class Case(NamedTuple):
    """One subject: its image files (one a channel, or a single 4D file) and its label map, if it has one."""

    id: str
    images: tuple[Path, ...]
    label: Path | None
    affine: str = "auto"  # how its headers are read, as data.affine says

    @property
    def files(self) -> tuple[Path, ...]:
        """Its image files, and its label map if it has one."""
        if self.label is None:
            return self.images
        return (*self.images, self.label)

    @property
    def named(self) -> str:
        """Its id and its first file, as errors name them."""
        return ": ".join([self.id, *map(str, self.images[:1])])


class DatasetInfo(NamedTuple):
    """A data set. `classes` are named by label value, background first; `cases` are sorted by id.

    With `regions`, which are of label values, `classes` are the background and their names.
    `relabel` is what data.label_map makes of the files' labels, before anything else sees them. `wrong_labels` is the
    error of labels, in dataset.json or in data.label_map, that make no classes; then `classes` is empty.
    """

    name: str
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    ignore: int | None
    cases: tuple[Case, ...]
    relabel: Relabel = None
    wrong_labels: str = ""
    regions: Regions | None = None
    announced: int | None = None  # cases, by dataset.json's numTraining
    options_of_labels: tuple[str, ...] = ()  # that make classes of wrong labels
    left_out: tuple[str, ...] = ()  # sentences on files that are not read, or named otherwise than dataset.json says

    @property
    def label_count(self) -> int:
        """Return the number of labels in its maps once they are read, but the ignored one; 0 where none is known."""
        return len(self.classes) if self.regions is None else self.regions.label_count


def read_dataset(data: Data) -> DatasetInfo:
    """Return the data set that `data` describes. The phantom and MNI152 are generated if absent. Raises UserError."""
    dataset = dataset_to_check(data)
    if dataset.wrong_labels:
        raise UserError(dataset.wrong_labels)
    return dataset


def dataset_to_check(data: Data) -> DatasetInfo:
    """Return the data set, without classes where its labels make none, so that all else can be checked.

    Raises UserError for what else is wrong.
    """
    if data.format == "phantom":
        root = Path(data.root or synthetic.PHANTOM_ROOT)
        return _decathlon(synthetic.ensure_phantom(data.phantom, root), data)
    if data.format == "mni152":
        root = Path(data.root or synthetic.MNI152_ROOT)
        return _decathlon(synthetic.ensure_mni152(root), data)
    assert data.root is not None, "unet3d.config.rules requires it"
    readers = {
        "decathlon": _decathlon,
        "nnunet": _nnunet,
        "folders": _folders,
    }
    dataset = readers[data.format](Path(data.root), data)
    cases = tuple(case._replace(affine=data.affine) for case in dataset.cases)
    files = [path for case in cases for path in case.files]
    notes = left_out(files, is_list=data.format == "decathlon")
    return dataset._replace(cases=cases, left_out=(*dataset.left_out, *notes))


def phantom_outline(data: Data) -> DatasetInfo:
    """Return what `read_dataset` returns for the phantom, and generate no file. Raises UserError."""
    root = Path(data.root or synthetic.PHANTOM_ROOT)
    folder = synthetic.phantom_folder(data.phantom, root)
    about = synthetic.PHANTOM
    cases = []
    for name, entry in synthetic.phantom_files(data.phantom).items():
        cases.append(Case(name, (folder / entry["image"],), folder / entry["label"]))
    names = {int(label): name for label, name in about["labels"].items()}
    labels = _labels(names, data.ignore, data, folder / "dataset.json", asked_regions(data))
    if labels.problem:
        raise UserError(labels.problem)
    channels = tuple(about["modality"].values())
    return _dataset(about["name"], channels, labels, data.ignore, tuple(cases), len(cases))


def _dataset(
    name: str,
    channels: tuple[str, ...],
    labels: Labels,
    ignore: int | None,
    cases: tuple[Case, ...],
    announced: int | None = None,
) -> DatasetInfo:
    """Return a data set whose labels are known, or known to be wrong."""
    return DatasetInfo(
        name,
        channels,
        labels.classes,
        ignore,
        cases,
        labels.relabel,
        labels.problem,
        labels.regions,
        announced,
        labels.options,
    )


def _decathlon(root: Path, data: Data) -> DatasetInfo:
    """Read a data set of the Medical Segmentation Decathlon.

    dataset.json lists the files; several channels are one 4D image.
    """
    about = DatasetJson(root, data.allow_outside)
    if "channel_names" in about.content and "modality" not in about.content:
        raise UserError(f"{about.where} is in nnU-Net's format; read it with data=nnunet")
    cases = _sorted(
        (_decathlon_case(about, entry) for entry in about.field("training", list)),
        about.where,
    )
    about.refuse_version_1(cases[0].images[0])
    channels = in_sequence(about.numbered("modality"), "modality", about.where)
    labels = _labels(about.numbered("labels"), data.ignore, data, about.where, asked_regions(data))
    return _dataset(about.title, channels, labels, data.ignore, cases, about.announced)


def _decathlon_case(about: DatasetJson, entry: Any) -> Case:
    """Return the case of an entry in "training". Raises UserError."""
    if not isinstance(entry, dict) or "image" not in entry:
        raise about.error(f'{shown(entry)} in "training" is not {{"image": path, "label": path}}')
    image = about.path(entry["image"])
    label = about.path(entry["label"]) if "label" in entry else None
    return Case(nifti.stem(image), (image,), label)


def _nnunet(root: Path, data: Data) -> DatasetInfo:
    """Read nnU-Net's raw layout: imagesTr/<case>_<channel>, one file a channel, and labelsTr/<case>."""
    about = DatasetJson(root, data.allow_outside)
    if "modality" in about.content and "channel_names" not in about.content:
        for path in volumes_in(root / "imagesTr"):
            about.refuse_version_1(path.with_name(f"{without_channel(nifti.stem(path))}.nii.gz"))
        raise UserError(f"{about.where} is in Decathlon's format; read it with data=decathlon")
    ending = about.field("file_ending", str)
    if f".{ending.lower()}" in nifti.SUFFIXES:
        raise about.error(f'"file_ending" is {shown(ending)}; write it with its dot, {shown(f".{ending}")}')
    if ending.lower() not in nifti.SUFFIXES and ending.lower().endswith(("gz", "nii")):
        raise about.error(f'"file_ending" is {shown(ending)}; write {" or ".join(map(shown, nifti.SUFFIXES))}')
    if ending.lower() not in nifti.SUFFIXES:
        raise about.error(f'"file_ending" is {shown(ending)}; convert the volumes to {" or ".join(nifti.SUFFIXES)}')
    channels = in_sequence(about.numbered("channel_names"), "channel_names", about.where)
    regions = asked_regions(data)
    own = read_regions(about)
    if own is not None and regions is not None:
        remedy = f"{about.where} has regions of its own; leave data.regions unset"
        raise UserError(f"data.regions={data.regions}, but {remedy}")
    if own is not None:
        values, regions = own
    else:
        values = about.by_value("labels")
    ignore = next(
        (value for value, name in values.items() if name == "ignore"),
        data.ignore,
    )
    if data.ignore not in (None, ignore):
        raise UserError(f"data.ignore={data.ignore}, but {about.where} says {ignore}; leave data.ignore unset")
    labels = _labels(values, ignore, data, about.where, regions)
    cases = _nnunet_cases(root, ending, len(channels), about)
    cases = _inside(cases, (root,), data.allow_outside)
    dataset = _dataset(about.title, channels, labels, ignore, cases, about.announced)
    others = [path for case in cases for path in case.files if nifti.ending(path).lower() != ending.lower()]
    if not others:
        return dataset
    what = f'"file_ending" is {shown(ending)}, but {len(others)} files end otherwise, and are read all the same'
    return dataset._replace(left_out=(f"{about.where}: {what} ({shown_files(others)})",))


def _nnunet_cases(root: Path, ending: str, channels: int, about: DatasetJson) -> tuple[Case, ...]:
    """Return every case with a label or an image; a missing file is reported when it is opened. Raises UserError."""
    images = root / "imagesTr"
    maps = by_stem(volumes_in(root / "labelsTr"))
    present = by_stem(volumes_in(images))
    refuse_channel_names(maps, present)
    names = {*maps, *map(without_channel, present)}
    wanted = len(names) * channels
    if wanted > MAX_ABSENT * (len(present) + 100):
        what = f"{channels:,} channels, which are {wanted:,} files of {len(names):,} cases"
        raise about.error(f'"channel_names" has {what}, but {images} holds {len(present):,}; make them agree')
    cases = list[Case]()
    for name in names:
        stems = [f"{name}_{channel:04d}" for channel in range(channels)]
        files = tuple(present.get(stem, images / f"{stem}{ending}") for stem in stems)
        cases.append(Case(name, files, maps.get(name)))
    return _sorted(cases, images)


def _labels(
    names: dict[int, str],
    ignore: int | None,
    data: Data,
    where: object,
    regions: NamedRegions | None,
) -> Labels:
    """Return what the files' labels mean, which `names` and `regions` are of."""
    try:
        if data.label_map is not None:
            refuse_odd_names(names, "labels", str(where))  # they are joined
        new_names, relabel = relabelling(names, ignore, data)
        classes = class_names(new_names, ignore, str(where))
        if regions is None:
            return Labels(classes, relabel)
        region_names, of_classes = as_classes(regions, classes, relabel, str(where))
        return Labels(region_names, relabel, regions=of_classes)
    except UnnumberedLabels as error:
        return Labels(problem=str(error), options=error.options)
    except UserError as error:
        return Labels(problem=str(error))


def _folders(root: Path, data: Data) -> DatasetInfo:
    """Read two folders with equal names; an image may be split into <case>_0000, <case>_0001 ..., one a channel."""
    regions = asked_regions(data)
    assert data.classes is not None or regions is not None, "unet3d.config.rules requires one of them"
    images = root / data.images
    labels = root / data.labels
    # A folder that the command line puts outside of the root is outside on purpose.
    outside = [folder for folder in (images, labels) if not folder.is_relative_to(root) or ".." in folder.parts]
    cases = _inside(_folder_cases(images, labels), (root, *outside), data.allow_outside)
    count = mode(len(case.images) for case in cases)  # the others lack a channel, or have one too many
    if count == 1:
        first = next(case for case in cases if len(case.images) == count)
        count = nifti.channels(nifti.open_image(first.id, first.images[0], data.affine))
    names = dict[int, str]()
    if regions is not None:
        names = {0: "background"} | regions.label_names()
    elif data.classes is not None and data.label_map is None:  # else they are of the new labels
        names = dict(enumerate(data.classes))
    where = "data.classes" if regions is None else "data.regions"
    meanings = _labels(names, data.ignore, data, where, regions)
    channels = tuple(f"channel_{channel}" for channel in range(count))
    return _dataset(root.name, channels, meanings, data.ignore, cases)


def _folder_cases(images: Path, labels: Path) -> tuple[Case, ...]:
    """Return the cases of a folder of images and one of label maps. Raises UserError."""
    maps = by_stem(volumes_in(labels))
    _sorted((Case(name, (), path) for name, path in maps.items()), labels)
    grouped = images_by_case(images, maps)
    return _sorted(
        (Case(name, in_order(name, paths), maps.get(name)) for name, paths in grouped.items()),
        images,
    )


def _inside(cases: tuple[Case, ...], roots: Sequence[Path], allow_outside: bool) -> tuple[Case, ...]:
    """Return the cases. Raises UserError for a file that is a link out of all `roots`."""
    if allow_outside:
        return cases
    for case in cases:
        for path in case.files:
            if all(dataset_json.leaves(root, path) for root in roots):
                remedy = "put the file there, or set data.allow_outside=true"
                raise UserError(f"{path}: is a link out of {roots[0]}; {remedy}")
    return cases


def _sorted(cases: Iterable[Case], where: Path) -> tuple[Case, ...]:
    """Return the cases by id: at least one, and no id twice. Raises UserError."""
    by_id = dict[str, Case]()
    for case in cases:
        if not is_plain(case.id):
            raise UserError(f"{where}: {case.id!r} cannot name a case; rename its files")
        refuse_long(where, case.id)
        if case.id in by_id:
            raise UserError(f"{where}: two cases are called {case.id}; rename one of them")
        by_id[case.id] = case
    if not by_id:
        remedy = other_volumes([where]) or "there must be at least two with labels"
        raise UserError(f"{where}: lists no case; {remedy}")
    return tuple(by_id[case_id] for case_id in sorted(by_id))
