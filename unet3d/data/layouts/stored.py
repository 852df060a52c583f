"""Layouts of files: the Medical Segmentation Decathlon's, nnU-Net's raw one, and two folders with equal names.

A dataset.json is not trusted. Every UserError names it, what is wrong in it and what to do.
"""

import json
import os
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from statistics import mode
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.files import NIFTI_ENDINGS
from unet3d.config.data_rules import checked_regions
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo, in_order, inside, layout, other_volumes, sorted_cases, with_classes
from unet3d.data.labels import NamedRegions, asked_regions, in_sequence
from unet3d.data.texts import MAX_OTHERS_LISTED, MAX_SHOWN, is_plain, leaves, read_json, shown, shown_names

JSON_TYPES: dict[type, str] = {dict: "object", list: "list", str: "string"}
MAX_PATH = 1024  # characters of a path
LONGEST_NAME = 250  # characters of the name of a data set, channel or class
# Times the files that are there: where dataset.json asks for more, its channels are wrong, not the files.
MAX_ABSENT = 10
MAX_MAPS_LISTED = 200  # letters of the names of label maps


class DatasetJson:
    """The fields of a data set's dataset.json in the folder `root`."""

    def __init__(self, root: Path, allow_outside: bool, content: dict[str, Any] | None = None) -> None:
        self.root = root
        self.where = root / "dataset.json"
        self.allow_outside = allow_outside
        self.content = read_json(self.where, None if allow_outside else root) if content is None else content
        self.title = self.content.get("name", root.name)
        if not is_plain(self.title):
            raise self.error(f'"name" is {shown(self.title)}; give one line of text')
        for field in ("name", "modality", "channel_names", "labels"):
            given = self.content.get(field)
            for name in (*given, *given.values()) if isinstance(given, dict) else (given,):
                if isinstance(name, str) and len(name) > LONGEST_NAME:
                    what = f"has {len(name):,} letters; give it {LONGEST_NAME} at most"
                    raise self.error(f'"{field}": {shown(name)} {what}')
        count = self.content.get("numTraining")
        self.announced = count if type(count) is int else None  # cases

    def error(self, what: str) -> UserError:
        """Return the error for this file."""
        return UserError(f"{self.where}: {what}")

    def field(self, name: str, kind: type) -> Any:
        """Return a field that must be a dict, list or str. Raises UserError."""
        if not isinstance(self.content.get(name), kind):
            raise self.error(f'"{name}" is missing or no JSON {JSON_TYPES[kind]}; data/README.md shows one')
        return self.content[name]

    def numbered(self, name: str) -> dict[int, str]:
        """Return a field {"number": text} as {number: text}. Raises UserError."""
        texts = self.field(name, dict)
        try:
            by_number = {int(number): text for number, text in texts.items()}
        except ValueError as error:
            raise self.error(f'{name} {shown(texts)}; the keys must be numbers: {{"0": name, ...}}') from error
        if len(by_number) < len(texts):
            raise self.error(f"{name} {shown(texts)}; a number occurs twice, give each name its own")
        return by_number

    def by_value(self, name: str) -> dict[int, str]:
        """Return a field {text: number}, as nnU-Net names labels, as {number: text}. Raises UserError."""
        given = self.field(name, dict)
        if given and all(key.isdecimal() and is_plain(text) and not text.isdecimal() for key, text in given.items()):
            turned = {text: int(number) for number, text in given.items()}
            raise self.error(f"{name} {shown(given)}: the names come first, as in {_as_json(turned)}")
        texts = dict[int, str]()
        for text, value in given.items():
            number = value[0] if isinstance(value, list) and len(value) == 1 else value
            if type(number) is not int:  # JSON's true would count as 1
                raise self.error(f"label {shown(text)} is {shown(value)}; give one integer, or a region's list of them")
            texts[number] = text
        if len(texts) < len(given):
            raise self.error(f"{name} {shown(given)}; two names share a value, give each its own")
        return texts

    def refuse_version_1(self, image: Path) -> None:
        """Raise UserError where an image is not there, but a file of its first channel: the layout of nnU-Net v1."""
        stem = nifti.stem(image)
        beside = [image.with_name(f"{stem}_0000{ending}") for ending in NIFTI_ENDINGS]
        found = next((path for path in beside if os.path.exists(path)), None)
        if found is None or os.path.exists(image):
            return
        channels = _as_json(self.numbered("modality"))
        values = _as_json({text: number for number, text in self.numbered("labels").items()})
        fields = f'"channel_names": {channels}, "labels": {values}, "file_ending": "{nifti.ending(found)}"'
        raise self.error(f"is nnU-Net v1's, with {found.name} for a case; write {fields}, and read it with data=nnunet")

    def path(self, name: Any) -> Path:
        """Return the path `name` below the root.

        Raises UserError for what leaves it: an absolute path, `..`, or a link to elsewhere.
        """
        if is_plain(name) and len(name) <= MAX_PATH:
            relative = Path(name)
            path = self.root / relative
            if "\\" in name and not os.path.exists(path):
                raise self.error(f"{shown(name)}: has backslashes, as on Windows; write / between folders")
            is_outside = relative.is_absolute() or ".." in relative.parts or leaves(self.root, path)
            if self.allow_outside or not is_outside:
                return path
        remedy = "move the file there and give its relative path, or set data.allow_outside=true"
        raise self.error(f"{shown(name)} is not a path inside {self.root}; {remedy}")

    def file_ending(self) -> str:
        """Return the ending that volumes are to have. Raises UserError for one that is not NIfTI's."""
        ending: str = self.field("file_ending", str)
        if ending.lower() not in NIFTI_ENDINGS:
            remedy = f"write {' or '.join(map(shown, NIFTI_ENDINGS))}, and convert volumes of other formats"
            raise self.error(f'"file_ending" is {shown(ending)}; {remedy}')
        return ending


