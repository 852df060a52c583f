"""Commands: exit codes, one line, no torch for a typo, no litter; what goes on, and what is printed to be pasted."""

import dataclasses
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from guards import no, nothing, without
from promises import promise
from tables import cases, missing
from training import ROOT, TINY, face, planned, run, yaml_of

from unet3d import __main__
from unet3d.base import process, progress
from unet3d.base.errors import UserError
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.schema import Config

LARGE = ["model=forum_large", "data.patch=[64,64,16]"]  # ten stages; the default network has eight
composed = cache(lambda *words: compose.compose(words))


@promise(
    "What scripts rely on",
    "names of commands",
    "`train`, `options`, `memory`, `plan`, `predict`, `publish`, `score`, `check-data`, `report`, `compare`, `folds`",
)
def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture) -> None:
    assert face() == 0
    shown = capsys.readouterr().out
    for name in "train options memory plan predict publish score check-data report compare folds".split():  # noqa: SIM905
        assert name in shown.split(), name
    with pytest.raises(SystemExit) as ended:
        face("--version")
    assert ended.value.code == 0 and capsys.readouterr().out.split() == ["unet3d", version("unet3d")]


@promise("What scripts rely on", "names of options", "docs/options.md has each, with its default and what it means")
def test_the_page_of_options_is_what_the_command_prints(capsys: pytest.CaptureFixture) -> None:
    assert face("options") == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "options.md").read_text(), "unet3d options > docs/options.md"


def test_a_warning_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert face("check-data", *TINY, "inference.mirror=true", "data.augment.mirror=[]", f"data.root={tmp_path}") == 0
    assert capsys.readouterr().err.count("inference.mirror=True") == 1
    planned(["hydra.job.chdir=true", "hydra.run.dir=runs/${hydra:job.name}-${uid:}", "seed=1"])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "hydra.job.chdir=true" in printed


def test_the_composed_config_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert face("train", "--cfg", "job", "model=forum_mid", "wandb.name=1_2") == 0
    shown = capsys.readouterr().out
    assert "upsampling: trilinear" in shown and "name: '1_2'" in shown


@promise("Config", "a wrong key, group ...")
def test_a_mistake_loads_neither_torch_nor_monai(tmp_path: Path) -> None:
    code = "import sys; from unet3d.cli import train; c = train.main(); print(c, {'torch', 'monai'} & {*sys.modules})"
    done = run("ckpt=-1", cwd=tmp_path, code=code)
    assert done.stdout == "2 set()\n" and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- Ctrl-C


def ctrl_c(*_: object, **named: object) -> None:
    signal.raise_signal(signal.SIGINT)


def ctrl_c_in_an_import(*_: object, **named: object) -> None:
    try:
        ctrl_c()
    except KeyboardInterrupt as error:
        raise ImportError("a library cannot be loaded") from error


def swallowed(then: Callable[[], None]) -> Callable[..., str]:
    """A Ctrl-C that is lost, by a library, or by Python in a callback."""

    def lost(*_: object) -> str:
        with suppress(KeyboardInterrupt):
            ctrl_c()
        then()
        return "the command went on"

    return lost


def fails() -> None:
    raise ImportError("cannot load module more than once per process")


OPTIONS = "unet3d.cli.commands.tables_of_options"


