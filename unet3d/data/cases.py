"""A data set on disk as one typed `DatasetInfo`, whatever its layout, and its split into train and validation.

Reads names and JSON, not voxels. Errors name the path and the remedy.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from unet3d.config import Data
from unet3d.data import dataset_json, nifti, synthetic
from unet3d.errors import UserError


@dataclass(frozen=True)
class Case:
    """One subject: its image files (one a channel, or a single 4D file) and its label map, if it has one."""

    id: str
    images: tuple[Path, ...]
    label: Path | None


@dataclass(frozen=True)
class DatasetInfo:
    """A data set. `classes` are named by label value, background first; `cases` are sorted by id."""

    name: str
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    ignore: int | None
    cases: tuple[Case, ...]


def read_dataset(data: Data) -> DatasetInfo:
    """The data set that `data` describes. The phantom and MNI152 are made first where absent. Raises UserError."""
    if data.format == "phantom":
        return _decathlon(synthetic.ensure_phantom(data.phantom, Path(data.root or synthetic.PHANTOM_ROOT)), data)
    if data.format == "mni152":
        return _decathlon(synthetic.ensure_mni152(Path(data.root or synthetic.MNI152_ROOT)), data)
    assert data.root is not None, "unet3d.checks asks for it"
    layouts = {"decathlon": _decathlon, "nnunet": _nnunet, "folders": _folders}
    return layouts[data.format](Path(data.root), data)


def split(task: DatasetInfo, data: Data) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """The labelled cases as (train, val): by data.split, else data.fold, else data.val_fraction. Raises UserError.

    With data.semi all of them are both: other slices are scored than learned from.
    """
    labelled = {case.id: case for case in task.cases if case.label is not None}
    if data.semi and labelled:
        every = tuple(labelled[name] for name in sorted(labelled))
        return every, every
    if len(labelled) < 2:
        raise UserError(
            f"{task.name}: {len(labelled)} labelled cases; training and validation need one each "
            "(or the same, without data.fold: data.semi=true data.sparse=[5,5,3])"
        )
    ids = sorted(labelled)
    if data.split is not None:
        train, val = listed_split(ids, dataset_json.read_json(Path(data.split)), data.split)
    elif data.fold is not None:
        train, val = fold_split(ids, data.folds, data.fold)
    else:
        train, val = fraction_split(ids, data.val_fraction)
    return tuple(labelled[name] for name in train), tuple(labelled[name] for name in val)


def _decathlon(root: Path, data: Data) -> DatasetInfo:
    """Medical Segmentation Decathlon: dataset.json lists the files; several channels are one 4D image."""
    where = root / "dataset.json"
    content = dataset_json.read_json(where, None if data.allow_outside else root)
    if "channel_names" in content and "modality" not in content:
        raise UserError(f"{where} is in nnU-Net's format; read it with data=nnunet")
    entries = dataset_json.field(content, "training", list, where)
    modality = dataset_json.numbered(dataset_json.field(content, "modality", dict, where), "modality", where)
    labels = dataset_json.numbered(dataset_json.field(content, "labels", dict, where), "labels", where)
    return DatasetInfo(
        name=dataset_json.title(content, root.name, where),
        channels=dataset_json.in_order(modality, "modality", where),
        classes=dataset_json.classes(labels, data.ignore, where),
        ignore=data.ignore,
        cases=_sorted((_decathlon_case(root, entry, where, data.allow_outside) for entry in entries), where),
    )


def _decathlon_case(root: Path, entry: Any, where: Path, allow_outside: bool) -> Case:
    if not isinstance(entry, dict) or "image" not in entry:
        raise UserError(f'{where}: {dataset_json.shown(entry)} in "training" is not {{"image": path, "label": path}}')
    image = dataset_json.inside(root, entry["image"], where, allow_outside)
    label = dataset_json.inside(root, entry["label"], where, allow_outside) if "label" in entry else None
    return Case(nifti.stem(image), (image,), label)


def _nnunet(root: Path, data: Data) -> DatasetInfo:
    """nnU-Net raw: imagesTr/<case>_<channel>, one file a channel, and labelsTr/<case>."""
    where = root / "dataset.json"
    content = dataset_json.read_json(where, None if data.allow_outside else root)
    ending = dataset_json.field(content, "file_ending", str, where)
    if ending not in nifti.SUFFIXES:
        raise UserError(
            f'{where}: "file_ending" is {dataset_json.shown(ending)}; '
            f"convert the volumes to {' or '.join(nifti.SUFFIXES)}"
        )
    names = dataset_json.numbered(dataset_json.field(content, "channel_names", dict, where), "channel_names", where)
    channels = dataset_json.in_order(names, "channel_names", where)
    labels = dataset_json.by_value(dataset_json.field(content, "labels", dict, where), where)
    ignore = next((value for value, name in labels.items() if name == "ignore"), data.ignore)
    if data.ignore not in (None, ignore):
        raise UserError(f"data.ignore={data.ignore}, but {where} says {ignore}; leave data.ignore unset")
    return DatasetInfo(
        name=dataset_json.title(content, root.name, where),
        channels=channels,
        classes=dataset_json.classes(labels, ignore, where),
        ignore=ignore,
        cases=_nnunet_cases(root, [f"_{channel:04d}{ending}" for channel in range(len(channels))], ending, data),
    )


def _nnunet_cases(root: Path, endings: list[str], ending: str, data: Data) -> tuple[Case, ...]:
    """Every case with a label or an image; files that are missing among them are found when they are opened."""
    labels = {nifti.stem(path): path for path in volumes_in(root / "labelsTr") if path.name.endswith(ending)}
    images = {without_channel(nifti.stem(path)) for path in volumes_in(root / "imagesTr")}
    cases = (
        Case(name, tuple(root / "imagesTr" / f"{name}{end}" for end in endings), labels.get(name))
        for name in {*labels, *images}
    )
    return _inside(_sorted(cases, root / "imagesTr"), (root,), data.allow_outside)


def _folders(root: Path, data: Data) -> DatasetInfo:
    """Two folders with equal names; an image may be split into <case>_0000, <case>_0001 ..., one a channel."""
    assert data.classes is not None, "unet3d.checks asks for them"
    images, labels = root / data.images, root / data.labels
    # A folder that the command line itself puts elsewhere is not left by accident.
    roots = (root, *(folder for folder in (images, labels) if not folder.is_relative_to(root) or ".." in folder.parts))
    cases = _inside(_folder_cases(images, labels), roots, data.allow_outside)
    first = cases[0]
    count = len(first.images) if len(first.images) > 1 else nifti.channels(nifti.open_image(first.id, first.images[0]))
    classes = dataset_json.classes(dict(enumerate(data.classes)), data.ignore, "data.classes")
    return DatasetInfo(root.name, tuple(f"channel_{c}" for c in range(count)), classes, data.ignore, cases)


def _folder_cases(images: Path, labels: Path) -> tuple[Case, ...]:
    found = _sorted((Case(nifti.stem(path), (), path) for path in volumes_in(labels)), labels)
    maps = {case.id: case.label for case in found}
    files, grouped = volumes_in(images), dict[str, list[Path]]()
    stems = {*map(nifti.stem, files)}
    for path in files:
        # A name such as scan_2019 ends like a channel; it is one only beside scan_0000, and if no label has all of it.
        stem = nifti.stem(path)
        case = without_channel(stem)
        grouped.setdefault(case if f"{case}_0000" in stems and stem not in maps else stem, []).append(path)
    if alone := sorted({*maps} - {*grouped}):
        more = f"; nor of {shorten(', '.join(alone[1:]), 200, placeholder=' ...')}" if len(alone) > 1 else ""
        raise UserError(f"{maps[alone[0]]}: no image of that name in {images}{more}; add it or take the label away")
    return _sorted((Case(name, in_order(name, paths), maps.get(name)) for name, paths in grouped.items()), images)


def volumes_in(folder: Path) -> list[Path]:
    """The NIfTI files of a folder by name. Raises UserError where there is no folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; check data.root, data/README.md shows the layouts")
    # Hidden files are skipped: archives made on a Mac hold a `._name.nii.gz` beside each volume.
    return sorted(p for p in folder.iterdir() if p.name.endswith(nifti.SUFFIXES) and not p.name.startswith("."))


