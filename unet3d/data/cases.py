"""A data set on disk as one typed `DatasetInfo`, whatever its layout, and its split: names and JSON, no voxels."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mode
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data import dataset_json, nifti, synthetic
from unet3d.data.dataset_json import DatasetJson, class_names, in_sequence, is_plain, read_json, refuse_odd_names, shown
from unet3d.data.labels import Relabel, relabelling

FOLD_SEED = 12345  # nnU-Net's, so that folds compare with published ones
MAX_NAME = 255  # bytes of a file's name
ABSENT = 10  # times the files that are there: where dataset.json asks for more, its channels are wrong, not the files


class Case(NamedTuple):
    """One subject: its image files (one a channel, or a single 4D file) and its label map, if it has one."""

    id: str
    images: tuple[Path, ...]
    label: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        """Its image files, and its label map if it has one."""
        return self.images if self.label is None else (*self.images, self.label)

    @property
    def named(self) -> str:
        """Its id and its first file, as errors name them."""
        return ": ".join([self.id, *map(str, self.images[:1])])


class DatasetInfo(NamedTuple):
    """A data set. `classes` are named by label value, background first; `cases` are sorted by id.

    `relabel` is what data.label_map makes of the files' labels, before anything else sees them.
    """

    name: str
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    ignore: int | None
    cases: tuple[Case, ...]
    relabel: Relabel = None


def read_dataset(data: Data) -> DatasetInfo:
    """The data set that `data` describes. The phantom and MNI152 are generated if absent. Raises UserError."""
    if data.format == "phantom":
        return _decathlon(synthetic.ensure_phantom(data.phantom, Path(data.root or synthetic.PHANTOM_ROOT)), data)
    if data.format == "mni152":
        return _decathlon(synthetic.ensure_mni152(Path(data.root or synthetic.MNI152_ROOT)), data)
    assert data.root is not None, "unet3d.config.rules requires it"
    return {"decathlon": _decathlon, "nnunet": _nnunet, "folders": _folders}[data.format](Path(data.root), data)


def _decathlon(root: Path, data: Data) -> DatasetInfo:
    """Medical Segmentation Decathlon: dataset.json lists the files; several channels are one 4D image."""
    found = DatasetJson(root, data.allow_outside)
    if "channel_names" in found.content and "modality" not in found.content:
        raise UserError(f"{found.where} is in nnU-Net's format; read it with data=nnunet")
    cases = _sorted((_decathlon_case(found, entry) for entry in found.field("training", list)), found.where)
    channels = in_sequence(found.numbered("modality"), "modality", found.where)
    classes, relabel = _classes(found.numbered("labels"), data.ignore, data, found.where)
    return DatasetInfo(found.title, channels, classes, data.ignore, cases, relabel)


def _decathlon_case(found: DatasetJson, entry: Any) -> Case:
    if not isinstance(entry, dict) or "image" not in entry:
        raise found.error(f'{shown(entry)} in "training" is not {{"image": path, "label": path}}')
    image = found.path(entry["image"])
    return Case(nifti.stem(image), (image,), found.path(entry["label"]) if "label" in entry else None)


def _nnunet(root: Path, data: Data) -> DatasetInfo:
    """nnU-Net raw: imagesTr/<case>_<channel>, one file a channel, and labelsTr/<case>."""
    found = DatasetJson(root, data.allow_outside)
    ending = found.field("file_ending", str)
    if ending not in nifti.SUFFIXES:
        raise found.error(f'"file_ending" is {shown(ending)}; convert the volumes to {" or ".join(nifti.SUFFIXES)}')
    channels = in_sequence(found.numbered("channel_names"), "channel_names", found.where)
    values = found.by_value("labels")
    ignore = next((value for value, name in values.items() if name == "ignore"), data.ignore)
    if data.ignore not in (None, ignore):
        raise UserError(f"data.ignore={data.ignore}, but {found.where} says {ignore}; leave data.ignore unset")
    classes, relabel = _classes(values, ignore, data, found.where)
    # Every case with a label or an image; a missing file is reported when it is opened.
    images, labels = root / "imagesTr", root / "labelsTr"
    maps = {nifti.stem(path): path for path in volumes_in(labels) if path.name.endswith(ending)}
    present = volumes_in(images)
    names = {*maps, *(without_channel(nifti.stem(path)) for path in present)}
    if len(names) * len(channels) > ABSENT * (len(present) + 100):
        wanted = f"{len(channels):,} channels, which are {len(names) * len(channels):,} files of {len(names):,} cases"
        raise found.error(f'"channel_names" has {wanted}, but {images} holds {len(present):,}; make them agree')
    files = {name: tuple(images / f"{name}_{c:04d}{ending}" for c in range(len(channels))) for name in names}
    cases = _sorted((Case(name, files[name], maps.get(name)) for name in names), images)
    return DatasetInfo(found.title, channels, classes, ignore, _inside(cases, (root,), data.allow_outside), relabel)


def _classes(names: dict[int, str], ignore: int | None, data: Data, where: object) -> tuple[tuple[str, ...], Relabel]:
    """The class names, and what becomes of the files' labels, which `names` are of."""
    if data.label_map is not None:
        refuse_odd_names(names, "labels", str(where))  # they are joined
    new_names, relabel = relabelling(names, ignore, data)
    return class_names(new_names, ignore, str(where)), relabel


