"""Everything that is wrong with a data set, listed at once: `<case>: <path>: <what is wrong; what to do>`."""

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from unet3d.base import progress
from unet3d.base.errors import UserError
from unet3d.base.files import open_regular
from unet3d.config.data_rules import MAX_LABEL
from unet3d.config.rules import check, network
from unet3d.config.schema import Config, Data, Model
from unet3d.data import nifti, volume
from unet3d.data.cases import Case, DatasetInfo, split
from unet3d.data.labels import proposal
from unet3d.data.nifti import ValidationRules
from unet3d.data.twins import Digests, VoxelDigest, leaks
from unet3d.model import geometry
from unet3d.model.geometry import Triple

WARNING = "warning: "  # a run starts despite lines that begin so
SHEAR = 1e-3  # cosine of the angle between two axes that still counts as a right one
SPACING_VARIATION, ANISOTROPY = 1.1, 2  # ratios of spacings: between cases, and along a case's axes
MOST, CASES_SAMPLED = 0.5, 200  # of a patch, at least, is not to be padding; cases whose sizes are compared with it
LISTED, LONGEST = 10, 2_000  # lines about the files of one case, and characters of names in a line
BLOCK, BLOCKS = 2**12, 16  # bytes, and how many blocks of a file are sampled: all of its bytes up to 64 KiB


class Content(NamedTuple):
    """What the voxels of a case hold: digests of its image, and which label values occur."""

    digests: Digests
    labels: frozenset[int]


def check_cases(dataset: DatasetInfo, cases: Sequence[Case], data: Data, full: bool) -> list[str]:
    """All problems of all `cases`, a line each, and those of the split; for what the options accept, warnings.

    Reads headers: files, sizes, channels, grids, units; `full`: also voxels (damage, NaN, labels, twins), odd headers.
    """
    contents, rules = dict[str, Content](), ValidationRules.of(data)
    lines = [dataset.wrong_labels] if dataset.wrong_labels else []
    unknown: set[int] = set()
    for case in progress.track(cases, "checking cases", len(cases)):
        opened, found = _headers(dataset, case, data)
        lines += found
        if full:
            if case.label is None:
                what = "has no label map; it is neither learned from nor scored"
                lines.append(f"{WARNING}{case.id}: {case.images[0]}: {what}")
            lines += [f"{WARNING}{case.id}: {path}: {what}" for path in opened for what in _oddities(opened[path])]
            content, found, labels = _content(dataset, case, opened, rules)
            lines += found
            contents |= content
            unknown |= labels
    if dataset.classes:
        lines += _proposal(dataset, unknown, contents)
    try:
        train, val = split(dataset, data)
    except UserError as error:
        return [*lines, str(error)]
    twins = [] if data.semi else leaks(train, val, {name: content.digests for name, content in contents.items()})
    if not dataset.classes:
        return [*lines, *twins]
    return [*lines, *twins, *_absences(dataset, "train", train, contents), *_absences(dataset, "val", val, contents)]


def _headers(dataset: DatasetInfo, case: Case, data: Data) -> tuple[dict[Path, nib.Nifti1Image], list[str]]:
    """The files that could be opened, and everything wrong that their headers show."""
    opened, found = dict[Path, nib.Nifti1Image](), list[str]()
    for path in (*case.images, case.label) if case.label else case.images:
        try:
            opened[path] = nifti.open_image(case.id, path)
            if path == case.images[0]:
                volume.target_grid(case, opened[path], data.spacing)
        except UserError as error:
            found.append(str(error))
    found += map(str, volume.contradictions(case, opened, ValidationRules.of(data)))
    count, wanted = sum(nifti.channels(opened[path]) for path in case.images if path in opened), dataset.channels
    if not found and count != len(wanted):
        is_short = count < len(wanted) and nifti.stem(case.images[-1]) == f"{case.id}_{count - 1:04d}"
        absent = f": {case.id}_{count:04d} is missing" if is_short else ""
        what = f"has {count} channels, the data set {len(wanted)} ({_names(wanted)}){absent}; make them agree"
        found.append(str(nifti.problem(case.id, case.images[0], what)))
    strict = map(str, (*volume.contradictions(case, opened), *volume.foreign_units(case, opened)))
    warnings = [f"{WARNING}{line}" for line in strict if line not in found]
    return opened, [*_bounded(case, found), *_bounded(case, warnings, WARNING)]


