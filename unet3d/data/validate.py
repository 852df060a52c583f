"""Everything that is wrong with a data set, listed at once: `<case>: <path>: <what is wrong; what to do>`."""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from unet3d.base import progress
from unet3d.base.errors import UserError, listed
from unet3d.config.region_rules import MAX_LABEL
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.headers import WARNING, CaseHeader, scan_case, shown_names
from unet3d.data.image_files import ImageFiles, OpenFile
from unet3d.data.labels import proposal
from unet3d.data.nifti import ValidationRules
from unet3d.data.nifti_labels import UnknownLabels, read_label
from unet3d.data.splits import split
from unet3d.data.twins import Digests, VoxelDigest, leaks

SHEAR = 1e-3  # cosine of the angle between two axes that still counts as a right one
SAME_FORM = 0.01  # mm: largest difference between sform and qform that counts as none


class Content(NamedTuple):
    """The content of a sound case: digests of its image, and the label values that occur."""

    digests: Digests
    labels: frozenset[int]


class CaseContent(NamedTuple):
    """The content of a case if all of it could be read, the problems of its voxels, and labels that are no class."""

    content: Content | None
    lines: list[str]
    unknown: frozenset[int]  # all labels of the maps where some are unknown


class DatasetCheck(NamedTuple):
    """The headers of the cases by id, and a line for each problem and warning."""

    headers: dict[str, CaseHeader]
    lines: list[str]


def check_cases(dataset: DatasetInfo, cases: Sequence[Case], data: Data, full: bool) -> DatasetCheck:
    """Return the headers of `cases`, and all problems of cases and split; for what the options accept, warnings.

    Reads headers: files, sizes, channels, grids, units; `full`: also voxels (damage, NaN, labels, twins), odd headers.
    """
    if not full:
        return check_headers(dataset, cases, data, ImageFiles())
    headers = dict[str, CaseHeader]()
    contents = dict[str, Content]()
    lines = [dataset.wrong_labels] if dataset.wrong_labels else []
    unknown = set[int]()
    for case in progress.track(cases, "checking cases", len(cases)):
        files = ImageFiles()
        with files.kept_open():
            header = scan_case(dataset, case, data, files)
            headers[case.id] = header
            lines += header.lines
            lines += _oddities_of_case(case, files)
            found = _read_content(dataset, case, files, ValidationRules.of(data))
        lines += found.lines
        unknown |= found.unknown
        if found.content is not None:
            contents[case.id] = found.content
    if dataset.classes:
        lines += _label_map_proposal(dataset, unknown, contents)
    lines += _split_problems(dataset, data, contents)
    return DatasetCheck(headers, lines)


def check_headers(
    dataset: DatasetInfo,
    cases: Sequence[Case],
    data: Data,
    files: ImageFiles,
    fingerprint: str | None = None,
) -> DatasetCheck:
    """Return the headers of `cases`, and all problems that they and the split show; `fingerprint`: with hashes."""
    headers = dict[str, CaseHeader]()
    for case in progress.track(cases, "checking cases", len(cases)):
        headers[case.id] = scan_case(dataset, case, data, files, fingerprint)
    lines = [line for header in headers.values() for line in header.lines]
    return DatasetCheck(headers, [*lines, *_split_problems(dataset, data, {})])


def sound_headers(
    dataset: DatasetInfo,
    cases: Sequence[Case],
    data: Data,
    files: ImageFiles,
    fingerprint: str | None = None,
) -> dict[str, CaseHeader]:
    """Return the headers of `cases` by id, and print warnings. Raises UserError that lists every problem."""
    headers, lines = check_headers(dataset, cases, data, files, fingerprint)
    problems = [line for line in lines if not line.startswith(WARNING)]
    if problems:
        raise UserError("\n".join(listed(problems)))
    for line in listed(lines):
        print(line, file=sys.stderr)
    return headers


