"""The command line without a process: what is read from it, and what is printed to be pasted into one."""

import dataclasses
import errno
import io
import os
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
from training import ROOT, TINY, face

from unet3d import checks, compose, errors
from unet3d.cli import lifecycle, options, sweep, train
from unet3d.cli.lifecycle import SafeStream
from unet3d.errors import UserError

LARGE = ["model=forum_large", "data.patch=[64,64,16]"]  # ten stages; the default network has eight


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The files of a run of `LARGE` that mark its folder as one that can resume."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    (tmp_path / "config.yaml").write_text(compose.to_yaml(compose.compose(LARGE)))
    lifecycle.save_overrides(tmp_path, LARGE)
    return tmp_path


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture) -> None:
    assert face() == 0
    shown = capsys.readouterr().out
    names = ("train", "options", "memory", "predict", "publish", "score", "check-data", "report", "compare")
    assert all(f"\n    {name}" in shown for name in names)


def test_help_shows_every_option_with_type_range_default_and_meaning() -> None:
    shown = " ".join(options.as_text().split())
    for name, _, metadata in checks.options(compose.compose([])):
        assert f" {name}=" in shown and " ".join(metadata["about"].split()) in shown, name
    assert "steps=150 (int; >= 1) optimizer steps" in shown, "the default is what a plain run does"
    assert "model.norm=instance (str; instance, batch, batch_current, group, none) normalisation" in shown
    assert "data.patch=[64,64,32] (list[int]; >= 1 and <= 2048, 3 items)" in shown


def test_the_page_of_options_is_that_of_the_schema(capsys: pytest.CaptureFixture) -> None:
    assert face("options") == 0
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == capsys.readouterr().out, "write it again: python -m unet3d options > docs/options.md"


def test_a_warning_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert face("check-data", *TINY, "inference.mirror=true", "data.augment.mirror=[]", f"data.root={tmp_path}") == 0
    assert capsys.readouterr().err.count("warning: inference.mirror=True does nothing") == 1


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        face("--version")
    assert ended.value.code == 0 and capsys.readouterr().out.split() == ["unet3d", version("unet3d")]


@pytest.mark.parametrize(
    "name", ["jürgen", "MRI (2)", "amp=false,ckpt=2", "it's", "a\\b", "[x]", "{y}", "~", "plain-1.0"]
)
def test_the_command_that_resumes_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.pt").touch()
    *_, word = shlex.split(lifecycle.how_to_go_on(folder))
    assert compose.compose([word]).resume == str(folder)


def test_options_on_resuming_are_for_the_network_of_the_run(killed: Path) -> None:
    with pytest.raises(UserError, match="this model has 8 stages"):
        train.checked_arguments(["ckpt=10"])
    words = train.checked_arguments([f"resume={killed}", "ckpt=10"])
    assert words == [f"resume={killed}", "ckpt=10", f"hydra.run.dir={killed}"]
    found = train.resumed_config(killed, words)
    assert (found.ckpt, found.resume, len(found.model.features)) == (10, str(killed), 5)
    with pytest.raises(UserError, match=r"^resume=FOLDER and requeue=true are for one run"):
        sweep.plan(train.checked_arguments([f"resume={killed}", "-m"]))


