"""predictions.jsonl in a folder of label maps: which network wrote which of them, and from which images.

A label map whose file was named has such a record of its own, hidden, so that the folder's other files stay alone.

A line is added before a label map is written and after it, so that a process may be killed at any time, and several may
write to one folder. The last line about a file counts.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unet3d.base.errors import not_saved
from unet3d.base.files import read_lines
from unet3d.data.cases import Case
from unet3d.data.scan import file_hashes

RECORD = "predictions.jsonl"
OPTIONS = ("overlap", "mirror", "components")  # that change what the same network writes
Entry = dict[str, Any]


class Origins:
    """The record of a folder, for a network of this origin: its digest, and options that change its label maps."""

    def __init__(self, path: Path, network: Entry, checkpoint: Path) -> None:
        self.path = path
        self._network = network
        self._checkpoint = str(checkpoint)
        self._entries = dict[str, Entry]()  # by the label map's name
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
        if not present:
            return list(paths)
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
            return list(paths) if entry.get("replaces") or paths[0] in present else _without(paths, present)
        if paths[0] in present and entry.get("hash") != _sample([paths[0]]):
            raise ValueError(f"{paths[0]}: was changed or replaced since this network wrote it")
        return _without(paths, present)

    def _difference(self, entry: Entry, case: Case) -> str | None:
        """Return in words in what the origin of a file is another; None where it is the same."""
        if entry.get("state") not in ("writing", "written"):
            return f"nothing in {self.path.name} says which network wrote it"
        if entry.get("network") != self._network["network"]:
            return f"is of another network, {entry.get('checkpoint')}"
        for name in OPTIONS:
            if entry.get(name) != self._network[name]:
                return f"is of {name} {json.dumps(entry.get(name))}, not {json.dumps(self._network[name])}"
        images = _sample(case.images)
        if images is not None and entry.get("images") != images:  # what cannot be read is reported as it is segmented
            return f"is of other images of the name {case.id}, or these changed since"
        return None

    def begin(self, case: Case, paths: Sequence[Path]) -> None:
        """Note that the files of a case are to be written. Raises NotSaved."""
        replaces = any(os.path.lexists(path) for path in paths)
        before = self._entries.get(paths[0].name, {})
        earlier = before if before.get("state") == "written" else before.get("earlier")
        self._add(self._entry(case, paths[0], state="writing", replaces=replaces, earlier=earlier))

    def end(self, case: Case, path: Path) -> None:
        """Note that the label map of a case is written. Raises NotSaved."""
        self._add(self._entry(case, path, state="written", hash=_sample([path])))

    def _entry(self, case: Case, path: Path, **about: Any) -> Entry:
        origin = {**self._network, "checkpoint": self._checkpoint, "images": _sample(case.images)}
        return {"file": path.name, **origin, **about}

    def _add(self, entry: Entry) -> None:
        """Add a line, whole or so that the next one is."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(self.path, flags, 0o666), "r+b", buffering=0) as file:
                with suppress(OSError):  # a disk without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                start = "" if file.read() in (b"", b"\n") else "\n"
                content = f"{start}{json.dumps(entry)}\n".encode()
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
        except OSError as error:
            raise not_saved(self.path, error) from error
        self._entries[entry["file"]] = entry


def _without(paths: Sequence[Path], present: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path not in present]


def _sample(paths: Sequence[Path]) -> list[Any] | None:
    """Return hashes by which files are known again; None where they cannot be read."""
    with suppress(OSError, ValueError):
        hashes = file_hashes(paths, full=False)
        return [hashes["sample"], hashes["times"]]
    return None
