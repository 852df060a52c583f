"""Foreseen ends of a run, each with the exit code that scripts rely on."""

import errno
import re
from collections.abc import Sequence
from typing import Any

# Control codes, which command a terminal; line separators; marks that reorder text; surrogates, which UTF-8 lacks.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object, keep: str = "") -> str:
    """Text for a terminal or a page, whoever wrote it: UNPRINTABLE as `\\x1b`, but for the characters in `keep`."""
    return UNPRINTABLE.sub(lambda c: c[0] if c[0] in keep else c[0].encode("unicode_escape").decode(), str(text))


class ForeseenError(BaseException):
    """Its text may quote a stranger's file: it is escaped, and may have several lines."""

    def __str__(self) -> str:
        return escaped(super().__str__(), keep="\n")


class UserError(ForeseenError, ValueError):
    """Config or data that the user can correct. The message says what is wrong, where, and what to do."""

    exit_code = 2


class SnapshotError(ForeseenError, ValueError):
    """A snapshot that cannot be read or does not fit."""

    exit_code = 3


class DamagedSnapshot(SnapshotError):
    """A snapshot that is missing, cut short or changed on disk; an older one may serve."""


class NotSaved(UserError):
    """A file that could not be written: the disk is full, or the folder cannot be written to."""


class NonFiniteLoss(ForeseenError, ArithmeticError):
    """The loss became NaN or infinite; the weights are those before the step. `batches` are the step's."""

    exit_code = 4

    def __init__(self, message: str, batches: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.batches = batches


class LoaderError(ForeseenError, RuntimeError):
    """A process that prepares batches was killed, or hangs."""

    exit_code = 1


class OutOfMemory(ForeseenError, Exception):
    """Memory ran out. The message says when, what held it, and what would need less."""

    exit_code = 5


class Preempted(ForeseenError):
    """A signal asked the run to stop. Not an Exception, like KeyboardInterrupt: no handler of errors may swallow it."""

    exit_code = 75  # EX_TEMPFAIL: retryable


NO_MEMORY = (
    "can't allocate",  # the host's allocator
    "could not create a primitive",  # oneDNN
    "CUDA error: out of memory",  # the context, a kernel's code, page-locked memory
    "ALLOC_FAILED",  # cuDNN's and cuBLAS's handles
    "unable to find an engine",  # cuDNN, where no convolution's workspace fits
)


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises OutOfMemoryError for a device's tensors, and other RuntimeErrors for the host and for libraries."""
    is_named = "OutOfMemoryError" in type(error).__name__ or any(word in str(error) for word in NO_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_named)


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk, the user's share of it or the largest size of a file does not allow more."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def not_saved(path: object, error: OSError) -> NotSaved:
    """The error to raise for a file that could not be written."""
    return NotSaved(f"{path}: not saved ({error.strerror}){'; make room' * is_disk_full(error)}")


def reason(error: BaseException) -> str:
    """What happened, in one line."""
    text = escaped(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
