"""A data set on disk as one typed `DatasetInfo`, whatever its layout: names and JSON, no voxels."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config.schema import LAYOUTS, Data
from unet3d.data.dataset_json import is_plain, leaves
from unet3d.data.file_names import left_out, other_volumes, refuse_long
from unet3d.data.labels import NamedRegions, Relabel, as_classes, class_names, refuse_odd_names, relabelling

WARNING = "warning: "  # a run starts despite lines that begin so
MAX_NAMES = 2_000  # letters of names in a line


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
    wrong_labels: str = ""
    options_of_labels: tuple[str, ...] = ()  # that make classes of wrong labels
    announced: int | None = None  # cases, by dataset.json's numTraining
    left_out: tuple[str, ...] = ()  # sentences on files that are not read, or named otherwise than dataset.json says

    @property
    def label_count(self) -> int:
        """Return the number of labels in its maps once they are read, but the ignored one; 0 where none is known."""
        return len(self.classes) if self.regions is None else self.regions.label_count


Layout = Callable[[Path, Data], DatasetInfo]
READERS = dict[str, Layout]()  # of the layouts whose files are loaded


def layout(
    *, generated: str = "", names_classes: bool = True, by_channel: bool = False, lists_files: bool = False
) -> Callable[[Layout], Layout]:
    """Register `(data.root, options) -> DatasetInfo`, in a file of `unet3d.data.layouts`, as data.format of its name.

    `config/schema.py` reads the arguments, which are written as constants, without loading that file. `generated`: the
    folder that takes the place of data.root, for what the function generates. `names_classes`: false where no file
    names them, so that data.classes must. `by_channel`: each channel is a file, called CASE_0000 and so on, even a
    single one. `lists_files`: a list says which files count, so that others beside them are no mistake.
    """

    def register(function: Layout) -> Layout:
        READERS[function.__name__] = function
        return function

    return register


def read_dataset(data: Data) -> DatasetInfo:
    """Return the data set that `data` describes; what is generated is made if absent. Raises UserError."""
    dataset = dataset_to_check(data)
    if dataset.wrong_labels:
        raise UserError(dataset.wrong_labels)
    return dataset


def dataset_to_check(data: Data) -> DatasetInfo:
    """Return the data set, without classes where its labels make none, so that all else can be checked.

    Raises UserError for what else is wrong.
    """
    facts = LAYOUTS[data.format]
    importlib.import_module(f"unet3d.data.layouts.{facts['module']}")
    default = facts.get("generated", "")
    assert data.root or default, "unet3d.config.rules requires data.root"
    dataset = READERS[data.format](Path(data.root or default), data)
    if default:
        return dataset
    cases = tuple(case._replace(affine=data.affine) for case in dataset.cases)
    files = [path for case in cases for path in case.files]
    notes = left_out(files, is_list=facts.get("lists_files", False))
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
        options: tuple[str, ...] = getattr(error, "options", ())
        return dataset._replace(wrong_labels=str(error), options_of_labels=options)


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


def shown_names(names: Sequence[str]) -> str:
    """Return names in one line of a bounded length."""
    return shorten(", ".join(names), MAX_NAMES, placeholder=" ...")