def _as_json(fields: Mapping[Any, Any]) -> str:
    """Return an object for a message, the way it has to be written, shortened."""
    return shown_names([json.dumps(fields, ensure_ascii=False)], MAX_SHOWN)


@layout(lists_files=True)
def decathlon(root: Path, data: Data) -> DatasetInfo:
    """Return the data set of the files that `root`/dataset.json lists; several channels are one 4D image.

    Raises UserError.
    """
    return decathlon_of(DatasetJson(root, data.allow_outside), data)


def decathlon_of(about: DatasetJson, data: Data) -> DatasetInfo:
    """Return the data set of these fields. Raises UserError."""
    if "channel_names" in about.content and "modality" not in about.content:
        raise UserError(f"{about.where} is in nnU-Net's format; read it with data=nnunet")
    cases = sorted_cases((_case(about, entry) for entry in about.field("training", list)), about.where)
    about.refuse_version_1(cases[0].images[0])
    channels = in_sequence(about.numbered("modality"), "modality", about.where)
    names = about.numbered("labels")
    dataset = DatasetInfo(about.title, channels, cases, data.ignore, announced=about.announced)
    return with_classes(dataset, names, data, about.where, asked_regions(data))


def _case(about: DatasetJson, entry: Any) -> Case:
    """Return the case of an entry in "training". Raises UserError."""
    if not isinstance(entry, dict) or "image" not in entry:
        raise about.error(f'{shown(entry)} in "training" is not {{"image": path, "label": path}}')
    image = about.path(entry["image"])
    label = about.path(entry["label"]) if "label" in entry else None
    return Case(nifti.stem(image), (image,), label)


