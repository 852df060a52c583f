"""A run's numbers survive what happens to it and to its loggers; what wandb records, and what it must not."""

import errno
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from guards import unchanged, without
from PIL import Image
from promises import promise
from rich.console import Console as Terminal
from training import forked, make_media_folder
from wandb_records import read_file, read_run

from unet3d.base import errors, progress, terminal
from unet3d.base.errors import UserError, reason
from unet3d.base.types import Table
from unet3d.config import rules
from unet3d.config.schema import Config, Wandb
from unet3d.report import loggers
from unet3d.report.loggers import JsonLines, Loggers, TensorBoardLogger, TerminalLogger, identity, open_loggers

SOURCE = str(Path(loggers.__file__).parents[2])
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def offline(config: Config) -> str:
    """Return the mode of wandb, whatever is asked for."""
    return "offline"


def python(program: Path, *arguments: str, **variables: str) -> list[str]:
    """Run a program in its folder, as a user who never set up wandb, by a fork that has torch; its lines on stderr."""
    child = forked(run_program, program, arguments, variables)
    child.start()
    child.join()
    said = program.with_name("err").read_text()
    assert child.exitcode == 0, said
    return said.splitlines()


def run_program(program: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    os.chdir(program.parent)
    make_media_folder()
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        del os.environ[name]
    os.environ |= variables
    os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open("out", os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


# --- metrics.jsonl


def test_a_record_has_its_values_its_step_and_strings_that_float_reads_for_what_json_lacks(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "metrics.jsonl")
    logger.scalars({"train/loss": 0.1, "note": "é", "val/dice/left": None, "val/dice/right": np.float32(0.5)}, 1)
    logger.scalars({"a": np.float32(math.nan), "b": math.inf, "c": -math.inf}, 2)
    logger.close(0)
    found = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert found == [
        {"step": 1, "train/loss": 0.1, "note": "é", "val/dice/left": None, "val/dice/right": 0.5},
        {"step": 2, "a": "nan", "b": "inf", "c": "-inf"},
    ]


def test_a_record_that_a_broken_disk_does_not_take_ends_the_run(tmp_path: Path, monkeypatch: Patch) -> None:
    """A disk that is full may have room again; one that fails has not."""
    logger = JsonLines(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(JsonLines, "_write", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        logger.scalars({"train/loss": 1.0}, 1)
    monkeypatch.undo()
    logger.close(1)


@promise("Training", "SIGKILL while records are ...")
def test_a_resumed_run_appends_after_a_record_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "train/lo')
    for step in (3, 4):
        logger = JsonLines(path)
        logger.scalars({}, step)
        logger.close(0)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "train/lo\n{"step": 3}\n{"step": 4}\n'


ENDLESS = """
import itertools, pathlib
from unet3d.report.loggers import JsonLines

logger = JsonLines(pathlib.Path("metrics.jsonl"))
for step in itertools.count(1):
    logger.scalars({"train/loss": 1 / step}, step)
    print(step, flush=True)
"""


@promise(
    "Training",
    "SIGKILL while records are written",
    "every finished step is there; a last line that was cut short is passed over",
)
def test_a_killed_run_has_every_record_that_it_wrote(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=environment) as child:
        while int(child.stdout.readline()) < 500:
            pass
        child.send_signal(signal.SIGKILL)
        printed = int([b"500", *child.stdout.read().split(b"\n")][-2])
    records = lines(tmp_path / "metrics.jsonl")
    assert len(records) >= printed >= 500
    assert records[printed - 1] == {"step": printed, "train/loss": 1 / printed}


# --- the fan-out


def log_all(logger: Any) -> None:
    logger.scalars({"a": 1}, 1)
    logger.image("picture", Path("a.png"), 2)
    logger.table("scores", ["case"], [["x"]])
    logger.summary({"best": 1})
    logger.close(4)


@promise("Training", "a logger of one's own that fails, exits or has no `scalars`", "one warning; the run continues")
@pytest.mark.parametrize(("method", "called"), [("scalars", 1), ("table", 3), ("close", 5)])
def test_a_logger_that_fails_is_dropped_with_one_line_and_the_others_go_on(
    method: str, called: int, capsys: Capture
) -> None:
    alone, bad, good = Mock(), Mock(), Mock()
    getattr(bad, method).side_effect = OSError("disk\nfull")
    log_all(alone)
    log_all(Loggers([bad, SimpleNamespace(scalars=alone.only_scalars), good]))
    assert good.mock_calls == alone.mock_calls[:-1] and alone.mock_calls[-1] == call.only_scalars({"a": 1}, 1)
    assert bad.mock_calls == [*good.mock_calls[:called], call.close(1)]
    line = capsys.readouterr().err
    assert "loggers=[unittest.mock:Mock]" in line and "OSError: disk full" in line and line.count("\n") == 1


def test_an_interrupt_is_not_taken_for_a_failing_logger() -> None:
    with pytest.raises(KeyboardInterrupt):
        Loggers([Mock(**{"scalars.side_effect": KeyboardInterrupt})]).scalars({}, 1)


PARTS = """
class Exits:
    def __init__(self, config, folder): self.lines = []
    def scalars(self, values, step): raise SystemExit(3)
    def close(self, exit_code): raise SystemExit(5)

class Starts:
    def __init__(self, config, folder): raise SystemExit(3)

def nothing(config, folder): pass
"""


@promise("Training", "a logger of one's ...")
@pytest.mark.parametrize("name", ["Exits", "Starts", "nothing"])
def test_a_logger_of_ones_own_neither_ends_the_run_nor_logs_nothing_unsaid(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "own_loggers.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(loggers=[f"own_loggers:{name}"], wandb=Wandb(mode="disabled"))
    opened = open_loggers(config, tmp_path)
    opened.scalars({"a": 1}, 1)
    opened.close(0)
    line = capsys.readouterr().err
    assert f"loggers=[own_loggers:{name}]" in line and line.count("\n") == 1
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}]


# --- wandb, for real


SESSION = """
import pathlib, socket, sys
from unet3d.config.schema import Config
from unet3d.report.loggers import open_loggers

socket.gethostname = lambda: "radiology-pc-12"
config = Config()
config.wandb.private = "public" not in sys.argv
config.model.features = [8, 16]
config.data.root, config.data.images = "patients_2024", "/archive/images"
config.data.classes = ["background", "/archive/names"]
folder = pathlib.Path("run")
folder.mkdir(exist_ok=True)
loggers = open_loggers(config, folder)
print("on the console: Mrs Smith")
loggers.scalars({"train/loss": 1.5, "val/dice/left": None}, 10)
loggers.scalars({"train/loss": 0.5}, 20)
loggers.scalars({"train/loss": 0.7}, 20)
loggers.image("val/prediction", pathlib.Path("picture.png"), 20)
rows = [["a", None, "/archive/a"], ["b", 1, None], ["c", "low", None]]
loggers.table("val/scores", ["case", "dice/left", "from"], rows)
loggers.summary({"val/dice_mean": 0.75, "from": "/archive/b"})
loggers.close(3)
"""


def session(folder: Path, *arguments: str, code: str = SESSION) -> tuple[Path, list[str]]:
    """Run SESSION as a program of its own, in a folder and by a user with names that can be searched for."""
    place = folder / "ward-seven"
    place.mkdir()
    Image.new("RGB", (8, 6)).save(place / "picture.png")
    program = place / "segment_everyone.py"
    program.write_text(code)
    user = {"USER": "marie.curie", "LOGNAME": "marie.curie", "HOME": str(folder / "marie.curie")}
    return place / "run", python(program, *arguments, **user)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, warnings = session(tmp_path_factory.mktemp("private"))
    assert warnings == []
    return folder


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that is not private, and was to be online, of a user without a key; and the lines on its stderr.

    Its best checkpoint is recorded, too.
    """
    code = SESSION.replace("config = Config()", "config = Config(); config.wandb.mode = 'online'")
    code = code.replace("loggers.close(3)", "loggers.checkpoint(pathlib.Path('picture.png'))\nloggers.close(3)")
    return session(tmp_path_factory.mktemp("public"), "public", code=code)


@pytest.mark.slow
def test_wandb_records_all_that_it_is_given_at_its_own_step_and_no_path(private: Path) -> None:
    """Also two records of one step."""
    recorded = read_run(private)
    assert recorded.config["model"]["features"] == [8, 16] and recorded.config["seed"] == 0
    assert not {"root", "images", "split", "classes"} & {*recorded.config["data"]}
    rows = [(row["trainer/step"], row["train/loss"]) for row in recorded.history if "train/loss" in row]
    assert rows == [(10, 1.5), (20, 0.5), (20, 0.7)] and recorded.history[0]["val/dice/left"] is None
    assert recorded.step_metrics == {"trainer/step": "", "*": "trainer/step"}
    assert recorded.unsummarised == {"trainer/step", "*"}, "only what `summary` gets is in the summary"
    assert recorded.summary["val/dice_mean"] == 0.75 and recorded.exit_code == 3
    (image,) = (row for row in recorded.history if "val/prediction._type" in row)
    assert (image["val/prediction.width"], image["val/prediction.height"], image["trainer/step"]) == (8, 6, 20)
    (table,) = (row for row in recorded.history if "val/scores._type" in row)
    (files,) = private.glob("wandb/*/files")
    assert recorded.files == {image["val/prediction.path"], table["val/scores.path"]}
    assert json.loads((files / table["val/scores.path"]).read_text()) == {
        "columns": ["case", "dice/left", "from"],
        "data": [["a", None, None], ["b", 1, None], ["c", "low", None]],
    }


def test_wandb_names_a_run_as_its_options_and_its_own_variables_say(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("NAME", "RUN_GROUP", "PROJECT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    sweep = tmp_path / "seeds"
    (sweep / "3").mkdir(parents=True)
    (sweep / "multirun.yaml").touch()

    def named(folder: Path, **options: Any) -> list[Any]:
        return [*identity(Wandb(**options), folder).values()]

    assert named(tmp_path) == ["unet3d", None, tmp_path.name, None, None, None, None]
    assert named(sweep / "3")[2:4] == ["seeds-3", "seeds"]
    assert named(sweep)[2:4] == ["seeds", "seeds"], "the comparison at its end"
    for name in ("NAME", "RUN_GROUP", "PROJECT"):
        monkeypatch.setenv(f"WANDB_{name}", "of the environment")
    assert named(sweep / "3")[:4] == ["of the environment", None, None, None]
    chosen = named(sweep, entity="lab", name="a/b", group="g", project="p", job_type="j", tags=["t"], notes="n")
    assert chosen == ["p", "lab", "a/b", "g", "j", ["t"], "n"]


@promise("Training", "wandb without network or ...")
def test_without_a_key_an_online_run_goes_on_offline_with_its_best_checkpoint(public: tuple[Path, list[str]]) -> None:
    folder, (warning,) = public
    assert "UsageError" in warning and "wandb sync" in warning
    found = read_run(folder)
    assert len(found.history) == 5
    (artifact,) = found.artifacts
    assert (artifact.type, artifact.name) == ("model", f"run-{found.run.run_id}-best")
    (entry,) = artifact.manifest.contents
    assert entry.path == "picture.png" and Path(entry.local_path).is_relative_to(folder.resolve())
    assert Path(entry.local_path).read_bytes() == Path(folder, "..", "picture.png").read_bytes()
    assert not [p for p in (folder.parents[1] / "marie.curie").rglob("*") if "artifacts" in p.parts and p.is_file()]


RESUMED = """
import pathlib
from unet3d.config.schema import Config
from unet3d.report.loggers import open_loggers

loggers = open_loggers(Config(resume="run"), pathlib.Path("run"))
loggers.scalars({"train/loss": float("nan")}, 30)
loggers.close(0)
"""


@promise(
    "Training",
    "a tracked run that is stopped or killed, and resumed offline",
    "the resumed part has a new id and all records: nothing is replaced or missing, in any order of upload",
)
def test_a_resumed_part_that_is_offline_is_complete_and_replaces_nothing(private: Path, tmp_path: Path) -> None:
    """What is uploaded under an id replaces what is there. The file of a killed run may hold nothing."""
    folder = tmp_path / "run"
    shutil.copytree(private, folder)
    (first,) = folder.glob("wandb/*/*.wandb")
    earlier = read_run(folder)
    first.write_bytes(first.read_bytes()[:7])
    (tmp_path / "resumed.py").write_text(RESUMED)
    assert python(tmp_path / "resumed.py", HOME=str(tmp_path)) == []
    (second,) = {*folder.glob("wandb/*/*.wandb")} - {first}
    found = read_file(second)
    assert found.run.run_id != earlier.run.run_id
    named = [(one.run.project, one.run.display_name, one.run.run_group) for one in (earlier, found)]
    assert named[0] == named[1]
    rows = [(row["trainer/step"], row["train/loss"]) for row in found.history]
    assert rows[:-1] == [(10, 1.5), (20, 0.5), (20, 0.7)] and rows[-1][0] == 30 and math.isnan(float(rows[-1][1]))
    assert found.history[0]["val/dice/left"] is None


NAMED = {"radiology-pc-12", "marie.curie", "ward-seven", "segment_everyone", "patients_2024", "Mrs Smith"}


def names_in(folder: Path, names: set[str]) -> set[str]:
    """Which of these are in what wandb left in a run folder: in bytes and names of files, and targets of links."""
    everything = Path(shutil.make_archive(str(folder.with_name("all")), "tar", folder, "wandb")).read_bytes()
    return {name for name in names if name.encode() in everything}


@promise("the code itself", "wandb is offline and records nothing about machine, user and paths, unless asked to")
@pytest.mark.slow
def test_a_private_run_records_nothing_about_machine_user_and_paths(
    private: Path, public: tuple[Path, list[str]]
) -> None:
    """The machine's real name is looked for only if it is no chance find, like "vm"."""
    machine = {socket.gethostname()} if len(socket.gethostname()) > 4 else set()
    assert names_in(private, NAMED | machine | {str(private), sys.prefix, "archive"}) == set()
    assert "environment" not in read_run(private).kinds
    assert not list(private.glob("wandb/*/files/*.*"))  # requirements.txt, output.log, wandb-metadata.json
    assert names_in(public[0], NAMED) == NAMED and "environment" in read_run(public[0]).kinds, "the search finds them"
    assert read_run(public[0]).config["data"]["images"] == "/archive/images"


@promise("Training", "wandb without network or ...")
@without("unet3d.report.loggers.QUIET", {"init_timeout": 90})
def test_every_private_setting_is_known_to_this_wandb() -> None:
    import wandb

    assert set(loggers.PRIVATE) | set(loggers.QUIET) <= set(wandb.Settings.model_fields)
    assert loggers.QUIET["init_timeout"] <= 20


@pytest.fixture
def wandb(monkeypatch: Patch) -> Mock:
    """An older wandb, which knows few settings, in place of wandb."""
    fake = Mock(Error=OSError)
    fake.init.return_value.id = "new"
    fake.Settings.model_fields = {"console": None}
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "to be set, and unset after the test")
    for name in ("ERROR_REPORTING", "MODE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    return fake


def test_an_older_wandb_gets_the_settings_that_it_knows_and_of_a_private_run_reports_no_errors(
    tmp_path: Path, wandb: Mock
) -> None:
    for is_private in (False, True):
        loggers.WandbLogger(Config(wandb=Wandb(private=is_private)), tmp_path)
        assert os.environ.get("WANDB_ERROR_REPORTING") == ("false" if is_private else None)
    assert wandb.Settings.mock_calls == [call(), call(console="off")]


@promise("Training", "a tracked run that ...")
def test_only_a_resumed_run_that_was_and_is_online_continues_its_wandb_run(tmp_path: Path, wandb: Mock) -> None:
    def started(mode: str, resume: str | None) -> tuple[str | None, str | None]:
        loggers.WandbLogger(Config(resume=resume, wandb=Wandb(mode=mode)), tmp_path)
        return wandb.init.call_args.kwargs["id"], wandb.init.call_args.kwargs["resume"]

    assert started("online", "run") == (None, None)
    for name in ("run-20250102_101010-old", "run-20260102_101010-new", "offline-run-20240102_101010-older"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert started("online", "run") == ("new", "allow")
    assert started("online", None) == started("offline", "run") == (None, None)
    (tmp_path / "wandb" / "offline-run-20270102_101010-last").mkdir()
    assert started("online", "run") == (None, None)


@promise("Training", "wandb without network or ...")
@pytest.mark.slow
def test_without_network_an_online_run_goes_on_offline_with_one_line_and_an_id_of_its_own(tmp_path: Path) -> None:
    code = (
        "import os, unet3d.report.loggers; unet3d.report.loggers.QUIET['init_timeout'] = 1\n"
        "os.environ |= {'WANDB_MODE': 'online', 'WANDB_API_KEY': 'a' * 40, 'WANDB_BASE_URL': 'http://127.0.0.1:9'}\n"
        "pathlib.Path('run/wandb/run-20200101_101010-abcd1234').mkdir(parents=True)\n"
    )
    folder, warnings = session(
        tmp_path, code=SESSION.replace("config = Config()", f"{code}config = Config(resume='run')")
    )
    (warning,) = warnings
    assert "CommError" in warning and "wandb sync" in warning
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert path.name != "run-abcd1234.wandb"
    assert len(lines(folder / "metrics.jsonl")) == 3


@promise("Training", "wandb without network or ...")
@without("unet3d.report.loggers.wandb_mode", offline, only="disabled-online")
@pytest.mark.parametrize(
    ("variable", "option", "problem"),
    [("disabled", "online", ""), ("", "disabled", ""), ("", "offline", "wandb does not start (ModuleNotFoundError")],
)
def test_wandb_that_cannot_be_loaded_costs_one_line_and_disabled_it_is_not_even_loaded(
    variable: str, option: str, problem: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setitem(sys.modules, "wandb", None)
    out = open_loggers(Config(wandb=Wandb(mode=option)), tmp_path)
    out.scalars({"train/loss": 1.0}, 1)
    out.close(0)
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == bool(problem)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1 and not (tmp_path / "wandb").exists()


def test_tensorboard_has_scalars_pictures_tables_and_the_config_and_hides_what_is_repeated(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (8, 6), (250, 0, 0)).save(tmp_path / "picture.png")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2)))
    first, resumed = Config(tensorboard=True), Config(tensorboard=True, resume="run")
    for config, steps in ((first, (1, 2, 3)), (resumed, (3, 4))):
        logger = TensorBoardLogger(config, tmp_path)
        for step in steps:
            logger.scalars({"train/loss": step / (2 if config.resume else 1), "val/dice/left": None}, step)
        logger.image("val/prediction", tmp_path / "picture.png", 3)
        logger.table("val/cases", ["case", "dice/left"], [["a", None], ["b", 0.5]])
        logger.summary({"val/dice_mean": 0.75})
        logger.close(0)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 1.5), (4, 2)]
    assert found.Tags()["scalars"] == ["train/loss"]
    (image, *_) = found.Images("val/prediction")
    assert (image.width, image.height, image.step) == (8, 6, 3)
    texts = "".join(str(found.Tensors(tag)[-1].tensor_proto) for tag in found.Tags()["tensors"])
    assert all(text in texts for text in ("| b | 0.5 |", "val/dice_mean | 0.75", "tensorboard: true"))


