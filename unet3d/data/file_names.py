"""Files of volumes by their names: a folder's volumes, and the channels of a case."""

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

from unet3d.base.errors import UserError
from unet3d.base.files import OTHER_ENDINGS
from unet3d.data import nifti

MAX_NAME = 255  # bytes of a file's name
MAX_FILES_LISTED = 2_000  # letters of the names of a case's files
MAX_MAPS_LISTED = 200  # letters of the names of label maps
MAX_OTHERS_LISTED = 300  # letters of the names of volumes that are not read
NAME_SHOWN = 40  # letters of a name that is too long


def volumes_in(folder: Path) -> list[Path]:
    """Return the NIfTI files of a folder by name. Raises UserError where there is no folder."""
    if not folder.is_dir():
        what = f"no such folder{backslashes(folder)}"
        raise UserError(f"{folder}: {what}; check data.root, data/README.md shows the layouts")
    return [path for path in _visible(folder) if nifti.ending(path)]


def _visible(folder: Path) -> list[Path]:
    """Return what a folder holds by name, but hidden files: a Mac's archives hold a `._name.nii.gz` for each volume."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def other_volumes(folders: Iterable[Path]) -> str:
    """Return which volumes of formats that are not read lie in these folders, with what helps; "" for none."""
    by_ending = dict[str, list[Path]]()
    for folder in dict.fromkeys(folders):
        with suppress(OSError):
            for path in _visible(folder):
                found = OTHER_ENDINGS.search(path.name)
                if found is not None:
                    by_ending.setdefault(found.group().lower(), []).append(path)
    images = {path.stem for path in by_ending.get(".img", ())}
    if images and images == {path.stem for path in by_ending.get(".hdr", ())}:
        del by_ending[".img"]
        pairs = ".hdr/.img pair" if len(images) == 1 else ".hdr/.img pairs"
        by_ending[pairs] = by_ending.pop(".hdr")
    kinds = [f"{len(files):,} {ending} ({shown_files(files)})" for ending, files in by_ending.items()]
    return f"volumes of other formats are not read: {', '.join(kinds)}; convert them to .nii.gz" if kinds else ""


def images_by_case(images: Path, maps: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return the images of a folder by case, whose label maps have these names. Raises UserError where one has none."""
    stems = by_stem(volumes_in(images))
    counts = Counter(map(without_channel, maps))
    of_several = {}
    for name, path in maps.items():
        case_id = without_channel(name)
        if f"{case_id}_0001" in stems and counts[case_id] == 1:  # else cases are numbered so
            of_several[name] = path
    refuse_channel_names(of_several, stems)
    grouped = dict[str, list[Path]]()
    for name, path in stems.items():
        # scan_2019 ends like a channel; it is one only beside scan_0000, and if no label map is called scan_2019.
        case_id = without_channel(name)
        first = f"{case_id}_0000"
        is_channel = first in stems and first not in maps and name not in maps
        grouped.setdefault(case_id if is_channel else name, []).append(path)
    without_image = sorted({*maps} - {*grouped})
    if without_image:
        first, *others = without_image
        listed = shorten(", ".join(others), MAX_MAPS_LISTED, placeholder=" ...")
        more = f"; nor of {listed}" if others else ""
        is_short = any(without_channel(name) == first for name in stems)
        what = f"{first}_0000 is missing" if is_short else "no image of that name"
        remedy = other_volumes([images]) or "add it or remove the label map"
        if without_channel(first) in stems and first != without_channel(first):
            remedy = f"a label map is called as its case, {without_channel(first)}, without a channel's number"
        raise UserError(f"{maps[first]}: {what} in {images}{more}; {remedy}")
    return grouped


def left_out(used: Iterable[Path], is_list: bool) -> Iterator[str]:
    """Yield sentences on other volumes in the folders of these files: NIfTI, unless the used are a list, and others."""
    files = dict.fromkeys(used)
    folders = dict.fromkeys(path.parent for path in files)
    others = list[Path]()
    for folder in () if is_list else folders:
        with suppress(OSError):
            others += [path for path in _visible(folder) if nifti.ending(path) and path not in files]
    if others:
        yield f"NIfTI files of no case are not read: {len(others):,} ({shown_files(others)})"
    unread = other_volumes(folders)
    if unread:
        yield unread


def refuse_channel_names(maps: Mapping[str, Path], images: Container[str]) -> None:
    """Raise UserError for label maps called as a channel of their case; `maps` and `images` by their names."""
    wrong = [path for name, path in maps.items() if name in images and f"{name}_0000" not in images]
    wrong = [path for path in wrong if nifti.stem(path) != without_channel(nifti.stem(path))]
    if wrong:
        name = without_channel(nifti.stem(wrong[0]))
        what = "is called as a channel; a label map is called as its case, without _0000"
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}: {what}: rename it to {name}{nifti.ending(wrong[0])}{more}")


def shown_files(files: Iterable[Path]) -> str:
    """Return the paths of files in a bounded length."""
    return shorten(", ".join(map(str, files)), MAX_OTHERS_LISTED, placeholder=" ...")


def backslashes(name: object) -> str:
    """Return what is wrong with a path as Windows writes it, where no file has that name; "" for another path."""
    return ": backslashes are letters of a name, write / between folders" if "\\" in str(name) else ""


def by_stem(files: Iterable[Path]) -> dict[str, Path]:
    """Return files by their names without .nii and .nii.gz. Raises UserError where two share one."""
    by_name = dict[str, Path]()
    for path in files:
        name = nifti.stem(path)
        if name in by_name:
            names = f"{by_name[name].name} and {path.name}"
            raise UserError(f"{path.parent}: {names} are two files of one name, {name}; remove or rename one")
        by_name[name] = path
    return by_name


def in_order(name: str, files: Sequence[Path], count: int = 0) -> tuple[Path, ...]:
    """Return one case's channels by their numbers, which must be 0000, 0001 and so on, `count` or more.

    Raises UserError.
    """
    ordered = sorted(files, key=lambda file: file.name)
    if len({file.parent for file in files}) == 1:
        by_stem(ordered)
    stems = [nifti.stem(file) for file in ordered]
    wanted = [f"{name}_{channel:04d}" for channel in range(max(count, len(stems)))]
    holds_all = len(stems) == 1 and stems[0] not in wanted
    if stems == wanted or holds_all:
        return tuple(ordered)
    absent = ordered[0].with_name(next(stem for stem in wanted if stem not in stems))
    present = shorten(", ".join(map(str, ordered)), MAX_FILES_LISTED, placeholder=" ...")
    what = f"{absent} is missing beside {present}"
    raise UserError(f"{name}: {what}; a case's channels are called {name}_0000, {name}_0001 and so on")


def refuse_long(where: object, name: str) -> None:
    """Raise UserError where the label map of this case could not be written under its name."""
    if len(os.fsencode(f"{name}.nii.gz")) > MAX_NAME:
        what = f"the name of its label map, with .nii.gz, would have more than {MAX_NAME} bytes"
        start = f"{name[:NAME_SHOWN]}..., a name of {len(name)} letters"
        raise UserError(f"{where}: {start}: {what}; rename the case's files")


def without_channel(stem: str) -> str:
    """Return a case's name from its channel's: `case_0001` is `case`."""
    return re.sub(r"_\d{4}$", "", stem)
