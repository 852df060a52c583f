"""A cache on disk of arrays that outlive a run, read through memory maps: a folder for each key.

A key is a digest of all that its arrays depend on, so nothing here can be out of date. Files are not code: they are
mapped as numbers, or refused. Any folder may be removed at any time: what is missing is computed anew.
"""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import resource
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from unet3d.base.errors import (
    UserError,
    is_disk_full,
    is_out_of_files,
    is_out_of_memory,
    make_room,
)
from unet3d.base.files import TEMPORARY, open_regular, replacing_within
from unet3d.data.hashes import file_hashes

FORMAT = 1  # raise it with every change to what is computed for a key
LOCK = ".lock"
INDEX = "index.json"  # written last: with it, the files of a key are whole
LARGEST_INDEX = 2**16  # bytes
KEY = re.compile(r"[0-9a-f]{64}")
MAPPED = 5_000  # cases whose maps stay open: the system allows a process 65,530 maps, and a case has seven at most
NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)  # a file or a link in place of a folder
NO_FILE = (
    errno.ELOOP,
    errno.EISDIR,
    errno.ENXIO,
)  # a link, a folder or a pipe in place of a file
# Raised for an index or a header of an array that nobody here has written.
MALFORMED = (ValueError, KeyError, TypeError, OverflowError, RecursionError, TokenError)
Arrays = Mapping[str, np.ndarray]
Fits = Callable[[Arrays], bool]  # whether arrays can be what their key says


def key_of(*values: object) -> str:
    """Return the digest of plain values, of this format, and of the versions of the libraries that prepare cases."""
    return hashlib.sha256(json.dumps([FORMAT, _versions(), values]).encode()).hexdigest()


@functools.cache
def _versions() -> list[str]:
    return [version(name) for name in ("nibabel", "numpy", "scipy")]


def folder(path: str | None) -> Path:
    """Return the folder of data.cache_root; without one, of the user's cache. Raises UserError."""
    if path:
        return Path(path)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unet3d"
    except RuntimeError as error:
        raise UserError("data.cache_root is not set, and the user has no home; add data.cache_root=PATH") from error