@promise("What scripts rely on", "exit code 130 ...")
@promise("Resume", "a signal whose error ...")
@promise(
    "Resume",
    "Ctrl-C in any other command, also while libraries load; in `train` before the run",
    "one line; exit 130, of `train` 75",
)
@pytest.mark.parametrize(
    ("interrupted", "act", "words", "code"),
    [
        ("unet3d.cli.train.parse", ctrl_c, "train", 75),
        ("unet3d.run.predict.load", ctrl_c, "predict net.pt images -o out", 130),
        ("unet3d.cli.memory_answers.print_fit", ctrl_c, "memory fit budget=1GiB", 130),
        (OPTIONS, ctrl_c_in_an_import, "options", 130),
        (OPTIONS, swallowed(fails), "options", 130),
        (OPTIONS, swallowed(progress.beat), "options", 130),
    ],
)
def test_ctrl_c_ends_each_command_in_one_line(
    interrupted: str,
    act: Callable[..., object],
    words: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where it is swallowed, before an error or the next border."""
    monkeypatch.setattr(interrupted, act)
    monkeypatch.setattr(sys, "argv", ["unet3d", *words.split()])
    try:
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        assert ended.value.code == code
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "a second one ends nothing"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capsys.readouterr().err == "interrupted\n"
    progress.beat()


WHILE_LOADING = """
import sys

class Finder:
    def find_spec(name, path, target=None):
        if name == "hydra":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder)
from unet3d.__main__ import main

sys.argv = ["unet3d", "check-data"]
sys.exit(main())
"""


@promise("Resume", "Ctrl-C in any other ...")
def test_ctrl_c_while_libraries_load_is_one_line(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, code=WHILE_LOADING)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# --- a run that goes on


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The files of a run of `LARGE` that mark its folder as one that can resume."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    (tmp_path / "config.yaml").write_text(yaml_of(*LARGE))
    lifecycle.save_overrides(tmp_path, LARGE)
    return tmp_path


REFUSED = """
optim=sgd | resume | optim.name: adamw -> sgd
model.norm=group | resume | model.norm: batch -> group
seed=1 | resume | seed: 0 -> 1
data=phantom | resume | data.patch: [64, 64, 16] -> [64, 64, 32]
dry_run=true | resume | dry_run
-m | resume=auto hydra.sweep.dir=FOLDER
experiment=hipocampus | experiment=hipocampus
~data.fold | data.fold
optim=null | optim=null
nothing=1 | nothing
ckpt=99 recompute=none | ckpt=99
"""


@promise(
    "Resume",
    "`resume=` with another width, patch, seed or data",
    "exit 2 with each option that differs; another learning rate is taken, with a line",
)
@pytest.mark.parametrize(("words", "parts"), cases(REFUSED))
@without("unet3d.config.compose.refuse_changes", nothing, only="seed=1")
def test_what_would_make_it_another_run_is_refused_however_it_is_written(
    killed: Path, words: list[str], parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        planned([f"resume={killed}", *words])
    assert not missing(str(caught.value), parts), caught.value


@pytest.mark.parametrize("word", ["optim=adamw", "optim.lr=0.5", "optim.clip=null"])
def test_what_leaves_it_the_same_run_is_not(killed: Path, word: str) -> None:
    """Also where the word says what is the default, or was so before."""
    config = composed(*LARGE, "optim.lr=0.1")
    (killed / "config.yaml").write_text(yaml_of(*LARGE, "optim.lr=0.1"))
    found = planned([f"resume={killed}", word]).config
    assert found.optim.lr == {"optim=adamw": 0.003, "optim.lr=0.5": 0.5}.get(word, 0.1)
    assert found.model == config.model and found.data == config.data


def test_options_on_resuming_are_for_the_network_of_the_run(killed: Path) -> None:
    found = planned([f"resume={killed}", "ckpt=10"])
    assert found.folder == killed
    assert (found.config.ckpt, found.config.resume, len(found.config.model.features)) == (10, str(killed), 5)


@promise("What scripts rely on", "config.yaml", "a run is rebuilt from it alone")
@promise("checkpoints and run folders", "a run is rebuilt ...")
@pytest.mark.parametrize("content", [None, "a: [", "- experiment=../../evil"])
def test_a_run_goes_on_from_its_config_alone(killed: Path, content: str | None) -> None:
    path = killed / "overrides.yaml"
    path.unlink() if content is None else path.write_text(content)
    assert len(compose.resumed(killed, compose.compose_tree([])).model.features) == 5


@promise(
    "Resume",
    "an option that makes a resumed run another one, or contradicts one of the run",
    "one line with the given option and the run's",
)
@pytest.mark.parametrize(
    ("was", "given", "line"),
    [
        (
            [f"init={__file__}", "optim.init_lr=0.1", "optim.init_names=[inc]"],
            ["steps=999", "init=null"],
            r"^resume: .*\binit: (?!.*init_names)",
        ),
        (["recompute=lean"], ["ckpt=2"], r"^recompute=lean and ckpt=2: .*; the run that goes on has recompute=lean$"),
        (["recompute=lean"], ["ckpt=99", "recompute=none"], r"^ckpt=99: [^;]*; [^;]*; [^;]*$"),
    ],
)
def test_a_resumed_run_names_no_option_that_was_never_given(
    was: list[str], given: list[str], line: str, tmp_path: Path
) -> None:
    """`init_names` is what the run has noted of its start; `recompute` is the run's own, and is called so."""
    (tmp_path / "config.yaml").write_text(yaml_of("model=unet_tiny", *was))
    with pytest.raises(UserError, match=line):
        compose.resumed(tmp_path, compose.compose_tree(given))


