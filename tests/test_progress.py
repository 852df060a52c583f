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


@pytest.fixture(autouse=True)
def lines_come_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program; other tests print none, however slow the machine is."""
    monkeypatch.setattr(progress, "FIRST_LINE", 5.0)


def lines(text: str) -> list[Line]:
    """Return the lines of counters: "reading: 1 of 4, about 0:00:06 left" as ("reading", ["1", "4", "0:00:06"])."""
    parts = [line.partition(": ") for line in text.splitlines()]
    return [(what, re.findall(r"\d+(?::\d+)*", rest)) for what, _, rest in parts]


def printed(total: int | None, seconds: list[float]) -> list[Line]:
    """Return the plain lines of a counter that advances at these times."""
    file, times = io.StringIO(), [0.0]
    counter = Counter("validation", total, Terminal(file=file, width=40), clock=lambda: times[-1])
    for now in seconds:
        times.append(now)
        counter.advance()
    counter.close()
    return lines(file.getvalue())


def test_quick_work_prints_nothing() -> None:
    assert printed(4, [1, 2, 3, 4]) == []


def test_long_work_says_how_much_is_left_now_and_then_and_not_at_its_end() -> None:
    assert printed(10, [2, 4, 6, 8, 22, 30]) == [
        ("validation", ["3", "10", "0:00:14"]),
        ("validation", ["5", "10", "0:00:22"]),
    ]
    assert printed(2, [100, 200]) == [("validation", ["1", "2", "0:01:40"])]
    assert printed(None, [6]) == [("validation", ["1", "0:00:06"])]


def test_what_is_counted_cannot_command_a_terminal(terminal: io.StringIO) -> None:
    file, times = io.StringIO(), [0.0]
    counter = Counter("a\x1b[2Jb\r:skull:", 3, Terminal(file=file, width=80), clock=lambda: times[-1])
    times.append(6)
    counter.advance()
    counter.close()
    assert lines(file.getvalue()) == [(r"a\x1b[2Jb\r:skull:", ["1", "3", "0:00:12"])]
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
    file, times = io.StringIO(), [0.0]
    counter = Counter("networks", 3, Terminal(file=file, width=80), clock=lambda: times[-1])
    for second in (1, 6, 7, 22):
        times.append(second)
        progress.beat()
    counter.close()
    assert lines(file.getvalue()) == [("networks", ["0", "3", "0:00:06"]), ("networks", ["0", "3", "0:00:22"])]
    progress.beat()  # of no counter


def test_bars_on_a_terminal_share_one_display_which_ends_with_the_last(terminal: io.StringIO) -> None:
    with progress.counting("training", 3) as outer:
        outer.advance("loss 0.5")
        for _ in progress.track("ab", "validation", 2):
            assert list(progress.parts("cd")) == ["c", "d"]
    assert outer.done == 1
    shown = terminal.getvalue()
    assert "training" in shown and "validation" in shown and "loss 0.5" in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(("is_terminal", "kind"), [(False, "xterm"), (True, "dumb")])
def test_where_the_cursor_cannot_be_moved_there_are_lines_though_colour_is_forced(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, kind: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", kind)
    file, times = io.StringIO(), [0.0]
    file.isatty = lambda: is_terminal  # type: ignore[method-assign]
    counter = Counter("validation", 2, Terminal(file=file, width=80), clock=lambda: times[-1])
    times.append(10.0)
    counter.advance()
    counter.close()
    assert not counter.has_bar and "\x1b" not in file.getvalue()
    assert lines(file.getvalue()) == [("validation", ["1", "2", "0:00:10"])]


def test_interrupted_work_removes_its_bar(terminal: io.StringIO) -> None:
    with pytest.raises(KeyboardInterrupt), progress.counting("searching"):
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[?25h")
    assert list(progress.parts("ab")) == ["a", "b"], "with nothing open they are shares of nothing"


def test_a_part_that_lasts_says_how_much_is_left_of_all() -> None:
    file, times = io.StringIO(), [0.0]
    counter = Counter("validation", 2, Terminal(file=file, width=40), clock=lambda: times[-1])
    for share in progress.parts([0.25, 0.5, 0.75, 1.0]):
        times.append(20 * share)
    assert lines(file.getvalue()) == [("validation", ["0", "2", "0:00:35"]), ("validation", ["0", "2", "0:00:20"])]
    counter.close()
    assert [*progress.parts("ab")] == ["a", "b"]  # counts nothing


def test_a_part_that_lasts_says_how_much_of_it_is_done() -> None:
    file, times = io.StringIO(), [0.0]
    counter = Counter("predicting cases", 3, Terminal(file=file, width=80), clock=lambda: times[-1])
    counter.advance()
    for _ in progress.parts(range(0, 10, 4), "windows", 10):
        times.append(times[-1] + 20)
    counter.close()
    shown = [numbers[:4] for _, numbers in lines(file.getvalue())]
    assert shown == [["1", "3", done, "10"] for done in ("4", "8", "10")] and "windows" in file.getvalue()


def test_a_part_moves_the_bar(terminal: io.StringIO) -> None:
    with progress.counting("validation", 2) as counter:
        list(progress.parts("ab"))
        with progress.counting("redraws the display"):
            assert "1/2" in terminal.getvalue() and counter.done == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_a_file_gets_does_not_go_to_the_terminal(
    stream: str, terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.counting("predicting", 1):
        print("out/a.nii.gz", file=getattr(sys, stream))
    out, err = capsys.readouterr()
    assert (out if stream == "stdout" else err) == "out/a.nii.gz\n" and "a.nii.gz" not in terminal.getvalue()


def test_a_bar_needs_no_standard_streams(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with progress.counting("predicting", 1) as counter:
        assert counter.has_bar


def test_a_validation_that_fails_removes_its_bar_before_the_error_is_shown(terminal: io.StringIO) -> None:
    def fail(_: Case) -> None:
        raise RuntimeError

    shown = ""
    try:
        [*evaluate(Mock(), [Case("a", (), None)], fail, False, "validation", nothing)]
    except RuntimeError:
        shown = terminal.getvalue()
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


# --- what shows progress


def print_each_part() -> None:
    """Each part that is finished is a line."""
    progress.FIRST_LINE = progress.BETWEEN_LINES = -1


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder; beside it, in `err`, what it printed."""
    place = tmp_path_factory.mktemp("watched")
    cases = ["data.val_fraction=0.5", "data.sparse=[3,3,3]", "data.intensity=ct"]
    done = train(place, *TINY, *cases, "hydra.run.dir=run", hook=print_each_part)
    assert done.code == 0, done.err
    return place / "run"


