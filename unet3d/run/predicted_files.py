"""Files of the command predict: which are cases, and predictions.jsonl, which network wrote which label map.

A folder of label maps has this record of them, and of the images that they were made from. A label map whose file was
named has its own record, hidden, so that the folder's other files stay alone.

A line is added before a label map is written and after it, so that a process may be killed at any time, and several may
write to one folder. The last line about a file counts.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError, saving, warn
from unet3d.base.files import read_lines
from unet3d.data.cache import file_hashes
from unet3d.data.cases import Case, in_order, other_volumes, refuse_long
from unet3d.data.check import remarks
from unet3d.data.nifti import (
    DECIDES,
    Remark,
    backslashes,
    channels,
    doubts,
    in_few_lines,
    open_image,
    stem,
    volumes_in,
    without_channel,
)
from unet3d.data.volume import contradictions

RECORD = "predictions.jsonl"
OPTIONS = ("overlap", "mirror", "components")  # They change what the same network writes.
Entry = dict[str, Any]


def accepted_contradictions(case: Case) -> list[str]:
    """Return the contradictions between a case's files, which the checkpoint's options accept, as in training."""
    return [str(error) for error, _ in contradictions(case, _opened(case))]


def _opened(case: Case) -> dict[Path, Any]:
    return {path: open_image(case.id, path, case.affine) for path in case.images}


def doubts_about(cases: Iterable[Case]) -> list[str]:
    """Return a line for all files that state two voxel sizes, no place or another unit than mm.

    Unreadable ones are reported later.
    """
    found = list[Remark]()
    for case in cases:
        with suppress(UserError):
            found += remarks(case, _opened(case), doubts)
    decides = "data.affine of training decides; write the true size into the headers"
    return in_few_lines((words, decides if remedy == DECIDES else remedy) for words, remedy in found)


def files_in(inputs: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the files, also the NIfTI files of folders; and a line for each input that is neither.

    Raises UserError where there is no file.
    """
    files: list[Path] = []
    problems: list[str] = []
    for path in inputs:
        try:
            if path.is_file() or path.is_dir():
                files += [path] if path.is_file() else volumes_in(path)
            else:
                what = "neither file nor folder" if path.exists() else f"no such file or folder{backslashes(path)}"
                problems.append(f"{path}: {what}")
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
    if not files and not problems:
        names = f"no .nii or .nii.gz file in {', '.join(map(str, inputs))}"
        raise UserError("; ".join(filter(None, (names, other_volumes(inputs)))))
    return files, problems


def find_cases(
    inputs: Sequence[Path],
    count: int,
    by_channel: bool = False,
    shard: tuple[int, int] = (0, 1),
    affine: str = "auto",
) -> tuple[list[Case], list[str]]:
    """Return the files, also the NIfTI files of folders, as cases of `count` channels, and a line for each problem.

    A case has one file with all channels, or one for each, named `_0000`, `_0001` .. Of a `shard` (i, n) every n-th
    case by name, from the i-th on: the n shards are disjoint and hold all cases. `affine` is data.affine of training.
    """
    files_of: dict[str, list[Path]] = {}
    files, problems = files_in(inputs)
    unread = other_volumes([path for path in inputs if path.is_dir()])
    if unread:
        warn(unread)
    for file in files:
        files_of.setdefault(_case_name(file, count, by_channel, affine), []).append(file)
    index, shards = shard
    cases = []
    for name in sorted(files_of)[index::shards]:
        try:
            cases.append(_case(name, files_of[name], count)._replace(affine=affine))
        except UserError as error:
            problems.append(str(error))
    return cases, problems


def _case_name(file: Path, count: int, by_channel: bool, affine: str) -> str:
    """Return the name of the case that a file belongs to, for a network of `count` channels."""
    name = stem(file)
    if count == 1:
        return name.removesuffix("_0000") if by_channel else name
    with suppress(UserError):  # a file that cannot be read is reported later
        if channels(open_image(name, file, affine)) == count:
            return name
    return without_channel(name)