def test_a_run_without_an_option_of_a_newer_version_can_resume() -> None:
    now, before = compose.to_plain(Config()), compose.to_plain(Config())
    del before["data"]["nonfinite"]
    compose.refuse_changes(before, now)
    before["data"]["affine_check"], before["data"]["allow_outside"] = "warn", True
    with pytest.raises(UserError, match=r"data\.affine_check\b.*\bwarn\b.*\berror$"):
        compose.refuse_changes(before, now)


@promise("Resume", "a run that was ...")
@without("unet3d.cli.lifecycle.checkpoints", no)
def test_a_job_that_may_have_begun_goes_on_or_begins(killed: Path, tmp_path: Path) -> None:
    found = planned(["resume=auto", f"hydra.run.dir={killed}", "steps=999"])
    assert (found.config.steps, found.config.resume, found.folder) == (999, str(killed), killed)
    new = tmp_path / "new"
    begun = planned(["resume=auto", "model=unet_tiny", f"hydra.run.dir={new}"])
    assert (begun.config, begun.folder) == (composed("model=unet_tiny"), new)


@promise("Training", "the same of a ...")
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["experiment=cicek2016_semi", "model=cicek2016_2d", "data.sparse_fold=1", "optim.lr=0.5"],
        ["experiment=[cicek2016_full,five_folds]", "data.fold=1", "data.phantom.cases=5"],
    ],
    ids=["semi", "folds"],
)
@without("unet3d.config.compose.files_of", lambda group, name, folders: iter(()), only="folds")
def test_a_job_of_an_experiment_goes_on_with_the_words_that_began_it(killed: Path, words: list[str]) -> None:
    """Its experiment and its network set the same options, in one order."""
    (killed / "config.yaml").write_text(yaml_of(*words))
    found = planned([*words, "resume=auto", f"hydra.run.dir={killed}"]).config
    assert dataclasses.replace(found, resume=None) == composed(*words)


@promise("Config", "a folder for `--config-dir` ...")
@pytest.mark.parametrize("name", ["jürgen", "amp=false,ckpt=2", "it's", "a\\b", "[x] (2)"])
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
    """By train.py only where it was run, or is in the current folder; by `python` where that is this interpreter."""

    def words(typed: str, place: Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [typed])
        monkeypatch.chdir(place)
        return shlex.split(process.training_command(["a=b c"]))

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    (tmp_path / "train.py").touch()  # of somebody else
    assert words("train.py", ROOT) == ["python", "train.py", "a=b c"]
    assert words(str(ROOT / "train.py"), tmp_path) == ["python", str(ROOT / "train.py"), "a=b c"]
    assert words("train.py", tmp_path) == ["python", "-m", "unet3d", "train", "a=b c"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words("unet3d", tmp_path)[0] == sys.executable
