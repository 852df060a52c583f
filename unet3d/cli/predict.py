"""`unet3d predict`: label maps of NIfTI files, one after another; a file that cannot be segmented stops no other."""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.base import progress
from unet3d.base.errors import UserError, escaped, is_out_of_files, is_out_of_memory, not_saved, reason, warn
from unet3d.base.files import NIFTI_ENDINGS, OTHER_ENDINGS
from unet3d.cli import lifecycle
from unet3d.cli.commands import counted
from unet3d.config.schema import LAYOUTS

if TYPE_CHECKING:
    from unet3d.data.cases import Case
    from unet3d.run.predict import Segmenter
    from unet3d.run.predicted_files import Origins

SHARD = re.compile(r"(\d{1,20})/(\d{1,20})", re.ASCII)


def run(arguments: argparse.Namespace) -> int:
    """Segment every file. Return 2 if one could not be segmented."""
    shard = _shard(arguments.shard)
    is_file = _names_file(arguments.out)
    if is_file and shard != (0, 1):
        raise UserError(f"-o {arguments.out}: names one file, --shard a part of many; give a folder")
    from unet3d.run import predicted_files
    from unet3d.run.predicted_files import RECORD, Origins

    segmenter = _open_segmenter(arguments)
    channels = len(segmenter.intensity)
    by_channel = LAYOUTS[segmenter.options.format].get("by_channel", False)
    affine = segmenter.options.affine
    cases, problems = predicted_files.find_cases(arguments.inputs, channels, by_channel, shard, affine)
    count = len(cases) + len(problems)
    if is_file and count > 1:
        raise UserError(f"-o {arguments.out}: names one file for {counted(count, 'case')}; give a folder")
    for problem in problems:
        lifecycle.print_error(f"error: {escaped(problem)}")
    paths_of = {case.id: _paths(case, arguments, is_file) for case in cases}
    _refuse_images(paths_of.values(), predicted_files.files_in(arguments.inputs)[0], is_file)
    record = arguments.out / RECORD if not is_file else arguments.out.with_name(f".{arguments.out.name}.jsonl")
    origins = Origins(record, segmenter.origin, arguments.checkpoint)
    missing_of = paths_of if arguments.overwrite else _missing(origins, cases, paths_of)
    for line in predicted_files.doubts_about(cases):
        warn(line)
    counts = Counter(failed=len(problems))
    with progress.counting("predicting cases", len(cases)) as counter:
        for case in cases:
            missing = missing_of[case.id]
            label_map = paths_of[case.id][0]
            if label_map not in missing:
                counts["skipped"] += 1
                before = "this network wrote it from this image (--overwrite writes it again)"
                print(f"{escaped(label_map)}: skipped, {before}")
                for path in missing[:1]:
                    print(f"{escaped(path)}: not written, since its label map was skipped (--overwrite)")
            else:
                is_written = _segment(segmenter, case, missing, origins)
                counts["written" if is_written else "failed"] += 1
            counter.advance()
    _print_counts(counts, segmenter)
    return UserError.exit_code if counts["failed"] else 0


def _names_file(out: Path) -> bool:
    """Return whether -o names a label map, not a folder. Raises UserError for a file of another kind."""
    if out.is_dir():
        return False
    name = out.name.lower()
    if name.endswith(NIFTI_ENDINGS):
        return True
    if out.exists():
        raise UserError(f"{out}: is a file; -o names a folder")
    if OTHER_ENDINGS.search(name) or name.endswith(".gz"):
        raise UserError(f"-o {out}: label maps are written as .nii.gz; name it so, or give a folder")
    return False


def _missing(
    origins: "Origins",
    cases: Sequence["Case"],
    paths_of: Mapping[str, Sequence[Path]],
) -> dict[str, list[Path]]:
    """Return by case the files to write. Raises UserError where others than this network's are there."""
    missing = {}
    others = []
    for case in cases:
        try:
            missing[case.id] = origins.missing(case, paths_of[case.id])
        except ValueError as error:
            others.append(str(error))
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise UserError(f"{others[0]}{more}; give another folder, or --overwrite to replace what is there")
    return missing


