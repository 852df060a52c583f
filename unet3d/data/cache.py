"""Hashes of files, and a cache on disk of arrays that outlive a run, read through memory maps: a file for each key.

A key is a digest of all that its arrays depend on, so nothing here can be out of date. A file is written whole or not
at all; two processes that need the same one at once may both write it, with the same bytes. Files are not code: their
bytes are mapped as numbers. Any may be removed at any time: what is missing is computed anew.
"""

import hashlib
import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from unet3d.base.errors import UserError, is_disk_full, is_out_of_files, is_out_of_memory, make_room
from unet3d.base.files import open_regular, remove_abandoned, replacing
from unet3d.data.cases import Case
from unet3d.data.nifti import is_compressed, problem

BLOCK = 2**12  # bytes of a block that is sampled
BLOCKS = 16  # blocks that are sampled of a file: all of its bytes up to 64 KiB
VERSIONS = [version(name) for name in ("nibabel", "numpy", "scipy")]  # Versions of the libraries that prepare cases.
FORMAT = 4  # raise it with every change to what is computed for a key, or to how it is written
ALIGNMENT = 64  # bytes that an array's place in its file is a multiple of; its shape is in as many before it
DIGEST = hashlib.sha256().digest_size  # bytes; a file begins with two: of a sample of what follows, and of all of it
MAPPED = 30_000  # cases whose maps stay open: the system allows a process 65,530 maps, and a case has two at most
# Of some files: `sample`, hashes of a part of their bytes; `full`, of all, if asked for; and `times` (ns since 1970) of
# those that their sample does not settle.
Hashes = dict[str, list[Any]]
Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int | None, ...]]  # Shapes of a file's arrays in its order; None: any length.
KINDS = {
    "image": np.float32,
    "label": np.int16,
    "centres": np.int32,  # Centres that patches may have: the number of a class, from 0, and a voxel's place.
    "replaced": np.int64,  # voxels that were not finite
    "digest": np.uint8,  # Digest of the image: equal ones are twins.
    "voxels": np.float32,
}


def sample_digest(stream: IO[bytes], start: int = 0) -> bytes:
    """Return the digest of an open file's size, and of BLOCKS blocks evenly spread over it from byte `start` on."""
    size = stream.seek(0, os.SEEK_END)
    digest = hashlib.sha256(b"%d" % size)
    for place in np.linspace(start, max(size - BLOCK, start), BLOCKS, dtype=int):
        stream.seek(place)
        digest.update(stream.read(BLOCK))
    return digest.digest()


def file_hashes(paths: Iterable[Path], full: bool = False) -> Hashes:
    """Return the hashes of several files. Raises OSError, and ValueError for what is no file."""
    found: Hashes = {"sample": [], "full": [], "times": []}
    for path in paths:
        with open_regular(path) as stream:
            found["sample"].append(sample_digest(stream).hex())
            if full:
                stream.seek(0)
                found["full"].append(hashlib.file_digest(stream, "sha256").hexdigest())
            status = os.fstat(stream.fileno())
            # A gzip file ends with the checksum of its whole content, so its last block settles it.
            if status.st_size > BLOCK * BLOCKS and not is_compressed(path.name):
                found["times"].append(status.st_mtime_ns)
    return found


def have_changed(case: Case, before: Mapping[str, Hashes]) -> bool:
    """Return whether the files of a case are others than those with these hashes. Raises UserError."""
    try:
        now = file_hashes(case.files)
    except (OSError, ValueError) as error:
        raise problem(case.id, case.images[0], f"cannot be read, or its label map ({error})") from error
    return any(now[kind] != [*chain(*(part[kind] for part in before.values()))] for kind in ("sample", "times"))


