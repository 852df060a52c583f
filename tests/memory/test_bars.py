"""The bar that shows how far a prediction is."""

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console as Terminal
from training import PLAIN

from unet3d.base import progress
from unet3d.base.errors import UserError
from unet3d.cli import memory_answers
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import remedies as search_of_ways
from unet3d.memory.prediction import preflight
from unet3d.memory.remedies import oom_suggestions

WORDS = [
    *("model=unet_tiny", "model.features=[8]", "data.patch=[4,16,16]", "batch=2", "dry_run=true"),
    "model.norm=none",
    *("model.in_channels=1", "model.classes=3", *PLAIN),
]
COLOUR = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
BAR = re.compile(r"(\S[^\r\n]*?) +━+ +0/\d+")  # what is counted, as a bar begins


def config(*overrides: str) -> Config:
    return compose.compose([*WORDS, *overrides])


def refused(*overrides: str) -> None:
    asked = config(*overrides)
    with pytest.raises(UserError, match="budget="):
        preflight(asked, asked.model)


def out_of_memory() -> None:
    list(oom_suggestions(config(), config().model))


def choose_segments() -> None:
    asked = config("ckpt=3", "model.features=[8,8]")
    preflight(asked, asked.model)


LONG: dict[str, tuple[Callable[[], object], int]] = {  # and how many bars, at least
    "memory": (lambda: memory_answers.print_explanation([*WORDS, "seed=1"], half=False, out=None), 1),
    "peaks": (lambda: memory_answers.print_peaks([[*WORDS, "batch=1"], [*WORDS, "batch=2"]], False, None), 1),
    "fit": (lambda: memory_answers.print_fit([*WORDS, "budget=0.2MiB"]), 1),
    "segments": (choose_segments, 2),
    "out of memory": (out_of_memory, 1),
    "budget": (lambda: refused("budget=0.04MiB"), 2),
}


@pytest.mark.parametrize("name", LONG)
def test_what_may_last_shows_a_bar_and_prints_the_same(
    name: str, terminal: io.StringIO, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_of_ways, "WITH_BUDGET", ())
    monkeypatch.setattr(search_of_ways, "PLANS", ())  # which take most of the time
    work, bars = LONG[name]
    work()
    printed, shown = capsys.readouterr().out, terminal.getvalue()
    assert len({*BAR.findall(COLOUR.sub("", shown))}) >= bars
    assert not any(line and line in shown for line in printed.splitlines()), "results are no part of the display"
    assert shown.endswith("\x1b[?25h"), "the cursor is back, also where a refusal ends the work"
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=io.StringIO()))
    work()
    assert capsys.readouterr().out == printed
