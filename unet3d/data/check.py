"""Everything that is wrong with a data set, listed at once: `<case>: <path>: <what is wrong; what to do>`.

One scan reads headers, and hashes of files. Held-out cases that training sees, too, are found by their voxels, one
volume in memory at a time.
"""

import hashlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations, product
from math import prod
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np

from unet3d.base import progress, ranks
from unet3d.base.errors import UserError
from unet3d.config.data_rules import MAX_LABEL
from unet3d.config.rules import effective_model
from unet3d.config.schema import Data, Model
from unet3d.data import nifti
from unet3d.data.cache import Hashes, file_hashes
from unet3d.data.cases import Case, DatasetInfo, raise_listed, warn_once
from unet3d.data.labels import WrongLabels, likely_ignored, misread, options_for
from unet3d.data.nifti import Remark, in_few_lines, problem, read_image, replacement
from unet3d.data.splits import absences, labels_by_class, split, unused
from unet3d.data.texts import shown_names
from unet3d.data.volume import (
    Grid,
    Headers,
    ImageFiles,
    LabelValues,
    canonical_grid,
    contradictions,
    on_network_grid,
    read_classes,
    read_grid,
    target_grid,
)
from unet3d.model import geometry

MIN_PATCH_FILL = 0.5  # smallest share of a patch that volumes must fill
MAX_LINES_OF_CASE = 10  # about the files of one case
DIGEST = hashlib.blake2b().digest_size  # bytes of the digest of an image
CASES_SAMPLED = 200  # Headers that are read, about, where only their sizes are of use.


class CaseHeader(NamedTuple):
    """The headers of a case, before a voxel is read, as plain values that ranks can exchange."""

    stored: Grid | None  # Grid of the first image in RAS+; None where it cannot be read.
    target: Grid | None  # Grid that the network sees.
    orientation: str  # Axes of the first image, such as LPS; "" where it cannot be read.
    channels: int  # Channels of all images that could be read.
    hashes: dict[str, Hashes]  # Keys "images" and "labels", if asked for and all could be read.

    @property
    def is_resampled(self) -> bool:
        """True if the network sees the case on another grid than its file's, regardless of their axes."""
        return self.stored is not None and self.target is not None and not self.stored.is_same(self.target)


class Content(NamedTuple):
    """The content of a sound case: the digest of its image, the labels in its file, and those on the network's grid."""

    digest: bytes
    labels: frozenset[int]
    kept: frozenset[int]


@dataclass
class DatasetCheck:
    """The headers of the cases by id, all problems and warnings, and options that the labels need.

    If there are such options, the labels are one of the problems.
    """

    headers: dict[str, CaseHeader] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    options: tuple[str, ...] = ()
    contents: dict[str, Content] = field(default_factory=dict)  # Sound cases by id, where voxels are read.
    unknown: list[WrongLabels] = field(default_factory=list)  # problems of label maps with other labels

    def sound_headers(self) -> dict[str, CaseHeader]:
        """Return the headers, and print warnings. Raises UserError that lists every problem."""
        raise_listed(self.problems)
        warn_once(self.warnings)
        return self.headers


def check_cases(
    dataset: DatasetInfo,
    cases: Sequence[Case],
    data: Data,
    files: ImageFiles | None = None,
    hashes: bool = False,
    voxels: bool = False,
) -> DatasetCheck:
    """Return the headers of `cases`, with `hashes` if asked for, and all problems of cases and split.

    Of headers: files, sizes, channels, grids, units; with `voxels` also oddities, and of these damage, NaN, labels and
    twins.
    """
    found = DatasetCheck()
    if dataset.wrong_labels is not None:
        found.problems.append(str(dataset.wrong_labels))
        found.options = getattr(dataset.wrong_labels, "options", ())
    files = files or ImageFiles(data)
    doubts = list[Remark]()
    odd = list[Remark]()
    for case in progress.track(cases, "checking cases", len(cases)):
        opened = _scan(found, dataset, case, files, hashes)
        doubts += remarks(case, opened, nifti.doubts)
        if voxels:
            if case.label is None:
                what = "has no label map; it is neither learned from nor scored"
                found.warnings.append(f"{case.id}: {case.images[0]}: {what}")
            odd += remarks(case, opened, nifti.oddities)
            _read_content(found, dataset, case, files, [path for path in case.files if path in opened])
    found.warnings += [*in_few_lines(doubts), *in_few_lines(odd)]
    if found.unknown:
        _propose_label_map(found, dataset)
    if voxels and dataset.announced not in (None, len(dataset.cases)):
        what = f"numTraining is {dataset.announced}, but {len(dataset.cases)} cases are found"
        found.warnings.append(f"{dataset.name}: {what}; are files missing, or named otherwise?")
    _check_split(found, dataset, data)
    return found