def _bounded(case: Case, lines: Sequence[str], start: str = "") -> list[str]:
    """The first lines about the files of a case, and how many more there are: it may have thousands of channels."""
    more = [f"{start}{case.id}: and {len(lines) - LISTED:,} more of this case"] if len(lines) > LISTED else []
    return [*lines[:LISTED], *more]


def _names(names: Iterable[str]) -> str:
    """Names in one line of a bounded length."""
    return shorten(", ".join(names), LONGEST, placeholder=" ...")


def _oddities(image: nib.Nifti1Image) -> Iterator[str]:
    """What may be right in a header but often is not."""
    header = image.header
    axes = image.affine[:3, :3] / voxel_sizes(image.affine)
    if np.abs(axes.T @ axes - np.eye(3)).max() > SHEAR:
        yield "its grid is sheared; it is used as if its axes were at right angles"
    sform, qform = header.get_sform(coded=True)[0], None
    try:
        qform = header.get_qform(coded=True)[0]
    except (ValueError, nib.spatialimages.HeaderDataError):  # e.g. rounding has made a quaternion longer than 1
        yield "its qform is no rotation; the sform is used"
    if sform is None and qform is None:
        yield "neither sform nor qform is set: which side is left is a guess; set one"
    elif sform is not None and qform is not None and not np.allclose(sform, qform, atol=0.01):
        yield "sform and qform differ; the sform is used"


def _content(
    dataset: DatasetInfo, case: Case, opened: volume.Headers, rules: ValidationRules
) -> tuple[dict[str, Content], list[str], frozenset[int]]:
    """What the voxels hold, by the case's id, if all could be read; what is wrong; labels where some are unknown."""
    errors, warnings, digest, labels, unknown = [], [], VoxelDigest(), frozenset[int](), frozenset[int]()
    for path, image in opened.items():
        try:
            if path == case.label:
                count = len(dataset.classes) or MAX_LABEL + 1  # any, where no class is known
                label = nifti.read_label(case.id, path, image, count, dataset.ignore, dataset.relabel)
                labels = frozenset(np.flatnonzero(np.bincount(label.ravel())).tolist())
            else:
                voxels, replaced = nifti.read_image(case.id, path, image, rules)
                digest.update(voxels)
                if replaced:
                    warnings.append(f"{WARNING}{case.id}: {path}: {nifti.replacement(replaced)}")
        except UserError as error:
            if not isinstance(error, nifti.UnknownLabels):
                errors.append(str(error))
                continue
            errors.append(error.alone)  # the map that would help is proposed once, for all files
            unknown |= error.found
    if errors or len(opened) < len(case.images) + bool(case.label):
        return {}, [*errors, *warnings], unknown
    if case.label and labels <= {0, dataset.ignore}:
        warnings.append(f"{WARNING}{case.id}: {case.label}: has no foreground")
    return {case.id: Content(digest.digests(), labels)}, warnings, unknown


def _proposal(dataset: DatasetInfo, unknown: Collection[int], contents: Mapping[str, Content]) -> Iterator[str]:
    """The label map that suits all files, where `unknown` labels occur."""
    known = {label for content in contents.values() for label in content.labels} if dataset.relabel is None else set()
    found = {*unknown, *(known - {0, dataset.ignore} if unknown else ())}
    if option := proposal(found, len(dataset.classes), dataset.relabel):
        held = _names(map(str, sorted({0, *found})))
        yield f"{WARNING}{dataset.name}: the label maps hold {held}; to learn from them as they are, add {option}"


def content_hashes(case: Case, full: bool) -> dict[str, dict[str, Any]]:
    """Hashes of the bytes of the case's images, and of its labels: `sample`, and `full` or None. Raises UserError.

    `times` (ns since 1970) are of the last changes to those files that their sample does not settle.
    """
    try:
        labels = (case.label,) if case.label else ()
        return {"images": file_hashes(case.images, full), "labels": file_hashes(labels, full)}
    except (OSError, ValueError) as error:
        raise nifti.problem(case.id, case.images[0], f"cannot be read, or its label map ({error})") from error


