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