@layout(by_channel=True)
def nnunet(root: Path, data: Data) -> DatasetInfo:
    """Return the data set of `root`/dataset.json, imagesTr/<case>_<channel>, a file each, and labelsTr/<case>.

    Labels may be regions. Raises UserError.
    """
    about = DatasetJson(root, data.allow_outside)
    if "modality" in about.content and "channel_names" not in about.content:
        for path in nifti.volumes_in(root / "imagesTr"):
            about.refuse_version_1(path.with_name(f"{nifti.without_channel(nifti.stem(path))}.nii.gz"))
        raise UserError(f"{about.where} is in Decathlon's format; read it with data=decathlon")
    ending = about.file_ending()
    channels = in_sequence(about.numbered("channel_names"), "channel_names", about.where)
    regions = asked_regions(data)
    own = _own_regions(about)
    if own is None:
        values = about.by_value("labels")
    elif regions is not None:
        remedy = f"{about.where} has regions of its own; leave data.regions unset"
        raise UserError(f"data.regions={data.regions}, but {remedy}")
    else:
        values, regions = own
    ignore = next((value for value, name in values.items() if name == "ignore"), data.ignore)
    if data.ignore not in (None, ignore):
        raise UserError(f"data.ignore={data.ignore}, but {about.where} says {ignore}; leave data.ignore unset")
    dataset = DatasetInfo(about.title, channels, (), ignore, announced=about.announced)
    dataset = with_classes(dataset, values, data, about.where, regions)
    cases = inside(_cases(root, ending, len(channels), about), (root,), data.allow_outside)
    others = [path for case in cases for path in case.files if nifti.ending(path).lower() != ending.lower()]
    notes = list[str]()
    if others:
        what = f'"file_ending" is {shown(ending)}, but {len(others)} files end otherwise, and are read all the same'
        notes.append(f"{about.where}: {what} ({shown_names(others, MAX_OTHERS_LISTED)})")
    return dataset._replace(cases=cases, left_out=tuple(notes))


def _cases(root: Path, ending: str, channels: int, about: DatasetJson) -> tuple[Case, ...]:
    """Return every case with a label or an image; a missing file is reported when it is opened. Raises UserError."""
    images = root / "imagesTr"
    maps = nifti.by_stem(nifti.volumes_in(root / "labelsTr"))
    present = nifti.by_stem(nifti.volumes_in(images))
    _refuse_channel_names(maps, present)
    names = {*maps, *map(nifti.without_channel, present)}
    wanted = len(names) * channels
    if wanted > MAX_ABSENT * (len(present) + 100):
        what = f"{channels:,} channels, which are {wanted:,} files of {len(names):,} cases"
        raise about.error(f'"channel_names" has {what}, but {images} holds {len(present):,}; make them agree')
    cases = list[Case]()
    for name in names:
        stems = [f"{name}_{channel:04d}" for channel in range(channels)]
        files = tuple(present.get(stem, images / f"{stem}{ending}") for stem in stems)
        cases.append(Case(name, files, maps.get(name)))
    return sorted_cases(cases, images)


def _own_regions(about: DatasetJson) -> tuple[dict[int, str], NamedRegions] | None:
    """Return the labels' names and the regions of a dataset.json; None where its labels do not overlap.

    As nnU-Net decides: they do where any has several. Raises UserError.
    """
    values = about.field("labels", dict)
    if not any(isinstance(value, list) and len(value) != 1 for value in values.values()):
        return None
    others: dict[int, str] = {}  # the background, and the label to ignore
    labels_of = {}
    for name, value in values.items():
        if type(value) is int and (value == 0 or name == "ignore"):
            others[value] = name
        elif name == "ignore":
            raise about.error(f'"ignore" is {shown(value)}; give one integer, above all other labels')
        else:
            labels_of[name] = value
    if 0 not in others:
        raise about.error('"labels" has no background; add "background": 0')
    order = about.content.get("regions_class_order")
    regions = checked_regions(labels_of, order, about.where, '"regions_class_order"')
    named = NamedRegions(tuple(labels_of), regions)
    names = named.label_names()
    both = sorted(names.keys() & others.keys())
    if both:
        raise about.error(f"{both[0]} is the label to ignore, and in a region; give it a label of its own")
    return names | others, named