def counts(text: str) -> list[list[str]]:
    """Return what the counters of a text count, in turn, as ["1 of 4", "2 of 4"]."""
    turns = groupby(lines(text), key=lambda line: line[0])
    return [[" of ".join(numbers[:2]) for _, numbers in turn] for _, turn in turns]


def test_a_run_shows_how_its_cases_are_prepared_and_validated(watched: Path) -> None:
    shown = counts((watched.parent / "err").read_text())
    of_each_case = [f"{done} of 4" for done in (1, 2, 3)]
    assert shown[:3] == [of_each_case] * 3, "they are generated, checked, read"
    assert shown[3] == ["1 of 2"], "slices are chosen"
    validated = [*chain(*shown[4:])]
    assert "0 of 2" in validated, "within the first volume"
    assert validated.count("1 of 2") >= 2


def test_the_commands_show_progress_beside_what_they_print(
    watched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", -1)
    monkeypatch.setattr(progress, "BETWEEN_LINES", -1)
    checkpoint, root = watched / "checkpoints" / "last.pt", f"data.root={watched.parent / 'data' / 'phantom'}"
    for name in "ab":
        nib.save(nib.Nifti1Image(np.zeros((9, 9, 20), np.float32), np.eye(4)), tmp_path / f"{name}.nii")
    assert face("predict", checkpoint, tmp_path / "a.nii", tmp_path / "b.nii", "-o", tmp_path / "made") == 0
    shown = capsys.readouterr()
    *maps, summary = shown.out.splitlines()
    assert maps == [str(tmp_path / "made" / f"{name}.nii.gz") for name in "ab"] and "2" in summary
    lines = [line for line in shown.err.splitlines() if not line.startswith("warning: ")]  # of images unlike training
    (predicted,) = counts("\n".join(lines))
    assert {*predicted} == {"0 of 2", "1 of 2"}
    assert face("score", checkpoint, *TINY, root, "data.val_fraction=0.5", "-o", tmp_path / "scores") == 0
    assert "1 of 2" in counts(capsys.readouterr().err)[-1]
    assert face("check-data", *TINY, root) == 0
    assert counts(capsys.readouterr().err) == [[f"{done} of 4" for done in (1, 2, 3)]]
