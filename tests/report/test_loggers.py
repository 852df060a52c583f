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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from unet3d.report.loggers import JsonLines, Loggers, TensorBoardLogger, TerminalLogger, open_loggers

SOURCE = str(Path(loggers.__file__).parents[2])
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds wandb-core through /proc")


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


def test_a_record_has_its_values_and_its_step(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "metrics.jsonl")
    logger.scalars({"train/loss": 0.1, "note": "é"}, 1)
    logger.scalars({"val/dice/left": None, "val/dice/right": np.float32(0.5)}, 2)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 0.1, "note": "é"},
        {"step": 2, "val/dice/left": None, "val/dice/right": 0.5},
    ]
    logger.close(0)


def test_a_record_that_a_broken_disk_does_not_take_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full may have room again; one that fails has not."""

    def fail(logger: JsonLines) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    logger = JsonLines(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(JsonLines, "_write", fail)
    with pytest.raises(OSError, match="Input/output"):
        logger.scalars({"train/loss": 1.0}, 1)
    monkeypatch.undo()
    logger.close(1)


def test_what_json_lacks_is_a_string_that_float_reads(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "metrics.jsonl")
    logger.scalars({"a": np.float32(math.nan), "b": math.inf, "c": -math.inf}, 1)
    logger.close(0)
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert record == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}
    assert float(record["c"]) == -math.inf


@promise("Training", "SIGKILL while records are ...")
def test_a_resumed_run_appends_after_a_record_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "train/lo')
    for step in (3, 4):
        logger = JsonLines(path)
        logger.scalars({}, step)
        logger.close(0)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "train/lo\n{"step": 3}\n{"step": 4}\n'


@promise(
    "Training",
    "SIGKILL while records are written",
    "every finished step is there; a last line that was cut short is passed over",
)
def test_a_killed_run_has_every_record_that_it_wrote(tmp_path: Path) -> None:
    code = (
        "import itertools, pathlib; from unet3d.report.loggers import JsonLines\n"
        "logger = JsonLines(pathlib.Path('metrics.jsonl'))\n"
        "for step in itertools.count(1):\n"
        "    logger.scalars({'train/loss': 1 / step}, step)\n"
        "    print(step, flush=True)"
    )
    environment = os.environ | {"PYTHONPATH": SOURCE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, env=environment) as child:
        while int(child.stdout.readline()) < 500:
            pass
        child.send_signal(signal.SIGKILL)
        printed = int([b"500", *child.stdout.read().split(b"\n")][-2])
    records = lines(tmp_path / "metrics.jsonl")
    assert len(records) >= printed >= 500
    assert records[printed - 1] == {"step": printed, "train/loss": 1 / printed}


# --- the fan-out


class Memory:
    """Keeps its calls; raises in the `fails`-th."""

    def __init__(self, fails: int = -1, error: type[BaseException] = OSError) -> None:
        self.calls: list[tuple] = []
        self.fails, self.error = fails, error

    def _keep(self, *call: Any) -> None:
        self.calls.append(call)
        if len(self.calls) - 1 == self.fails:
            raise self.error("disk\nfull")

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        self._keep("scalars", dict(values), step)

    def image(self, key: str, path: Path, step: int) -> None:
        self._keep("image", key, path, step)

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
        self._keep("table", key, columns, rows)

    def summary(self, values: Mapping[str, object]) -> None:
        self._keep("summary", dict(values))

    def close(self, exit_code: int) -> None:
        self._keep("close", exit_code)


def log_all(logger: Memory | Loggers) -> None:
    logger.scalars({"a": 1}, 1)
    logger.image("picture", Path("a.png"), 2)
    logger.table("scores", ["case"], [["x"]])
    logger.summary({"best": 1})
    logger.close(4)


@promise("Training", "a logger of one's own that fails, exits or has no `scalars`", "one warning; the run continues")
@pytest.mark.parametrize("fails", range(5))
def test_a_logger_that_fails_is_dropped_with_one_line_and_the_others_go_on(fails: int, capsys: Capture) -> None:
    alone, bad, good = Memory(), Memory(fails), Memory()
    log_all(alone)
    log_all(Loggers([bad, good]))
    assert good.calls == alone.calls
    assert bad.calls == [*alone.calls[: fails + 1], ("close", 1)]
    line = capsys.readouterr().err
    assert "Memory" in line and "OSError: disk full" in line and line.count("\n") == 1


@pytest.mark.parametrize("is_good", [True, False])
def test_a_logger_has_only_the_methods_that_it_needs(is_good: bool, capsys: Capture) -> None:
    class Losses:
        def scalars(self, values: Mapping[str, Any], step: int) -> None:
            losses.append((step, values["a"] if is_good else values["b"]))

    losses: list[tuple[int, Any]] = []
    log_all(Loggers([Losses()]))
    assert losses == ([(1, 1)] if is_good else [])
    line = capsys.readouterr().err
    assert line.count("\n") == (not is_good) and ("Losses" in line and "KeyError: 'b'" in line) == (not is_good)


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


def test_a_logger_is_one_file_that_its_path_names(tmp_path: Path, capsys: Capture) -> None:
    path = "unet3d.report.loggers:TensorBoardLogger"
    opened = open_loggers(Config(loggers=[path], wandb=Wandb(mode="disabled")), tmp_path)
    opened.scalars({"a": 1}, 1)
    opened.close(0)
    assert any((tmp_path / "tensorboard").iterdir()) and capsys.readouterr().err == ""


def test_an_interrupt_is_not_taken_for_a_failing_logger() -> None:
    with pytest.raises(KeyboardInterrupt):
        Loggers([Memory(0, KeyboardInterrupt)]).scalars({}, 1)


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
def test_wandb_records_the_config_as_nested_values_without_paths(private: Path) -> None:
    config = read_run(private).config
    assert config["model"]["features"] == [8, 16]
    assert config["data"]["augment"]["mirror"] == [0, 1, 2]
    assert config["seed"] == 0
    assert not {"root", "images", "split", "classes"} & set(config["data"])
    assert "resume" not in config


def test_wandb_records_scalars_at_their_own_step_and_loses_none_of_a_step_logged_twice(private: Path) -> None:
    recorded = read_run(private)
    rows = [(row["trainer/step"], row["train/loss"]) for row in recorded.history if "train/loss" in row]
    assert rows == [(10, 1.5), (20, 0.5), (20, 0.7)]
    assert recorded.history[0]["val/dice/left"] is None
    assert recorded.step_metrics == {"trainer/step": "", "*": "trainer/step"}
    assert recorded.unsummarised == {"trainer/step", "*"}, "only what `summary` gets is in the summary"


def test_wandb_records_pictures_tables_summary_and_exit_code(private: Path) -> None:
    recorded = read_run(private)
    assert recorded.exit_code == 3
    assert recorded.summary["val/dice_mean"] == 0.75
    (image,) = (row for row in recorded.history if "val/prediction._type" in row)
    assert (image["val/prediction.width"], image["val/prediction.height"], image["trainer/step"]) == (8, 6, 20)
    (table,) = (row for row in recorded.history if "val/scores._type" in row)
    (files,) = private.glob("wandb/*/files")
    assert recorded.files == {image["val/prediction.path"], table["val/scores.path"]}
    assert (files / image["val/prediction.path"]).is_file()
    assert json.loads((files / table["val/scores.path"]).read_text()) == {
        "columns": ["case", "dice/left", "from"],
        "data": [["a", None, None], ["b", 1, None], ["c", "low", None]],
    }


def test_wandb_names_a_run_as_its_options_and_its_own_variables_say(
    tmp_path: Path, starts: list[dict[str, Any]], monkeypatch: Patch
) -> None:
    for name in ("NAME", "RUN_GROUP", "PROJECT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    names = ("project", "entity", "name", "group", "job_type", "tags", "notes")
    job = tmp_path / "seeds" / "3"
    job.mkdir(parents=True)

    def started(config: Config, folder: Path) -> list[Any]:
        loggers.WandbLogger(config, folder)
        return [starts[-1][name] for name in names]

    assert started(Config(), tmp_path) == ["unet3d", None, tmp_path.name, None, None, None, None]
    (tmp_path / "seeds" / "multirun.yaml").touch()
    assert started(Config(), job)[2:4] == ["seeds-3", "seeds"]
    assert started(Config(), tmp_path / "seeds")[2:4] == ["seeds", "seeds"], "the comparison at its end"
    chosen = Config(wandb=Wandb(entity="lab", name="a/b", group="g", project="p", job_type="j", tags=["t"], notes="n"))
    for name in ("NAME", "RUN_GROUP", "PROJECT"):
        monkeypatch.setenv(f"WANDB_{name}", "of the environment")
    assert started(chosen, job) == ["p", "lab", "a/b", "g", "j", ["t"], "n"]
    assert started(Config(), job)[:4] == ["of the environment", None, None, None]


def test_the_best_checkpoint_is_an_artifact(public: tuple[Path, list[str]]) -> None:
    folder, _ = public
    found = read_run(folder)
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


def everything(folder: Path) -> bytes:
    """All that wandb left in a run folder: bytes and names of files, targets of links."""
    found = []
    for path in (folder / "wandb").rglob("*"):
        found.append(os.fsencode(path.relative_to(folder)))
        if path.is_symlink():
            found.append(os.fsencode(path.readlink()))
        elif path.is_file():
            found.append(path.read_bytes())
    return b"\n".join(found)


def secrets(folder: Path) -> set[str]:
    """What could tell who ran this where. The machine's real name only if it is no chance find, like "vm"."""
    names = [socket.gethostname()] if len(socket.gethostname()) > 4 else []
    return {"radiology-pc-12", "marie.curie", "ward-seven", "segment_everyone", str(folder), sys.prefix, *names}