def can_stay_mapped(cases: int) -> bool:
    """Return whether the maps of all cases may stay open.

    `ulimit -v` counts them as memory, though they take none.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return cases <= MAPPED and soft_limit == resource.RLIM_INFINITY


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

    def read(
        self,
        key: str,
        names: tuple[str, ...],
        make: Callable[[], Arrays],
        fits: Fits | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the arrays of these names, mapped; `make` makes them if they are missing or damaged, or do not fit.

        Raises UserError.
        """
        arrays = self._map(key, names, fits)
        if arrays is not None:
            return arrays
        with self._held(key):
            arrays = self._map(key, names, fits)  # another process may have made it meanwhile
            if arrays is None:
                self._write(key, make())
                arrays = self._map(key, names, fits)
        if arrays is None:
            raise self._problem(self.root / key, "is damaged as soon as it is written")
        return arrays

    def holds(self, key: str) -> bool:
        """Return whether all files of the key have been written."""
        with suppress(OSError):
            is_folder = stat.S_ISDIR((self.root / key).lstat().st_mode)
            return is_folder and stat.S_ISREG((self.root / key / INDEX).lstat().st_mode)
        return False

    def digest(self, key: str, name: str) -> object:
        """Return the digest of all bytes of an array's file, as it was written; the arrays have been read."""
        return self.indices[key][name]["full"]

    def room(self) -> int:
        """Return the free bytes of its disk."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def sweep(self) -> None:
        """Remove what killed processes have left unfinished; those that live hold their keys."""
        keys = [path.name for path in self.root.iterdir() if KEY.fullmatch(path.name)]
        for key in keys:
            if self.holds(key):
                continue
            with self._held(key, wait=False) as is_held:
                if is_held and not self.holds(key):
                    self._remove(key)

    def _map(self, key: str, names: tuple[str, ...], fits: Fits | None) -> dict[str, np.ndarray] | None:
        """Return the arrays; None if they are not all there as they were written."""
        try:
            with self._entry(key) as place:
                if key not in self.indices:
                    self.indices[key] = self._compared(place, names)
                arrays = {name: map_array(place, f"{name}.npy") for name in names}
        except UserError:
            raise
        except (FileNotFoundError, *MALFORMED):
            return None
        except OSError as error:
            if is_out_of_memory(error) or is_out_of_files(error):
                raise
            raise self._problem(self.root / key, f"cannot be read ({error.strerror})") from error
        if fits is not None and not fits(arrays):
            return None
        return arrays

    def _compared(self, place: int, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the index, once these files are as it says.

        Raises OSError, and ValueError and others where they are not.
        """
        with open_regular(INDEX, place) as file:
            content = file.read(LARGEST_INDEX + 1)
        if len(content) > LARGEST_INDEX:
            raise ValueError("no index is so large")
        index: dict[str, Any] = json.loads(content)
        of = "full" if self.full else "sample"
        for name in names:
            if not isinstance(index[name]["full"], str):
                raise ValueError(f"{name} has no hash")
            hashes = file_hashes([Path(f"{name}.npy")], self.full, place)
            if hashes[of] != index[name][of]:
                raise ValueError(f"{name} is not as it was written")
        return index

    def _write(self, key: str, arrays: Arrays) -> None:
        """Write the arrays of a key that is held: what is there is damaged, or left by a process that was killed."""
        self._remove(key)
        try:
            (self.root / key).mkdir(exist_ok=True)
            with self._entry(key) as place:
                index = {}
                for name, array in arrays.items():
                    with replacing_within(place, f"{name}.npy") as file:
                        np.save(file, array, allow_pickle=False)
                    index[name] = file_hashes([Path(f"{name}.npy")], True, place)
                write_index(place, index)
        except BaseException as error:
            self._remove(key)
            if isinstance(error, OSError):
                raise self._problem(self.root, f"not saved ({error.strerror})", error) from error
            raise

    def _remove(self, key: str) -> None:
        """Remove what was written for the key, its index first, and nothing behind a link."""
        self.indices.pop(key, None)
        with suppress(OSError, UserError), self._entry(key) as place:
            for name in sorted(os.listdir(place), key=lambda name: name != INDEX):
                if name == INDEX or name.endswith(".npy") or TEMPORARY.fullmatch(name):
                    with suppress(OSError):
                        os.unlink(name, dir_fd=place)
        with suppress(OSError):
            (self.root / key).rmdir()

    @contextmanager
    def _entry(self, key: str) -> Iterator[int]:
        """Yield the open folder of the key: names in it are its own, wherever its path leads meanwhile.

        Raises OSError, and UserError for a link, which may lead to files of others.
        """
        try:
            place = os.open(self.root / key, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in NO_FOLDER:
                raise self._problem(
                    self.root / key,
                    "is a link or a file, not a folder",
                    remedy="remove it",
                ) from error
            raise
        try:
            yield place
        finally:
            os.close(place)

    @contextmanager
    def _held(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Hold the key, a byte of one lock file; yields False if it is held and not to be waited for.

        The locks of a process that is killed go with it. A process that closes the file loses all of its locks: it
        holds one key at a time.
        """
        try:
            descriptor = os.open(
                self.root / LOCK,
                os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK,
                0o666,
            )
        except OSError as error:
            if error.errno in NO_FILE:
                raise self._problem(self.root / LOCK, "is not a file", remedy="remove it") from error
            raise self._problem(self.root, f"cannot be locked ({error.strerror})") from error
        with open(descriptor, "wb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise self._problem(self.root / LOCK, "is not a file", remedy="remove it")
            is_held = True
            try:
                fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
            except OSError as error:
                if wait or error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise self._problem(self.root, f"cannot be locked ({error.strerror})") from error
                is_held = False
            yield is_held

    @staticmethod
    def _problem(place: Path, what: str, error: OSError | None = None, remedy: str = "") -> UserError:
        """Return the error for the cache: where, what is wrong, and what to do."""
        remedies = ["give another folder, data.cache_root=PATH"]
        if error is not None and is_disk_full(error):
            remedy = make_room(error)
        if remedy:
            remedies.insert(0, remedy)
        return UserError(f"data.cache=disk: {place}: {what}; {', or '.join(remedies)}")


def write_index(place: int, index: Mapping[str, Any]) -> None:
    """Write the index of the open folder of a key. Raises OSError."""
    with replacing_within(place, INDEX) as file:
        file.write(json.dumps(index, indent=2).encode())


def map_array(place: int, name: str) -> np.ndarray:
    """Return the array of a file in an open folder, mapped.

    Raises OSError, and ValueError for what is no array of numbers.

    Unlike numpy.load, it knows neither archives nor pickles.
    """
    with open_regular(name, place) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is not as it was written")
        shape, is_fortran, kind = np.lib.format.read_array_header_1_0(file)
        if kind.hasobject:
            raise ValueError(f"{name} holds objects")
        return np.asarray(np.memmap(file, kind, "r", file.tell(), shape, "F" if is_fortran else "C"))
