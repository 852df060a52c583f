"""`python -m unet3d memory` as a user runs it."""

import csv
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from promises import promise
from training import PLAIN, face

from unet3d.base.types import mib
from unet3d.cli.memory_answers import family, narrowed
from unet3d.config import compose
from unet3d.memory.prediction import estimate

NET = ("model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]")


def memory(*arguments: object) -> int:
    return face("memory", *arguments)


@pytest.mark.slow
def test_one_config_is_explained_and_its_files_written(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("unet3d.config.compose.choices", lambda group: ["unet_small", "unet_tiny"])
    assert memory("model=unet_tiny", *NET, *PLAIN, "ckpt=2", "-o", out) == 0
    said = capsys.readouterr().out
    found = json.loads((out / "memory.json").read_text())
    peak = found["predicted"]["peak_bytes"]
    for part in (
        "unet_tiny: ",
        f"{found['parameters']:,}",
        "16x16x16",
        f"{mib(peak)} MiB",
        "ckpt=2",  # takes away
        mib(found["without"]["ckpt=2"]),
        "amp=true",  # a further way
        "(model.features=",  # half the width where the peak is
        mib(found["advice"]["halved_peak_bytes"]),
        "2 x 8 x 16 x 16 x 16 float32 = 262,144",  # the first convolution's output
        "torchinfo",  # a usual estimate
        "32 -> 16",  # half the width at a level
        "unet_small",  # of the same family
    ):
        assert part in said, part
    assert list(found["without"]) == ["ckpt=2"] and found["without"]["ckpt=2"] > peak
    assert "measured" not in found
    assert 0 < found["advice"]["halved_peak_bytes"] < peak
    page = (out / "report.html").read_text()
    assert mib(peak) in page and mib(found["without"]["ckpt=2"]) in page
    assert page.count("<img") == 3
    assert (out / "memory" / "snapshot.pickle").stat().st_size > 0
    assert [line.rstrip() for line in (out / "explained.txt").read_text().splitlines()] == [
        line.rstrip() for line in said.splitlines()[:-1]
    ]


@pytest.mark.slow
def test_a_relative_with_more_parameters_and_a_lower_peak_is_explained(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet3d.config.compose.choices", lambda group: ["forum_32"])
    monkeypatch.setattr("unet3d.cli.memory_answers.narrowed", lambda subject: {})
    monkeypatch.setattr("unet3d.cli.memory_answers.remedies.single_techniques", lambda asked: [])
    words = ["data.patch=[48,32,32]", "batch=1", "amp=true", "model.in_channels=1", "model.classes=2", *PLAIN]
    assert memory("model=forum_small", *words) == 0
    said = capsys.readouterr().out
    small, large = (estimate([f"model={name}", *words], half=False) for name in ("forum_small", "forum_32"))
    assert large.parameters > small.parameters and large.step.tensors < small.step.tensors
    (line,) = (line for line in said.splitlines() if mib(small.step.tensors - large.step.tensors) in line)
    for part in (f"{large.parameters / small.parameters:.1f}", "32 + 64 = 96", "64 + 128 = 192"):
        assert part in line, part


@pytest.mark.parametrize(
    ("words", "relatives"),
    [
        (["model=cicek2016", "data.patch=[92,92,92]"], True),  # the default patch does not fit it
        (["model=unet_tiny", *NET], True),
        (["model=unet_tiny", *NET, "++model.features=[4,8]"], False),
    ],
)
def test_a_network_has_relatives_unless_its_widths_are_set(words: list[str], relatives: bool) -> None:
    subject = estimate(words, half=False)
    found = family(subject, words)
    assert found[0] is subject and (len(found) > 1) == relatives


def test_a_network_of_the_users_own_has_no_widths_and_no_relatives() -> None:
    """It has no levels, so its options name no features."""
    subject = estimate(["model=unet_tiny", *NET], half=False)
    own = replace(subject, model=replace(subject.model, features=[]))
    assert family(own, []) == [own] and not narrowed(own)


@pytest.mark.slow
def test_several_configs_stand_side_by_side(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    net = ("model=unet_tiny", "model.features=[4,8]", *NET, *PLAIN)
    assert memory(*net, "model.activation=swish,swish_lean", "-o", out) == 0
    assert "model.activation=swish_lean" in capsys.readouterr().out
    with (out / "peaks.csv").open() as file:
        peaks = {row["config"]: int(row["peak_bytes"]) for row in csv.DictReader(file)}
    assert peaks["model.activation=swish_lean"] < peaks["model.activation=swish"]
    assert (out / "figures" / "peaks.png").exists()


@promise(
    "Config",
    "several configs for `unet3d memory`, some of which make no sense",
    "a line says why each is skipped; exit 2 if all are",
)
def test_a_combination_that_makes_no_sense_is_skipped_and_the_others_go_on(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = ("model=unet_tiny", "model.features=[4]", *NET, *PLAIN, "compile=true")
    assert memory(*net, "ckpt=0,2", "-o", tmp_path) == 0
    said = capsys.readouterr().out
    assert re.search(r"ckpt=2 +skipped", said) and "skipped: ckpt=2: compile=true and ckpt=2: " in said
    with (tmp_path / "peaks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["peak_bytes"]) for row in rows] == [True, False] and [row["ckpt"] for row in rows] == ["0", "2"]
    assert max(map(len, said.split("skipped: ")[0].splitlines())) <= 80
    assert memory(*net[:-1], "ckpt=2", "recompute=lean,tiles") == 2
    found = capsys.readouterr()
    assert (
        "recompute=lean and ckpt=2: " in found.err
        and "recompute=tiles and ckpt=2: " in found.err
        and found.err.count("\n") == 1
        and not found.out
    )


def test_fit_says_which_combinations_it_does_not_try(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet3d.cli.memory_answers.remedies.find_fit", lambda asked, limit: ([asked], asked))
    net = ("model=unet_tiny", "model.features=[4]", *NET, *PLAIN)
    assert memory("fit", *net, "channels_last=true", "budget=1GiB") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not tried: ")]
    assert ["recompute=lean" in lines[0], "recompute=tiles" in lines[1]] == [True, True] and "channels_last" in lines[0]
    assert memory("fit", *net, "budget=1GiB") == 0 and "not tried" not in capsys.readouterr().out


@pytest.mark.slow
def test_peaks_against_batch_width_and_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for values, few in (("BATCHES", (1, 2)), ("SCALES", (0.5, 1, 2)), ("SIZES", (0.5, 1))):
        monkeypatch.setattr(f"unet3d.cli.memory_answers.{values}", few)
    net = ["model=unet_tiny", "model.features=[4,8]", "model.decoder=[4]", *NET, *PLAIN]
    assert memory(*net, "model.activation=relu,silu", "--curves", "-o", tmp_path) == 0
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    for changed in {row["config"] for row in rows}:
        compose.compose([*net, *changed.split()])  # it can be pasted
    lines = defaultdict(list)
    for row in rows:
        option = row["config"].partition("=")[0]
        lines[option, row["varied"], row["series"]].append((float(row["x"]), int(row["peak_bytes"])))
    points = {"batch": 2, "model.features": 3, "data.patch": 2}
    series = ("model.activation=relu", "model.activation=silu")
    assert {(option, name) for option, _, name in lines} == set(product(points, series))
    for (option, _, _), line in lines.items():
        assert len(line) == points[option] and line == sorted(line), "more of it, more memory"
        assert [peak for _, peak in line] == sorted(peak for _, peak in line)
    assert all("model.decoder=" in row["config"] for row in rows if row["config"].startswith("model.features="))
    assert (tmp_path / "figures" / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["modle=unet"], ["modle"]),
        (["--curves"], ["--curves", "-o"]),
        (["model=forum_mid", "amp=true", "--half"], ["--half", "amp=true"]),
        (["model=unet_tiny", "ckpt=99"], ["ckpt=99"]),
        (["fit", "model=unet_tiny", *NET, "budget=1MiB", "--half"], ["fit", "--half", "one config"]),
        (["-o", "FILE"], ["-o", "FILE"]),
        (["-o", "RUN"], ["-o", "RUN"]),
        (["model=unet_tiny", *NET, "batch=2,2,4"], ["batch=2"]),
        (["model=unet_tiny", "--half", "ckpt=99"], ["ckpt=99"]),  # a word after a flag is one, too
        (["model=unet_tiny", "--hlaf"], ["--hlaf"]),
    ],
    ids=lambda value: " ".join(value[-2:]),
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture, tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    (tmp_path / "FILE").touch()
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "STATUS").touch()
    paths = {name: str(tmp_path / name) for name in ("FILE", "RUN")}
    assert memory(*(paths.get(argument, argument) for argument in arguments)) == 2
    found = capsys.readouterr()
    assert all(paths.get(part, part) in found.err for part in said)
    assert found.err.count("\n") == 1 and not found.out


def test_a_mistake_is_answered_before_torch_loads() -> None:
    code = "import sys; from unet3d.cli import main as m; sys.argv = ['unet3d', 'memory', 'ckpt=two']; "
    done = subprocess.run(
        [sys.executable, "-c", code + "c = m.main(); print('torch' in sys.modules); sys.exit(c)"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == "False\n"


@pytest.mark.slow
def test_a_config_for_a_gpu_has_the_allocators_rows(capsys: pytest.CaptureFixture) -> None:
    assert memory("model=unet_tiny", "model.features=[4]", *NET, *PLAIN, "device=cuda") == 0
    said = capsys.readouterr().out
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said
    assert said.count("replay") == 3, "allocated, reserved, and reserved in growing segments"


MODULE = ("--module", "monai.networks.nets:SegResNet", "--input", "1x1x16x16x16")


@pytest.mark.slow
def test_any_network_is_explained_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--args", '{"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]}', "amp=true", "--measure")
    assert face("memory", *MODULE, *words, "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out
    predicted, measured = (re.search(rf"^{kind}\b.* ([\d.]+) MiB", said, re.M) for kind in ("predicted", "measured"))
    assert predicted and measured and predicted[1] == measured[1]
    memory = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert mib(memory["measured"]["peak_bytes"]) == measured[1]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "SegResNet" in page and "1x1x16x16x16" in page


@pytest.mark.slow
def test_any_network_by_several_plans_stands_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--args", '{"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]}', "recompute=none,lean,tiles")
    assert face("memory", *MODULE, *words) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("recompute=")]
    assert [row[0] for row in rows] == ["recompute=none", "recompute=lean", "recompute=tiles"]
    none, lean, tiles = (float(row[1]) for row in rows)
    assert none > lean > tiles and len(rows[0]) == 3 and rows[1][-1].startswith("+")
    assert face("memory", *MODULE, *words[:2], "recompute=lean") == 0
    said = capsys.readouterr().out
    assert f"predicted peak of a step: {lean} MiB" in said
    assert re.search(r"^recompute=lean: \d+ % more forward work$", said, re.M)


@pytest.mark.slow
def test_any_network_has_the_allocators_sizes_as_on_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--args", '{"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]}', "device=cuda")
    assert face("memory", *MODULE, *words, "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out
    entry = json.loads((tmp_path / "out" / "memory.json").read_text())["predicted"]
    assert entry["peak_bytes"] < entry["allocated_bytes"] < entry["reserved_bytes"]
    for name in ("allocated", "reserved"):
        assert f"{mib(entry[f'{name}_bytes'])} MiB {name}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*MODULE, "--args", '{"nope": 1}'), [f"--module {MODULE[1]}:", '--args {"nope": 1}', "TypeError"]),
        ((*MODULE, "--args", "{"), ["--args:", "JSON", "property name"]),
        ((*MODULE, "--args", "[1]"), ["--args [1]:"]),
        ((*MODULE, "batch=3"), ["batch=3:", "--module", "amp", "amp_dtype", "device", "recompute"]),
        ((*MODULE, "recompute=auto"), ["recompute=auto:", "lean", "model.path="]),
        ((*MODULE, "recompute=none,lean", "--below", "1GiB"), ["--below: ", "commas"]),
        ((*MODULE[:3], "1x1x17x16x16"), ["SegResNet cannot take an image of 1x1x17x16x16", "1x1x24x16x16"]),
        ((*MODULE, "--half"), ["--half", "--module", "one config"]),
        ((*MODULE[:3], "1x3x16x16x16"), ["SegResNet cannot take an image of 1x3x16x16x16"]),
        ((*MODULE[:3], "16"), ["--input 16:", "1x1x96x96x96"]),
        (("--module", "json:loads", *MODULE[2:]), ["--module json:loads:", "--args {}", "TypeError"]),
        (("--module", "builtins:dict", *MODULE[2:]), ["--module builtins:dict:", "torch.nn.Module"]),
        (("--module", "torch.nn:Identity", *MODULE[2:]), ["Identity", "no weights"]),
        (("--measure",), ["--measure", "--module"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_a_network_that_cannot_be_explained_is_one_line(
    words: tuple[str, ...], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert face("memory", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {said[0]}") and all(part in captured.err for part in said)
    assert captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_a_network_whose_package_is_not_installed_says_which(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MONAI imports some only when a network is made or run, and explains at length."""

    def fails(*arguments: object) -> None:
        raise ImportError("from einops import rearrange (No module named 'einops').\n\nFor details\nTraceback ...")

    monkeypatch.setattr(f"monai.networks.nets.SegResNet.{method}", fails)
    assert face("memory", *MODULE) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --module {MODULE[1]}:")
    assert said.endswith("from einops import rearrange (No module named 'einops').\n") and said.count("\n") == 1