def _split_problems(dataset: DatasetInfo, data: Data, contents: Mapping[str, Content]) -> Iterator[str]:
    """Yield what is wrong with training and held-out cases: a split that cannot be made, twins, absent classes."""
    try:
        train, val = split(dataset, data)
    except UserError as error:
        yield str(error)
        return
    if not data.semi:
        yield from leaks(
            train,
            val,
            {case_id: content.digests for case_id, content in contents.items()},
        )
    if not dataset.classes:
        return
    yield from _absences(dataset, "train", train, contents)
    yield from _absences(dataset, "val", val, contents)


def _oddities_of_case(case: Case, files: ImageFiles) -> Iterator[str]:
    """Yield warnings of what may be right in a case but often is not."""
    if case.label is None:
        what = "has no label map; it is neither learned from nor scored"
        yield f"{WARNING}{case.id}: {case.images[0]}: {what}"
    for path, image in files.headers.items():
        for oddity in _oddities(image):
            yield f"{WARNING}{case.id}: {path}: {oddity}"


def _oddities(image: nib.Nifti1Image) -> Iterator[str]:
    """Yield what may be right in a header but often is not."""
    header = image.header
    axes = image.affine[:3, :3] / voxel_sizes(image.affine)
    if np.abs(axes.T @ axes - np.eye(3)).max() > SHEAR:
        yield "its grid is sheared; it is used as if its axes were at right angles"
    sform = header.get_sform(coded=True)[0]
    qform = None
    try:
        qform = header.get_qform(coded=True)[0]
    except (
        ValueError,
        nib.spatialimages.HeaderDataError,
    ):  # e.g. rounding has made a quaternion longer than 1
        yield "its qform is no rotation; the sform is used"
    if sform is None and qform is None:
        yield "neither sform nor qform is set: which side is left is a guess; set one"
    elif sform is not None and qform is not None and not np.allclose(sform, qform, atol=SAME_FORM):
        yield "sform and qform differ; the sform is used"


def _read_content(dataset: DatasetInfo, case: Case, files: ImageFiles, rules: ValidationRules) -> CaseContent:
    """Read the voxels of those files of a case that have a sound header."""
    errors = list[str]()
    warnings = list[str]()
    unknown = frozenset[int]()
    labels = frozenset[int]()
    digest = VoxelDigest()
    paths = [path for path in case.files if path in files.headers]
    for path in paths:
        try:
            with files.reopened(case.id, path) as file:
                if path == case.label:
                    labels = _label_values(dataset, case, file)
                else:
                    voxels, nonfinite = nifti.read_image(case.id, path, file.image, rules, file.stream)
                    digest.update(voxels)
                    if nonfinite:
                        warnings.append(f"{WARNING}{case.id}: {path}: {nifti.replacement(nonfinite)}")
        except UnknownLabels as error:
            errors.append(error.alone)  # the map that would help is proposed once, for all files
            unknown |= error.labels
        except UserError as error:
            errors.append(str(error))
    if errors or len(paths) < len(case.files):
        return CaseContent(None, [*errors, *warnings], unknown)
    if case.label is not None and labels <= {0, dataset.ignore}:
        warnings.append(f"{WARNING}{case.id}: {case.label}: has no foreground")
    return CaseContent(Content(digest.digests(), labels), warnings, unknown)


def _label_values(dataset: DatasetInfo, case: Case, file: OpenFile) -> frozenset[int]:
    """Return the values that occur in the label map of a case. Raises UnknownLabels, UserError."""
    assert case.label is not None, case.id
    classes = dataset.label_count or MAX_LABEL + 1  # any label, where no class is known
    label = read_label(
        case.id,
        case.label,
        file.image,
        classes,
        dataset.ignore,
        dataset.relabel,
        file.stream,
    )
    return frozenset(np.flatnonzero(np.bincount(label.ravel())).tolist())


