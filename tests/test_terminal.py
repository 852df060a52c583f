"""What is printed: values of strangers neither command a terminal nor end the work; a full disk loses little."""

import errno
import io
import os
import re
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from guards import unchanged, without
from promises import promise
from training import PLAIN, TINY, face, fail, status

from unet3d.base import errors
from unet3d.base.process import SafeStream
from unet3d.cli import lifecycle
from unet3d.config.schema import Config
from unet3d.data import restore
from unet3d.run import checkpoint

CODES = "\x1b[2J\x07\x9b\u202e"  # they clear a terminal, ring, begin another command, reverse what follows
FOREIGN = os.fsdecode(b"\xff")  # of a file's name that is not UTF-8
SHOWN = r"\x1b[2J\x07\x9b\u202e"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
Capture = pytest.CaptureFixture[str]


def refuse_codes(printed: str) -> None:
    """Nothing of what is printed may command a terminal."""
    assert printed.replace("\n", "").isprintable(), ascii(printed)


def save_image(path: Path, bright: int = 0, depth: float = 1) -> None:
    """Zeros, but for one slice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.zeros((9, 9, 9), np.uint8)
    voxels[bright] = 1
    restore.save_image(path, nib.Nifti1Image(voxels, np.diag([1, 1, depth, 1])))


def errors_in(printed: str) -> list[str]:
    """The lines but those on images that are unlike the phantom's."""
    return [line for line in printed.splitlines() if " in training " not in line]


@promise(
    "Run folders and checkpoints of strangers",
    "what is not printable, as control codes, in names, values and tensors; CSV cells that are formulas",
    "shown as `\\x1b`; with an apostrophe before them",
)
def test_what_is_not_printable_is_escaped() -> None:
    """Marks without a width, which reorder text; code points that nobody has given a meaning."""
    assert errors.escaped("é 語\u200e\u07b7\x85\n", keep="\n") == "é 語\\u200e\\u07b7\\x85\n"


@promise("what is printed and written", "names and values from ...")
@pytest.mark.parametrize("project", [f"a{CODES}b", f"'a{CODES}{FOREIGN}b'"], ids=("bare", "quoted"))
@without("unet3d.base.errors.escaped", unchanged, only="bare")
def test_a_value_of_an_option_cannot_command_a_terminal(project: str, capsys: Capture) -> None:
    assert face("train", f"wandb.project={project}", "seed=x") == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    refuse_codes(printed.out + printed.err)


