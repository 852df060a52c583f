"""Rules that concern more than one option of `data`. Free of torch."""

from pathlib import Path

from unet3d.config import Data
from unet3d.errors import UserError


def check_data(data: Data) -> None:
    """Raise UserError for the first option of `data` that is at odds with another."""
    for name in ("scaling", "contrast", "gamma", "blur", "low_resolution"):
        pair = getattr(data.augment, name)
        if len(pair) != 2 or pair[0] > pair[1]:
            raise UserError(f"data.augment.{name}={pair}: give [smallest, largest]")
    if data.spacing is not None and len(data.spacing) != 3:
        raise UserError(f"data.spacing={data.spacing}: give three lengths in mm")
    if len(data.phantom.shape) != 3:
        raise UserError(f"data.phantom.shape={data.phantom.shape}: give three lengths x,y,z")
    if len(set(data.augment.mirror)) != len(data.augment.mirror):
        raise UserError(f"data.augment.mirror={data.augment.mirror}: name each axis once")
    if data.classes and data.format != "folders":
        raise UserError(f"data.classes does nothing for data={data.format}: dataset.json names them; leave it null")
    if data.fold is not None and data.split is not None:
        raise UserError("data.fold does nothing beside data.split; leave one of them null")
    if (data.fold is not None or data.split is not None) and data.val_fraction != Data().val_fraction:
        raise UserError("data.val_fraction does nothing beside data.fold or data.split; leave it away")
    if data.fold is not None and data.fold >= data.folds:
        raise UserError(f"data.fold={data.fold}: with data.folds={data.folds} it runs from 0 to {data.folds - 1}")
    _check_sparse(data)
    if data.format == "folders" and not data.classes:
        raise UserError("data.classes is not set: data=folders needs the class names, e.g. [background,organ]")


def _check_sparse(data: Data) -> None:
    for name, counts in (("sparse", data.sparse), ("scored", data.scored)):
        if counts is not None and (len(counts) != 3 or not any(counts)):
            raise UserError(f"data.{name}={counts}: give three numbers of slices, across x, y and z, not all 0")
    if not data.semi:
        if data.scored != Data().scored:
            raise UserError("data.scored does nothing without data.semi=true; leave it away")
        if data.sparse_fold is not None:
            raise UserError("data.sparse_fold does nothing without data.semi=true; leave it null")
        if data.sparse_folds != Data().sparse_folds:
            raise UserError("data.sparse_folds does nothing without data.sparse_fold; leave it away")
        return
    if data.sparse is None:
        raise UserError("data.semi=true needs slices to learn from: add data.sparse=[yz,xz,xy], e.g. [5,5,3]")
    if data.fold is not None or data.split is not None:
        raise UserError("data.semi=true learns from slices of every case; leave data.fold and data.split null")
    if data.val_fraction != Data().val_fraction:
        raise UserError("data.semi=true holds no case out: data.val_fraction does nothing; leave it away")
    if data.sparse_fold is None:
        if data.sparse_folds != Data().sparse_folds:
            raise UserError("data.sparse_folds does nothing without data.sparse_fold; name a part, or leave it away")
        return
    if data.scored != Data().scored:
        raise UserError("data.scored does nothing beside data.sparse_fold, which scores that part; leave it away")
    if data.format == "mni152" and data.sparse[0]:
        raise UserError(
            f"data.sparse={data.sparse}: mni152 is its own mirror image across x, so with data.sparse_fold slices are "
            f"scored whose mirror images are learned; take none across x, e.g. data.sparse=[0,6,12]"
        )
    if data.sparse_fold >= data.sparse_folds:
        raise UserError(
            f"data.sparse_fold={data.sparse_fold}: with data.sparse_folds={data.sparse_folds} it runs from 0 to "
            f"{data.sparse_folds - 1}"
        )
    if max(data.sparse) < data.sparse_folds:
        raise UserError(f"data.sparse={data.sparse}: too few slices for data.sparse_folds={data.sparse_folds} parts")


def check_root(format_: str, root: str | None) -> None:
    """Raise UserError where the folder of the data set is not there."""
    if root is None:
        raise UserError(f"data.root is not set: data={format_} needs the data set's folder; add data.root=PATH")
    if not Path(root).is_dir():
        raise UserError(f"data.root={root}: no such folder; give the folder that holds the data set")
