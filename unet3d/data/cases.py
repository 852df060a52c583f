"""A data set on disk as one typed `DatasetInfo`, whatever its layout: names of files and JSON, no voxels."""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unet3d.base import ranks
from unet3d.base.errors import UserError, listed, warn
from unet3d.base.files import OTHER_ENDINGS
from unet3d.base.types import Regions
from unet3d.config.schema import LAYOUTS, Data
from unet3d.data import nifti
from unet3d.data.labels import NamedRegions, Relabel, as_classes, class_names, refuse_odd_names, relabelling
from unet3d.data.texts import MAX_OTHERS_LISTED, is_plain, leaves, shown_names

MAX_NAME = 255  # bytes of a file's name
NAME_SHOWN = 40  # letters of a name that is too long


def raise_listed(problems: Sequence[str]) -> None:
    """Raise UserError with all problems, a line each, if there are any."""
    if problems:
        raise UserError("\n".join(listed(problems)))


def warn_once(lines: Sequence[str]) -> None:
    """Print warnings, once for all ranks."""
    for line in listed(lines) if ranks.RANK == 0 else ():
        warn(line)


class Case(NamedTuple):
    """One subject: its image files (one a channel, or a single 4D file) and its label map, if it has one."""

    id: str
    images: tuple[Path, ...]
    label: Path | None
    affine: str = "auto"  # how its headers are read, as data.affine says

    @property
    def files(self) -> tuple[Path, ...]:
        """Its image files, and its label map if it has one."""
        return self.images if self.label is None else (*self.images, self.label)

    @property
    def named(self) -> str:
        """Its id and its first file, as errors name them."""
        return ": ".join([self.id, *map(str, self.images[:1])])


class DatasetInfo(NamedTuple):
    """A data set. `cases` are sorted by id, `classes` are named by label value, background first.

    With `regions`, which are of label values, `classes` are the background and their names.
    `relabel` is what data.label_map makes of the files' labels, before anything else sees them. `wrong_labels` is the
    error of labels, in dataset.json or in data.label_map, that make no classes; then `classes` is empty.
    """

    name: str
    channels: tuple[str, ...]
    cases: tuple[Case, ...]
    ignore: int | None = None
    classes: tuple[str, ...] = ()
    relabel: Relabel = None
    regions: Regions | None = None
    wrong_labels: UserError | None = None
    announced: int | None = None  # cases, by dataset.json's numTraining
    left_out: tuple[str, ...] = ()  # sentences on files that are not read, or named otherwise than dataset.json says

    @property
    def label_count(self) -> int:
        """Return the number of labels in its maps once they are read, but the ignored one; 0 where none is known."""
        return len(self.classes) if self.regions is None else self.regions.label_count


Layout = Callable[[Path, Data], DatasetInfo]


def layout(
    *, generated: str = "", names_classes: bool = True, by_channel: bool = False, lists_files: bool = False
) -> Callable[[Layout], Layout]:
    """Mark `(data.root, options) -> DatasetInfo`, in a file of `unet3d.data.layouts`, as data.format of its name.

    `config/schema.py` reads the arguments, which are written as constants, without loading that file. `generated`: the
    folder that takes the place of data.root, for what the function generates. `names_classes`: false where no file
    names them, so that data.classes must. `by_channel`: each channel is a file, called CASE_0000 and so on, even a
    single one. `lists_files`: a list says which files count, so that others next to them are no mistake.
    """
    return lambda function: function


def read_dataset(data: Data) -> DatasetInfo:
    """Return the data set that `data` describes; what is generated is made if absent. Raises UserError."""
    return sound(dataset_to_check(data))


def sound(dataset: DatasetInfo) -> DatasetInfo:
    """Return the data set. Raises UserError where its labels make no classes."""
    if dataset.wrong_labels is not None:
        raise dataset.wrong_labels
    return dataset


def dataset_to_check(data: Data) -> DatasetInfo:
    """Return the data set, without classes where its labels make none, so that all else can be checked.

    Raises UserError for what else is wrong.
    """
    facts = LAYOUTS[data.format]
    read: Layout = getattr(importlib.import_module(f"unet3d.data.layouts.{facts['module']}"), data.format)
    default = facts.get("generated", "")
    assert data.root or default, "unet3d.config.rules requires data.root"
    dataset = read(Path(data.root or default), data)
    if default:
        return dataset
    cases = tuple(case._replace(affine=data.affine) for case in dataset.cases)
    files = [path for case in cases for path in case.files]
    notes = _left_out(files, is_list=facts.get("lists_files", False))
    return dataset._replace(cases=cases, left_out=(*dataset.left_out, *notes))