def in_order(name: str, files: Sequence[Path]) -> tuple[Path, ...]:
    """One case's channels by their numbers, which must be 0000, 0001 and so on. Raises UserError."""
    ordered = sorted(files, key=lambda file: file.name)
    if len(ordered) > 1 and [nifti.stem(file) for file in ordered] != [f"{name}_{c:04d}" for c in range(len(ordered))]:
        listed = ", ".join(map(str, ordered))
        raise UserError(f"{name}: {listed}: a case's channels are called {name}_0000, {name}_0001 and so on")
    return tuple(ordered)


def without_channel(stem: str) -> str:
    """A case's name from its channel's: `case_0001` is `case`."""
    return re.sub(r"_\d{4}$", "", stem)


def _inside(cases: tuple[Case, ...], roots: Sequence[Path], allow_outside: bool) -> tuple[Case, ...]:
    """The cases, none of whose files is a link to somewhere outside of all `roots`."""
    paths = (path for case in cases for path in (*case.images, *([case.label] if case.label else [])))
    for path in () if allow_outside else paths:
        if all(dataset_json.leaves(root, path) for root in roots):
            raise UserError(f"{path}: is a link out of {roots[0]}; put the file there, or set data.allow_outside=true")
    return cases


def _sorted(cases: Iterable[Case], where: Path) -> tuple[Case, ...]:
    """The cases by id, of which there must be one, and each only once."""
    by_id: dict[str, Case] = {}
    for case in cases:
        if not dataset_json.is_plain(case.id):
            raise UserError(f"{where}: {case.id!r} is no name for a case; rename its files")
        if case.id in by_id:
            raise UserError(f"{where}: two cases are called {case.id}; rename one of them")
        by_id[case.id] = case
    if not by_id:
        raise UserError(f"{where}: lists no case; there must be at least two with labels")
    return tuple(by_id[name] for name in sorted(by_id))


