"""The files of a data set, kept open between their scan and the reading of their voxels, and so opened once.

Header, hash and voxels then come from the same bytes. That is for up to 256 files; the rest are opened again.
"""

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import nibabel as nib

from unet3d.data import nifti
from unet3d.data.cases import Case

MAX_KEPT_OPEN = 256  # files between their scan and the reading of their voxels; others are opened again
SHARE_OF_LIMIT = 4  # and at most a quarter of the files that the process may have open


class OpenFile(NamedTuple):
    """An open NIfTI file: its checked header as an image, and the stream that its voxels are read from."""

    image: nib.Nifti1Image
    stream: BinaryIO


class ImageFiles:
    """The NIfTI files that this process has opened: their headers, and streams of those whose voxels are yet unread.

    A copy in another process is empty, and opens the files again.
    """

    def __init__(self) -> None:
        self.headers = dict[Path, nib.Nifti1Image]()  # as images without voxels
        self._streams = dict[Path, BinaryIO]()
        self._limit = 0

    def __reduce__(self) -> tuple[type["ImageFiles"], tuple[()]]:
        return ImageFiles, ()

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep files that are opened within open until their voxels are read, or until the end."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = MAX_KEPT_OPEN
        if soft_limit != resource.RLIM_INFINITY:
            self._limit = min(MAX_KEPT_OPEN, soft_limit // SHARE_OF_LIMIT)
        try:
            yield
        finally:
            self._limit = 0
            self.close()

    @contextmanager
    def scanned(self, case: Case, path: Path) -> Iterator[OpenFile]:
        """Open a file to look at its header and bytes within; it may stay open for its voxels. Raises UserError."""
        with ExitStack() as stack:
            file = self._open(case, path)
            stack.callback(file.stream.close)
            yield file
            if len(self._streams) < self._limit:
                self._streams[path] = file.stream
                stack.pop_all()  # stays open

    @contextmanager
    def opened(self, case: Case) -> Iterator[dict[Path, OpenFile]]:
        """Open the files of a case to read their voxels within, but for those still open. Raises UserError."""
        with ExitStack() as stack:
            yield {path: stack.enter_context(self.reopened(case, path)) for path in case.files}

    @contextmanager
    def reopened(self, case: Case, path: Path) -> Iterator[OpenFile]:
        """Open a file to read its voxels within, unless it is still open. Raises UserError."""
        stream = self._streams.pop(path, None)
        file = self._open(case, path) if stream is None else OpenFile(self.headers[path], stream)
        with file.stream:
            yield file

    def header(self, case: Case, path: Path) -> nib.Nifti1Image:
        """Return the header of a file as an image, as it was when the file was opened last. Raises UserError."""
        if path not in self.headers:
            self.headers[path] = nifti.open_image(case.id, path, case.affine)
        return self.headers[path]

    def close(self) -> None:
        """Close all files that are still open."""
        while self._streams:
            _, stream = self._streams.popitem()
            stream.close()

    def _open(self, case: Case, path: Path) -> OpenFile:
        stream = nifti.open_file(case.id, path)
        try:
            image = nifti.read_header(case.id, path, stream, case.affine)
        except BaseException:
            stream.close()
            raise
        self.headers[path] = image
        return OpenFile(image, stream)
