"""Everything that is wrong with a data set, listed at once: `<case>: <path>: <what is wrong; what to do>`."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import numpy as np

from unet3d.base import progress
from unet3d.base.errors import UserError
from unet3d.config.data_rules import MAX_LABEL
from unet3d.config.rules import effective_model
from unet3d.config.schema import Data, Model
from unet3d.data.cases import WARNING, Case, DatasetInfo, warn_or_raise
from unet3d.data.grids import Grid
from unet3d.data.labels import likely_ignored, misread, options_for
from unet3d.data.nifti import in_one_line, read_image, replacement, two_places
from unet3d.data.scan import CaseHeader, ImageFiles, channel_digest, image_digest, leaks, oddities, read_grid, scan_case
from unet3d.data.splits import absences, labels_by_class, split, unused
from unet3d.data.texts import shown_names
from unet3d.data.volume import LabelValues, UnknownLabels, on_network_grid, read_classes
from unet3d.model import geometry

MIN_PATCH_FILL = 0.5  # smallest share of a patch that volumes must fill
CASES_SAMPLED = 200  # about so many headers are read where only their sizes are of use


class Content(NamedTuple):
    """The content of a sound case: the digest of its image, the labels in its file, and those on the network's grid."""

    digest: bytes
    labels: frozenset[int]
    kept: frozenset[int]


class DatasetCheck(NamedTuple):
    """The headers of the cases by id, a line for each problem and warning, and options that the labels need.

    If there are such options, the labels are one problem among the lines.
    """

    headers: dict[str, CaseHeader]
    lines: list[str]
    options: tuple[str, ...] = ()

    def sound_headers(self) -> dict[str, CaseHeader]:
        """Return the headers, and print warnings. Raises UserError that lists every problem."""
        warn_or_raise(self.lines)
        return self.headers


def check_cases(dataset: DatasetInfo, cases: Sequence[Case], data: Data) -> DatasetCheck:
    """Return the headers of `cases`, and all problems of cases and split; for what the options accept, warnings.

    Of headers: files, sizes, channels, grids, units, oddities; of voxels: damage, NaN, labels, twins.
    """
    headers = dict[str, CaseHeader]()
    contents = dict[str, Content]()
    lines = [] if dataset.wrong_labels is None else [str(dataset.wrong_labels)]
    unknown = list[UnknownLabels]()
    places = list[str]()
    for case in progress.track(cases, "checking cases", len(cases)):
        files = ImageFiles(data)
        with files.kept_open():
            headers[case.id] = scan_case(dataset, case, files)
            lines += headers[case.id].lines
            if case.label is None:
                what = "has no label map; it is neither learned from nor scored"
                lines.append(f"{WARNING}{case.id}: {case.images[0]}: {what}")
            for path, image in files.headers.items():
                lines += [f"{WARNING}{case.id}: {path}: {oddity}" for oddity in oddities(image, case.affine)]
                apart = two_places(image.header, case.affine)
                places += [f"{WARNING}{case.id}: {path}: {apart}"] if apart else []
            content, errors, warnings = _read_content(dataset, case, files)
        if content is not None:
            contents[case.id] = content
        lines += [*map(str, errors), *warnings]
        unknown += [error for error in errors if isinstance(error, UnknownLabels)]
    lines += [*_warnings_of_sizes(headers), *in_one_line(places)]
    options: tuple[str, ...] = getattr(dataset.wrong_labels, "options", ())
    if unknown:
        options = _with_label_map(dataset, lines, unknown, contents)
    if dataset.announced not in (None, len(dataset.cases)):
        what = f"numTraining is {dataset.announced}, but {len(dataset.cases)} cases are found"
        lines.append(f"{WARNING}{dataset.name}: {what}; are files missing, or named otherwise?")
    lines += _split_problems(dataset, data, contents)
    return DatasetCheck(headers, lines, options)