def _folders(root: Path, data: Data) -> DatasetInfo:
    """Two folders with equal names; an image may be split into <case>_0000, <case>_0001 ..., one a channel."""
    assert data.classes is not None, "unet3d.config.rules requires them"
    images, labels = root / data.images, root / data.labels
    # A folder that the command line puts outside of the root is outside on purpose.
    roots = (root, *(folder for folder in (images, labels) if not folder.is_relative_to(root) or ".." in folder.parts))
    cases = _inside(_folder_cases(images, labels), roots, data.allow_outside)
    usual = mode(len(case.images) for case in cases)  # the others lack a channel, or have one too many
    first = next(case for case in cases if len(case.images) == usual)
    count = usual if usual > 1 else nifti.channels(nifti.open_image(first.id, first.images[0]))
    names = dict(enumerate(data.classes)) if data.label_map is None else {}  # then they are of the new labels
    classes, relabel = _classes(names, data.ignore, data, "data.classes")
    return DatasetInfo(root.name, tuple(f"channel_{c}" for c in range(count)), classes, data.ignore, cases, relabel)


def _folder_cases(images: Path, labels: Path) -> tuple[Case, ...]:
    maps = {case.id: case.label for case in _sorted((Case(nifti.stem(p), (), p) for p in volumes_in(labels)), labels)}
    files, grouped = volumes_in(images), dict[str, list[Path]]()
    stems = {*map(nifti.stem, files)}
    for path in files:
        # scan_2019 ends like a channel; it is one only beside scan_0000, and if no label map is called scan_2019.
        stem = nifti.stem(path)
        case = without_channel(stem)
        grouped.setdefault(case if f"{case}_0000" in stems and stem not in maps else stem, []).append(path)
    if alone := sorted({*maps} - {*grouped}):
        more = f"; nor of {shorten(', '.join(alone[1:]), 200, placeholder=' ...')}" if len(alone) > 1 else ""
        is_short = any(without_channel(stem) == alone[0] for stem in stems)
        what = f"{alone[0]}_0000 is missing" if is_short else "no image of that name"
        raise UserError(f"{maps[alone[0]]}: {what} in {images}{more}; add it or remove the label map")
    return _sorted((Case(name, in_order(name, paths), maps.get(name)) for name, paths in grouped.items()), images)


def volumes_in(folder: Path) -> list[Path]:
    """The NIfTI files of a folder by name. Raises UserError where there is no folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; check data.root, data/README.md shows the layouts")
    # Hidden files are skipped: archives made on a Mac hold a `._name.nii.gz` beside each volume.
    return sorted(p for p in folder.iterdir() if p.name.endswith(nifti.SUFFIXES) and not p.name.startswith("."))


def in_order(name: str, files: Sequence[Path], count: int = 0) -> tuple[Path, ...]:
    """One case's channels by their numbers, which must be 0000, 0001 and so on, `count` or more. Raises UserError."""
    ordered = sorted(files, key=lambda file: file.name)
    stems = [nifti.stem(file) for file in ordered]
    wanted = [f"{name}_{c:04d}" for c in range(max(count, len(stems)))]
    if stems == wanted or (len(stems) == 1 and stems[0] not in wanted):  # which holds all channels
        return tuple(ordered)
    absent = ordered[0].with_name(next(stem for stem in wanted if stem not in stems))
    what = f"{absent} is missing beside {shorten(', '.join(map(str, ordered)), 2_000, placeholder=' ...')}"
    raise UserError(f"{name}: {what}; a case's channels are called {name}_0000, {name}_0001 and so on")


