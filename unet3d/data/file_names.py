"""Files of volumes by their names: a folder's volumes, and the channels of a case."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from unet3d.base.errors import UserError
from unet3d.data import nifti

MAX_NAME = 255  # bytes of a file's name
MAX_FILES_LISTED = 2_000  # letters of the names of a case's files
NAME_SHOWN = 40  # letters of a name that is too long


def volumes_in(folder: Path) -> list[Path]:
    """Return the NIfTI files of a folder by name. Raises UserError where there is no folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; check data.root, data/README.md shows the layouts")
    volumes = list[Path]()
    for path in folder.iterdir():
        # Hidden files are skipped: archives made on a Mac hold a `._name.nii.gz` beside each volume.
        if path.name.endswith(nifti.SUFFIXES) and not path.name.startswith("."):
            volumes.append(path)
    return sorted(volumes)


def in_order(name: str, files: Sequence[Path], count: int = 0) -> tuple[Path, ...]:
    """Return one case's channels by their numbers, which must be 0000, 0001 and so on, `count` or more.

    Raises UserError.
    """
    ordered = sorted(files, key=lambda file: file.name)
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