def file_hashes(paths: Sequence[Path], full: bool, folder: int | None = None) -> dict[str, Any]:
    """`sample`, `full` or None, and `times` of several files as if they were one, in the open `folder` if one is given.

    Raises OSError, and ValueError for what is no file.
    """
    sample, whole, times = hashlib.sha256(), hashlib.sha256(), []
    for path in paths:
        with open_regular(path, folder) as stream:
            found = os.fstat(stream.fileno())
            size, changed = found.st_size, found.st_mtime_ns
            sample.update(b"%d" % size)
            for start in np.linspace(0, max(size - BLOCK, 0), BLOCKS, dtype=int):
                stream.seek(start)
                sample.update(stream.read(BLOCK))
            if full:
                stream.seek(0)
                whole.update(hashlib.file_digest(stream, "sha256").digest())
        # A gzip file ends with the checksum of its whole content, so its last block settles it.
        times += [changed] if size > BLOCK * BLOCKS and not path.name.endswith(".gz") else []
    return {"sample": sample.hexdigest(), "full": whole.hexdigest() if full else None, "times": times}


def _absences(dataset: DatasetInfo, part: str, cases: Sequence[Case], contents: Mapping[str, Content]) -> Iterator[str]:
    """Classes that do not occur in a part, if all of its cases were read."""
    if all(case.id in contents for case in cases):
        present = frozenset[int]().union(*(contents[case.id].labels for case in cases))
        absent = [name for value, name in enumerate(dataset.classes) if value and value not in present]
        if len(absent) == len(dataset.classes) - 1 and part == "train":
            yield f"{dataset.name}: no foreground in any training case; there is nothing to learn, check the label maps"
        elif absent:
            yield f"{WARNING}{dataset.name}: {_names(absent)} in no {part} case; its score will mean nothing there"


