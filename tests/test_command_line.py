"""The command line without a process: what is read from it, and what is printed to be pasted into one."""

import dataclasses
import errno
import io
import os
import re
import shlex
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from guards import no, nothing, without
from promises import promise
from training import ROOT, TINY, face, planned, yaml_of

from unet3d.base import errors, process
from unet3d.base.errors import UserError
from unet3d.base.process import SafeStream
from unet3d.cli import commands, lifecycle
from unet3d.config import compose, schema
from unet3d.config.words import path_option

LARGE = ["model=forum_large", "data.patch=[64,64,16]"]  # ten stages; the default network has eight
composed = cache(lambda *words: compose.compose(words))
nothing_asked = cache(lambda: compose.compose_tree([]))


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The files of a run of `LARGE` that mark its folder as one that can resume."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    (tmp_path / "config.yaml").write_text(yaml_of(*LARGE))
    lifecycle.save_overrides(tmp_path, LARGE)
    return tmp_path


@promise(
    "What scripts rely on",
    "names of commands",
    "`train`, `options`, `memory`, `plan`, `predict`, `publish`, `score`, `check-data`, `report`, `compare`, `folds`",
)
def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture) -> None:
    assert face() == 0
    shown = capsys.readouterr().out
    names = ("train", "options", "memory", "plan", "predict", "publish", "score", "check-data", "report", "compare")
    assert {*names, "folds"} <= {*shown.split()}


def rows(markdown: str) -> list[str]:
    """Return the options that the tables of a page describe, a row each."""
    first = re.findall(r"^\| *`?([\w.]+)`? *\|", markdown, re.MULTILINE)
    return [name for name in first if name != "option"]


def test_help_shows_every_option_with_type_range_default_and_meaning() -> None:
    text = commands.help_text()
    shown = " ".join(text.split())
    for name, _, metadata in schema.options(composed()):
        assert f" {name}=" in shown and " ".join(metadata["about"].split()) in shown, name
    heads = {line.split("=")[0].strip(): line for line in text.splitlines() if re.match(r" +[\w.]+=", line)}
    for name, parts in {
        "steps": ("steps=150", "int", ">= 1"),  # the default is what a plain run does
        "model.norm": ("=instance", "instance, batch, batch_current, group, none"),
        "data.patch": ("=[64,64,32]", "list[int]", ">= 1", "<= 2048", "3"),
    }.items():
        assert all(part in heads[name] for part in parts), heads[name]


@promise("What scripts rely on", "names of options", "docs/options.md has each, with its default and what it means")
def test_the_page_of_options_is_that_of_the_schema(capsys: pytest.CaptureFixture) -> None:
    """A row an option; `tests/bench/docs_outputs.py` compares the page with what is printed."""
    assert face("options") == 0
    there = sorted(name for name, _, _ in schema.options(composed()))
    for page in ((ROOT / "docs" / "options.md").read_text(), capsys.readouterr().out):
        assert sorted(rows(page)) == there, "write it again: python -m unet3d options > docs/options.md"


def test_a_warning_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert face("check-data", *TINY, "inference.mirror=true", "data.augment.mirror=[]", f"data.root={tmp_path}") == 0
    assert capsys.readouterr().err.count("inference.mirror=True") == 1


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
    assert compose.parsed([word])[0].value() == str(folder)


@promise("Resume", "the command to go ...")
def test_the_command_that_resumes_names_the_code_that_no_run_folder_may(killed: Path) -> None:
    parts = ["model.path=mine:small", "data.transforms=[mine:a,mine:b]", "loss.path=mine.losses:l1", "loggers=[mine:c]"]
    (killed / "config.yaml").write_text(yaml_of(*LARGE, *parts))
    words = shlex.split(lifecycle.how_to_go_on(killed))
    words = words[words.index(f"resume={killed}") :]
    assert words[1:] == parts
    assert planned(words).config.data.transforms == ["mine:a", "mine:b"]
    for content in ("- 1", "a: [", "model: 1"):
        (killed / "config.yaml").write_text(content)
        assert lifecycle.how_to_go_on(killed).endswith(f" resume={killed}")