@promise("the code itself", "wandb is offline and records nothing about machine, user and paths, unless asked to")
def test_a_private_run_records_nothing_about_machine_user_and_paths(private: Path) -> None:
    recorded = everything(private)
    names = secrets(private) | {"archive", "patients_2024", "Mrs Smith"}
    assert {name for name in names if name.encode() in recorded} == set()
    assert "environment" not in read_run(private).kinds
    assert not list(private.glob("wandb/*/files/*.*"))  # requirements.txt, output.log, wandb-metadata.json


@pytest.mark.slow
def test_the_search_for_secrets_finds_them_in_a_run_that_is_not_private(public: tuple[Path, list[str]]) -> None:
    folder, _ = public
    recorded = everything(folder)
    names = {"radiology-pc-12", "marie.curie", "ward-seven", "segment_everyone", "patients_2024", "Mrs Smith"}
    assert {name for name in names if name.encode() not in recorded} == set()
    assert "environment" in read_run(folder).kinds
    assert read_run(folder).config["data"]["images"] == "/archive/images"


@promise("Training", "wandb without network or ...")
@without("unet3d.report.loggers.QUIET", {"init_timeout": 90})
def test_every_private_setting_is_known_to_this_wandb() -> None:
    import wandb

    assert set(loggers.PRIVATE) | set(loggers.QUIET) <= set(wandb.Settings.model_fields)
    assert loggers.QUIET["init_timeout"] <= 20