def unsuitable_patch(config: Config, cases: Sequence[Case]) -> str | None:
    """What is wrong with a patch most of which is padding in most of these cases, and one that suits them; else None.

    Reads headers alone; those that cannot be read are `check_cases`' to report.
    """
    grids = list(_grids(cases[:: -(-len(cases) // CASES_SAMPLED) or 1], config.data.spacing))
    patch, model = config.data.patch, network(config.model)
    given = geometry.output_size(patch, model)  # valid convolutions give less than they take, which may be padding
    share = float(np.median([filled(given, grid.shape) for grid in grids] or [1]))
    if share >= MOST:
        return None
    x, y, z = (int(n) for n in np.median([grid.shape for grid in grids], axis=0))
    part = "it" if given == tuple(patch) else f"its output of {'x'.join(map(str, given))}"
    what = (
        f"data.patch={patch}: volumes of {x}x{y}x{z} voxels, the median in training, fill {100 * share:.0f}% of {part}"
    )
    other = suitable_patch(config, model, (x, y, z), grids[0].spacing) if model.features and part == "it" else None
    remedy = f"data.patch={other} suits them".replace(", ", ",") if other else "give a smaller one"
    return f"{what}, the rest is padding; {remedy}"


def suitable_options(config: Config, cases: Sequence[Case]) -> list[str]:
    """Options that suit these cases better than the config's: their median spacing for all, levels and patch for it.

    As nnU-Net plans (arXiv:1809.10486, 2.2), but a patch of no more voxels than the config's. Reads headers alone.
    """
    grids = list(_grids(cases[:: -(-len(cases) // CASES_SAMPLED) or 1], None))
    model, own, spacings = network(config.model), config.data.spacing, np.array([grid.spacing for grid in grids])
    if not grids or not model.features or model.padding == "valid":
        return []
    varies = own is None and (spacings.max(0) > SPACING_VARIATION * spacings.min(0)).any()
    median = np.quantile(spacings, 0.5, axis=0, method="nearest")
    spacing = [float(f"{mm:.3g}") for mm in median] if varies else own or list(grids[0].spacing)
    found: dict[str, object] = {"data.spacing": spacing} if varies else {}
    sizes = () if "auto" in (model.kernels, model.strides) else (*geometry.kernels(model), *geometry.strides(model))
    if (
        max(spacing) > ANISOTROPY * min(spacing) and sizes and all(len({*size}) == 1 for size in sizes)
    ):  # equal along axes
        found |= {"model.kernels": "auto", "model.strides": "auto"}
        config = replace(config, model=replace(config.model, kernels="auto", strides="auto"))
    x, y, z = (round(n) for n in np.median([np.multiply(g.shape, g.spacing) / spacing for g in grids], axis=0))
    patch = suitable_patch(config, network(config.model), (x, y, z), spacing)
    if patch and found and patch != config.data.patch:
        found["data.patch"] = patch
    return [f"{name}={value}".replace(" ", "") for name, value in found.items()]


def filled(patch: Sequence[int], sizes: Sequence[int]) -> float:
    """How much of a patch a volume of these sizes (voxels) fills."""
    return prod(min(p, n) / p for p, n in zip(patch, sizes, strict=True))


def suitable_patch(config: Config, model: Model, sizes: Triple, spacing: Sequence[float]) -> list[int] | None:
    """A patch for volumes of these sizes (voxels), of no more voxels than the config's, whose maps strides divide.

    None if there is no such patch.
    """
    automatic = geometry.from_spacing(spacing, sizes, len(model.features))[1]
    strides = automatic if model.strides == "auto" else geometry.strides(model)
    units = [_unit([stride[axis] for stride in strides], n) for axis, n in enumerate(sizes)]
    patch = [-(-n // unit) * unit for n, unit in zip(sizes, units, strict=True)]
    if filled(patch, sizes) < MOST:
        patch = [n // unit * unit for n, unit in zip(sizes, units, strict=True)]
    while prod(patch) > prod(config.data.patch):
        axis = max((a for a in range(3) if patch[a] > units[a]), key=patch.__getitem__, default=None)
        if axis is None:
            return None
        patch[axis] -= units[axis]
    with contextlib.suppress(UserError):
        check(replace(config, data=replace(config.data, patch=patch)), here=False)
        return patch
    return None


def _unit(strides: Sequence[int], size: int) -> int:
    """What a length along an axis of this size (voxels) is to be a multiple of: the strides, as far as it reaches."""
    return max((unit for unit in accumulate(strides, mul) if unit <= size), default=1)


def _grids(cases: Sequence[Case], spacing: Sequence[float] | None) -> Iterator[volume.Grid]:
    for case in cases:
        with contextlib.suppress(UserError):
            yield volume.target_grid(case, nifti.open_image(case.id, case.images[0]), spacing)


def summary(dataset: DatasetInfo, train: Sequence[Case], val: Sequence[Case]) -> list[str]:
    """A few plain lines about a data set; sizes are those of the images that can be read."""
    grids, orientations = list[volume.Grid](), Counter[str]()
    for case in dataset.cases:
        with contextlib.suppress(UserError):  # `check_cases` reports it
            image = nifti.open_image(case.id, case.images[0])
            grids.append(volume.canonical_grid(image))
            orientations["".join(nib.aff2axcodes(image.affine))] += 1
    turned = ", ".join(f"{count} {codes}" for codes, count in sorted(orientations.items())) or "unknown"
    unlabelled = sum(case.label is None for case in dataset.cases)
    return [
        f"{dataset.name}: {len(dataset.cases)} cases: {len(train)} train, {len(val)} val, {unlabelled} without labels",
        f"channels: {_names(dataset.channels)}",
        f"classes: {_names(f'{value} {name}' for value, name in enumerate(dataset.classes)) or 'unknown'}"
        + ("" if dataset.ignore is None else f"; {dataset.ignore} is ignored"),
        f"orientation: {turned}; the axes x, y, z of size, spacing and data.patch run right, anterior, superior (RAS)",
        f"size x, y, z (voxels): {_range([grid.shape for grid in grids])}",
        f"spacing x, y, z (mm): {_range([grid.spacing for grid in grids])}",
    ]


def _range(triples: Sequence[Sequence[float]]) -> str:
    """The median of each axis, with the smallest and largest where they differ."""
    if not triples:
        return "unknown"
    rows = np.quantile(triples, (0, 0.5, 1), axis=0, method="nearest")
    low, middle, high = (" x ".join(f"{value:.4g}" for value in row) for row in rows)
    return middle if low == high else f"{middle} (median), from {low} to {high}"
