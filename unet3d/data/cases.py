"""What there is to learn from: a data set on disk as one typed `Task`, whichever of the known layouts it has.

Reads names and JSON, not voxels. Anything but a usable data set raises UserError with the path and the remedy.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d.config import Data
from unet3d.data import manifest, mni152, nifti, phantom, splits
from unet3d.errors import UserError


@dataclass(frozen=True)
class Case:
    """One subject: its image files (one a channel, or a single 4D file) and its label map, if it has one."""

    id: str
    images: tuple[Path, ...]
    label: Path | None


@dataclass(frozen=True)
class Task:
    """A data set. `classes` are named by label value, background first; `cases` are sorted by id."""

    name: str
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    ignore: int | None
    cases: tuple[Case, ...]


def read_task(data: Data) -> Task:
    """The data set that `data` describes. The phantom and MNI152 are made first where absent. Raises UserError."""
    if data.format == "phantom":
        return _decathlon(phantom.ensure(data.phantom, Path(data.root or phantom.ROOT)), data)
    if data.format == "mni152":
        return _decathlon(mni152.ensure(Path(data.root or mni152.ROOT)), data)
    assert data.root is not None, "unet3d.checks asks for it"
    layouts = {"decathlon": _decathlon, "nnunet": _nnunet, "folders": _folders}
    return layouts[data.format](Path(data.root), data)


def split(task: Task, data: Data) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
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
        train, val = splits.listed(ids, manifest.read(Path(data.split)), data.split)
    elif data.fold is not None:
        train, val = splits.fold(ids, data.folds, data.fold)
    else:
        train, val = splits.fraction(ids, data.val_fraction)
    return tuple(labelled[name] for name in train), tuple(labelled[name] for name in val)


def _decathlon(root: Path, data: Data) -> Task:
    """Medical Segmentation Decathlon: dataset.json lists the files; several channels are one 4D image."""
    where = root / "dataset.json"
    content = manifest.read(where, None if data.allow_outside else root)
    if "channel_names" in content and "modality" not in content:
        raise UserError(f"{where} is in nnU-Net's format; read it with data=nnunet")
    entries = manifest.field(content, "training", list, where)
    modality = manifest.numbered(manifest.field(content, "modality", dict, where), "modality", where)
    labels = manifest.numbered(manifest.field(content, "labels", dict, where), "labels", where)
    return Task(
        name=manifest.title(content, root.name, where),
        channels=manifest.in_order(modality, "modality", where),
        classes=manifest.classes(labels, data.ignore, where),
        ignore=data.ignore,
        cases=_sorted((_decathlon_case(root, entry, where, data.allow_outside) for entry in entries), where),
    )


def _decathlon_case(root: Path, entry: Any, where: Path, allow_outside: bool) -> Case:
    if not isinstance(entry, dict) or "image" not in entry:
        raise UserError(f'{where}: {manifest.shown(entry)} in "training" is not {{"image": path, "label": path}}')
    image = manifest.inside(root, entry["image"], where, allow_outside)
    label = manifest.inside(root, entry["label"], where, allow_outside) if "label" in entry else None
    return Case(nifti.stem(image), (image,), label)


def _nnunet(root: Path, data: Data) -> Task:
    """nnU-Net raw: imagesTr/<case>_<channel>, one file a channel, and labelsTr/<case>."""
    where = root / "dataset.json"
    content = manifest.read(where, None if data.allow_outside else root)
    ending = manifest.field(content, "file_ending", str, where)
    if ending not in nifti.SUFFIXES:
        raise UserError(
            f'{where}: "file_ending" is {manifest.shown(ending)}; convert the volumes to {" or ".join(nifti.SUFFIXES)}'
        )
    names = manifest.numbered(manifest.field(content, "channel_names", dict, where), "channel_names", where)
    channels = manifest.in_order(names, "channel_names", where)
    labels = manifest.by_value(manifest.field(content, "labels", dict, where), where)
    ignore = next((value for value, name in labels.items() if name == "ignore"), data.ignore)
    if data.ignore not in (None, ignore):
        raise UserError(f"data.ignore={data.ignore}, but {where} says {ignore}; leave data.ignore unset")
    return Task(
        name=manifest.title(content, root.name, where),
        channels=channels,
        classes=manifest.classes(labels, ignore, where),
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


def _folders(root: Path, data: Data) -> Task:
    """Two folders with equal names; an image may be split into <case>_0000, <case>_0001 ..., one a channel."""
    assert data.classes is not None, "unet3d.checks asks for them"
    images, labels = root / data.images, root / data.labels
    # A folder that the command line itself puts elsewhere is not left by accident.
    roots = (root, *(folder for folder in (images, labels) if not folder.is_relative_to(root) or ".." in folder.parts))
    cases = _inside(_folder_cases(images, labels), roots, data.allow_outside)
    first = cases[0]
    count = len(first.images) if len(first.images) > 1 else nifti.channels(nifti.open_image(first.id, first.images[0]))
    classes = manifest.classes(dict(enumerate(data.classes)), data.ignore, "data.classes")
    return Task(root.name, tuple(f"channel_{c}" for c in range(count)), classes, data.ignore, cases)


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
        if all(manifest.leaves(root, path) for root in roots):
            raise UserError(f"{path}: is a link out of {roots[0]}; put the file there, or set data.allow_outside=true")
    return cases


def _sorted(cases: Iterable[Case], where: Path) -> tuple[Case, ...]:
    """The cases by id, of which there must be one, and each only once."""
    by_id: dict[str, Case] = {}
    for case in cases:
        if not manifest.is_plain(case.id):
            raise UserError(f"{where}: {case.id!r} is no name for a case; rename its files")
        if case.id in by_id:
            raise UserError(f"{where}: two cases are called {case.id}; rename one of them")
        by_id[case.id] = case
    if not by_id:
        raise UserError(f"{where}: lists no case; there must be at least two with labels")
    return tuple(by_id[name] for name in sorted(by_id))
