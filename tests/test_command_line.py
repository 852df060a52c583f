"""The command face without a process: what is read from a command line, and what is printed to be pasted into one."""

import errno
import io
import os
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
from training import face

from unet3d import compose
from unet3d.cli import lifecycle, train
from unet3d.cli.lifecycle import SafeStream
from unet3d.errors import UserError

LARGE = ["model=forum_large", "data.patch=[64,64,16]"]  # ten stages; the default network has eight


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a run of `LARGE` leaves for those that look whether there is one."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    (tmp_path / "config.yaml").write_text(compose.to_yaml(compose.compose(LARGE)))
    lifecycle.save_overrides(tmp_path, LARGE)
    return tmp_path


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture) -> None:
    assert face() == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in ("memory", "predict", "publish", "score", "check-data", "compare"))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        face("--version")
    assert ended.value.code == 0 and capsys.readouterr().out.split() == ["unet3d", version("unet3d")]


@pytest.mark.parametrize(
    "name", ["jürgen", "MRI (2)", "amp=false,ckpt=2", "it's", "a\\b", "[x]", "{y}", "~", "plain-1.0"]
)
def test_the_command_that_goes_on_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.pt").touch()
    *_, word = shlex.split(lifecycle.how_to_go_on(folder))
    assert compose.compose([word]).resume == str(folder)


def test_options_on_resuming_are_for_the_network_of_the_run(killed: Path) -> None:
    with pytest.raises(UserError, match="this model has 8 stages"):
        train.checked_arguments(["ckpt=10"])
    assert train.checked_arguments([f"resume={killed}", "ckpt=10"])[:3] == [*LARGE, f"resume={killed}"]
    with pytest.raises(UserError, match="resume goes on with one run"):
        train.checked_arguments([f"resume={killed}", "-m"])


@pytest.mark.parametrize(
    ("name", "content"),
    [("overrides.yaml", ""), ("overrides.yaml", "a: ["), ("overrides.yaml", "a: 1"), ("config.yaml", None)],
)
def test_a_run_folder_that_is_damaged_is_one_line(killed: Path, name: str, content: str | None) -> None:
    if content is None:
        (killed / name).unlink()
    else:
        (killed / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}: (cannot be read|is damaged)") as told:
        train.checked_arguments([f"resume={killed}"])
    assert "\n" not in str(told.value)


def test_what_would_be_replaced_anew_on_resuming_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data.root=\$\{oc.env:HOME\}: .* let the shell replace it"):
        train.checked_arguments(["data.root=${oc.env:HOME}"])
    words = ["seed=0,1", "hydra.sweep.subdir=${hydra.job.override_dirname}"]
    assert train.checked_arguments(words[1:]) == words[1:]


def test_a_sweep_takes_configs_by_pattern() -> None:
    assert compose.sweep(["model=glob(unet*)", "seed=1"]) == [
        [f"model={name}", "seed=1"] for name in ("unet", "unet_small", "unet_tiny")
    ]


class Filling(io.StringIO):
    """A file on a disk that is full now and then."""

    is_full = False

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_printed_goes_on_once_a_full_disk_has_room() -> None:
    file = Filling()
    stream = SafeStream(file)
    for text, file.is_full in (("a", False), ("b", True), ("c", False)):
        stream.write(text)
        stream.flush()
    assert file.getvalue() == "abc"