def _label_map_proposal(
    dataset: DatasetInfo, unknown: Collection[int], contents: Mapping[str, Content]
) -> Iterator[str]:
    """Yield the label map that suits all files, where `unknown` labels occur."""
    labels = {*unknown}
    if unknown and dataset.relabel is None:
        for content in contents.values():
            labels |= content.labels - {0, dataset.ignore}
    option = proposal(labels, dataset.label_count, dataset.relabel)
    if option:
        held = shown_names([str(label) for label in sorted({0, *labels})])
        yield f"{WARNING}{dataset.name}: the label maps hold {held}; to learn from them as they are, add {option}"


def _absences(
    dataset: DatasetInfo,
    part: str,
    cases: Sequence[Case],
    contents: Mapping[str, Content],
) -> Iterator[str]:
    """Yield classes that do not occur in a part, if all of its cases were read."""
    if not all(case.id in contents for case in cases):
        return
    present = frozenset[int]().union(*(contents[case.id].labels for case in cases))
    labels_of = labels_by_class(dataset)
    absent = [name for name, labels in labels_of.items() if present.isdisjoint(labels)]
    if len(absent) == len(labels_of) and part == "train":
        yield f"{dataset.name}: no foreground in any training case; there is nothing to learn, check the label maps"
    elif absent:
        yield f"{WARNING}{dataset.name}: {shown_names(absent)} in no {part} case; its score will mean nothing there"


def labels_by_class(dataset: DatasetInfo) -> dict[str, Sequence[int]]:
    """Return the label values of each class, or region, but the background."""
    names = dataset.classes[1:]
    if dataset.regions is None:
        return {name: (value,) for value, name in enumerate(names, start=1)}
    return dict(zip(names, dataset.regions.labels, strict=True))


def _class_words(dataset: DatasetInfo) -> list[str]:
    """Return the values and names of the classes; of regions, their labels and what they are drawn as."""
    if dataset.regions is None:
        return [f"{value} {name}" for value, name in enumerate(dataset.classes)]
    words = [f"0 {dataset.classes[0]}"]
    for name, labels, drawn in zip(dataset.classes[1:], *dataset.regions, strict=True):
        words.append(f"{'+'.join(map(str, labels))} {name} (a region, drawn as {drawn})")
    return words


def summary(
    dataset: DatasetInfo,
    train: Sequence[Case],
    val: Sequence[Case],
    headers: Mapping[str, CaseHeader],
) -> list[str]:
    """Return a few plain lines about a data set; sizes are of the images that can be read."""
    readable = [headers[case.id] for case in dataset.cases if headers[case.id].stored is not None]
    orientations = Counter(header.orientation for header in readable)
    grids = [header.stored for header in readable if header.stored is not None]
    turned = ", ".join(f"{count} {codes}" for codes, count in sorted(orientations.items())) or "unknown"
    unlabelled = sum(case.label is None for case in dataset.cases)
    classes = shown_names(_class_words(dataset))
    ignored = "" if dataset.ignore is None else f"; {dataset.ignore} is ignored"
    return [
        f"{dataset.name}: {len(dataset.cases)} cases: {len(train)} train, {len(val)} val, {unlabelled} without labels",
        f"channels: {shown_names(dataset.channels)}",
        f"classes: {classes or 'unknown'}{ignored}",
        f"orientation: {turned}; the axes x, y, z of size, spacing and data.patch run right, anterior, superior (RAS)",
        f"size x, y, z (voxels): {_range([grid.shape for grid in grids])}",
        f"spacing x, y, z (mm): {_range([grid.spacing for grid in grids])}",
    ]


def _range(triples: Sequence[Sequence[float]]) -> str:
    """Return the median of each axis, with the smallest and largest where they differ."""
    if not triples:
        return "unknown"
    rows = np.quantile(triples, (0, 0.5, 1), axis=0, method="nearest")
    low, middle, high = (" x ".join(f"{value:.4g}" for value in row) for row in rows)
    return middle if low == high else f"{middle} (median), from {low} to {high}"
