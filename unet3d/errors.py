"""What can end a run in a foreseen way, each with the exit code that scripts rely on."""


class UserError(ValueError):
    """Config or data that the user can mend. The message says what is wrong, where, and what to do."""

    exit_code = 2


class SnapshotError(ValueError):
    """A snapshot that cannot be read or does not fit."""

    exit_code = 3


class NonFiniteLoss(ArithmeticError):
    """The loss became NaN or infinite; the weights are those before the step."""

    exit_code = 4


class LoaderError(RuntimeError):
    """A process that prepares batches was killed, or hangs."""

    exit_code = 1


class OutOfMemory(Exception):
    """Memory ran out: exit code 5. The message says when, who held it, and what would need less."""

    exit_code = 5


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises OutOfMemoryError for a device, and a plain RuntimeError for the host."""
    return (
        isinstance(error, MemoryError) or "OutOfMemoryError" in type(error).__name__ or "can't allocate" in str(error)
    )