def _case(name: str, files: Sequence[Path], count: int) -> Case:
    """Return the files of one name as a case, with other channels' that lie there, but were not given.

    Raises UserError.
    """
    listed = ", ".join(map(str, files))
    refuse_long(files[0].parent, name)
    stems = {stem(file) for file in files}
    if len(files) > count > 1 and len(stems) == len(files):
        raise UserError(f"{name}: has {len(files)} files ({listed}); this network takes {count} channels")
    if len(files) > count:
        raise UserError(f"{name}: {len(files)} files of one name ({listed}); their label maps would be one file")
    wanted = {f"{name}_{channel:04d}" for channel in range(count)}
    found = list(files)
    if count > 1 and stems < wanted:
        with suppress(OSError):
            found += [file for file in volumes_in(files[0].parent) if stem(file) in wanted - stems]
    if len(found) > count:
        raise UserError(f"{name}: {', '.join(map(str, found))}: two files of one channel; give those to segment")
    return Case(name, in_order(name, found, count), None)


class Origins:
    """The record of a folder, for a network of this origin: its digest, and options that change its label maps."""

    def __init__(self, path: Path, network: Entry, checkpoint: Path) -> None:
        self.path = path
        self._network = {**network, "checkpoint": str(checkpoint)}
        self._entries = dict[str, Entry]()  # Entries by the label map's name.
        for line in read_lines(self.path) if path.parent.is_dir() else ():
            with suppress(ValueError, RecursionError):  # a line that was cut short
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("file"), str):
                    self._entries[entry["file"]] = entry

    def missing(self, case: Case, paths: Sequence[Path]) -> list[Path]:
        """Return which of a case's files are to be written: its label map, and perhaps its probabilities.

        Raises ValueError, whose text says what is there instead, for a file that is not this network's of these images.
        """
        present = [path for path in paths if os.path.lexists(path)]
        absent = [path for path in paths if path not in present]
        if not present:
            return absent
        entry = self._entries.get(paths[0].name, {})
        difference = self._difference(entry, case)
        earlier = entry.get("earlier")
        if difference is not None and isinstance(earlier, dict) and earlier.get("hash") == _sample([paths[0]]):
            # Another network was to replace the label map, and has not.
            entry = earlier
            difference = self._difference(entry, case)
        if difference is not None:
            raise ValueError(f"{present[0]}: {difference}")
        if entry["state"] != "written":
            # This network was killed as it wrote: what is there may be what it was to replace.
            return list(paths) if entry.get("replaces") or paths[0] in present else absent
        if paths[0] in present and entry.get("hash") != _sample([paths[0]]):
            raise ValueError(f"{paths[0]}: was changed or replaced since this network wrote it")
        return absent

    def _difference(self, entry: Entry, case: Case) -> str | None:
        """Return in words in what the origin of a file is another; None where it is the same."""
        if entry.get("state") not in ("writing", "written"):
            return f"nothing in {self.path.name} says which network wrote it"
        if entry.get("network") != self._network["network"]:
            return f"is of another network, {entry.get('checkpoint')}"
        for name in OPTIONS:
            there, here = entry.get(name), self._network[name]
            if there != here:
                return f"is of {name} {json.dumps(there)}, not {json.dumps(here)}"
        images = _sample(case.images)
        if images is not None and entry.get("images") != images:  # Segmenting reports what cannot be read.
            return f"is of other images of the name {case.id}, or these changed since"
        return None

    def begin(self, case: Case, paths: Sequence[Path]) -> None:
        """Note that the files of a case are to be written. Raises NotSaved."""
        replaces = any(os.path.lexists(path) for path in paths)
        before = self._entries.get(paths[0].name, {})
        earlier = before if before.get("state") == "written" else before.get("earlier")
        self._add(case, paths[0], {"state": "writing", "replaces": replaces, "earlier": earlier})

    def end(self, case: Case, path: Path) -> None:
        """Note that the label map of a case is written. Raises NotSaved."""
        self._add(case, path, {"state": "written", "hash": _sample([path])})

    def _add(self, case: Case, path: Path, about: Entry) -> None:
        """Add a line about the label map of a case, whole or so that the next one is."""
        entry = {"file": path.name, **self._network, "images": _sample(case.images), **about}
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with saving(self.path), open(os.open(self.path, flags, 0o666), "r+b", buffering=0) as file:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            start = "" if file.read() in (b"", b"\n") else "\n"
            content = f"{start}{json.dumps(entry)}\n".encode()
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        self._entries[entry["file"]] = entry


def _sample(paths: Sequence[Path]) -> list[Any] | None:
    """Return hashes by which files are known again; None where they cannot be read."""
    with suppress(OSError, ValueError):
        hashes = file_hashes(paths)
        return [hashes["sample"], hashes["times"]]
    return None