@promise(
    "Resume",
    "the command to go on, pasted elsewhere, of a run with code of its own or another `python`",
    "names the program and interpreter that are there, and each import path",
)
def test_the_command_that_trains_is_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By train.py only where it was run, or is in the current folder."""

    def program(typed: str, place: Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [typed])
        monkeypatch.chdir(place)
        return shlex.split(process.training_command(["a=b c"]))[1:]

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    (tmp_path / "train.py").touch()  # of somebody else
    assert program("train.py", ROOT) == ["train.py", "a=b c"]
    assert program(str(ROOT / "unet3d" / "__main__.py"), ROOT) == ["train.py", "a=b c"]
    assert program(str(ROOT / "train.py"), tmp_path) == [str(ROOT / "train.py"), "a=b c"]
    for typed in ("train.py", "unet3d", "-c"):
        assert program(typed, tmp_path) == ["-m", "unet3d", "train", "a=b c"]


@promise("Resume", "the command to go ...")
@pytest.mark.parametrize(("is_on_path", "name"), [(True, "python"), (False, sys.executable)])
def test_the_command_that_trains_is_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_path: bool, name: str
) -> None:
    (tmp_path / "python").touch(0o755)
    monkeypatch.setattr(process.sys, "executable", str(tmp_path / "python3") if is_on_path else sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(process.training_command([]))[0] == name


def test_options_on_resuming_are_for_the_network_of_the_run(killed: Path) -> None:
    with pytest.raises(UserError, match=r"ckpt=10(?!\d).*\b8\b"):
        planned(["ckpt=10"])
    run = planned([f"resume={killed}", "ckpt=10"])
    found = run.config
    assert run.folder == killed
    assert (found.ckpt, found.resume, len(found.model.features)) == (10, str(killed), 5)
    with pytest.raises(UserError, match=r"\bresume=auto hydra\.sweep\.dir="):
        planned([f"resume={killed}", "-m"])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *((content, "config.yaml") for content in (None, "", "a: [", "- 1", "steps: 1\n" * 9999)),
        ("nothing: 1", "nothing"),
        ("steps: x", "steps"),
    ],
    ids=["missing", "empty", "no YAML", "a list", "large", "no option", "no number"],
)
def test_a_config_that_is_damaged_is_one_line(killed: Path, content: str | None, named: str) -> None:
    (killed / "config.yaml").unlink() if content is None else (killed / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=rf"\b{named}\b") as caught:
        compose.resumed(killed, nothing_asked())
    assert "\n" not in str(caught.value)


@promise("What scripts rely on", "config.yaml", "a run is rebuilt from it alone")
@promise("checkpoints and run folders", "a run is rebuilt ...")
@pytest.mark.parametrize("content", [None, "", "a: [", "a: 1", "- experiment=../../evil"])
def test_a_run_goes_on_from_its_config_alone(killed: Path, content: str | None) -> None:
    path = killed / "overrides.yaml"
    path.unlink() if content is None else path.write_text(content)
    assert len(compose.resumed(killed, nothing_asked()).model.features) == 5


@promise("Resume", "`resume=` with another width ...")
@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("optim=sgd", "optim.name"),
        ("optim.name=sgd", "optim.name"),
        ("model.norm=group", "model.norm"),
        ("seed=1", "seed"),
        ("data=phantom", "data.patch"),
    ],
)
@without("unet3d.config.compose.refuse_changes", nothing, only="seed=1")
def test_what_would_make_it_another_run_is_refused_however_it_is_written(killed: Path, word: str, option: str) -> None:
    with pytest.raises(UserError, match=rf"^resume\b.* {option}: \S+.* -> "):
        planned([f"resume={killed}", word])


@pytest.mark.parametrize(
    "word", ["optim=adamw", "model=forum_large", "loss=dice_ce", "optim.lr=0.5", "optim.clip=null"]
)
def test_what_leaves_it_the_same_run_is_not(killed: Path, word: str) -> None:
    """Also where the word says what is the default, or was so before."""
    config = composed(*LARGE, "optim.lr=0.1")
    (killed / "config.yaml").write_text(yaml_of(*LARGE, "optim.lr=0.1"))
    found = planned([f"resume={killed}", word]).config
    assert found.optim.lr == {"optim=adamw": 0.003, "optim.lr=0.5": 0.5}.get(word, 0.1)
    assert found.model == config.model and found.data == config.data


@pytest.mark.parametrize("word", ["experiment=hipocampus", "~experiment", "~data.fold", "optim=null", "nothing=1"])
def test_a_word_that_names_no_option_of_the_run_is_one_line(killed: Path, word: str) -> None:
    with pytest.raises(UserError) as caught:
        planned([f"resume={killed}", word])
    text = str(caught.value)
    option = re.split(r"[=.]", word.lstrip("~"))[0]
    assert "\n" not in text and re.search(r"needs" if word == "optim=null" else rf"\b{option}\b", text), text


@promise("Resume", "a run that was ...")
@without("unet3d.cli.lifecycle.checkpoints", no)
def test_a_job_that_may_have_begun_goes_on_or_begins(killed: Path, tmp_path: Path) -> None:
    run = planned(["resume=auto", f"hydra.run.dir={killed}", "steps=999"])
    assert (run.config.steps, run.config.resume, run.folder) == (999, str(killed), killed)
    new = tmp_path / "new"
    begun = planned(["resume=auto", "model=unet_tiny", f"hydra.run.dir={new}"])
    assert (begun.config, begun.folder) == (composed("model=unet_tiny"), new)
    for words in (["resume=auto"], ["resume=auto", "hydra.run.dir=${now:%Y}"]):
        with pytest.raises(UserError, match=r"^resume=auto\b.*\bhydra\.run\.dir="):
            planned(words)


@promise("Training", "the same of a ...")
@pytest.mark.slow
def test_a_job_of_an_experiment_goes_on_with_the_words_that_began_it(killed: Path) -> None:
    """Its experiment and its network set the same options, in one order."""
    words = ["experiment=cicek2016_semi", "model=cicek2016_2d", "data.sparse_fold=1", "optim.lr=0.5"]
    config = composed(*words)
    assert config.model.features != compose.compose(["model=cicek2016_2d", "data.patch=[108,108,108]"]).model.features
    (killed / "config.yaml").write_text(yaml_of(*words))
    found = planned([*words, "resume=auto", f"hydra.run.dir={killed}"]).config
    assert dataclasses.replace(found, resume=None) == config


@without("unet3d.config.compose.files_of", lambda group, name, folders: iter(()))
def test_a_fold_of_two_experiments_goes_on_with_the_words_that_began_it(killed: Path) -> None:
    words = ["experiment=[cicek2016_full,five_folds]", "data.fold=1", "data.phantom.cases=5"]
    config = composed(*words)
    (killed / "config.yaml").write_text(yaml_of(*words))
    found = planned([*words, "resume=auto", f"hydra.run.dir={killed}"])
    assert dataclasses.replace(found.config, resume=None) == config
    jobs = planned(["experiment=[cicek2016_full,five_folds]", "data.phantom.cases=5"])
    assert [job.config.data.fold for job in jobs] == [0, 1, 2, 3, 4]


@promise("Config", "a value with `${...}` from the command line or a YAML file of one's own", "refused before the run")
def test_what_resuming_would_resolve_once_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.root=\$\{oc\.env:HOME\}.*\bdata\.root=\$"):
        planned(["data.root=${oc.env:HOME}"])
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text('# @package _global_\nwandb: {notes: "costs \\\\${USD} 5"}\n')
    with pytest.raises(UserError, match=r"^wandb\.notes=costs \$\{USD\} 5"):
        compose.compose([compose.search_path(str(tmp_path)), "optim=mine"])
    words = ["seed=0,1", "hydra.sweep.subdir=${hydra.job.override_dirname}"]
    jobs = planned([*words, "-m"])
    assert [job.folder.name for job in jobs] == ["seed=0", "seed=1"]


@promise(
    "Config",
    "a folder for `--config-dir`, or to resume, with quotes, backslashes, brackets or `${...}` in its name",
    "it is that folder",
)
@pytest.mark.parametrize("name", ["q'uote=back\\", "br]acket[\\'q", "${oc.env:HOME}\\${x}"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "optim").mkdir(parents=True)
    (folder / "optim" / "mine.yaml").write_text("lr: 0.5\n")
    words = [compose.search_path(str(folder)), "optim=mine", path_option("hydra.sweep.dir", folder)]
    composed = compose.compose_tree(words)
    assert (composed.options.optim.lr, composed.sweep_folder) == (0.5, folder)


@promise("Config", "a file of `--config-dir` that is no YAML, or has a tag of Python's", "one line with its place")
@pytest.mark.parametrize("text", ["lr: [1\nb: 2\n", "lr: !!python/object/apply:os.getcwd []\n"])
def test_a_config_file_that_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"^.*mine\.yaml\", line 1.*$"):
        compose.compose([compose.search_path(str(tmp_path)), "optim=mine"])


def test_a_sweep_takes_configs_by_pattern() -> None:
    names = [name for name in compose.choices("model") if name.startswith("unet")]
    assert {"unet", "unet_tiny"} < {*names} < {*compose.choices("model")}
    assert compose.sweep(["model=glob(unet*)", "seed=1"]) == [[f"model={name}", "seed=1"] for name in names]


@promise("Config", "a flag that does not exist", "one line that says how to write it as an option")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--step", "10"], "steps=10"),
        (["seed=1", "--lr=0.1"], "optim.lr=0.1"),
        (["--save-evry", "4"], "save_every=4"),
        (["--model", "seed=1"], "model=VALUE"),
        (["-b", "4"], "--help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_flag_that_does_not_exist_is_one_line_that_says_what_to_write(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture
) -> None:
    (flag,) = (word for word in words if word.startswith("-"))
    with pytest.raises(UserError) as caught:
        planned(words)
    line = str(caught.value)
    assert line.startswith(flag) and {remedy} <= {*re.split(r"[\s;,]+", line)}
    assert face("memory", *words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and line in printed


@pytest.mark.parametrize("words", [["--config", "3"], ["-c", "4"], ["--cfg"], ["seed=1", "-cd"]])
def test_a_flag_of_hydra_that_is_not_understood_is_one_line(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*\bbatch=4$"):
        planned(words)


@pytest.mark.parametrize("word", ["--config-name=mine", "--config-path=.", "--experimental-rerun=job.pickle"])
def test_a_run_has_the_packages_own_config(word: str) -> None:
    with pytest.raises(UserError, match=rf"^{word.partition('=')[0]}\b[^\n]*\bexperiment=NAME$"):
        planned([word])


def test_an_option_of_hydras_that_does_nothing_for_a_run_is_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    planned(["hydra.job.chdir=true", "hydra.run.dir=runs/${hydra:job.name}-${uid:}", "seed=1"])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "hydra.job.chdir=true" in printed


@pytest.mark.parametrize("word", ["hydra.run.dir=", "hydra.run.dir=''", "resume=", "hydra.sweep.dir= "])
def test_a_folder_without_a_name_is_not_the_current_one(word: str) -> None:
    name = re.escape(word.partition("=")[0])
    with pytest.raises(UserError, match=rf"\b{name}=FOLDER\b"):
        planned(["seed=1", word])


def test_a_config_group_cannot_be_removed() -> None:
    with pytest.raises(UserError, match=r"^~model\b[^\n]*$"):
        planned(["~model"])


def test_the_status_of_a_run_can_be_shown_whatever_it_names(tmp_path: Path) -> None:
    lifecycle.write_end(tmp_path, f"error: \x1b[2J{os.fsdecode(bytes([255]))}: no\nto go on: ü", 2)
    assert (tmp_path / "STATUS").read_text(encoding="utf-8") == (
        "error: \\x1b[2J\\udcff: no\nto go on: ü\nexit code 2\n"
    )


@promise(
    "Run folders and checkpoints of strangers",
    "what is not printable, as control codes, in names, values and tensors; CSV cells that are formulas",
    "shown as `\\x1b`; with an apostrophe before them",
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