@pytest.mark.parametrize("content", [None, "", "a: [", "- 1", "nothing: 1", "steps: x", "steps: 1\n" * 9999])
def test_a_config_that_is_damaged_is_one_line(killed: Path, content: str | None) -> None:
    (killed / "config.yaml").unlink() if content is None else (killed / "config.yaml").write_text(content)
    with pytest.raises(
        UserError, match=r"config\.yaml: (cannot be read|holds no options|has [0-9,]+ bytes)|^nothing|^steps"
    ) as caught:
        train.checked_arguments([f"resume={killed}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "a: [", "a: 1", "- experiment=../../evil"])
def test_a_run_goes_on_from_its_config_alone(killed: Path, content: str | None) -> None:
    path = killed / "overrides.yaml"
    path.unlink() if content is None else path.write_text(content)
    assert len(train.resumed_config(killed, [f"resume={killed}"]).model.features) == 5


@pytest.mark.parametrize("word", ["optim=sgd", "optim.name=sgd", "model.norm=group", "seed=1", "data=phantom"])
def test_what_would_make_it_another_run_is_refused_however_it_is_written(killed: Path, word: str) -> None:
    with pytest.raises(UserError, match=r"^resume: a run goes on as it was; start a new one to change"):
        train.checked_arguments([f"resume={killed}", word])


@pytest.mark.parametrize(
    "word", ["optim=adamw", "model=forum_large", "loss=dice_ce", "optim.lr=0.5", "optim.clip=null"]
)
def test_what_leaves_it_the_same_run_is_not(killed: Path, word: str) -> None:
    """Also where the word says what is the default, or was so before."""
    config = compose.compose([*LARGE, "optim.lr=0.1"])
    (killed / "config.yaml").write_text(compose.to_yaml(config))
    found = train.resumed_config(killed, [f"resume={killed}", word])
    assert found.optim.lr == {"optim=adamw": 0.003, "optim.lr=0.5": 0.5}.get(word, 0.1)
    assert found.model == config.model and found.data == config.data


@pytest.mark.parametrize("word", ["experiment=hipocampus", "~experiment", "~data.fold", "optim=null", "nothing=1"])
def test_a_word_that_names_no_option_of_the_run_is_one_line(killed: Path, word: str) -> None:
    with pytest.raises(
        UserError, match=r"no such (option|config)|cannot be removed|does not exist|must be a string|Could not"
    ):
        train.checked_arguments([f"resume={killed}", word])


def test_a_job_that_may_have_begun_goes_on_or_begins(killed: Path, tmp_path: Path) -> None:
    go_on = train.checked_arguments(["resume=auto", f"hydra.run.dir={killed}", "steps=999"])
    assert train.resumed_config(killed, go_on).steps == 999 and f"resume={killed}" in go_on
    begin = ["model=unet_tiny", f"hydra.run.dir={tmp_path / 'new'}"]
    assert train.checked_arguments(["resume=auto", *begin]) == begin
    for words in (["resume=auto"], ["resume=auto", "hydra.run.dir=${now:%Y}"]):
        with pytest.raises(UserError, match=r"^resume=auto: .* name it: hydra.run.dir=runs/a$"):
            train.checked_arguments(words)


def test_a_job_of_an_experiment_goes_on_with_the_words_that_began_it(killed: Path) -> None:
    """Its experiment and its network set the same options, in one order."""
    words = ["experiment=cicek2016_semi", "model=cicek2016_2d", "data.sparse_fold=1", "optim.lr=0.5"]
    config = compose.compose(words)
    assert config.model.features != compose.compose(["model=cicek2016_2d", "data.patch=[108,108,108]"]).model.features
    (killed / "config.yaml").write_text(compose.to_yaml(config))
    found = train.resumed_config(killed, train.checked_arguments([*words, "resume=auto", f"hydra.run.dir={killed}"]))
    assert dataclasses.replace(found, resume=None) == config


def test_what_resuming_would_resolve_once_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.root=\$\{oc.env:HOME\}: .* let the shell replace it"):
        train.checked_arguments(["data.root=${oc.env:HOME}"])
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text('# @package _global_\nwandb: {notes: "costs \\\\${USD} 5"}\n')
    with pytest.raises(UserError, match=r"^wandb.notes=costs \$\{USD\} 5: write it without \$\{...\}"):
        compose.compose([compose.search_path(str(tmp_path)), "optim=mine"])
    words = ["seed=0,1", "hydra.sweep.subdir=${hydra.job.override_dirname}"]
    assert train.checked_arguments(words[1:]) == words[1:]


def test_a_sweep_takes_configs_by_pattern() -> None:
    assert compose.sweep(["model=glob(unet*)", "seed=1"]) == [
        [f"model={name}", "seed=1"] for name in ("unet", "unet_small", "unet_tiny")
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--epochs", "10"], "--epochs: no such flag; options are written without dashes: steps=10"),
        (["seed=1", "--lr=0.1"], "--lr=0.1: no such flag; options are written without dashes: optim.lr=0.1"),
        (["--batch-size", "4"], "--batch-size: no such flag; options are written without dashes: batch=4"),
        (["--model", "seed=1"], "--model: no such flag; options are written without dashes: model=VALUE"),
        (["-b", "4"], "-b: no such flag; options are written without dashes: batch=4; python train.py --help lists"),
    ],
)
def test_a_flag_that_does_not_exist_is_one_line_that_says_what_to_write(
    words: list[str], line: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(UserError) as caught:
        train.checked_arguments(words)
    assert str(caught.value).startswith(line)
    assert face("memory", *words) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


@pytest.mark.parametrize("words", [["--config", "3"], ["-c", "4"], ["--cfg"], ["seed=1", "-cd"]])
def test_a_flag_of_hydra_that_is_not_understood_is_one_line(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"^a[^\n]*; options are written without dashes: batch=4$"):
        train.checked_arguments(words)


@pytest.mark.parametrize("word", ["hydra.run.dir=", "hydra.run.dir=''", "resume=", "hydra.sweep.dir= "])
def test_a_folder_without_a_name_is_not_the_current_one(word: str) -> None:
    with pytest.raises(UserError, match=r" is empty; give [a-z.]+=FOLDER, or leave it out$|: is empty"):
        train.checked_arguments(["seed=1", word])


def test_a_config_group_cannot_be_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^~model: cannot be removed; leave it out, or choose another$"):
        train.checked_arguments(["~model"])


def test_the_status_of_a_run_can_be_shown_whatever_it_names(tmp_path: Path) -> None:
    lifecycle.write_end(tmp_path, f"error: \x1b[2J{os.fsdecode(bytes([255]))}: no\nto go on: ü", 2)
    assert (tmp_path / "STATUS").read_text(encoding="utf-8") == (
        "error: \\x1b[2J\\udcff: no\nto go on: ü\nexit code 2\n"
    )


def test_what_is_not_printable_is_escaped() -> None:
    """Marks without a width, which reorder text; code points that nobody has given a meaning."""
    assert errors.escaped("é 語\u200e\u07b7\x85\n", keep="\n") == "é 語\\u200e\\u07b7\\x85\n"


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