def test_tensorboard_that_is_not_installed_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^tensorboard=true: .*\[tensorboard\]"):
        rules.check(Config(tensorboard=True))
    rules.check(Config())


def test_the_terminal_shows_dice_so_far_and_the_time_left(
    terminal: io.StringIO, monkeypatch: Patch, golden: Callable[[str, str], None]
) -> None:
    """In plain lines, of a run that was resumed at step 20, and in a bar."""
    plain, now = io.StringIO(), [100.0]
    monkeypatch.setattr(loggers.time, "perf_counter", lambda: now[0])
    lines_of = TerminalLogger(40, Terminal(file=plain, width=80))
    for step in range(21, 27):
        now[0] += 3 if step < 25 else 1  # the machine is free again
        lines_of.scalars({"train/loss": 0.5, "time/step_s": 2.5 if step < 25 else step - 24.5}, step)
        if step == 24:
            dice = {"val/dice_mean": 0.5, "val/dice/[core] :skull:": 0.5, "val/dice/x\x1b[2J [/b]": None}
            lines_of.scalars(dice | {"time/val_s": 12.0}, step)
    lines_of.close(0)
    golden("training_lines.txt", plain.getvalue())
    bar = TerminalLogger(40, Terminal(file=terminal, width=120))
    for values in ({"val/dice_mean": 0.5}, {"val/dice_mean": 0.25}, {"train/loss": 0.75, "time/step_s": 1.0}):
        bar.scalars(values, 30)
    with progress.counting("more"):  # draws all bars
        pass
    bar.close(0)
    assert re.search(r"0\.7500\D+0\.250\D+0\.500", terminal.getvalue())


