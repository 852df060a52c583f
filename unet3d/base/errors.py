"""Foreseen ends of a run, each with the exit code that scripts rely on."""

import errno
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def escaped(text: object, keep: str = "") -> str:
    """Escape every character that is not printable, as `\\x1b`, except those in `keep`."""
    shown = str(text)
    escapes = {}
    for letter in set(shown):
        if not letter.isprintable() and letter not in keep:
            escapes[ord(letter)] = letter.encode("unicode_escape").decode()
    return shown.translate(escapes)


def warn(text: object) -> None:
    """Print one line on stderr, whatever it quotes."""
    print(f"warning: {escaped(text)}", file=sys.stderr, flush=True)


def listed(lines: Sequence[str], most: int = 1000) -> list[str]:
    """Return the first lines, and one that says how many more there are."""
    shown = list(lines[:most])
    if len(lines) > most:
        shown.append(f"and {len(lines) - most:,} more")
    return shown


class ForeseenError(BaseException):
    """An end that was foreseen. Its text may quote a stranger's file, so it is escaped; it may have several lines."""

    def __str__(self) -> str:
        return escaped(super().__str__(), keep="\n")


class UserError(ForeseenError, ValueError):
    """Config or data that the user can correct. The message says what is wrong, where, and what to do."""

    exit_code = 2


class CheckpointError(ForeseenError, ValueError):
    """A checkpoint that cannot be read or does not fit."""

    exit_code = 3


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is cut short or changed on disk; an older one may serve."""


class MissingCheckpoint(CheckpointError):
    """A checkpoint that is not there; an older one may serve."""


class NotSaved(UserError):
    """A file that could not be written: the disk is full, or the folder cannot be written to."""


class NonFiniteLoss(ForeseenError, ArithmeticError):
    """The loss became NaN or infinite; the weights are those before the step. `batches` are the step's."""

    exit_code = 4

    def __init__(self, message: str, batches: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.batches = batches


class NonFinitePrediction(UserError):
    """A network's outputs for an image are NaN or infinite: no class would be the likeliest."""

    exit_code = NonFiniteLoss.exit_code


class LoaderError(ForeseenError, RuntimeError):
    """A process that prepares batches was killed, or hangs."""

    exit_code = 1


class RankLost(ForeseenError, Exception):
    """Another process of the same run ended, or does not answer. The exit code is its cause's, where known."""

    exit_code = 1

    def __init__(self, message: str, code: int = exit_code) -> None:
        super().__init__(message)
        self.exit_code = code


class OutOfMemory(ForeseenError, Exception):
    """Memory ran out. The message says when, what held it, and what would need less."""

    exit_code = 5


class Preempted(ForeseenError):
    """A signal asked the run to stop. Not an Exception, like KeyboardInterrupt: no handler of errors may swallow it."""

    exit_code = 75  # EX_TEMPFAIL: retryable


NO_MEMORY = (  # regular expressions
    "can't allocate",  # the host's allocator
    "Cannot allocate memory",  # the system
    "bad_alloc",  # C++
    "failed to map segment",  # a library while it is loaded
    "could not create a primitive(?! descriptor)",  # oneDNN; it cannot describe what it does not support
    "CUDA error: out of memory",  # the context, a kernel's code, page-locked memory
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # no memory, and the driver does not say who has it: MIG, vGPU, WSL
    "ALLOC_FAILED",  # cuDNN's and cuBLAS's handles
    "unable to find an engine",  # cuDNN, where no convolution's workspace fits
)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out.

    torch raises OutOfMemoryError for a device's tensors; for the host and for libraries there are many other errors.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):  # its text names a file, whatever that is called
        return error.errno == errno.ENOMEM
    text = str(error)
    if not isinstance(error, (RuntimeError, ImportError)):
        return False
    return "OutOfMemoryError" in type(error).__name__ or any(re.search(word, text) for word in NO_MEMORY)


def is_disk_full(error: BaseException) -> bool:
    """Return whether the disk, a quota or the largest size of a file does not allow more."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


def is_out_of_files(error: BaseException) -> bool:
    """Return whether the process has as many open files as it may have."""
    if isinstance(error, OSError):  # its text names a file, whatever that is called
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, RuntimeError) and "Too many open files" in str(error)


def file_limit() -> str:
    """Return a line about `ulimit -n` for the error of files that could not be opened."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"ulimit -n allows {limit} open files: raise it"


def make_room(error: OSError) -> str:
    """Return the remedy for a full disk, or for a file that may not grow."""
    if error.errno == errno.EFBIG:
        return "ulimit -f allows no larger file: raise it"
    return "make room"


def not_saved(path: object, error: OSError) -> NotSaved:
    """Return the error to raise for a file that could not be written."""
    remedy = f"; {make_room(error)}" if is_disk_full(error) else ""
    return NotSaved(f"{path}: not saved ({error.strerror}){remedy}")


@contextmanager
def saving(path: object) -> Iterator[None]:
    """Raise NotSaved where the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise not_saved(path, error) from error


def reason(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    name = type(error).__name__
    text = escaped(" ".join(str(error).split()))
    return f"{name}: {text}" if text else name
