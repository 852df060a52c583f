"""What SECURITY.md promises of checkpoints, run folders and code; the promises for data sets are held in tests/data."""

import ast
import base64
import dataclasses
import json
import os
import secrets
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from guards import nothing, without, yes
from promises import promise
from tables import cases
from training import TINY, face, planned
from training import train as train_in

import unet3d
from unet3d import build
from unet3d.base import files
from unet3d.base.errors import CheckpointError, DamagedCheckpoint, UserError
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.report import held_out, memory_plots, plots, report
from unet3d.run import checkpoint, predict, record

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "train.py", *sorted((ROOT / "unet3d").rglob("*.py"))]


def dotted(node: ast.expr) -> str:
    """`torch.load` of its syntax tree; `?` stands for what has no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


CALLS = """
eval exec compile __import__ os.system os.popen importlib.import_module runpy.run_path
pickle.load pickle.loads pickle.Unpickler marshal.loads shelve.open joblib.load dill.load
yaml.load yaml.unsafe_load yaml.full_load yaml.load_all numpy.load np.load
tarfile.open shutil.unpack_archive torch.jit.load torch.hub.load torch.package.PackageImporter
hydra.utils.instantiate instantiate hydra.utils.call hydra.utils.get_class hydra.utils.get_method
"""
DANGEROUS = {*CALLS.split()}


def dangers(source: str) -> Iterator[str]:
    """Calls in the source that could run what a file says, or unpack one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            called = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from called & {*DANGEROUS, "torch.load", "torch.serialization.load"}
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {word.arg: word.value for word in node.keywords}
        if name in DANGEROUS or name.rpartition(".")[2] in ("extract", "extractall"):
            yield name
        if name == "torch.load" and not is_true(given.get("weights_only")):
            yield "torch.load without weights_only=True"
        if "shell" in given or any(is_true(value) for word, value in given.items() if word == "allow_pickle"):
            yield f"{name} with shell or pickle"


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@promise(
    "checkpoints and run folders",
    "a checkpoint is read with `weights_only=True`, without exception and without a second try",
)
@promise("the code itself", "no `eval`, `exec`, `pickle.load`, unsafe YAML or shell; no archive is unpacked")
def test_no_call_runs_or_unpacks_what_a_file_says() -> None:
    found = [(path.name, path.parent.name, danger) for path in SOURCES for danger in dangers(path.read_text())]
    assert found == [
        ("build.py", "unet3d", "importlib.import_module"),  # what a command line names
        ("cases.py", "data", "importlib.import_module"),  # the files of the folder of layouts
        ("__init__.py", "rules", "importlib.import_module"),  # the files of its own folder
    ]


FOUND = """
torch.load(p)
torch.load(p, weights_only=flag)
from torch import load
from pickle import load
eval(s)
yaml.load(s, L)
archive.extractall(p)
numpy.load(p)
os.system(s)
subprocess.run(s, shell=True)
read(p, allow_pickle=True)
hydra.utils.instantiate(c)
"""


@pytest.mark.parametrize("source", FOUND.strip().splitlines())
def test_a_call_that_does_would_be_found(source: str) -> None:
    assert [*dangers(source)]


Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def tiny() -> Config:
    return compose.compose(["model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]"])


@pytest.fixture
def given(tmp_path: Path, tiny: Config) -> Callable[[Change], Path]:
    """The checkpoint of a run of a tiny network, changed."""

    def make(change: Change) -> Path:
        config = deepcopy(tiny)
        config.model.in_channels, config.model.classes = 1, 3
        state = {
            "config": compose.to_plain(config),
            "model_options": dataclasses.asdict(config.model),
            "classes": ["background", "a", "b"],
            "channels": ["MR"],
            "intensity": [{"kind": "zscore", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}],
            "model": build.model(config.model, 0).state_dict(),
            "average": {},
            "seen": None,
            "step": 1,
        }
        change(state)
        checkpoint.save_checkpoint(tmp_path / "given.pt", state)
        return tmp_path / "given.pt"

    return make