def with_classes(
    dataset: DatasetInfo, names: dict[int, str], data: Data, where: object, regions: NamedRegions | None = None
) -> DatasetInfo:
    """Return the data set with the classes that labels of these names, or `regions` of them, are; or with its error.

    `where` is what names them; data.label_map is applied.
    """
    try:
        if data.label_map is not None:
            refuse_odd_names(names, "labels", where)  # they are joined
        new_names, relabel = relabelling(names, dataset.ignore, data)
        classes = class_names(new_names, dataset.ignore, where)
        if regions is None:
            return dataset._replace(classes=classes, relabel=relabel)
        region_names, of_classes = as_classes(regions, classes, relabel, where)
        return dataset._replace(classes=region_names, relabel=relabel, regions=of_classes)
    except UserError as error:
        return dataset._replace(wrong_labels=error)


def inside(cases: tuple[Case, ...], roots: Sequence[Path], allow_outside: bool) -> tuple[Case, ...]:
    """Return the cases. Raises UserError for a file that is a link out of all `roots`."""
    if allow_outside:
        return cases
    for case in cases:
        for path in case.files:
            if all(leaves(root, path) for root in roots):
                remedy = "put the file there, or set data.allow_outside=true"
                raise UserError(f"{path}: is a link out of {roots[0]}; {remedy}")
    return cases


def sorted_cases(cases: Iterable[Case], where: Path) -> tuple[Case, ...]:
    """Return the cases by id: at least one, and no id twice. Raises UserError."""
    by_id = dict[str, Case]()
    for case in cases:
        if not is_plain(case.id) or case.id.startswith("warning: "):  # Lines of warnings begin with that word.
            raise UserError(f"{where}: {case.id!r} cannot name a case; rename its files")
        refuse_long(where, case.id)
        if case.id in by_id:
            raise UserError(f"{where}: two cases are called {case.id}; rename one of them")
        by_id[case.id] = case
    if not by_id:
        remedy = other_volumes([where]) or "there must be at least two with labels"
        raise UserError(f"{where}: lists no case; {remedy}")
    return tuple(by_id[case_id] for case_id in sorted(by_id))


def other_volumes(folders: Iterable[Path]) -> str:
    """Return which volumes of formats that are not read lie in these folders, with what helps; "" for none."""
    by_ending = dict[str, list[Path]]()
    for folder in dict.fromkeys(folders):
        with suppress(OSError):
            for path in nifti.visible(folder):
                found = OTHER_ENDINGS.search(path.name)
                if found is not None:
                    by_ending.setdefault(found.group().lower(), []).append(path)
    images = {path.stem for path in by_ending.get(".img", ())}
    if images and images == {path.stem for path in by_ending.get(".hdr", ())}:
        del by_ending[".img"]
        pairs = ".hdr/.img pair" if len(images) == 1 else ".hdr/.img pairs"
        by_ending[pairs] = by_ending.pop(".hdr")
    kinds = [f"{len(found):,} {kind} ({shown_names(found, MAX_OTHERS_LISTED)})" for kind, found in by_ending.items()]
    return f"volumes of other formats are not read: {', '.join(kinds)}; convert them to .nii.gz" if kinds else ""


def _left_out(used: Iterable[Path], is_list: bool) -> Iterator[str]:
    """Yield sentences on other volumes in the folders of these files: NIfTI, unless the used are a list, and others."""
    files = dict.fromkeys(used)
    folders = dict.fromkeys(path.parent for path in files)
    others = list[Path]()
    for folder in () if is_list else folders:
        with suppress(OSError, UserError):
            others += [path for path in nifti.volumes_in(folder) if path not in files]
    if others:
        yield f"NIfTI files of no case are not read: {len(others):,} ({shown_names(others, MAX_OTHERS_LISTED)})"
    unread = other_volumes(folders)
    if unread:
        yield unread


def in_order(name: str, files: Sequence[Path], count: int = 0) -> tuple[Path, ...]:
    """Return one case's channels by their numbers, which must be 0000, 0001 and so on, `count` or more.

    Raises UserError.
    """
    ordered = sorted(files, key=lambda file: file.name)
    if len({file.parent for file in files}) == 1:
        nifti.by_stem(ordered)
    stems = [nifti.stem(file) for file in ordered]
    wanted = [f"{name}_{channel:04d}" for channel in range(max(count, len(stems)))]
    holds_all = len(stems) == 1 and stems[0] not in wanted
    if stems == wanted or holds_all:
        return tuple(ordered)
    absent = ordered[0].with_name(next(stem for stem in wanted if stem not in stems))
    present = shown_names(ordered)
    what = f"{absent} is missing beside {present}"
    raise UserError(f"{name}: {what}; a case's channels are called {name}_0000, {name}_0001 and so on")


def refuse_long(where: object, name: str) -> None:
    """Raise UserError where the label map of this case could not be written under its name."""
    if len(os.fsencode(f"{name}.nii.gz")) > MAX_NAME:
        what = f"the name of its label map, with .nii.gz, would have more than {MAX_NAME} bytes"
        start = f"{name[:NAME_SHOWN]}..., a name of {len(name)} letters"
        raise UserError(f"{where}: {start}: {what}; rename the case's files")