@promise("what is printed and written", "names and values from ...")
@without("unet3d.base.terminal.escaped", unchanged)
def test_a_table_shows_what_would_command_a_terminal_and_keeps_every_language() -> None:
    table = Table(["class\x1b[2J", "näme\x9b1m"], [["日本語 🧠", "a\tb\r\nc\x07"], ["\udcff", "\u202eesrever\u2028"]])
    text = terminal.plain_text(["a line\x1b[2J\nübung", ("title\x1b]0;x\x07\n", table)], 100)
    first, second, title, _, head, _, one, other, *_ = text.splitlines()
    assert (first, second, title) == (r"a line\x1b[2J", "übung", r"title\x1b]0;x\x07\n")
    assert head.split() == [r"class\x1b[2J", r"näme\x9b1m"]
    assert one.split() == ["日本語", "🧠", r"a\tb\r\nc\x07"] and other.split() == [r"\udcff", r"\u202eesrever\u2028"]


@promise(
    "Run folders and checkpoints of strangers",
    "a name that is an emoji's, as `:skull:`, or markup, as `[b]`",
    "printed as it is",
)
def test_a_name_that_is_an_emojis_or_markup_stays_text(capsys: Capture) -> None:
    name = "[b]:skull:[/b]"
    table = name, Table([name], [[name]])
    assert terminal.plain_text([name, table], 80).count(name) == 4
    for part in (name, terminal.terminal_table(*table)):
        terminal.paper(80).print(part)
    assert capsys.readouterr().out.count(name) == 4


@promise("what is printed and written", "names and values from ...")
@without("unet3d.base.errors.escaped", unchanged)
def test_a_warning_is_one_line_of_text(capsys: Capture) -> None:
    assert reason(ValueError("a\x1b[2J\n\n\u2066b")) == r"ValueError: a\x1b[2J \u2066b"
    errors.warn("no/\udcff\nwarning: all is lost\x1b[2J")
    assert capsys.readouterr().err == "warning: no/\\udcff\\nwarning: all is lost\\x1b[2J\n"