def _open_segmenter(arguments: argparse.Namespace) -> "Segmenter":
    """Return the segmenter of the checkpoint. Raises UserError, which names flags, or CheckpointError."""
    from unet3d.run import predict

    try:
        network = predict.load(
            arguments.checkpoint,
            arguments.device,
            mirror=arguments.mirror,
            model=arguments.model,
            batch=_number(int, arguments.batch),
            overlap=_number(float, arguments.overlap),
        )
        return network.segmenter
    except UserError as error:  # about an argument of that function, which is a flag here
        text = re.sub(r"^(batch|overlap)=", r"--\1 ", str(error))
        raise UserError(text.replace("mirror=true: ", "--mirror: ", 1)) from error


def _paths(case: "Case", arguments: argparse.Namespace, is_file: bool) -> list[Path]:
    """Return the files to write for a case: its label map, and its probabilities where they are asked for."""
    from unet3d.data.nifti import stem

    label_map = arguments.out if is_file else arguments.out / f"{case.id}.nii.gz"
    if not arguments.probabilities:
        return [label_map]
    return [label_map, label_map.with_name(f"{stem(label_map)}_probabilities.nii")]


def _refuse_images(outputs: Iterable[Sequence[Path]], images: Sequence[Path], is_file: bool) -> None:
    """Raise UserError where one of the files to write is an image to segment, or would lie among these.

    From then on it would count as one of them. A file that was named may lie there, but not under an image's name.
    """
    from unet3d.data.nifti import stem

    places = {os.path.realpath(path) for path in images}  # Path.resolve raises: a circle
    neighbours = {(os.path.realpath(path.parent), stem(path) if is_file else ""): path for path in images}
    for path in chain.from_iterable(outputs):
        if os.path.realpath(path) in places:
            raise UserError(f"{path}: is an image to segment; give another folder for the label maps")
        image = neighbours.get((os.path.realpath(path.parent), stem(path) if is_file else ""))
        if image is not None:
            what = f"would lie among the images to segment, as {image.name}, and count as one of them"
            raise UserError(f"{path}: {what}; give another folder for the label maps")


def _print_counts(counts: Mapping[str, int], segmenter: "Segmenter") -> None:
    """Print how many label maps were written, what their values mean, and how many were not."""
    line = f"{counted(counts['written'], 'label map')} written"
    for kind, what in (("skipped", "skipped"), ("failed", "not segmented")):
        if counts[kind]:
            line += f", {counts[kind]} {what}"
    if counts["written"]:
        line += f"; values: {escaped(segmenter.written)}"
    if counts["written"] and segmenter.largest:
        kept = ", ".join(segmenter.classes[number] for number in segmenter.largest)
        line += f"; only the largest component is kept of: {escaped(kept)}"
    print(line)


def _shard(text: str) -> tuple[int, int]:
    """Return `i/n` as two numbers. Raises UserError."""
    parts = SHARD.fullmatch(text)
    if parts is None or int(parts[1]) >= int(parts[2]):
        raise UserError(f"--shard {text}: is no part; give i/n, part i of n, from 0 on: 0/3, 1/3 or 2/3")
    return int(parts[1]), int(parts[2])


def _number(kind: type[int] | type[float], text: str | None) -> Any:
    """Return a flag's value as a number; other words as they are, for the check of the option."""
    try:
        return kind(text or "")
    except ValueError:
        return text


def _segment(segmenter: "Segmenter", case: "Case", paths: Sequence[Path], origins: "Origins") -> bool:
    """Write the files of a case, and print their paths. Return whether that was possible. Raises NotSaved."""
    from unet3d.data.nifti import replacement
    from unet3d.run import predicted_files

    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        origins.begin(case, paths)
        volume = segmenter.to_file(case, *paths)
        origins.end(case, paths[0])
        warnings = predicted_files.accepted_contradictions(case)
        if volume.nonfinite_voxels:
            warnings.insert(0, f"{case.id}: {replacement(volume.nonfinite_voxels)}")
        for line in warnings:
            warn(line)
        for path in paths:
            print(escaped(path))
        return True
    except UserError as error:
        lifecycle.print_error(f"error: {escaped(error)}")
    except OSError as error:
        if is_out_of_memory(error) or is_out_of_files(error):
            raise
        named = [path for path in paths if str(path) == error.filename]
        raise not_saved(named[0] if named else paths[0], error) from error
    except (RuntimeError, MemoryError) as error:  # perhaps for the size of this volume
        if not is_out_of_memory(error):
            raise
        lifecycle.print_error(f"error: {escaped(case.id)}: out of memory: {reason(error)}")
    return False
