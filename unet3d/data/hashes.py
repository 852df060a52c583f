"""Hashes of files, by which a resumed run and the cache on disk know their data again."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unet3d.base.files import open_regular
from unet3d.data import nifti
from unet3d.data.cases import Case

BLOCK = 2**12  # bytes of a block that is sampled
BLOCKS = 16  # blocks that are sampled of a file: all of its bytes up to 64 KiB
Hashes = dict[str, Any]  # `sample`, `full` or None, and `times`


class FileHasher:
    """Hashes several open files as if they were one: a sample of their bytes and, if `full`, all of them."""

    def __init__(self, full: bool) -> None:
        self._sample = hashlib.sha256()
        self._whole = hashlib.sha256() if full else None
        self._times = list[int]()

    def add(self, stream: BinaryIO, name: str) -> None:
        """Take in the next file, open at any place, of this name. Raises OSError."""
        status = os.fstat(stream.fileno())
        size = status.st_size
        self._sample.update(b"%d" % size)
        for start in np.linspace(0, max(size - BLOCK, 0), BLOCKS, dtype=int):
            stream.seek(start)
            self._sample.update(stream.read(BLOCK))
        if self._whole is not None:
            stream.seek(0)
            self._whole.update(hashlib.file_digest(stream, "sha256").digest())  # type: ignore[arg-type]
        # A gzip file ends with the checksum of its whole content, so its last block settles it.
        if size > BLOCK * BLOCKS and not nifti.is_compressed(name):
            self._times.append(status.st_mtime_ns)

    def hashes(self) -> Hashes:
        """Return `sample`, `full` or None, and `times` (ns since 1970) of files that their sample does not settle."""
        whole = None if self._whole is None else self._whole.hexdigest()
        return {"sample": self._sample.hexdigest(), "full": whole, "times": self._times}


def file_hashes(paths: Sequence[Path], full: bool, folder: int | None = None) -> Hashes:
    """Return the hashes of several files as if they were one, in the open `folder` if one is given.

    Raises OSError, and ValueError for what is no file.
    """
    hasher = FileHasher(full)
    for path in paths:
        with open_regular(path, folder) as stream:
            hasher.add(stream, path.name)
    return hasher.hashes()


def sampled_hashes(case: Case) -> dict[str, Hashes]:
    """Return the hashes of samples of the case's images, and of its label map. Raises UserError."""
    labels = () if case.label is None else (case.label,)
    try:
        return {
            "images": file_hashes(case.images, full=False),
            "labels": file_hashes(labels, full=False),
        }
    except (OSError, ValueError) as error:
        raise nifti.problem(case.id, case.images[0], f"cannot be read, or its label map ({error})") from error