def _scan(found: DatasetCheck, dataset: DatasetInfo, case: Case, files: ImageFiles, hashes: bool) -> Headers:
    """Note what the headers of a case's files say, with `hashes` as data.fingerprint has them; return those read."""
    headers = dict[Path, nib.Nifti1Image]()
    problems = list[str]()
    target = None
    for path in case.files:
        try:
            with files.opened(case, path) as file:
                headers[path] = file.image
            if path == case.images[0]:
                target = target_grid(case, headers[path], files.options.spacing)
        except UserError as error:
            problems.append(str(error))
    warnings = list[str]()
    for misfit, is_accepted in contradictions(case, headers, files.accepts_apart):
        (warnings if is_accepted else problems).append(str(misfit))
    channels = sum(nifti.channels(headers[path]) for path in case.images if path in headers)
    if not problems and channels != len(dataset.channels):
        problems.append(str(_wrong_channels(dataset, case, channels)))
    hashes_of = dict[str, Hashes]()
    if hashes and not problems:
        try:
            for part, paths in (("images", case.images), ("labels", case.files[len(case.images) :])):
                hashes_of[part] = file_hashes(paths, files.options.fingerprint == "full")
        except (OSError, ValueError) as error:
            problems.append(f"{case.named}: cannot be read, or another file of the case ({error})")
    first = headers.get(case.images[0])
    found.headers[case.id] = CaseHeader(
        stored=None if first is None else canonical_grid(first),
        target=target,
        orientation="" if first is None else "".join(nib.aff2axcodes(first.affine)),
        channels=channels,
        hashes=hashes_of,
    )
    for noted, lines in ((found.problems, problems), (found.warnings, warnings)):
        noted += lines[:MAX_LINES_OF_CASE]  # it may have thousands of channels
        if len(lines) > MAX_LINES_OF_CASE:
            noted.append(f"{case.id}: and {len(lines) - MAX_LINES_OF_CASE:,} more of this case")
    return headers


def remarks(case: Case, headers: Headers, find: Callable[[nib.Nifti1Image, str], Iterator[Remark]]) -> list[Remark]:
    """Return what is found in the headers of a case, with its name and the files'."""
    found = ((path, words, remedy) for path, image in headers.items() for words, remedy in find(image, case.affine))
    return [(f"{case.id}: {path}: {words}", remedy) for path, words, remedy in found]


def _wrong_channels(dataset: DatasetInfo, case: Case, channels: int) -> UserError:
    """Return the error for a case that has another number of channels than the data set."""
    is_short = channels < len(dataset.channels)
    is_by_channel = nifti.stem(case.images[-1]) == f"{case.id}_{channels - 1:04d}"
    absent = f": {case.id}_{channels:04d} is missing" if is_short and is_by_channel else ""
    wanted = f"{len(dataset.channels)} ({shown_names(dataset.channels)})"
    what = f"has {channels} channels, the data set {wanted}{absent}; make them agree"
    return problem(case.id, case.images[0], what)


def _read_content(
    found: DatasetCheck, dataset: DatasetInfo, case: Case, files: ImageFiles, paths: Sequence[Path]
) -> None:
    """Note problems of these files, whose headers are sound, and warnings; and what a case holds if all is sound."""
    problems = list[UserError]()
    labels = kept = frozenset[int]()
    digests = list[bytes]()
    values = LabelValues.of_files(dataset)
    if not dataset.label_count:  # no class is known, so that any label will do
        values = values._replace(classes=MAX_LABEL + 1)
    for path in paths:
        try:
            with files.opened(case, path) as file:
                if path == case.label:
                    label = read_classes(file, values)
                    labels = _occurring(label)
                    kept = _occurring(on_network_grid(label, case, file.image, files.options.spacing, dataset.ignore))
                    continue
                image, nonfinite = read_image(file, files.replaces_nonfinite)
            digests += map(channel_digest, image)
            if nonfinite:
                found.warnings.append(f"{case.id}: {path}: {replacement(nonfinite)}")
        except UserError as error:
            problems.append(error)
    found.problems += map(str, problems)
    found.unknown += [error for error in problems if isinstance(error, WrongLabels)]
    if problems or len(paths) < len(case.files):
        return
    if case.label is not None and labels <= {0, dataset.ignore}:
        found.warnings.append(f"{case.id}: {case.label}: has no foreground")
    found.contents[case.id] = Content(image_digest(digests), labels, kept)