@pytest.fixture
def starts(monkeypatch: Patch) -> list[dict[str, Any]]:
    """What wandb is asked to start from now on, in place of wandb: an older one, which knows few settings."""
    asked: list[dict[str, Any]] = []
    run = SimpleNamespace(id="new", define_metric=lambda name, step_metric=None, summary=None: None)
    settings = type("Settings", (SimpleNamespace,), {"model_fields": {"console": None}})
    init = lambda **options: asked.append(options) or run  # noqa: E731
    wandb = SimpleNamespace(Settings=settings, Error=OSError, setup=lambda settings: None, init=init)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "to be set, and unset after the test")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    return asked


def test_settings_that_an_older_wandb_lacks_are_omitted(tmp_path: Path, starts: list[dict[str, Any]]) -> None:
    public = Config()
    public.wandb.private = False
    for config in (public, Config()):
        loggers.WandbLogger(config, tmp_path)
    assert [vars(options["settings"]) for options in starts] == [{}, {"console": "off"}]


def test_only_a_private_run_keeps_wandb_from_reporting_errors(tmp_path: Path, starts: list[dict[str, Any]]) -> None:
    public = Config()
    public.wandb.private = False
    loggers.WandbLogger(public, tmp_path)
    assert "WANDB_ERROR_REPORTING" not in os.environ
    loggers.WandbLogger(Config(), tmp_path)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