@layout(names_classes=False)
def folders(root: Path, data: Data) -> DatasetInfo:
    """Return the data set of the folders data.images and data.labels below `root`, which hold files of equal names.

    An image may be split into <case>_0000, <case>_0001 ..., one a channel. Raises UserError.
    """
    regions = asked_regions(data)
    images = root / data.images
    labels = root / data.labels
    # A folder that the command line puts outside of the root is outside on purpose.
    outside = [folder for folder in (images, labels) if not folder.is_relative_to(root) or ".." in folder.parts]
    maps = nifti.by_stem(nifti.volumes_in(labels))
    sorted_cases((Case(name, (), path) for name, path in maps.items()), labels)
    grouped = _images_by_case(images, maps)
    found = (Case(name, in_order(name, paths), maps.get(name)) for name, paths in grouped.items())
    cases = inside(sorted_cases(found, images), (root, *outside), data.allow_outside)
    count = mode(len(case.images) for case in cases)  # the others lack a channel, or have one too many
    if count == 1:
        first = next(case for case in cases if len(case.images) == count)
        count = nifti.channels(nifti.open_image(first.id, first.images[0], data.affine))
    names = dict[int, str]()
    if regions is not None:
        names = {0: "background"} | regions.label_names()
    elif data.classes is not None and data.label_map is None:  # With a label map, the names are those of new labels.
        names = dict(enumerate(data.classes))
    where = "data.classes" if regions is None else "data.regions"
    dataset = DatasetInfo(root.name, tuple(f"channel_{channel}" for channel in range(count)), cases, data.ignore)
    return with_classes(dataset, names, data, where, regions)


def _images_by_case(images: Path, maps: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return the images of a folder by case, whose label maps have these names. Raises UserError where one has none."""
    stems = nifti.by_stem(nifti.volumes_in(images))
    counts = Counter(map(nifti.without_channel, maps))
    # Where several maps share a stem, the number is a case's.
    alone = [name for name in maps if counts[nifti.without_channel(name)] == 1]
    of_several = {name: maps[name] for name in alone if f"{nifti.without_channel(name)}_0001" in stems}
    _refuse_channel_names(of_several, stems)
    grouped = dict[str, list[Path]]()
    for name, path in stems.items():
        # scan_2019 ends like a channel; it is one only next to scan_0000, and if no label map is called scan_2019.
        case_id = nifti.without_channel(name)
        first = f"{case_id}_0000"
        is_channel = first in stems and first not in maps and name not in maps
        grouped.setdefault(case_id if is_channel else name, []).append(path)
    without_image = sorted({*maps} - {*grouped})
    if without_image:
        first, *others = without_image
        listed = shown_names(others, MAX_MAPS_LISTED)
        more = f"; nor of {listed}" if others else ""
        is_short = any(nifti.without_channel(name) == first for name in stems)
        what = f"{first}_0000 is missing" if is_short else "no image of that name"
        remedy = other_volumes([images]) or "add it or remove the label map"
        if nifti.without_channel(first) in stems and first != nifti.without_channel(first):
            remedy = f"a label map is called as its case, {nifti.without_channel(first)}, without a channel's number"
        raise UserError(f"{maps[first]}: {what} in {images}{more}; {remedy}")
    return grouped


def _refuse_channel_names(maps: Mapping[str, Path], images: Container[str]) -> None:
    """Raise UserError for label maps called as a channel of their case; `maps` and `images` by their names."""
    alike = [name for name in maps if name in images and f"{name}_0000" not in images]
    wrong = [maps[name] for name in alike if name != nifti.without_channel(name)]
    if wrong:
        name = nifti.without_channel(nifti.stem(wrong[0]))
        what = "is called as a channel; a label map is called as its case, without _0000"
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}: {what}: rename it to {name}{nifti.ending(wrong[0])}{more}")