def _occurring(label: np.ndarray) -> frozenset[int]:
    """Return the values that occur in a label map."""
    return frozenset(np.flatnonzero(np.bincount(label.ravel())).tolist())


def _propose_label_map(found: DatasetCheck, dataset: DatasetInfo) -> None:
    """Put the options that make the labels of all files classes into `found`, if there are any.

    What was one line for each of several files is one for all.
    """
    labels = {label for error in found.unknown for label in error.labels}
    known = {label for content in found.contents.values() for label in content.labels} - {0, dataset.ignore}
    if dataset.relabel is not None:  # Known labels have been relabelled.
        known = {old for old, new in dataset.relabel.items() if new in known}
    labels |= known if labels else set()
    found.options = options_for(labels, dataset.label_count, dataset.relabel, LabelValues.of_files(dataset).names)
    if not found.options:
        return
    remedy = f"add {shlex.join(found.options)}"
    first = found.unknown[0].alone
    line = f"{first}; correct the file, or {remedy}"
    if len(found.unknown) > 1:
        held = f"the label maps of {len(found.unknown)} cases hold {shown_names(sorted({0, *labels}))}"
        line = f"{dataset.name}: {held}: {remedy} (the first: {first})"
    lines = [str(error) for error in found.unknown]
    place = found.problems.index(lines[0])
    found.problems = [problem for problem in found.problems if problem not in lines]
    found.problems.insert(place, line)


def _check_split(found: DatasetCheck, dataset: DatasetInfo, data: Data) -> None:
    """Note what is wrong with training and held-out cases: a split that cannot be made, twins, absent classes."""
    found.warnings += [f"{dataset.name}: {note}" for note in dataset.left_out]
    contents = found.contents
    try:
        train, val = split(dataset, data)
        if not data.semi:
            digests = {case_id: content.digest for case_id, content in contents.items()}
            found.problems += leaks(train, val, digests, ImageFiles(data))
        found.warnings += unused(dataset, data, train, val)
        if not dataset.classes:
            return
        notes = [*likely_ignored(dataset.classes)]
        if dataset.regions is not None:
            notes += misread(dataset.classes, dataset.regions)
        found.warnings += [f"{dataset.name}: {note}" for note in notes]
        if any(case.id not in contents for case in (*train, *val)):
            return
        learned, scored = ({label for case in part for label in contents[case.id].kept} for part in (train, val))
        stored = {label for case in train for label in contents[case.id].labels}
        try:
            found.warnings += absences(dataset, data, learned, scored, stored)
        finally:  # Absences may be a problem, and this a warning.
            absent = [name for name, labels in labels_by_class(dataset).items() if scored.isdisjoint(labels)]
            if absent:
                what = f"{shown_names(absent)} in no held-out case; its score will mean nothing there"
                found.warnings.append(f"{dataset.name}: {what}")
    except UserError as error:
        found.problems.append(str(error))


def image_digest(channels: Iterable[bytes]) -> bytes:
    """Return the digest of all images of a case, of those of its channels: equal for equal voxels.

    Whatever their files say of them, however they are compressed, of whatever type, wherever they lie, in whatever
    order the channels come, and along whatever axes each is stored. Voxels are compared to 12 bits: normalising the
    same ones in another order rounds otherwise.
    """
    return hashlib.blake2b(b"".join(sorted(channels))).digest()