@promise("Training", "a tracked run that ...")
def test_only_a_resumed_run_that_was_and_is_online_continues_its_wandb_run(
    tmp_path: Path, starts: list[dict[str, Any]], monkeypatch: Patch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def started(mode: str, resume: str | None) -> tuple[str | None, str | None]:
        loggers.WandbLogger(Config(resume=resume, wandb=Wandb(mode=mode)), tmp_path)
        return starts[-1]["id"], starts[-1]["resume"]

    assert started("online", "run") == (None, None)
    for name in ("run-20250102_101010-old", "run-20260102_101010-new", "offline-run-20240102_101010-older"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert started("online", "run") == ("new", "allow")
    assert started("online", None) == started("offline", "run") == (None, None)
    (tmp_path / "wandb" / "offline-run-20270102_101010-last").mkdir()
    assert started("online", "run") == (None, None)


@promise("Training", "wandb without network or ...")
def test_without_a_key_an_online_run_goes_on_offline_with_one_line(public: tuple[Path, list[str]]) -> None:
    folder, (warning,) = public
    assert "UsageError" in warning and "wandb sync" in warning
    assert len(read_run(folder).history) == 5


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


KILLED = """
import atexit, os, pathlib
from unet3d.config.schema import Config
from unet3d.report.loggers import open_loggers

loggers = open_loggers(Config(), pathlib.Path())
children = [int(pid) for pid in pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
for child in children:
    os.kill(child, 9)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
for step in range(50):
    loggers.scalars({"train/loss": 1.0}, step)
loggers.close(0)
print(len(children))
atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
"""


@promise("Training", "wandb without network or ...")
@pytest.mark.slow
@LINUX
def test_a_killed_wandb_core_costs_one_line_and_no_record(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    (warning,) = python(tmp_path / "killed.py", HOME=str(tmp_path / "home"))
    assert (tmp_path / "out").read_text() == "1\n"
    assert "WandbLogger" in warning
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == list(range(50))


@promise("Training", "wandb without network or ...")
def test_wandb_that_cannot_be_loaded_costs_one_line(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    out = open_loggers(Config(), tmp_path)
    out.scalars({"train/loss": 1.0}, 1)
    out.close(0)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "wandb" in warning and "ModuleNotFoundError" in warning
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@promise("Training", "wandb without network or ...")
@without("unet3d.report.loggers.wandb_mode", offline, only="disabled-online")
@pytest.mark.parametrize(("variable", "option"), [("disabled", "online"), (None, "disabled"), ("", "disabled")])
def test_disabled_wandb_is_not_even_loaded(
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    variable: str | None,
    option: str,
) -> None:
    if variable is None:
        monkeypatch.delenv("WANDB_MODE", raising=False)
    else:
        monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = Config()
    config.wandb.mode = option
    out = open_loggers(config, tmp_path)
    out.close(0)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "wandb").exists()


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
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    assert "| b | 0.5 |" in texts["val/cases/text_summary"] and "val/dice_mean | 0.75" in texts["summary/text_summary"]
    assert "tensorboard: true" in texts["config/text_summary"]


def test_tensorboard_that_is_not_installed_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^tensorboard=true: .*\[tensorboard\]"):
        rules.check(Config(tensorboard=True))
    rules.check(Config())


def test_the_terminal_shows_dice_so_far_and_the_time_left(terminal: io.StringIO, monkeypatch: Patch) -> None:
    plain, now = io.StringIO(), [100.0]
    monkeypatch.setattr(loggers.time, "perf_counter", lambda: now[0])
    lines_of = TerminalLogger(40, Terminal(file=plain, width=80))
    for step in (21, 22, 23, 24):  # resumed at 20
        now[0] += 3
        lines_of.scalars({"train/loss": 0.5, "time/step_s": 2.5}, step)
    lines_of.scalars({"val/dice_mean": 0.5, "time/val_s": 12.0}, 24)
    for step in (25, 26):  # the machine is free again
        now[0] += 1
        lines_of.scalars({"train/loss": 0.5, "time/step_s": step - 24.5}, step)
    lines_of.close(0)
    shown = plain.getvalue().splitlines()
    assert [re.findall(r"\d[\d./:]*", line) for line in shown] == [
        ["0:00:06", "22/40", "0.5000", "2.50", "0:00:45"],
        ["0:00:12", "24/40", "0.5000", "2.50", "0:00:40"],
        ["0:00:12", "24/40", "0.5000"],
        ["0:00:14", "26/40", "0.5000", "1.00", "0:00:42"],
    ]
    assert shown[0].endswith("0:00:45 left") and "dice_mean" in shown[2]
    bar = TerminalLogger(40, Terminal(file=terminal, width=120))
    for values in ({"val/dice_mean": 0.5}, {"val/dice_mean": 0.25}, {"train/loss": 0.75, "time/step_s": 1.0}):
        bar.scalars(values, 30)
    with progress.counting("more"):  # draws all bars
        pass
    bar.close(0)
    assert re.search(r"0\.7500\D+0\.250\D+0\.500", terminal.getvalue())


def test_the_name_of_a_class_is_no_markup_and_no_command() -> None:
    file = io.StringIO()
    console = TerminalLogger(2, Terminal(file=file, width=80))
    console.scalars({"val/dice_mean": 0.5, "val/dice/[core] :skull:": 0.5, "val/dice/x\x1b[2J [/b]": None}, 2)
    console.close(0)
    assert "dice/[core] :skull: 0.5000  dice/x\\x1b[2J [/b] n/a" in file.getvalue()


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