def refuse_long(where: object, name: str) -> None:
    """Raise UserError where the label map of this case could not be written under its name."""
    if len(os.fsencode(f"{name}.nii.gz")) > MAX_NAME:
        what = f"the name of its label map, with .nii.gz, would have more than {MAX_NAME} bytes"
        raise UserError(f"{where}: {name[:40]}..., a name of {len(name)} letters: {what}; rename the case's files")


def without_channel(stem: str) -> str:
    """A case's name from its channel's: `case_0001` is `case`."""
    return re.sub(r"_\d{4}$", "", stem)


def _inside(cases: tuple[Case, ...], roots: Sequence[Path], allow_outside: bool) -> tuple[Case, ...]:
    """The cases. Refuses a file that is a link out of all `roots`."""
    paths = (path for case in cases for path in (*case.images, *([case.label] if case.label else [])))
    for path in () if allow_outside else paths:
        if all(dataset_json.leaves(root, path) for root in roots):
            raise UserError(f"{path}: is a link out of {roots[0]}; put the file there, or set data.allow_outside=true")
    return cases


def _sorted(cases: Iterable[Case], where: Path) -> tuple[Case, ...]:
    """The cases by id: at least one, and no id twice."""
    by_id: dict[str, Case] = {}
    for case in cases:
        if not is_plain(case.id):
            raise UserError(f"{where}: {case.id!r} cannot name a case; rename its files")
        refuse_long(where, case.id)
        if case.id in by_id:
            raise UserError(f"{where}: two cases are called {case.id}; rename one of them")
        by_id[case.id] = case
    if not by_id:
        raise UserError(f"{where}: lists no case; there must be at least two with labels")
    return tuple(by_id[name] for name in sorted(by_id))


def split(dataset: DatasetInfo, data: Data) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """The labelled cases as (train, val): by data.split, else data.fold, else data.val_fraction. Raises UserError."""
    labelled = {case.id: case for case in dataset.cases if case.label is not None}
    ids = sorted(labelled)
    if data.semi and ids:
        train = val = ids  # of which different slices are used
    elif len(ids) < 2:
        same = "(or the same, without data.fold: data.semi=true data.sparse=[5,5,3])"
        raise UserError(f"{dataset.name}: {len(ids)} labelled cases; training and validation need one each {same}")
    elif data.split is not None:
        train, val = _listed(ids, read_json(Path(data.split)), data.split)
    else:
        held_out = _held_out(len(ids), data)
        train, val = ([name for i, name in enumerate(ids) if (i in held_out) == is_val] for is_val in (False, True))
    return tuple(labelled[name] for name in train), tuple(labelled[name] for name in val)


def _held_out(count: int, data: Data) -> set[int]:
    """Indices of one fold, or of about data.val_fraction of the cases, evenly spread."""
    if data.fold is None:
        chosen = min(max(round(data.val_fraction * count), 1), count - 1)  # each part keeps at least one case
        return {int((k + 0.5) * count / chosen) for k in range(chosen)}
    if data.folds > count:
        raise UserError(f"data.folds={data.folds} is more than the {count} labelled cases; use data.folds={count}")
    # scikit-learn's KFold(folds, shuffle=True, random_state=FOLD_SEED); this legacy generator never changes
    order = np.random.RandomState(FOLD_SEED).permutation(count)
    return {*np.array_split(order, data.folds)[data.fold].tolist()}


def _listed(ids: Sequence[str], content: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """The parts that `content`, read from `where`, lists as {"train": [ids], "val": [ids]}."""
    known = {*ids}
    for part in ("train", "val"):
        names = content.get(part)
        if not isinstance(names, list) or not names:
            raise UserError(f'{where}: "{part}" must list one case id or more: {{"train": [ids], "val": [ids]}}')
        if unknown := [name for name in names if not isinstance(name, str) or name not in known]:
            raise UserError(f'{where}: "{part}" names {_some(unknown)}: no labelled case here; remove or rename')
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise UserError(f'{where}: "{part}" names {_some(twice)} more than once; name each case once')
    if both := sorted({*content["train"]} & {*content["val"]}):
        raise UserError(f'{where}: {_some(both)} in both "train" and "val"; a case can only be in one of them')
    return sorted(content["train"]), sorted(content["val"])


def _some(names: Sequence[Any], most: int = 5) -> str:
    shortened = (str(name) if isinstance(name, str) and len(name) <= MAX_NAME else shown(name) for name in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shortened) + more