def check_headers(
    dataset: DatasetInfo, cases: Sequence[Case], data: Data, files: ImageFiles | None = None, hashes: bool = False
) -> DatasetCheck:
    """Return the headers of `cases`, with `hashes` if asked for, and all problems that they and the split show."""
    files = files or ImageFiles(data)
    tracked = progress.track(cases, "checking cases", len(cases))
    headers = {case.id: scan_case(dataset, case, files, hashes) for case in tracked}
    lines = [line for header in headers.values() for line in header.lines]
    lines += _warnings_of_sizes(headers)
    return DatasetCheck(headers, [*lines, *_split_problems(dataset, data, {})])


def _warnings_of_sizes(headers: Mapping[str, CaseHeader]) -> list[str]:
    """Return a warning for all files of the cases that state two voxel sizes, and one for those that state no place."""
    lines = [line for header in headers.values() for line in header.sizes]
    return [f"{WARNING}{line}" for line in in_one_line(lines)]


def _split_problems(dataset: DatasetInfo, data: Data, contents: Mapping[str, Content]) -> Iterator[str]:
    """Yield what is wrong with training and held-out cases: a split that cannot be made, twins, absent classes."""
    for note in dataset.left_out:
        yield f"{WARNING}{dataset.name}: {note}"
    try:
        train, val = split(dataset, data)
    except UserError as error:
        yield str(error)
        return
    if not data.semi:
        digests = {case_id: content.digest for case_id, content in contents.items()}
        yield from leaks(train, val, digests, ImageFiles(data))
    for note in unused(dataset, data, train, val):
        if not contents or "label map" not in note:  # else each such case has its line
            yield f"{WARNING}{note}"
    if not dataset.classes:
        return
    notes = [*likely_ignored(dataset.classes)]
    if dataset.regions is not None:
        notes += misread(dataset.classes, dataset.regions)
    for note in notes:
        yield f"{WARNING}{dataset.name}: {note}"
    if not contents or any(case.id not in contents for case in (*train, *val)):
        return
    learned, scored = ({label for case in part for label in contents[case.id].kept} for part in (train, val))
    stored = {label for case in train for label in contents[case.id].labels}
    yield from absences(dataset, data, learned, scored, stored)
    absent = [name for name, labels in labels_by_class(dataset).items() if scored.isdisjoint(labels)]
    if absent:
        yield f"{WARNING}{dataset.name}: {shown_names(absent)} in no held-out case; its score will mean nothing there"


def _read_content(
    dataset: DatasetInfo, case: Case, files: ImageFiles
) -> tuple[Content | None, list[UserError], list[str]]:
    """Return the content of a case, None where it is not sound; errors of files with a sound header; and warnings."""
    errors = list[UserError]()
    warnings = list[str]()
    labels = frozenset[int]()
    kept = frozenset[int]()
    channels = list[bytes]()  # their digests
    values = LabelValues.of_files(dataset)
    if not dataset.label_count:  # no class is known, so that any label will do
        values = values._replace(classes=MAX_LABEL + 1)
    paths = [path for path in case.files if path in files.headers]
    for path in paths:
        try:
            with files.opened(case, path) as file:
                if path == case.label:
                    label = read_classes(file, values)
                    labels = kept = _occurring(label)
                    spacing = files.options.spacing
                    if spacing is not None:  # else all voxels stay
                        kept = _occurring(on_network_grid(label, case, file.image, spacing, dataset.ignore))
                    continue
                voxels, nonfinite = read_image(file, files.replaces_nonfinite)
            channels += map(channel_digest, voxels)
            if nonfinite:
                warnings.append(f"{WARNING}{case.id}: {path}: {replacement(nonfinite)}")
        except UserError as error:
            errors.append(error)
    if errors or len(paths) < len(case.files):
        return None, errors, warnings
    if case.label is not None and labels <= {0, dataset.ignore}:
        warnings.append(f"{WARNING}{case.id}: {case.label}: has no foreground")
    return Content(image_digest(channels), labels, kept), errors, warnings