def key_of(*values: object) -> str:
    """Return the digest of plain values, of this format and byte order, and of the libraries that prepare cases."""
    return hashlib.sha256(json.dumps([FORMAT, sys.byteorder, VERSIONS, values]).encode()).hexdigest()


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
    """The folder `root`, which several processes may use at once."""

    root: Path
    full: bool  # compare all bytes of a file with their digest, not a sample
    compared: set[str] = field(default_factory=set, repr=False)  # keys whose files are as they were written

    def __post_init__(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what the data set holds
        except OSError as error:
            raise self._problem(f"cannot be made ({error.strerror})") from error

    def read(self, key: str, shapes: Shapes, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of these names, mapped; `make` makes them if they are missing, damaged or of other shapes.

        Raises UserError.
        """
        arrays = self._map(key, shapes)
        if arrays is None:
            self._write(key, make(), shapes)
            arrays = self._map(key, shapes)
        if arrays is None:
            raise self._problem(f"{key} is damaged as soon as it is written")
        return arrays

    def holds(self, key: str) -> bool:
        """Return whether the file of the key has been written."""
        path = self._path(key)
        return os.path.isfile(path) and not os.path.islink(path)

    def room(self) -> int:
        """Return the free bytes of its disk, once what killed processes have left is removed."""
        remove_abandoned(self.root.absolute())
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.arrays"

    def _map(self, key: str, shapes: Shapes) -> Arrays | None:
        """Return the arrays; None if they are not there as they were written, or have other shapes."""
        try:
            with open_regular(self._path(key), follow=False) as file:
                if key not in self.compared:
                    self._compare(file)
                arrays = _mapped(file, shapes)
        except (FileNotFoundError, ValueError, TypeError, OverflowError):
            return None
        except OSError as error:
            if is_out_of_memory(error) or is_out_of_files(error):
                raise
            raise self._problem(f"{key} cannot be read ({error.strerror})") from error
        self.compared.add(key)
        return arrays

    def _compare(self, file: IO[bytes]) -> None:
        """Raise ValueError where the bytes of a file are not as its digests say."""
        file.seek(DIGEST * self.full)
        if file.read(DIGEST) != _digest(file, self.full):
            raise ValueError("it is not as it was written")

    def _write(self, key: str, arrays: Arrays, shapes: Shapes) -> None:
        """Write the arrays of a key in one move: what is there is damaged."""
        self.compared.discard(key)
        try:
            with replacing(self._path(key)) as file:
                file.seek(2 * DIGEST)
                for name in shapes:
                    write_array(file, np.asarray(arrays[name], KINDS[name], order="C"))
                digests = _digest(file, full=False) + _digest(file, full=True)
                file.seek(0)
                file.write(digests)
        except OSError as error:
            raise self._problem(f"not saved ({error.strerror})", error) from error

    def _problem(self, what: str, error: OSError | None = None) -> UserError:
        """Return the error for the cache: where, what is wrong, and what to do."""
        remedies = ["give another folder, data.cache_root=PATH"]
        if error is not None and is_disk_full(error):
            remedies.insert(0, make_room(error))
        return UserError(f"data.cache=disk: {self.root}: {what}; {', or '.join(remedies)}")


def _digest(file: IO[bytes], full: bool) -> bytes:
    """Return the digest of what follows the digests of a file: of all of it, or of its size and some blocks."""
    if not full:
        return sample_digest(file, start=2 * DIGEST)
    file.seek(2 * DIGEST)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


def write_array(file: IO[bytes], array: np.ndarray) -> None:
    """Write an array at the end of a file, behind its shape."""
    shape = np.array(array.shape, np.int64).tobytes()
    file.write(shape.ljust(ALIGNMENT, b"\0"))
    file.write(array.data)
    file.write(bytes(-array.nbytes % ALIGNMENT))


def _mapped(file: IO[bytes], shapes: Shapes) -> Arrays:
    """Return the arrays of an open file, mapped. Raises OSError, and ValueError, TypeError where they do not fit."""
    content = np.memmap(file, np.uint8, "r")
    arrays = dict[str, np.ndarray]()
    place = 2 * DIGEST
    for name, wanted in shapes.items():
        file.seek(place)  # not by the map, which would keep what is around a shape in memory
        shape = np.frombuffer(file.read(ALIGNMENT), np.int64, len(wanted)).tolist()
        if any(length not in (size, None) for length, size in zip(wanted, shape, strict=True)):
            raise ValueError(f"{name} has the shape {shape}")
        arrays[name] = np.ndarray(shape, KINDS[name], content, place + ALIGNMENT)
        size = arrays[name].nbytes
        place += ALIGNMENT + size + -size % ALIGNMENT
    return arrays
