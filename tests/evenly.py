"""Segments as torch itself would cut them: of equal length, the remainder in the last."""


def evenly(stages: int, segments: int) -> tuple[int, ...]:
    """The first stage of each segment; () for no segments."""
    return tuple(stages // segments * i for i in range(segments)) if segments else ()
