"""Progress: a bar on a terminal, plain lines elsewhere, nothing for what is quick."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console as Terminal

from unet3d import progress
from unet3d.progress import Counter


def printed(total: int | None, seconds: list[float]) -> list[str]:
    """The plain lines of a counter that advances at these times."""
    file, times = io.StringIO(), [0.0]
    counter = Counter("validation", total, Terminal(file=file, width=40), clock=lambda: times[-1])
    for now in seconds:
        times.append(now)
        counter.advance()
    counter.close()
    return file.getvalue().splitlines()


def test_quick_work_prints_nothing() -> None:
    assert printed(4, [1, 2, 3, 4]) == []


def test_long_work_says_how_much_is_left_now_and_then_and_not_at_its_end() -> None:
    assert printed(10, [2, 4, 6, 8, 22, 30]) == [
        "validation: 3 of 10, about 14 s left",
        "validation: 5 of 10, about 22 s left",
    ]
    assert printed(2, [100, 200]) == ["validation: 1 of 2, about 0:01:40 left"]
    assert printed(None, [6]) == ["validation: 1 done in 6 s"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    file = io.StringIO()
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=file, force_terminal=True, width=80))
    yield file


def test_bars_on_a_terminal_share_one_display_which_ends_with_the_last(terminal: io.StringIO) -> None:
    with progress.counting("training", 3) as outer:
        outer.advance("loss 0.5")
        for _ in progress.track("ab", "validation", 2):
            progress.advance()
    assert outer.done == 1
    shown = terminal.getvalue()
    assert "training" in shown and "validation" in shown and "loss 0.5" in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


def test_an_interrupted_piece_of_work_takes_its_bar_away(terminal: io.StringIO) -> None:
    with pytest.raises(KeyboardInterrupt), progress.counting("searching"):
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[?25h")
    progress.advance()  # counts nothing