def _occurring(label: np.ndarray) -> frozenset[int]:
    """Return the values that occur in a label map."""
    return frozenset(np.flatnonzero(np.bincount(label.ravel())).tolist())


def _with_label_map(
    dataset: DatasetInfo, lines: list[str], unknown: Sequence[UnknownLabels], contents: Mapping[str, Content]
) -> tuple[str, ...]:
    """Return the options that make the labels of all files classes, () without any, and put them into `lines`.

    What was one line for each of several files is one for all.
    """
    labels = {label for error in unknown for label in error.labels}
    known = {label for content in contents.values() for label in content.labels} - {0, dataset.ignore}
    if dataset.relabel is not None:  # which `known` have gone through
        known = {old for old, new in dataset.relabel.items() if new in known}
    labels |= known if labels else set()
    names = dataset.classes if dataset.regions is None else ()
    options = options_for(labels, dataset.label_count, dataset.relabel, names)
    if not options:
        return ()
    remedy = f"add {shlex.join(options)}"
    first = unknown[0].alone
    line = f"{first}; correct the file, or {remedy}"
    if len(unknown) > 1:
        held = f"the label maps of {len(unknown)} cases hold {shown_names(sorted({0, *labels}))}"
        line = f"{dataset.name}: {held}: {remedy} (the first: {first})"
    lines[lines.index(str(unknown[0]))] = line
    for error in unknown[1:]:
        lines.remove(str(error))
    return options


def _class_words(dataset: DatasetInfo) -> list[str]:
    """Return the values and names of the classes; of regions, their labels and what they are drawn as."""
    if dataset.regions is None:
        return [f"{value} {name}" for value, name in enumerate(dataset.classes)]
    words = [f"0 {dataset.classes[0]}"]
    for name, labels, drawn in zip(dataset.classes[1:], *dataset.regions, strict=True):
        words.append(f"{'+'.join(map(str, labels))} {name} (a region, drawn as {drawn})")
    return words


def summary(
    dataset: DatasetInfo, train: Sequence[Case], val: Sequence[Case], headers: Mapping[str, CaseHeader]
) -> list[str]:
    """Return a few plain lines about a data set; sizes are of the images that can be read."""
    of_cases = [headers[case.id] for case in dataset.cases]
    orientations = Counter(header.orientation for header in of_cases if header.orientation)
    grids = [header.stored for header in of_cases if header.stored is not None]
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


def read_grids(cases: Sequence[Case], spacing: Sequence[float] | None) -> list[Grid]:
    """Return the grids that the network sees of some cases; those that cannot be read are left out."""
    grids = list[Grid]()
    for case in cases[:: 1 + len(cases) // CASES_SAMPLED]:
        with suppress(UserError):  # `check_cases` reports it
            grids.append(read_grid(case, spacing))
    return grids


def mostly_padding(model: Model, patch: list[int], targets: Sequence[Grid | None]) -> str | None:
    """Return a line for a patch most of which is padding in most cases with these grids; None for any other patch.

    A grid is None where it could not be read.
    """
    grids = [grid for grid in targets if grid is not None]
    output = geometry.output_size(patch, effective_model(model))  # valid convolutions return less than they take
    shares = [prod(min(p, n) / p for p, n in zip(output, grid.shape, strict=True)) for grid in grids]
    share = float(np.median(shares)) if shares else 1.0
    if share >= MIN_PATCH_FILL:
        return None
    x, y, z = (int(n) for n in np.median([grid.shape for grid in grids], axis=0))
    part = "it" if output == tuple(patch) else f"its output of {'x'.join(map(str, output))}"
    volumes = f"volumes of {x}x{y}x{z} voxels, the median in training"
    problem = f"{volumes}, fill {100 * share:.0f}% of {part}, the rest is padding"
    return f"data.patch={patch}: {problem}; give a smaller one, or let python -m unet3d plan choose it"
