"""`python -m unet3d memory` as a user runs it."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training import PLAIN, face

from unet3d import compose
from unet3d.cli.memory import family, narrowed
from unet3d.memory.preflight import estimate

NET = ("model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]")


def memory(*arguments: object) -> int:
    return face("memory", *arguments)


def test_one_config_is_explained_and_its_files_written(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert memory("model=unet_tiny", *NET, *PLAIN, "ckpt=2", "-o", out) == 0
    said = capsys.readouterr().out
    for part in (
        "unet_tiny: ",
        "at most 2 checkpointed segments",
        "What each way to save memory takes away (predicted)",
        "Each further way to save memory, by itself (predicted)",
        "of the peak (",
        "half the width there (model.features=",
        "the first convolution's output: 2 x 8 x 16 x 16 x 16 float32 = 262,144 bytes",
        "Usual estimates and their error",
        "Half the width at one level",
        "unet_small",  # of the same family
    ):
        assert part in said, part
    found = json.loads((out / "memory.json").read_text())
    assert list(found["without"]) == ["ckpt=2"] and found["without"]["ckpt=2"] > found["predicted"]["peak_bytes"]
    assert found["predicted"]["peak_bytes"] > 0 and "measured" not in found
    assert 0 < found["advice"]["halved_peak_bytes"] < found["predicted"]["peak_bytes"]
    page = (out / "report.html").read_text()
    assert "Predicted (ledger)" in page and "nothing was run" in page and "takes away (MiB)" in page
    assert page.count("<img") == 3
    assert (out / "memory" / "snapshot.pickle").stat().st_size > 0
    assert [line.rstrip() for line in (out / "explained.txt").read_text().splitlines()] == [
        line.rstrip() for line in said.splitlines()[:-1]
    ]


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
    own = replace(subject, options=replace(subject.options, features=[]))
    assert family(own, []) == [own] and not narrowed(own)


def test_several_configs_stand_side_by_side(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert memory("model=unet_tiny", *NET, "model.activation=swish,swish_lean", "-o", out) == 0
    assert "model.activation=swish_lean" in capsys.readouterr().out
    with (out / "peaks.csv").open() as file:
        peaks = {row["config"]: int(row["peak_bytes"]) for row in csv.DictReader(file)}
    assert peaks["model.activation=swish_lean"] < peaks["model.activation=swish"]
    with (out / "trace.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["layer_idx", "call_idx", "layer_type", "exp", "hook_type", "mem_all", "mem_cached"]
    assert {row["exp"] for row in rows} == set(peaks)
    assert (out / "figures" / "trace.png").exists()


def test_peaks_against_batch_width_and_patch(tmp_path: Path) -> None:
    net = ["model=unet_tiny", "model.features=[4,8]", "model.decoder=[4]", *NET, *PLAIN]
    assert memory(*net, "model.activation=relu,silu", "--curves", "-o", tmp_path) == 0
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    for changed in {row["config"] for row in rows}:
        compose.compose([*net, *changed.split()])  # it can be pasted
    for varied in ("batch size", "first width (channels)", "patch (voxels)"):
        for series in ("model.activation=relu", "model.activation=silu"):
            line = [
                (float(r["x"]), int(r["peak_bytes"])) for r in rows if (r["varied"], r["series"]) == (varied, series)
            ]
            assert len(line) >= 4 and line == sorted(line), "more of it, more memory"
            assert [peak for _, peak in line] == sorted(peak for _, peak in line)
    assert (tmp_path / "figures" / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["modle=unet"], "modle"),
        (["--curves"], "add -o FOLDER"),
        (["model=forum_mid", "amp=true", "--half"], "drop one"),
        (["model=unet_tiny", "ckpt=99"], "ckpt=99"),
        (["fit", "model=unet_tiny", *NET, "budget=1MiB", "--half"], "remove -o, --curves, --half"),
        (["-o", "FILE"], "is a file"),
        (["-o", "RUN"], "holds a run"),
        (["model=unet_tiny", *NET, "batch=2,2"], "more than once"),
        (["model=unet_tiny", "--half", "ckpt=99"], "ckpt=99"),  # a word after a flag is one, too
        (["model=unet_tiny", "--hlaf"], "--hlaf: no such flag"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "FILE").touch()
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "STATUS").touch()
    assert memory(*(str(tmp_path / a) if a in ("FILE", "RUN") else a for a in arguments)) == 2
    found = capsys.readouterr()
    assert said in found.err and found.err.count("\n") == 1 and not found.out


def test_a_mistake_is_answered_before_torch_loads() -> None:
    code = "import sys; from unet3d.cli import main as m; sys.argv = ['unet3d', 'memory', 'ckpt=two']; "
    done = subprocess.run(
        [sys.executable, "-c", code + "c = m.main(); print('torch' in sys.modules); sys.exit(c)"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == "False\n"


def test_a_config_for_a_gpu_has_the_allocators_rows(capsys: pytest.CaptureFixture) -> None:
    assert memory("model=unet_tiny", "model.features=[4,8]", *NET, "device=cuda") == 0
    said = capsys.readouterr().out
    assert "allocated: blocks given out" in said and "reserved by the allocator" in said


MODULE = ("--module", "monai.networks.nets:SegResNet", "--input", "1x1x16x16x16")


def test_any_network_is_explained_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--args", '{"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]}', "amp=true", "--measure")
    assert face("memory", *MODULE, *words, "-o", tmp_path / "out") == 0
    predicted, measured = re.findall(r"(\w+) peak of a step: ([\d.]+) MiB", capsys.readouterr().out)
    assert (predicted[0], measured[0]) == ("predicted", "measured") and predicted[1] == measured[1]
    memory = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert f"{memory['measured']['peak_bytes'] / 2**20:.1f}" == measured[1]
    assert "SegResNet: input 1x1x16x16x16" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((*MODULE, "--args", '{"nope": 1}'), "--module monai.networks.nets:SegResNet: cannot be made with --args "),
        ((*MODULE, "--args", "{"), "--args: is not JSON (Expecting property name"),
        ((*MODULE, "--args", "[1]"), "--args [1]: give keywords, such as "),
        ((*MODULE, "batch=3"), "batch=3: with --module only amp, amp_dtype and device count"),
        ((*MODULE, "--half"), "--half and --curves are for the package's own networks"),
        (
            (*MODULE[:3], "1x3x16x16x16"),
            "--module monai.networks.nets:SegResNet: a step with --input 1x3x16x16x16 fails",
        ),
        ((*MODULE[:3], "16"), "--input 16: give the sizes N, C, D, H, W of the input, such as 1x1x96x96x96"),
        (("--module", "json:loads", *MODULE[2:]), "--module json:loads: cannot be made with --args {}: TypeError"),
        (("--module", "builtins:dict", *MODULE[2:]), "--module builtins:dict: made dict, not a torch.nn.Module"),
        (("--measure",), "--args, --input and --measure are of --module; name it"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_a_network_that_cannot_be_explained_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert face("memory", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {line}") and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_a_network_whose_package_is_not_installed_says_which(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MONAI imports some only when a network is made or run, and explains at length."""

    def fails(*arguments: object) -> None:
        raise ImportError("from einops import rearrange (No module named 'einops').\n\nFor details\nTraceback ...")

    monkeypatch.setattr(f"monai.networks.nets.SegResNet.{method}", fails)
    assert face("memory", *MODULE) == 2
    missing = "from einops import rearrange (No module named 'einops')."
    assert capsys.readouterr().err == f"error: --module {MODULE[1]}: needs a package that is not installed: {missing}\n"