def test_a_sound_checkpoint_opens(given: Callable[[Change], Path]) -> None:
    segmenter = predict.load(given(lambda state: None), "cpu").segmenter
    assert segmenter.intensity[0].kind == "zscore" and not segmenter.predictor.models[0].training


def put(*keys: Any, value: Any) -> Change:
    """Set state[key][key] ... to the value."""

    def change(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


CALL = "{_target_: os.system, command: exit 7, _args_: [exit 7]}"
SEEN = "spacing: [[1, 1, 1], [1, 1, 1]], extent: [[9, 9, 9], [9, 9, 9]], channels: []"
WRONG = f"""
# what would run, or be resolved
config._target_ | os.system
config.loss._target_ | os.system
config.data | {CALL}
config.data.augment | {CALL}
config.ckpt | {CALL}
config.data.root | {CALL}
model_options | {CALL}
model_options.kernels | [{CALL}, {CALL}]
model_options._target_ | os.system
intensity | [{CALL}]
config.wandb.project | a${{oc.env:HOME}}
# another type
config | 7
model | [1]
model_options.features | abc
model_options.features | [4, {{}}]
model_options.dropout | x
classes | 7
classes | [a, b, {{}}]
channels | [a, b]
# a range of intensities
intensity | 7
intensity.0.kind | sqrt
intensity.0.std | 0.0
intensity.0.low | x
intensity.0.mean | '3'
intensity.0.mean | .nan
# what was seen in training
seen | 7
seen | {{}}
seen | {{{SEEN}, extent: [[1, 1], [2, 2]]}}
seen | {{{SEEN}, spacing: [abc, [1, 1, 1]]}}
seen | {{{SEEN}, channels: [{{}}]}}
# a huge network
model_options.features | [40_000, 40_000]
model_options.features | [1099511627776, 8]
model_options.features | THOUSANDS
"""


@promise(
    "checkpoints and run folders",
    "a `_target_` in a checkpoint's config is never instantiated, and `${...}` never resolved",
)
@promise("Checkpoints", "`_target_: os.system` in a checkpoint's config", "never instantiated")
@promise(
    "checkpoints and run folders",
    "what a network was trained on (spacing, extent, range of each channel) is a few finite numbers",
)
@promise(
    "Checkpoints",
    "values of wrong types; a step, score, random state, loss scale or optimizer that no run wrote",
    "one line, exit 3; optimizer options come from the config alone",
)
@promise("checkpoints and run folders", "a checkpoint holds no ...")
@promise("Run folders and checkpoints of strangers", "a small pickle that ...")
@pytest.mark.parametrize(("place", "value"), cases(WRONG))
def test_a_checkpoint_of_wrong_values_is_one_line_runs_nothing_and_takes_no_memory(
    given: Callable[[Change], Path], place: list[str], value: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [int(key) if key.isdecimal() else key for key in place[0].split(".")]
    path = given(put(*keys, value=yaml.safe_load(value[0].replace("THOUSANDS", str([1] * 3000)))))
    make = build.model

    def built(*options: Any) -> torch.nn.Module:
        assert torch.get_default_device().type == "meta"
        return make(*options)

    monkeypatch.setattr(build, "model", built)
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it ran"))
    with pytest.raises(CheckpointError, match=r"given\.pt"):
        predict.load(path, "cpu")


@promise("checkpoints and run folders", "code is imported only ...")
def test_a_network_that_only_a_checkpoint_names_is_not_imported(
    given: Callable[[Change], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (given(lambda state: None).parent / "planted.py").write_text("raise SystemExit('it ran')")
    path = given(put("model_options", "path", value="planted:Network"))
    monkeypatch.chdir(path.parent)
    with pytest.raises(UserError, match=r"given\.pt.*--model planted:Network"):
        predict.load(path, "cpu")
    with pytest.raises(UserError, match=r"given\.pt.*--model"):
        predict.load(given(lambda state: None), "cpu", model="planted:Network")


BIAS = {
    "nowhere": lambda: torch.zeros(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
    "NaN": lambda: torch.full((3,), float("nan")),
    "infinite": lambda: torch.full((3,), float("inf")),
}


@promise("Checkpoints", "values of wrong types ...")
@promise("checkpoints and run folders", "weights that are NaN or infinite do not predict")
@promise("Checkpoints", "weights that are NaN or infinite", "exit 3; nothing is predicted")
@pytest.mark.parametrize("kind", BIAS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@without("unet3d.run.checkpoint.is_finite", yes, only="NaN")
def test_weights_that_are_no_finite_numbers_do_not_predict(given: Callable[[Change], Path], kind: str) -> None:
    named = r".*outc\.conv\.bias.*NaN" if kind in ("NaN", "infinite") else ""
    with pytest.raises(CheckpointError, match=rf"given\.pt{named}"):
        predict.load(given(put("model", "outc.conv.bias", value=BIAS[kind]())), "cpu")


@promise(
    "checkpoints and run folders",
    "a window that does not fit into the device's memory is refused before memory is taken",
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("config", "data", "patch", value=[2048, 2048, 2048]), "2048x2048x2048"),
        (put("config", "inference", "batch", value=4096), r"4096 at once.*inference\.batch=1"),
    ],
    ids=["window", "windows at once"],
)
@without("unet3d.run.predict.refuse_large_window", nothing, only="window")
def test_a_checkpoint_that_names_a_huge_window_takes_no_memory(
    given: Callable[[Change], Path], change: Change, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet3d.memory.simulate.host_bytes", lambda: 2**28)
    with pytest.raises(UserError, match=rf"given\.pt.*{said}"):
        predict.load(given(change), "cpu")


@promise(
    "checkpoints and run folders",
    "a checkpoint holds no more than its size, and a network is built only if its weights are in the file",
)
def test_a_checkpoint_that_is_packed_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """64 MiB of zeros in 64 KiB."""
    checkpoint.save_checkpoint(tmp_path / "a.pt", {"model": {"w": torch.zeros(2**20)}})
    with zipfile.ZipFile(tmp_path / "a.pt") as sound, zipfile.ZipFile(tmp_path / "b.pt", "w") as bomb:
        for name in sound.namelist():
            content = bytes(2**26) if "/data/" in name else sound.read(name)
            bomb.writestr(name, content, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "b.pt").stat().st_size < 2**17
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match=r"b\.pt.*torch\.save"):
        checkpoint.load_checkpoint(tmp_path / "b.pt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def with_another_end(sound: bytes, length: int) -> bytes:
    """Return a zip file whose end says that its list of contents begins `length` bytes earlier than zipfile looks."""
    begin, end = sound[:-98], bytearray(sound[-98:])
    offset = int.from_bytes(end[48:56], "little")
    end[48:56] = (offset - length).to_bytes(8, "little")
    return begin + bytes(end)


@promise("checkpoints and run folders", "a checkpoint holds no ...")
@without("unet3d.run.checkpoint.has_one_directory", yes)
@pytest.mark.parametrize(
    "damage",
    [
        lambda sound: with_another_end(sound, 16),
        lambda sound: b"legacy" + with_another_end(sound, -6),
        lambda sound: sound[:-2] + b"\1\0x",
        lambda sound: sound[:-34] + bytes([sound[-34] ^ 1]) + sound[-33:],
    ],
    ids=["directory", "begin", "comment", "locator"],
)
def test_a_checkpoint_that_torch_would_read_as_another_than_is_checked_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """zipfile shifts places that do not fit and skips what is before the first; torch does neither."""
    path = tmp_path / "a.pt"
    checkpoint.save_checkpoint(path, {"model": {"w": torch.zeros(9)}})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedCheckpoint, match=r"a\.pt.*torch\.save"):
        checkpoint.load_checkpoint(path)


@promise("Checkpoints", "a pickled command; a ...")
@pytest.mark.parametrize("content", [b"\x80\x02\x8c\x02\xff\xfe.", b"\x80\x02}q\x00h\x07.", b"\x80\x02(K\x01t."])
def test_a_damaged_pickle_is_one_line(tmp_path: Path, content: bytes) -> None:
    checkpoint.save_checkpoint(tmp_path / "a.pt", {})
    with zipfile.ZipFile(tmp_path / "a.pt") as sound, zipfile.ZipFile(tmp_path / "b.pt", "w") as damaged:
        for name in sound.namelist():
            damaged.writestr(name, content if name.endswith("data.pkl") else sound.read(name))
    with pytest.raises(CheckpointError, match=r"b\.pt: [^\n]*\Z"):
        checkpoint.load_checkpoint(tmp_path / "b.pt")


@pytest.fixture
def stranger(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run, which a test changes as a stranger might; its report draws no picture."""
    for module, name in ((plots, "training_curves"), (held_out, "score_plot")):
        monkeypatch.setattr(module, name, nothing)
    for name in ("phase_plot", "layer_plot"):
        monkeypatch.setattr(memory_plots, name, nothing)
    shutil.copytree(finished, tmp_path / "stranger")
    return tmp_path / "stranger"


EVIL = """# @package _global_
hydra:
  job_logging:
    version: 1
    handlers: {h: {"()": os.mkdir, path: it_ran}}
    root: {handlers: [h]}
  hydra_logging: ${hydra.job_logging}
"""


@promise(
    "checkpoints and run folders",
    "a run is rebuilt from its `config.yaml` as plain typed values: Hydra composes, resolves and "
    "instantiates nothing of a run folder",
)
@promise(
    "Run folders and checkpoints of strangers",
    "a config or an overrides.yaml that names a YAML file of the folder, code, an alias, `${...}` or a deep nesting",
    "refused, or not read: a run is rebuilt from config.yaml as plain values",
)
def test_a_config_in_a_run_folder_is_not_composed(
    stranger: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path that leaves the package's configs, an option could name a file of the folder, whose handlers run."""
    (stranger / "evil.yaml").write_text(EVIL)
    up = "/".join([".."] * 30)
    words = [f"experiment={up}/proc/self/cwd/stranger/evil", "steps=4"]
    (stranger / "overrides.yaml").write_text(yaml.safe_dump(words))
    phantom = finished.parent / "data" / "phantom"
    done = train_in(stranger.parent, "resume=stranger", "steps=5", "eval_every=0", f"data.root={phantom}")
    assert done.code == 0, done.err
    monkeypatch.chdir(stranger.parent)
    assert face("compare", "stranger") == 0
    assert not list(stranger.parent.rglob("it_ran"))


CONFIGS = """
_target_: os.system | _target_
hydra: {job_logging: {version: 1}} | hydra
defaults: [experiment: evil] | defaults
device: ${oc.env:HOME} | ${
loss: {path: 'os:system'} | resume: | loss.path=os:system
model: {path: 'os:system'} | resume: | model.path=os:system
loggers: ['os:system'] | resume: | loggers=
x: !!python/object/apply:os.system ['exit 7'] | config.yaml: | os.system
{x: &a [1, 1], y: *a} | config.yaml: | alias
x: DEEP | config.yaml: | levels
steps: LONG | config.yaml:
x: 2020-01-01 | config.yaml:
data: {patch: [16, {}, 16]} | data.patch
data: {phantom: {shape: [16, {a: 1}, 16]}} | data.phantom.shape=
steps: 1 LARGE | config.yaml:
a: [ | config.yaml
- 1 | config.yaml
nothing: 1 | nothing
steps: !!int "" | config.yaml:
x: !!set {a} | config.yaml:
steps: x | steps
"""


@promise("checkpoints and run folders", "a run is rebuilt ...")
@promise(
    "checkpoints and run folders",
    "code is imported only where the command line names it: `model.path`, `loss.path`, `data.transforms` and "
    "`loggers` of a run folder or a checkpoint are refused",
)
@promise("Run folders and checkpoints of strangers", "a config or an ...")
@pytest.mark.parametrize(("words", "parts"), cases(CONFIGS))
def test_a_config_in_a_run_folder_is_options_and_nothing_else(
    stranger: Path, words: list[str], parts: list[str]
) -> None:
    content = " ".join(words).replace("DEEP", "[" * 3000).replace("LONG", "1" * 5000).replace("LARGE", "#" * 2**17)
    (stranger / "config.yaml").write_text(f"{content}\n")
    with pytest.raises(UserError) as caught:
        planned([f"resume={stranger}"])
    text = str(caught.value)
    assert "\n" not in text and all(part in text for part in parts), text


@promise(
    "checkpoints and run folders",
    "nothing is read or written through a link that leads out of a run folder; a file is written under a random "
    "name and then renamed",
)
@promise(
    "Run folders and checkpoints of strangers",
    "links that lead out of the folder in place of any file or sub-folder; hard links",
    "refused; nothing outside is read or written",
)
@without("unet3d.run.record.refuse_links_out", nothing, only="scores.csv")
@without("unet3d.config.compose.refuse_links_out", nothing, only="new.link")
@pytest.mark.parametrize("name", ["scores.csv", "new.link", "checkpoints/last.pt", "figures", "STATUS", ".lock"])
def test_nothing_is_read_or_written_through_a_link_out_of_a_run_folder(
    stranger: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    """A link within, as wandb makes them, is no fault."""
    (stranger / "latest").symlink_to("config.yaml")
    assert face("report", stranger) == 0
    victim, path = stranger.parent / "victim", stranger / name
    is_folder = path.is_dir()
    if is_folder:
        path.rename(victim)
    else:
        path.unlink(missing_ok=True)
        victim.write_text("precious")
    (kept := victim / ".a.tmp" if is_folder else victim).write_text("precious")
    path.symlink_to(victim)
    capsys.readouterr()
    for command in ("report", "compare"):
        assert face(command, stranger) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and str(stranger) in line
    with pytest.raises(UserError, match=str(stranger)):
        planned([f"resume={stranger}"])
    ended = train_in(stranger.parent, *TINY, f"hydra.run.dir={stranger}")
    assert ended.code == 2 and ended.err.count("\n") == 1 and str(stranger) in ended.err
    assert kept.read_text() == "precious"


@promise("checkpoints and run folders", "nothing is read or ...")
@promise("Run folders and checkpoints of strangers", "links that lead out ...")
@without("unet3d.cli.lifecycle.os.O_NOFOLLOW", 0)
def test_a_lock_that_is_another_file_s_name_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("precious")
    os.link(tmp_path / "victim", tmp_path / "run" / ".lock")
    with (
        pytest.raises(UserError, match=r"\.lock: "),
        lifecycle.hold_folder(tmp_path / "run"),
    ):
        pass
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="symbolic links"), lifecycle.hold_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


@promise("checkpoints and run folders", "nothing is read or ...")
@promise("Run folders and checkpoints of strangers", "links that lead out ...")
def test_a_file_is_replaced_by_way_of_a_name_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_text(tmp_path / "a", "x")
    files.write_text(tmp_path / ("n" * 255), "the longest name")
    monkeypatch.setattr(secrets, "token_hex", lambda count: "guessed")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".unet3d-guessed.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "a", "y")
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "a").read_text() == "x"


@promise("checkpoints and run folders", "files of a run ...")
@promise(
    "Run folders and checkpoints of strangers",
    "a pipe, or a file of a terabyte without content",
    "refused unread",
)
@without("unet3d.base.files.stat.S_ISREG", yes, only="STATUS")
@pytest.mark.parametrize(
    "name", ["STATUS", "metrics.jsonl", "memory.json", "config.yaml", "scores.csv", "env.json", "split.json"]
)
def test_a_pipe_or_an_endless_file_in_a_run_folder_is_not_read(
    stranger: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    (stranger / name).unlink()
    os.mkfifo(stranger / name)
    if name != "config.yaml":  # without it, this is no run folder
        assert face("report", stranger) == 2 and f"{stranger / name}: " in capsys.readouterr().err
    (stranger / name).unlink()
    with (stranger / name).open("wb") as file:
        file.truncate(2**40)  # of no block on the disk
    assert face("report", stranger) == 2 and "1,099,511,627,776" in capsys.readouterr().err


@promise(
    "checkpoints and run folders",
    "files of a run folder are read if they are regular files, not too large (256 MiB of metrics.jsonl, which is "
    "read line by line, 16 MiB of scores.csv, with 100,000 rows at most, and of split.json, 8 MiB of memory.json, 1 "
    "MiB of STATUS, 64 KiB of env.json, 64 KiB of YAML without aliases) and plain (lists and texts of at most 500 "
    "parts in `memory.json`, `metrics.csv` of at most 2,000 columns, folders of at most 50 levels), pictures if "
    "they are pictures",
)
def test_a_file_may_not_be_a_folder_or_a_circle_of_links(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path, tmp_path / "circle"):
        with pytest.raises(UserError, match=rf"^{path}: "):
            files.read_text(path)


@promise("checkpoints and run folders", "files of a run ...")
@without("unet3d.base.files.DEEPEST_FOLDER", 10**6)
def test_folders_within_folders_without_end_are_refused(tmp_path: Path) -> None:
    deepest = tmp_path / "run"
    for _ in range(52):
        deepest /= "a"
    deepest.mkdir(parents=True)
    with pytest.raises(UserError, match=r"run: .*\b50\b"):
        files.refuse_links_out(tmp_path / "run")


@promise("checkpoints and run folders", "files of a run ...")
@pytest.mark.slow
@without("unet3d.report.report.MOST_COLUMNS", 10**6)
def test_a_table_is_as_large_as_its_file(tmp_path: Path) -> None:
    """Rows that are shorter than the head, and records that each have a key of their own."""
    assert files.from_csv([",".join(map(str, range(4000))), *["1"] * 4000])[0] == {"0": "1"}
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    lines = (json.dumps({"step": number, f"key{number}": 1}) for number in range(3000))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    report.write_report(record.read_run(tmp_path))
    assert (tmp_path / "metrics.csv").read_text().partition("\n")[0].count(",") + 1 == 2000


@promise("checkpoints and run folders", "files of a run ...")
@without("unet3d.report.report.PNG", b"")
def test_only_pictures_are_shown_as_pictures(stranger: Path) -> None:
    (stranger / "figures" / "prediction.png").write_text("precious")
    assert face("report", stranger) == 0
    assert base64.b64encode(b"precious").decode() not in (stranger / "report.html").read_text()


def doubled(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found, "b": found}
    return found


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@promise(
    "checkpoints and run folders",
    "a small checkpoint cannot describe much: no more values than it has bytes, 20 levels, 12 levels of a network",
)
@promise(
    "Run folders and checkpoints of strangers",
    "a small pickle that describes values without end; a network of thousands of levels, or of terabytes",
    "refused before memory or time is taken",
)
@without("unet3d.run.checkpoint.DEEPEST", 10**6, only="nested")
@pytest.mark.parametrize(
    "value",
    [doubled(60), nested(200), ["x" * 9999] * 999, 10**400, torch.zeros(1).expand(2**40), torch.float16, b"x"],
    ids=["doubled", "nested", "repeated", "integer", "expanded", "type", "bytes"],
)
def test_a_small_checkpoint_that_describes_much_is_refused(tmp_path: Path, value: Any) -> None:
    checkpoint.save_checkpoint(tmp_path / "a.pt", {"value": value})
    with pytest.raises(CheckpointError, match=r"a\.pt: "):
        checkpoint.load_checkpoint(tmp_path / "a.pt")


@promise("Checkpoints", "sound weights whose outputs ...")
def test_weights_whose_outputs_are_not_finite_predict_nothing(
    given: Callable[[Change], Path], capsys: pytest.CaptureFixture
) -> None:
    def enlarge(state: Any) -> None:
        state["model"]["outc.conv.weight"].fill_(3e38)

    path = given(enlarge)
    image = path.with_name("a.nii.gz")
    nib.save(nib.Nifti1Image(np.random.default_rng(0).random((9, 9, 9)), np.eye(4)), image)
    assert face("predict", path, image, "-o", path.parent / "out", "--device", "cpu", "--probabilities") == 2
    shown = capsys.readouterr().err
    assert str(image) in shown and "NaN" in shown and shown.count("\n") == 1
    assert not [*(path.parent / "out").glob("*.nii*")]
    with pytest.raises(UserError, match=r"as it was given\b.*\bNaN\b"):
        unet3d.load(path, device="cpu").segment(np.random.default_rng(0).random((9, 9, 9)), (1, 1, 1))