@promise(
    "what is printed and written",
    "names and values from data sets, checkpoints, run folders and command lines cannot command a terminal or "
    "reorder a line: what is not printable is shown as `\\x1b`",
)
@without("unet3d.cli.commands.escaped", unchanged)
def test_names_of_files_neither_command_a_terminal_nor_end_the_work(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    names = (f"a{CODES}\nerror: b.nii", f"c{FOREIGN}.nii")
    for name in names:
        save_image(tmp_path / "in" / name)
        (tmp_path / "in" / f"broken {name}").write_bytes(b"<html>")
    out = tmp_path / f"out{CODES}"
    shown = []
    for left_alone in (False, True):
        assert face("predict", finished / "checkpoints" / "last.pt", tmp_path / "in", "-o", out) == 2
        printed = capsys.readouterr()
        shown += [printed.out, *errors_in(printed.err)]
        assert ["broken" in line for line in errors_in(printed.err)] == [True, True]
        assert printed.out.count("\n") == 3 and printed.out.count("--overwrite") == 2 * left_alone
        assert re.findall(r"\b\d+\b", printed.out.splitlines()[-1])[:2] == ["2", "2"], "written or not, not segmented"
    refuse_codes("".join(shown))
    assert {path.name for path in out.glob("*.nii*")} == {f"{name}.gz" for name in names}


@promise(
    "what is printed and written",
    "a link that leads to itself, a pipe, or a folder that cannot be listed stops the prediction of no other file",
)
@promise("Prediction", "a file among others ...")
def test_an_input_that_cannot_be_read_stops_no_other(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    save_image(tmp_path / "in" / "good.nii.gz")
    for folder in (tmp_path, tmp_path / "in"):
        (folder / "loop.nii.gz").symlink_to("loop.nii.gz")
        (folder / "lost.nii.gz").symlink_to("nowhere")
        os.mkfifo(folder / "pipe.nii.gz")
    (tmp_path / "locked").mkdir()
    names = Path.iterdir

    def listed(folder: Path) -> Iterator[Path]:
        if folder.name == "locked":  # to root, no folder is
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return names(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    wrong = [tmp_path / name for name in ("locked", "loop.nii.gz", "lost.nii.gz", "pipe.nii.gz")]
    assert face("predict", finished / "checkpoints" / "last.pt", *wrong, tmp_path / "in", "-o", tmp_path / "out") == 2
    found = errors_in(capsys.readouterr().err)
    for path in (*wrong, *(tmp_path / "in" / path.name for path in wrong[1:])):
        assert len([line for line in found if f" {path}: " in line]) == 1, (path, found)
    assert [path.name for path in (tmp_path / "out").glob("*.nii*")] == ["good.nii.gz"]


@promise("What scripts rely on", "exit code 3", "no usable checkpoint")
@promise("what is printed and written", "names and values from ...")
@promise("Run folders and checkpoints of strangers", "what is not printable ...")
@without("unet3d.run.checkpoint.escaped", unchanged)
def test_names_in_a_checkpoint_cannot_command_a_terminal(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    state["model"][f"w{CODES}\nerror: all is lost"] = torch.zeros(1)
    checkpoint.save_checkpoint(tmp_path / "tensor.pt", state)
    with zipfile.ZipFile(tmp_path / "entry.pt", "w") as archive:
        archive.writestr(f"{CODES}\nerror: all is lost/data.pkl", "content")
    damaged = (tmp_path / "entry.pt").read_bytes().replace(b"content", b"CONTENT")
    (tmp_path / "entry.pt").write_bytes(damaged)
    for name, lines in (("tensor.pt", 3), ("entry.pt", 1)):
        assert face("predict", tmp_path / name, tmp_path, "-o", tmp_path / "out") == 3
        printed = capsys.readouterr().err
        assert printed.count("\n") == lines and r"\x1b[2J\x07\x9b" in printed
        refuse_codes(printed)


@promise("what is printed and written", "names and values from ...")
@without("unet3d.cli.commands.escaped", unchanged)
def test_names_in_a_data_set_cannot_command_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    """An error, the list of all problems, and warnings."""
    name = f"a{CODES}\nb{FOREIGN}"
    root = tmp_path / f"root {name}"
    for part, depth in (("images", 1), ("labels", 1.1)):
        save_image(root / part / f"{name}.nii.gz", depth=depth)
        save_image(root / part / "d.nii.gz", depth=depth)
    words = ["data=folders", f"data.root='{root}'", "data.classes=[background,organ]", "data.affine_check=warn"]
    assert face("check-data", *words) == 2
    refused = capsys.readouterr()
    assert errors.escaped(name) in refused.err and refused.out == "", "it cannot name a case"
    for part in ("images", "labels"):
        (root / part / f"{name}.nii.gz").rename(root / part / "e.nii.gz")
    assert face("check-data", *words) == 2
    listed = capsys.readouterr()
    assert "e.nii.gz" in listed.out and errors.escaped(root) in listed.out and "labels/d.nii.gz" in listed.out
    refuse_codes(refused.err + listed.out + listed.err)


@pytest.mark.slow
def test_what_memory_prints_cannot_command_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    """Nor do the legends of its pictures: a letter without a shape is a warning, which names it."""
    project, out = f"wandb.project='a{CODES}'", tmp_path / f"out{CODES}{FOREIGN}"
    for words in ([f"{project},'b{FOREIGN}'", "-o", out], ["fit", project, "recompute=lean"]):
        assert face("memory", *words, *TINY, *PLAIN, "model.features=[4]", "budget=1GiB") == 0
        printed = "".join(capsys.readouterr())
        assert SHOWN in printed
        refuse_codes(printed)


def test_a_trace_cannot_command_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    def divide(*_: object) -> None:
        raise ZeroDivisionError(f"{CODES}{FOREIGN}")

    assert lifecycle.run(divide, Config(dry_run=True), tmp_path, [])[0] == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and printed.count(rf"{SHOWN}\udcff") == 2
    refuse_codes(printed + status(tmp_path))


class Filling(io.StringIO):
    """A file on a disk that is full now and then."""

    is_full = False

    def flush(self) -> None:
        if self.is_full:
            raise FULL


def test_what_is_printed_goes_on_once_a_full_disk_has_room() -> None:
    file = Filling()
    stream = SafeStream(file)
    for text, file.is_full in (("a", False), ("b", True), ("c", False)):
        stream.write(text)
        stream.flush()
    assert file.getvalue() == "abc"


def test_status_is_written_over_the_file_that_is_there_where_no_other_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle.write_end(tmp_path, "a much longer line than the next", 0)
    monkeypatch.setattr("unet3d.run.run_folder.write_status", partial(fail, FULL))
    lifecycle.write_end(tmp_path, "failed", 1)
    assert status(tmp_path) == "failed\nexit code 1\n"


# --- predict and publish


@promise(
    "Prediction",
    "images turned, anisotropic, in any orientation or resampled",
    "label maps in each file's shape, affine and header, as uint8, of classes alone",
)
@promise(
    "Prediction",
    "a file among others that is broken, no case, or too large; a link to itself, a pipe",
    "the others are done; exit 2",
)
@promise(
    "Prediction",
    "a label map that is there already",
    "skipped if `predictions.jsonl` says that this network wrote it, with these options, from this "
    "image; else one line with `--overwrite`",
)
def test_predict_writes_label_maps_on_the_inputs_grid_and_replaces_a_file_only_when_asked(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    affine = np.array([[0, -1.5, 0, 10], [0.9, 0, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    voxels = np.random.default_rng(0).normal(size=(17, 23, 9)).astype(np.float32)
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm", "sec")
    nib.save(image, tmp_path / "scan one.nii.gz")
    (tmp_path / "broken.nii.gz").write_bytes(b"<html>")
    made = tmp_path / "out" / "scan one.nii.gz"
    made.parent.mkdir()
    made.write_bytes(b"of yesterday")
    words = ["predict", finished / "checkpoints" / "last.pt", tmp_path / "scan one.nii.gz", "-o", made.parent]
    assert face(*words) == 2
    assert "--overwrite" in capsys.readouterr().err and made.read_bytes() == b"of yesterday"
    assert face(*words, tmp_path / "broken.nii.gz", "--overwrite") == 2
    printed = capsys.readouterr().err
    assert "broken.nii.gz" in printed and printed.count("\n") == 1
    assert {path.name for path in made.parent.iterdir()} == {"scan one.nii.gz", "predictions.jsonl"}
    image, found = nib.load(tmp_path / "scan one.nii.gz"), nib.load(made)
    assert found.shape == image.shape and found.get_data_dtype() == np.uint8
    assert np.array_equal(found.affine, image.affine)
    for field in ("pixdim", "qform_code", "sform_code", "xyzt_units", "srow_x", "quatern_b"):
        assert np.array_equal(found.header[field], image.header[field]), field
    assert set(np.unique(found.dataobj)) <= {0, 1, 2, 3}


def test_a_published_checkpoint_predicts_the_same_and_names_no_path(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    whole, slim = tmp_path / "whole.pt", tmp_path / "net.pt"
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "best.pt")
    state["config"] |= {"resume": "/home/someone/run", "wandb": state["config"]["wandb"] | {"project": "a-secret"}}
    state["config"]["data"] |= {"images": "/home/someone/scans"}
    checkpoint.save_checkpoint(whole, state)
    assert face("publish", whole, "-o", slim) == 0
    for secret in (str(finished), "imagesTr", "phantom/", "a-secret", "/home/someone"):
        assert secret.encode() not in slim.read_bytes()
    image = next((finished.parent).rglob("imagesTr/*.nii.gz"))
    for name, path in (("whole", whole), ("slim", slim)):
        assert face("predict", path, image, "-o", tmp_path / name) == 0
    assert (tmp_path / "whole" / image.name).read_bytes() == (tmp_path / "slim" / image.name).read_bytes()
    assert capsys.readouterr().err == ""
    assert face("publish", whole, "-o", slim) == 2 and str(slim) in capsys.readouterr().err
