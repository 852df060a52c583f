"""`python -m unet3d memory` as a user runs it: where the memory of a step goes, what fits, and what is a mistake."""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from promises import promise
from rich.console import Console as Terminal
from torch import Tensor, nn
from training import PLAIN, face

from unet3d.base import process, progress
from unet3d.base.types import mib
from unet3d.cli.memory_answers import family
from unet3d.config import compose
from unet3d.memory.prediction import estimate
from unet3d.memory.technique import step_peak

NET = ("model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]", *PLAIN)
SMALL = ("model=unet_tiny", "model.features=[4,8]", *NET)
SIZE = "1x1x32x32x32"
KEYWORDS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [8, 16], "strides": [2]}
MODULE = ("--module", "monai.networks.nets:UNet", "--args", json.dumps(KEYWORDS), "--input", SIZE)


def memory(*words: object) -> int:
    return face("memory", *words)


def stripped(text: str) -> str:
    """Return a text without spaces at ends of lines."""
    return "\n".join(map(str.rstrip, text.splitlines())) + "\n"


@pytest.mark.slow
def test_an_explanation_and_its_files(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    """Of a network with a relative that has more parameters and a lower peak, on CUDA."""
    monkeypatch.setattr(compose, "choices", lambda group: ["forum_32", "forum_small"])
    words = ("model=forum_small", "data.patch=[48,32,32]", "batch=1", "amp=true", "ckpt=2", "device=cuda", *PLAIN)
    assert memory(*words, "model.in_channels=1", "model.classes=2", "-o", tmp_path) == 0
    text = (tmp_path / "explained.txt").read_text()
    golden("memory_explained.txt", stripped(text))
    assert capsys.readouterr().out.startswith(text)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["without"].keys() == {"amp=true", "ckpt=2"} and "measured" not in found
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 3
    assert all(mib(size) in page for size in (found["predicted"]["peak_bytes"], *found["without"].values()))
    assert (tmp_path / "memory" / "snapshot.pickle").stat().st_size > 0


@pytest.mark.slow
def test_an_explanation_of_a_step_that_recomputes(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    """It has the schedules that a budget would choose from; its layers have the first parts of their names."""
    assert memory(*SMALL, "device=cuda", "recompute=lean", "--depth", 1) == 0
    golden("memory_recompute.txt", stripped(capsys.readouterr().out))


def test_a_network_that_does_not_fit_the_default_patch_has_relatives() -> None:
    words = ["model=cicek2016", "data.patch=[92,92,92]"]
    assert len(family(estimate(words, half=False), words)) > 1


@promise(
    "Config",
    "several configs for `unet3d memory`, some of which make no sense",
    "a line says why each is skipped; exit 2 if all are",
)
@pytest.mark.slow
def test_several_configs_stand_side_by_side_and_one_that_makes_no_sense_is_skipped(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert memory(*SMALL, "compile=true", "model.activation=swish,swish_lean", "ckpt=0,2", "-o", "out") == 0
    golden("memory_several.txt", stripped(capsys.readouterr().out))
    with Path("out", "peaks.csv").open() as file:
        peaks = {row["config"]: row["peak_bytes"] for row in csv.DictReader(file)}
    usual, lean = (int(peaks[f"model.activation={name} ckpt=0"]) for name in ("swish", "swish_lean"))
    assert lean < usual and [*peaks.values()].count("") == 2
    assert Path("out", "figures", "peaks.png").exists()
    assert memory(*SMALL, "ckpt=2", "recompute=lean,tiles") == 2
    said = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]*recompute=lean and ckpt=2: [^\n]*recompute=tiles and ckpt=2: .*\n", said.err)
    assert not said.out


@pytest.mark.slow
def test_peaks_against_batch_width_and_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for values, few in (("BATCHES", (1, 2)), ("SCALES", (0.5, 1)), ("SIZES", (0.5, 1))):
        monkeypatch.setattr(f"unet3d.cli.memory_answers.{values}", few)
    net = [*SMALL, "model.decoder=[4]"]
    assert memory(*net, "model.activation=relu,silu", "--curves", "-o", tmp_path) == 0
    lines = defaultdict(list)
    with (tmp_path / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            compose.compose([*net, *row["config"].split()])  # it can be pasted
            assert row["config"].startswith("model.features=") == ("model.decoder=" in row["config"])
            lines[row["config"].partition("=")[0], row["series"]].append((float(row["x"]), int(row["peak_bytes"])))
    assert lines.keys() == {
        *product(("batch", "model.features", "data.patch"), map("model.activation={}".format, ("relu", "silu")))
    }
    for line in lines.values():
        (x, peak), (more, higher) = line
        assert x < more and peak < higher
    assert (tmp_path / "figures" / "curves.png").exists()


@pytest.mark.slow
def test_fit_prints_a_command_that_fits_and_what_it_did_not_try(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "batch=2", "channels_last=true")
    asked = compose.compose(words)
    limit = int(0.8 * step_peak(asked, asked.model).tensors)
    assert memory("fit", *words, f"budget={limit / 2**20}MiB") == 0
    *_, lean, tiles, last = capsys.readouterr().out.splitlines()
    for plan, line in (("lean", lean), ("tiles", tiles)):
        assert line.startswith("not tried: ") and f"recompute={plan}" in line and "channels_last" in line
    assert "batch=1" not in last, "Dice over the batch would be another loss"
    program = shlex.split(process.training_command([]))
    command = shlex.split(last)
    assert command[1 : 1 + len(program)] == program
    fitting = compose.compose(command[1 + len(program) :])
    assert step_peak(fitting, fitting.model).tensors <= limit


@pytest.mark.slow
def test_any_network_is_explained_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory(*MODULE, "amp=true", "--measure", "-o", tmp_path) == 0
    said = capsys.readouterr().out
    predicted, measured = (re.search(rf"^{kind}\b.* ([\d.]+) MiB", said, re.M) for kind in ("predicted", "measured"))
    assert predicted and measured and predicted[1] == measured[1]
    assert mib(json.loads((tmp_path / "memory.json").read_text())["measured"]["peak_bytes"]) == measured[1]
    page = (tmp_path / "report.html").read_text()
    assert "UNet" in page and SIZE in page


@pytest.mark.slow
def test_any_network_by_several_plans_stands_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory(*MODULE, "recompute=none,lean,tiles") == 0
    none, lean, tiles = (line.split() for line in capsys.readouterr().out.splitlines() if "recompute=" in line)
    assert [none[0], lean[0], tiles[0]] == ["recompute=none", "recompute=lean", "recompute=tiles"]
    assert float(none[1]) > float(lean[1]) > float(tiles[1])
    assert len(lean) == len(none) + 1 and lean[3].startswith("+"), "forward work"
    assert memory(*MODULE, "recompute=lean") == 0
    said = capsys.readouterr().out
    assert f"predicted peak of a step: {lean[1]} MiB" in said
    assert re.search(r"^recompute=lean: \d+ % more forward work$", said, re.M)


class Failing(nn.Conv3d):
    """Fails as it is made or as it is called, with errors of no special kind, or for want of a package, as MONAI's."""

    def __init__(self, where: str) -> None:
        if where == "init":
            raise AttributeError("of init")
        super().__init__(1, 3, 1)
        self.where = where

    def forward(self, image: Tensor) -> Tensor:
        if self.where == "import":
            raise ImportError("from einops import rearrange (No module named 'einops').\n\nFor details\nTraceback ...")
        raise KeyError("of forward")


# Words | what the line has.
MISTAKES = """
modle=unet                                         | modle
--curves                                           | --curves; -o
model=forum_mid amp=true --half                    | --half; amp=true
model=unet_tiny ckpt=99                            | ckpt=99
model=unet_tiny --half ckpt=99                     | ckpt=99
fit NET budget=1MiB --half                         | fit; --half; one config
fit NET                                            | budget=8GiB
-o FILE                                            | FILE: ; -o
-o RUN                                             | RUN
NET batch=2,2,4                                    | batch=2
--depth 0                                          | --depth 0:
--depth 1 batch=1,2                                | --depth; commas
--measure                                          | --measure; --module
--below 8                                          | --below 8:; GiB
--json                                             | --json; --below
--below 8GiB --curves -o out                       | --below; --curves
--below 8GiB NET batch=1,2                         | --below; commas
fit --below 8GiB budget=8GiB                       | --below; fit
--below 8GiB NET budget=8GiB                       | --below; remove budget=
--below 8GiB --json chkpt=2                        | chkpt
--below 8GiB SEGRESNET --measure                   | --below; --measure
SEGRESNET recompute=none,lean --below 1GiB         | --below: ; commas
SEGRESNET --args '{"nope": 1}'                     | --module; SegResNet:; --args {"nope": 1}; TypeError
SEGRESNET --args {                                 | --args:; JSON; property name
SEGRESNET --args [1]                               | --args [1]:
SEGRESNET batch=3                                  | batch=3:; --module; amp; amp_dtype; device; recompute
SEGRESNET recompute=auto                           | recompute=auto:; lean; model.path=
SEGRESNET --half                                   | --half; --module; one config
SEGRESNET --input 1x1x17x16x16                     | SegResNet cannot take an image of 1x1x17x16x16; 1x1x24x16x16
SEGRESNET --input 1x3x16x16x16                     | SegResNet cannot take an image of 1x3x16x16x16
SEGRESNET --input 16                               | --input 16:; 1x1x96x96x96
--module json:loads --input 1x1x8x8x8              | --module json:loads:; --args {}; TypeError
--module builtins:dict --input 1x1x8x8x8           | --module builtins:dict:; torch.nn.Module
--module torch.nn:Identity --input 1x1x8x8x8       | Identity; no weights
FAILING --args '{"where": "init"}'                 | --module test_command:Failing:; --args; AttributeError: of init
FAILING --args '{"where": "forward"}'              | Failing; 1x1x8x8x8; KeyError: 'of forward'
FAILING --args '{"where": "import"}' --below 8GiB  | --module test_command:Failing:; (No module named 'einops').
"""
STAND_FOR = {
    "NET": SMALL,
    "SEGRESNET": ("--module", "monai.networks.nets:SegResNet", "--input", "1x1x16x16x16"),
    "FAILING": ("--module", f"{__name__}:Failing", "--input", "1x1x8x8x8"),
}


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: row.partition("|")[0].strip())
def test_a_mistake_is_one_line(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `--below`, its exit code is neither that of a peak within the limit nor that of one above."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    Path("RUN").mkdir()
    Path("RUN", "STATUS").touch()
    words, said = row.split(" | ")
    given = [part for word in shlex.split(words) for part in STAND_FOR.get(word, (word,))]
    assert memory(*given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and all(part.strip() in captured.err for part in said.split(";"))
    assert captured.err.count("\n") == 1 and not captured.out


def test_a_mistake_is_answered_before_torch_loads() -> None:
    code = "import sys; from unet3d.cli import main as m; sys.argv = ['unet3d', 'memory', 'ckpt=two']; "
    code += "c = m.main(); print('torch' in sys.modules); sys.exit(c)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "False\n"


LONG = {  # and what ends its output
    ("fit", "budget=1GiB"): "fits: ",
    ("fit", "budget=0.04MiB"): "error: budget=0.04MiB: nothing tried fits; the smallest peak is ",
    ("batch=1,2",): "",
}


@pytest.mark.parametrize("words", LONG, ids=" ".join)
def test_what_may_last_shows_a_bar_and_prints_the_same(
    words: tuple[str, ...],
    terminal: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = (*words, *SMALL, "model.norm=none", "channels_last=true")  # without recompute, whose search takes long
    code = memory(*asked)
    printed, shown = capsys.readouterr(), terminal.getvalue()
    assert (printed.err or printed.out).splitlines()[-1].startswith(LONG[words])
    bars = re.findall(r"(\S[^\r\n]*?) +━+ +0/\d+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown))  # as they begin
    assert bars
    assert not any(line and line in shown for line in printed.out.splitlines()), "results are no part of the display"
    assert shown.endswith("\x1b[?25h"), "the cursor is back, also where a refusal ends the work"
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=io.StringIO()))
    assert memory(*asked) == code
    assert capsys.readouterr() == printed
