"""Options of the data at odds with each other."""

from collections import Counter
from typing import Any

from unet3d.base.errors import UserError
from unet3d.config.region_rules import MAX_LABEL, checked_regions, refuse_background, refuse_blank, refuse_hidden
from unet3d.config.schema import Data, names_classes


def check_data(data: Data) -> None:
    """Raise UserError for the first option that another does not allow."""
    if len(set(data.augment.mirror)) != len(data.augment.mirror):
        raise UserError(f"data.augment.mirror={data.augment.mirror}: name each axis once")
    _check_fold("fold", data.fold, data.folds)
    _check_fold("sparse_fold", data.sparse_fold, data.sparse_folds)
    if not names_classes(data) and not data.classes and data.regions is None:
        raise UserError(f"data.classes is not set: data={data.format} needs the class names, e.g. [background,organ]")
    _check_label_map(data)
    _check_regions(data)
    _check_sparse(data)


def check_classes_of_new_run(data: Data) -> None:
    """Raise UserError for names that are blank, and regions that no label map can show.

    Runs and checkpoints that have such classes are still read.
    """
    refuse_blank(data.classes or (), f"data.classes={data.classes}")
    refuse_background(data.classes or (), f"data.classes={data.classes}")
    if data.regions is None:
        return
    option = f"data.regions={data.regions}"
    names = [str(name) for name in data.regions]
    refuse_blank(names, option)
    if data.label_map is None:  # else they are of other labels
        regions = checked_regions(data.regions, data.regions_class_order, option, "data.regions_class_order")
        refuse_hidden(names, regions, option)


def _check_fold(name: str, index: int | None, count: int) -> None:
    if index is not None and index >= count:
        raise UserError(f"data.{name}={index}: with data.{name}s={count} it runs from 0 to {count - 1}")


def _check_sparse(data: Data) -> None:
    """Raise UserError for options of sparse slices that leave nothing to learn from, or to score."""
    for name, counts in (("sparse", data.sparse), ("scored", data.scored)):
        if counts is not None and not any(counts):
            raise UserError(f"data.{name}={counts}: give numbers of slices across x, y and z, not all 0")
    if data.semi and data.sparse is None:
        raise UserError("data.semi=true needs slices to learn from: add data.sparse=[yz,xz,xy], e.g. [5,5,3]")
    if data.semi and (data.fold is not None or data.split is not None):
        raise UserError("data.semi=true learns from slices of every case; set data.fold and data.split to null")
    if data.sparse_fold is None:
        return
    if not data.semi or data.sparse is None:
        raise UserError("data.sparse_fold needs data.semi=true: no other run scores a part of the slices")
    if data.format == "mni152" and data.sparse[0]:
        reason = "mni152 is its own mirror image across x: data.sparse_fold scores mirror images of learned slices"
        raise UserError(f"data.sparse={data.sparse}: {reason}; take none across x, e.g. data.sparse=[0,6,12]")
    if max(data.sparse) < data.sparse_folds:
        raise UserError(f"data.sparse={data.sparse}: too few slices for data.sparse_folds={data.sparse_folds}")


def _check_label_map(data: Data) -> None:
    """Raise UserError for a map of labels that cannot be, or that makes other classes than `data.classes`."""
    if data.label_map is None:
        return
    count = len(label_sources(data.label_map).keys() | {0})
    if data.classes and len(data.classes) != count:
        problem = f"makes {count} classes, background with them, but data.classes has {len(data.classes)} names"
        raise UserError(f"data.label_map={data.label_map}: {problem}; make them agree")


def _check_regions(data: Data) -> None:
    """Raise UserError for regions that cannot be, or that are named twice."""
    if data.regions is None:
        if data.regions_class_order is not None:
            raise UserError("data.regions_class_order is set, but data.regions is not; give both, or neither")
        return
    option = f"data.regions={data.regions}"
    if not isinstance(data.regions, dict):
        raise UserError(f"{option}: give names and labels, as in 'data.regions={{whole:[1,2,3],core:[2,3],rim:3}}'")
    if data.classes:
        raise UserError(f"{option}: names the classes, so that data.classes has nothing to name; leave it unset")
    checked_regions(data.regions, data.regions_class_order, option, "data.regions_class_order")


def label_sources(label_map: Any) -> dict[int, list[int]]:
    """Return `{1: [1, 2], 2: 4}` as `{1: [1, 2], 2: [4]}`. Raises UserError for anything else."""
    option = f"data.label_map={label_map}"
    example = "give each new label those of the files, as in 'data.label_map={1:[1,2],2:4}'"
    if not isinstance(label_map, dict) or not label_map:
        raise UserError(f"{option}: {example}")
    sources = {new: list(olds) if isinstance(olds, list) else [olds] for new, olds in label_map.items()}
    labels = [old for olds in sources.values() for old in olds]
    if not all(_is_label(label) for label in (*sources, *labels)):
        raise UserError(f"{option}: labels are whole numbers from 0 to {MAX_LABEL}; {example}")
    classes = sorted(sources.keys() - {0})
    if not classes or classes != list(range(1, len(classes) + 1)):
        raise UserError(f"{option}: number the new labels 1, 2, 3 ... without a gap; 0 may be there")
    if not all(sources.values()):
        raise UserError(f"{option}: a new label has none of the files; {example}")
    label, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise UserError(f"{option}: {label} is there twice; it can become one label only")
    return sources


def _is_label(label: object) -> bool:
    return type(label) is int and 0 <= label <= MAX_LABEL