def channel_digest(channel: np.ndarray) -> bytes:
    """Return a digest of the sums of voxels in each plane of a channel (X, Y, Z), the same however it is turned."""
    bits = (channel.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
    rounded = (bits + np.uint32(1 << 11)) >> np.uint32(12)  # Numbers of 12 significant bits have exact sums.
    profiles = list[bytes]()
    for others in ((1, 2), (0, 2), (0, 1)):
        sums = rounded.sum(others, np.uint64)
        profiles.append(min(sums.tobytes(), sums[::-1].tobytes()))
    return b"".join(hashlib.blake2b(profile).digest() for profile in sorted(profiles))


def voxel_digests(
    train: Sequence[Case], val: Sequence[Case], headers: Mapping[str, CaseHeader], files: ImageFiles
) -> dict[str, bytes]:
    """Return digests, by id, of cases that may be the same since their size occurs in both parts.

    Each of them is read once, by one of the ranks, and none is kept. Raises UserError that lists what cannot be read.
    """
    sizes = dict[str, tuple[int, ...]]()  # channels, and voxels along the axes in ascending order
    for case in (*train, *val):
        grid = headers[case.id].stored
        assert grid is not None, case.id
        sizes[case.id] = (headers[case.id].channels, *sorted(grid.shape))
    shared = {sizes[case.id] for case in train} & {sizes[case.id] for case in val}
    cases = [case for case in (*train, *val) if sizes[case.id] in shared]
    if ranks.count() > 1:
        cases = cases[ranks.RANK :: ranks.SIZE]
    by_id = dict[str, bytes]()
    problems = list[str]()
    for case in progress.track(cases, "comparing images", len(cases)):
        try:
            by_id[case.id] = image_digest(map(channel_digest, _channels(case, files)))
        except UserError as error:
            problems.append(str(error))
    shares = ranks.gather((by_id, problems))
    raise_listed([line for _, lines in shares for line in lines])
    return {case_id: digest for found, _ in shares for case_id, digest in found.items()}


def leaks(train: Sequence[Case], val: Sequence[Case], digests: Mapping[str, bytes], files: ImageFiles) -> Iterator[str]:
    """Yield held-out cases that training sees under another name.

    They have a digest in common, and the same voxels in the files: a digest may be of what a rule has made of these.
    Raises UserError for files that cannot be read again.
    """
    alike = defaultdict[bytes, list[Case]](list)
    for case in train:
        if case.id in digests:
            alike[digests[case.id]].append(case)
    for case in val:
        suspects = alike.get(digests.get(case.id, b""), [])
        twin = next((other for other in suspects if _are_same(case, other, files)), None)
        if twin is not None:
            what = f"is held out, but training sees the same image as {twin.id}; remove one"
            yield f"{case.id}: {case.images[0]}: {what}"


def _are_same(case: Case, other: Case, files: ImageFiles) -> bool:
    """Return whether the files of two cases hold the same voxels, as `image_digest` takes them. Raises UserError."""
    # Two are equal once the axes of one are exchanged and mirrored in some way.
    turns = [*product(permutations(range(3)), product((slice(None), slice(None, None, -1)), repeat=3))]
    waiting = list(_channels(other, files))
    for channel in _channels(case, files):
        found = next(
            (
                place
                for place, twin in enumerate(waiting)
                for axes, mirror in turns
                if np.array_equal(channel, twin.transpose(axes)[mirror])
            ),
            None,
        )
        if found is None:
            return False
        del waiting[found]
    return not waiting


def _channels(case: Case, files: ImageFiles) -> Iterator[np.ndarray]:
    """Yield the channels (X, Y, Z) of a case as its files hold them. Raises UserError."""
    for path in case.images:
        with files.opened(case, path) as file:
            yield from nifti.read_image(file, files.replaces_nonfinite)[0]


def summary(
    dataset: DatasetInfo, train: Sequence[Case], val: Sequence[Case], headers: Mapping[str, CaseHeader]
) -> list[str]:
    """Return a few plain lines about a data set; sizes are of the images that can be read."""
    of_cases = [headers[case.id] for case in dataset.cases]
    orientations = Counter(header.orientation for header in of_cases if header.orientation)
    grids = [header.stored for header in of_cases if header.stored is not None]
    turned = ", ".join(f"{count} {codes}" for codes, count in sorted(orientations.items())) or "unknown"
    unlabelled = sum(case.label is None for case in dataset.cases)
    words = [f"{value} {name}" for value, name in enumerate(dataset.classes)]
    for number, (labels, drawn) in enumerate(zip(*dataset.regions or ((), ()), strict=True), start=1):
        words[number] = f"{'+'.join(map(str, labels))} {dataset.classes[number]} (a region, drawn as {drawn})"
    classes = shown_names(words)
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
