"""Everything that is wrong with a data set, listed at once: `<case>: <path>: <what is wrong; what to do>`."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from unet3d import progress
from unet3d.config import Data
from unet3d.data import nifti, volume
from unet3d.data.cases import Case, DatasetInfo, split
from unet3d.data.nifti import ValidationRules
from unet3d.errors import UserError

WARNING = "warning: "  # a run starts despite lines that begin so
MM, UNITS = (0, 2), {1: "meter", 3: "micron"}  # 0 is unset, and mm by custom
SHEAR = 1e-3  # cosine of the angle between two axes that still counts as a right one


class Content(NamedTuple):
    """What the voxels of a case hold: a digest of its image, and which label values occur."""

    digest: bytes
    labels: frozenset[int]


def check_cases(dataset: DatasetInfo, cases: Sequence[Case], data: Data, full: bool) -> list[str]:
    """All problems of all `cases`, a line each, and those of the split; for what the options accept, warnings.

    Reads headers: files, sizes, channels, geometry; `full`: also voxels (damage, NaN, labels, twins) and odd headers.
    """
    lines, contents, rules = list[str](), dict[str, Content](), ValidationRules.of(data)
    for case in progress.track(cases, "checking cases", len(cases)):
        opened, found = _headers(dataset, case, rules)
        lines += found
        if full:
            if case.label is None:
                what = "has no label map; it is neither learned from nor scored"
                lines.append(f"{WARNING}{case.id}: {case.images[0]}: {what}")
            lines += [f"{WARNING}{case.id}: {path}: {what}" for path in opened for what in _oddities(opened[path])]
            content, found = _content(dataset, case, opened, rules)
            lines += found
            contents |= content
    try:
        train, val = split(dataset, data)
    except UserError as error:
        return [*lines, str(error)]
    leaks = [] if data.semi else _leaks(train, val, contents)
    return [*lines, *leaks, *_absences(dataset, "train", train, contents), *_absences(dataset, "val", val, contents)]


def _headers(dataset: DatasetInfo, case: Case, rules: ValidationRules) -> tuple[dict[Path, nib.Nifti1Image], list[str]]:
    """The files that could be opened, and everything wrong that their headers show."""
    opened, found = dict[Path, nib.Nifti1Image](), list[str]()
    for path in (*case.images, case.label) if case.label else case.images:
        try:
            opened[path] = nifti.open_image(case.id, path)
        except UserError as error:
            found.append(str(error))
    found += map(str, volume.contradictions(case, opened, rules))
    count, wanted = sum(nifti.channels(opened[path]) for path in case.images if path in opened), dataset.channels
    if not found and count != len(wanted):
        what = f"has {count} channels, the data set {len(wanted)} ({', '.join(wanted)}); make them agree"
        found.append(str(nifti.problem(case.id, case.images[0], what)))
    strict = map(str, volume.contradictions(case, opened))
    return opened, [*found, *(f"{WARNING}{line}" for line in strict if line not in found)]


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
    if (unit := int(header["xyzt_units"]) % 8) not in MM:
        name = UNITS.get(unit, f"a unit of code {unit}")
        yield f"lengths are in {name}; they are taken for mm, in data.spacing and in distances"


def _content(
    dataset: DatasetInfo, case: Case, opened: volume.Headers, rules: ValidationRules
) -> tuple[dict[str, Content], list[str]]:
    """What the voxels hold, by the case's id, if all could be read; and what is wrong with them."""
    errors, warnings, digest, labels = [], [], hashlib.blake2b(), frozenset[int]()
    for path, image in opened.items():
        try:
            if path == case.label:
                label = nifti.read_label(case.id, path, image, len(dataset.classes), dataset.ignore)
                labels = frozenset(np.flatnonzero(np.bincount(label.ravel())).tolist())
            else:
                voxels, replaced = nifti.read_image(case.id, path, image, rules)
                digest.update(voxels.tobytes())
                if replaced:
                    warnings.append(f"{WARNING}{case.id}: {path}: {nifti.replacement(replaced)}")
        except UserError as error:
            errors.append(str(error))
    if errors or len(opened) < len(case.images) + bool(case.label):
        return {}, [*errors, *warnings]
    if case.label and labels <= {0, dataset.ignore}:
        warnings.append(f"{WARNING}{case.id}: {case.label}: has no foreground")
    return {case.id: Content(digest.digest(), labels)}, warnings


def _leaks(train: Sequence[Case], val: Sequence[Case], contents: Mapping[str, Content]) -> Iterator[str]:
    """Held-out cases that training sees under another name: the same file, also by a link, or the same voxels."""
    seen: dict[object, str] = {_file(path): case.id for case in train for path in case.images}
    seen |= {contents[case.id].digest: case.id for case in train if case.id in contents}
    for case in val:
        images = [*map(_file, case.images), *([contents[case.id].digest] if case.id in contents else [])]
        if twin := next((seen[image] for image in images if image in seen), None):
            yield f"{case.id}: {case.images[0]}: is held out, but training sees the same image as {twin}; remove one"


def _file(path: Path) -> tuple[int, int] | Path:
    """The file that a path leads to, through any links; the path if it is missing, which `_headers` reports."""
    try:
        return (found := path.stat()).st_dev, found.st_ino
    except OSError:
        return path


def _absences(dataset: DatasetInfo, part: str, cases: Sequence[Case], contents: Mapping[str, Content]) -> Iterator[str]:
    """Classes that do not occur in a part, if all of its cases were read."""
    if all(case.id in contents for case in cases):
        present = frozenset[int]().union(*(contents[case.id].labels for case in cases))
        absent = [name for value, name in enumerate(dataset.classes) if value and value not in present]
        if len(absent) == len(dataset.classes) - 1 and part == "train":
            yield f"{dataset.name}: no foreground in any training case; there is nothing to learn, check the label maps"
        elif absent:
            yield f"{WARNING}{dataset.name}: {', '.join(absent)} in no {part} case; its score will mean nothing there"


def summary(dataset: DatasetInfo, train: Sequence[Case], val: Sequence[Case]) -> list[str]:
    """A few plain lines about a data set; sizes are those of the images that can be read."""
    grids = []
    for case in dataset.cases:
        with contextlib.suppress(UserError):  # `check_cases` reports it
            grids.append(volume.canonical_grid(nifti.open_image(case.id, case.images[0])))
    unlabelled = sum(case.label is None for case in dataset.cases)
    return [
        f"{dataset.name}: {len(dataset.cases)} cases: {len(train)} train, {len(val)} val, {unlabelled} without labels",
        f"channels: {', '.join(dataset.channels)}",
        f"classes: {', '.join(f'{value} {name}' for value, name in enumerate(dataset.classes))}"
        + ("" if dataset.ignore is None else f"; {dataset.ignore} is ignored"),
        f"size (voxels): {_range([grid.shape for grid in grids])}",
        f"spacing (mm): {_range([grid.spacing for grid in grids])}",
    ]


def _range(triples: Sequence[Sequence[float]]) -> str:
    """The median of each axis, with the smallest and largest where they differ."""
    if not triples:
        return "unknown"
    rows = np.quantile(triples, (0, 0.5, 1), axis=0, method="nearest")
    low, middle, high = (" x ".join(f"{value:.4g}" for value in row) for row in rows)
    return middle if low == high else f"{middle} (median), from {low} to {high}"
