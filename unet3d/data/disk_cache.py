"""Arrays in files that outlive a run, read through memory maps: a folder for each key, whole or made again.

A key is a digest of all that its arrays depend on, so nothing here can be out of date. Files are not code: they are
mapped as numbers, or refused. Any folder may be removed at any time: what is missing is made again.
"""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.check import file_hashes
from unet3d.errors import UserError, is_disk_full, is_out_of_files, is_out_of_memory, make_room
from unet3d.files import read_text, replacing, write_json

FORMAT = 1  # raise it with every change to what is computed for a key
LOCK, INDEX = ".lock", "index.json"  # the index is written last: with it, the files of a key are whole
LARGEST_INDEX = 2**16  # bytes
KEY = re.compile(r"[0-9a-f]{64}")
MAPPED = 5_000  # cases whose maps stay open: the system allows a process 65,530 maps, and a case has seven at most
Arrays = Mapping[str, np.ndarray]


def key_of(*values: object) -> str:
    """The digest of plain values, of this format, and of the versions of the libraries that prepare cases."""
    return hashlib.sha256(json.dumps([FORMAT, _versions(), values]).encode()).hexdigest()


@functools.cache
def _versions() -> list[str]:
    return [version(name) for name in ("nibabel", "numpy", "scipy")]


def folder(path: str | None) -> Path:
    """The folder of data.cache_root; without one, of the user's cache. Raises UserError."""
    try:
        return Path(path or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unet3d")
    except RuntimeError as error:
        raise UserError("data.cache_root is not set, and the user has no home; add data.cache_root=PATH") from error


def can_stay_mapped(cases: int) -> bool:
    """Whether the maps of all cases may stay open. `ulimit -v` counts them as memory, though they take none."""
    return cases <= MAPPED and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@dataclass
class DiskCache:
    """The folder `root`. Several processes may use it at once: one makes what a key holds, others wait for it."""

    root: Path
    full: bool  # compare all bytes of a file with their hash, not a sample
    indices: dict[str, Any] = field(default_factory=dict, repr=False)  # of keys whose files were compared with them

    def __post_init__(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what the data set holds
        except OSError as error:
            raise self._problem(self.root, f"cannot be made ({error.strerror})") from error

    def read(self, key: str, names: tuple[str, ...], make: Callable[[], Arrays]) -> dict[str, np.ndarray]:
        """The arrays of these names, mapped; `make` gives them if they are missing or damaged. Raises UserError."""
        found = self._map(key, names)
        if found is None:
            with self._held(key):
                if (found := self._map(key, names)) is None:  # another process may have made it meanwhile
                    self._write(key, make())
                    found = self._map(key, names)
        if found is None:
            raise self._problem(self.root / key, "is damaged as soon as it is written")
        return found

    def holds(self, key: str) -> bool:
        """Whether all files of the key have been written."""
        return (self.root / key / INDEX).is_file()

    def digest(self, key: str, name: str) -> object:
        """Of all bytes of an array's file, as it was written; the arrays have been read."""
        return self.indices[key][name]["full"]

    def room(self) -> int:
        """Free bytes."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def sweep(self) -> None:
        """Remove what killed processes have left unfinished; those that live hold their keys."""
        for unfinished in [path.name for path in self.root.iterdir() if KEY.fullmatch(path.name)]:
            if not self.holds(unfinished):
                with self._held(unfinished, wait=False) as is_held:
                    if is_held and not self.holds(unfinished):
                        self._remove(unfinished)

    def _map(self, key: str, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
        """The arrays, or None if they are not all there as they were written."""
        try:
            paths = {name: self.root / key / f"{name}.npy" for name in names}
            if key not in self.indices:
                index = json.loads(read_text(self.root / key / INDEX, LARGEST_INDEX))
                of = "full" if self.full else "sample"
                if any(file_hashes([path], self.full)[of] != index[name][of] for name, path in paths.items()):
                    return None
                self.indices[key] = index
            # Unlike numpy.load, it knows neither archives nor pickles.
            arrays = {name: np.asarray(np.lib.format.open_memmap(path, "r")) for name, path in paths.items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
        except OSError as error:
            if is_out_of_memory(error) or is_out_of_files(error):
                raise
            raise self._problem(self.root / key, f"cannot be read ({error.strerror})") from error
        return arrays

    def _write(self, key: str, arrays: Arrays) -> None:
        """Whoever writes holds the key: what is there is damaged, or left by a process that was killed."""
        self._remove(key)
        paths = {name: self.root / key / f"{name}.npy" for name in arrays}
        try:
            (self.root / key).mkdir(exist_ok=True)
            for name, path in paths.items():
                with replacing(path) as file:
                    np.save(file, arrays[name], allow_pickle=False)
            write_json(self.root / key / INDEX, {name: file_hashes([path], True) for name, path in paths.items()})
        except BaseException as error:
            self._remove(key)
            if isinstance(error, OSError):
                raise self._problem(self.root, f"not saved ({error.strerror})", error) from error
            raise

    def _remove(self, key: str) -> None:
        place = self.root / key
        for path in (place / INDEX, *place.glob("*.npy"), *place.glob(".*.tmp")):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            place.rmdir()

    @contextmanager
    def _held(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Hold the key, a byte of one lock file; yields False if it is held and not to be waited for.

        The locks of a process that is killed go with it. A process that closes the file loses all of its locks: it
        holds one key at a time.
        """
        with ExitStack() as stack:
            is_held = True
            try:
                file = stack.enter_context((self.root / LOCK).open("ab"))
                fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, int(key[:15], 16))
            except OSError as error:
                is_held = False
                if wait or error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise self._problem(self.root, f"cannot be locked ({error.strerror})") from error
            yield is_held

    @staticmethod
    def _problem(place: Path, what: str, error: OSError | None = None) -> UserError:
        remedy = f"{make_room(error)}, or " if error is not None and is_disk_full(error) else ""
        return UserError(f"data.cache=disk: {place}: {what}; {remedy}give another folder, data.cache_root=PATH")
