"""Progress: a bar on a terminal, plain lines elsewhere, nothing for what is quick."""

import io
import re
import sys
from itertools import chain, groupby
from pathlib import Path
from unittest.mock import Mock

import nibabel as nib
import numpy as np
import pytest
from guards import nothing
from promises import promise
from rich.console import Console as Terminal
from training import TINY, face, train

from unet3d.base import progress
from unet3d.base.progress import Counter
from unet3d.data.cases import Case
from unet3d.run.validation import evaluate

Line = tuple[str, list[str]]  # what is counted, and the numbers behind it
SHOWN_AGAIN = "\x1b[?25h"  # the cursor, once a bar is removed


@pytest.fixture(autouse=True)
def lines_come_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program; other tests print none, however slow the machine is."""
    monkeypatch.setattr(progress, "FIRST_LINE", 5.0)


def lines(text: str) -> list[Line]:
    """Return the lines of counters: "reading: 1 of 4, about 0:00:06 left" as ("reading", ["1", "4", "0:00:06"])."""
    parts = [line.partition(": ") for line in text.splitlines()]
    return [(what, re.findall(r"\d+(?::\d+)*", rest)) for what, _, rest in parts]


class Watched:
    """A counter with a clock that a test sets, and what it prints."""

    def __init__(self, total: int | None, what: str = "validation", is_terminal: bool = False) -> None:
        self.file, self.now = io.StringIO(), 0.0
        self.file.isatty = lambda: is_terminal  # type: ignore[method-assign]
        self.counter = Counter(what, total, Terminal(file=self.file, width=80), clock=lambda: self.now)

    def advance_at(self, *seconds: float) -> None:
        for self.now in seconds:
            self.counter.advance()

    @property
    def printed(self) -> list[list[str]]:
        """The numbers of each line, once the counter is closed."""
        self.counter.close()
        return [numbers for _, numbers in lines(self.file.getvalue())]


@pytest.mark.parametrize(
    ("total", "seconds", "printed"),
    [
        (4, [1, 2, 3, 4], []),
        (10, [2, 4, 6, 8, 22, 30], [["3", "10", "0:00:14"], ["5", "10", "0:00:22"]]),
        (2, [100, 200], [["1", "2", "0:01:40"]]),
        (None, [6], [["1", "0:00:06"]]),
    ],
    ids=["quick", "long", "two", "without an end"],
)
def test_long_work_says_how_much_is_left_now_and_then_and_not_at_its_end(
    total: int | None, seconds: list[float], printed: list[list[str]]
) -> None:
    watched = Watched(total)
    watched.advance_at(*seconds)
    assert watched.printed == printed


def test_what_is_counted_cannot_command_a_terminal(terminal: io.StringIO) -> None:
    watched = Watched(3, "a\x1b[2Jb\r:skull:")
    watched.advance_at(6)
    assert lines(watched.file.getvalue()) == [(r"a\x1b[2Jb\r:skull:", ["1", "3", "0:00:12"])]
    watched.counter.close()
    with progress.counting("a\x1b[2Jb", 3) as bar:
        bar.advance("c\x1b[2Jd")
        with progress.counting("more"):  # draws all bars
            pass
    assert "\x1b[2J" not in terminal.getvalue() and r"c\x1b[2Jd" in terminal.getvalue()


@promise(
    "Config",
    "a simulated step that takes minutes, as of thousands of tiles",
    "a line now and then says that it goes on",
)
def test_one_part_that_takes_long_is_said_to_go_on() -> None:
    watched = Watched(3)
    for watched.now in (1, 6, 7, 22):
        progress.beat()
    assert watched.printed == [["0", "3", "0:00:06"], ["0", "3", "0:00:22"]]
    progress.beat()  # of no counter


def test_a_part_that_lasts_says_how_much_is_left_of_all_and_how_much_of_it_is_done() -> None:
    watched = Watched(2)
    for share in progress.parts([0.25, 0.5, 0.75, 1.0]):
        watched.now = 20 * share
    assert watched.printed == [["0", "2", "0:00:35"], ["0", "2", "0:00:20"]]
    watched = Watched(3)
    watched.counter.advance()
    for _ in progress.parts(range(0, 10, 4), "windows", 10):
        watched.now += 20
    assert [numbers[:4] for numbers in watched.printed] == [["1", "3", done, "10"] for done in ("4", "8", "10")]
    assert [*progress.parts("ab")] == ["a", "b"], "of no counter"


@pytest.mark.parametrize(("is_terminal", "kind"), [(False, "xterm"), (True, "dumb")])
def test_where_the_cursor_cannot_be_moved_there_are_lines_though_colour_is_forced(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, kind: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", kind)
    watched = Watched(2, is_terminal=is_terminal)
    watched.advance_at(10)
    assert not watched.counter.has_bar and "\x1b" not in watched.file.getvalue()
    assert watched.printed == [["1", "2", "0:00:10"]]


def test_bars_on_a_terminal_share_one_display_which_ends_with_the_last(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.counting("training", 3) as outer:
        outer.advance("loss 0.5")
        for _ in progress.track("ab", "validation", 2):
            assert list(progress.parts("cd")) == ["c", "d"]
    assert outer.done == 1
    for part in ("training", "validation", "loss 0.5"):
        assert part in terminal.getvalue()
    with progress.counting("validation", 7) as counter:
        list(progress.parts("ab"))
        with progress.counting("redraws the display"):
            assert "1/7" in terminal.getvalue() and counter.done == 0, "a part moves the bar"
    assert terminal.getvalue().endswith(SHOWN_AGAIN)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(KeyboardInterrupt), progress.counting("searching") as counter:
        assert counter.has_bar, "without standard streams, too"
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith(SHOWN_AGAIN)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_a_file_gets_does_not_go_to_the_terminal(
    stream: str, terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.counting("predicting", 1):
        print("out/a.nii.gz", file=getattr(sys, stream))
    assert getattr(capsys.readouterr(), stream[3:]) == "out/a.nii.gz\n" and "a.nii.gz" not in terminal.getvalue()


def test_a_validation_that_fails_removes_its_bar_before_the_error_is_shown(terminal: io.StringIO) -> None:
    shown = ""
    try:
        [*evaluate(Mock(), [Case("a", (), None)], Mock(side_effect=RuntimeError), False, "validation", nothing)]
    except RuntimeError:
        shown = terminal.getvalue()  # while the error still holds the frames it left
    assert "validation" in shown and shown.endswith(SHOWN_AGAIN)


# --- what shows progress


def print_each_part() -> None:
    """Each part that is finished is a line."""
    progress.FIRST_LINE = progress.BETWEEN_LINES = -1


def counts(text: str) -> list[list[str]]:
    """Return what the counters of a text count, in turn, as ["1 of 4", "2 of 4"]; without warnings."""
    counted = [line for line in lines(text) if line[0] != "warning"]
    turns = groupby(counted, key=lambda line: line[0])
    return [[" of ".join(numbers[:2]) for _, numbers in turn] for _, turn in turns]


OF_EACH_CASE = [f"{done} of 4" for done in (1, 2, 3)]


def test_a_run_shows_how_its_cases_are_prepared_and_validated(tmp_path: Path) -> None:
    cases = ["data.val_fraction=0.5", "data.sparse=[3,3,3]", "data.intensity=ct"]
    done = train(tmp_path, *TINY, *cases, "hydra.run.dir=run", hook=print_each_part)
    assert done.code == 0, done.err
    shown = counts(done.err)
    assert shown[:3] == [OF_EACH_CASE] * 3, "they are generated, checked, read"
    assert shown[3] == ["1 of 2"], "slices are chosen"
    validated = [*chain(*shown[4:])]
    assert "0 of 2" in validated, "within the first volume"
    assert validated.count("1 of 2") >= 2


def test_the_commands_show_progress_beside_what_they_print(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", -1)
    monkeypatch.setattr(progress, "BETWEEN_LINES", -1)
    for name in "ab":
        nib.save(nib.Nifti1Image(np.zeros((9, 9, 20), np.float32), np.eye(4)), tmp_path / f"{name}.nii")
    assert (
        face(
            "predict",
            finished / "checkpoints" / "last.pt",
            tmp_path / "a.nii",
            tmp_path / "b.nii",
            "-o",
            tmp_path / "made",
        )
        == 0
    )
    shown = capsys.readouterr()
    *maps, summary = shown.out.splitlines()
    assert maps == [str(tmp_path / "made" / f"{name}.nii.gz") for name in "ab"] and "2" in summary
    (predicted,) = counts(shown.err)
    assert {*predicted} == {"0 of 2", "1 of 2"}
    assert face("check-data", *TINY, f"data.root={finished.parent / 'data' / 'phantom'}") == 0
    assert counts(capsys.readouterr().err) == [OF_EACH_CASE]