Split = tuple[list[str], list[str]]


FOLD_SEED = 12345  # nnU-Net's, so that folds compare with published ones


def fraction_split(ids: Sequence[str], share: float) -> Split:
    """Hold out about `share` of the ids, evenly spread over them; each part gets at least one."""
    count = min(max(round(share * len(ids)), 1), len(ids) - 1)
    held_out = [int((k + 0.5) * len(ids) / count) for k in range(count)]
    return _part(ids, held_out)


def fold_split(ids: Sequence[str], folds: int, index: int) -> Split:
    """Hold out one fold: scikit-learn's KFold(folds, shuffle=True, random_state=12345), without scikit-learn.

    Raises UserError for more folds than ids.
    """
    if folds > len(ids):
        raise UserError(f"data.folds={folds} is more than the {len(ids)} labelled cases; use data.folds={len(ids)}")
    order = np.arange(len(ids))
    np.random.RandomState(FOLD_SEED).shuffle(order)  # the legacy generator is frozen: the same folds for ever
    return _part(ids, np.array_split(order, folds)[index].tolist())


def listed_split(ids: Sequence[str], content: Mapping[str, Any], where: str) -> Split:
    """The parts that `content`, read from `where`, lists as {"train": [ids], "val": [ids]}.

    Raises UserError for a missing or empty part, an id that is no labelled case, or one that occurs twice.
    """
    train, val = (_listed_part(ids, content, part, where) for part in ("train", "val"))
    both = sorted({*train} & {*val})
    if both:
        raise UserError(f'{where}: {_some(both)} in both "train" and "val"; a case can only be in one of them')
    return train, val


def _listed_part(ids: Sequence[str], content: Mapping[str, Any], part: str, where: str) -> list[str]:
    names = content.get(part)
    if not isinstance(names, list) or not names:
        raise UserError(f'{where}: "{part}" must list one case id or more: {{"train": [ids], "val": [ids]}}')
    unknown = [str(name) for name in names if name not in ids]
    if unknown:
        raise UserError(
            f'{where}: "{part}" names {_some(unknown)}: no labelled case of this data set; remove or rename'
        )
    if len({*names}) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UserError(f'{where}: "{part}" names {_some(twice)} more than once; name each case once')
    return sorted(names)


def _part(ids: Sequence[str], held_out: Sequence[int]) -> Split:
    chosen = {*held_out}
    train = [name for index, name in enumerate(ids) if index not in chosen]
    return train, [ids[index] for index in sorted(chosen)]


def _some(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
