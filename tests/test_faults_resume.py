"""A run that was killed, stopped or moved goes on to the same weights and the same records, to the bit."""

import json
import os
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from guards import none, nothing, without
from promises import promise
from training import (
    ROOT,
    RUN,
    at_step,
    call,
    kill,
    numbers,
    records,
    resume,
    same,
    saved_step,
    send,
    status,
    steps_with,
    train,
    when,
)

from unet3d.base.errors import UserError
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.compose import refuse_changes
from unet3d.run import checkpoint, run_folder
from unet3d.run.run_folder import read_memory
from unet3d.run.training_state import refuse_other_data
from unet3d.training import trainer

KILLED = -signal.SIGKILL
SAVE_LAST = "unet3d.run.training_state.CheckpointManager.save_last"


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def contents(run: Path) -> dict[Path, bytes]:
    """Return the content of each file of a run, but for what Hydra and the lock write on each attempt."""
    files = (path for path in run.rglob("*") if path.is_file() and ".hydra" not in path.parts)
    return {path: path.read_bytes() for path in files if path.name not in (".lock", "train.log")}


load_scaler = torch.amp.GradScaler.load_state_dict


def another_scale(scaler: torch.amp.GradScaler, state: dict) -> None:
    """Load a scale at which gradients overflow; that of a new run would be the right one here."""
    load_scaler(scaler, state | {"scale": state["scale"] * 2.0**10})


@promise(
    "Resume",
    "SIGKILL at any step, then `resume=`",
    "weights and records are bit-identical to an uninterrupted run's (on the CPU, or with "
    "`deterministic=true`), with fp16, dropout, checkpointing, other `workers`, and as many threads",
)
@promise(
    "Resume",
    "random state, loss scale or optimizer state lost from a checkpoint",
    "the result differs, so the tests above notice",
)
@without("torch.set_rng_state", nothing)
@without("torch.amp.GradScaler.load_state_dict", another_scale)
@without("torch.optim.Optimizer.load_state_dict", nothing)
@pytest.mark.slow
def test_killed_twice_and_moved_a_run_ends_as_if_it_were_not(copy: Path, killed: Path, whole: Path) -> None:
    """Mid-epoch, with other workers; the lock of a killed run does not live on in its workers.

    Files of the same bytes are the same data, wherever they lie and however they are compared.
    """
    assert records(killed) == records(whole)[: len(records(killed))]
    assert steps_with(killed, "train/loss") == [1, 2, 3, 4, 5]
    (copy / "report.html").write_text("of an earlier end")
    second = resume(copy, "workers=2", "save_every=5", hook=partial(at_step, 6))
    assert not (copy / "report.html").exists(), "it would say how an earlier end was"
    moved = (copy.parent / "data" / "phantom").rename(copy.parent / "moved")
    third = resume(copy, "workers=1", f"data.root={moved}", "data.fingerprint=full")
    assert (second.code, third.code, third.err) == (KILLED, 0, ""), third.err
    assert same(copy, whole) and status(copy) == status(whole) and status(whole).startswith("done\n")
    (line,) = (line for line in third.out.splitlines() if "workers: 2 -> 1" in line)
    assert numbers(line)[0] == 5, "the step from which on"


def odd_clock() -> None:
    """It jumps back by a day, and into another zone."""

    def jump() -> None:
        now = time.time
        time.time = lambda: now() - 86400
        os.environ["TZ"] = "Pacific/Kiritimati"
        time.tzset()

    call(trainer, "train_step", 3, jump)


def wall_clock() -> float:
    """In place of a clock that only goes forward."""
    return time.time()


def sources() -> set[tuple[Path, int]]:
    found = [path for part in ("unet3d", "configs") for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"]
    return {(path, path.stat().st_mtime_ns) for path in found if path.is_file()}


@promise("Resume", "another number of data workers, checkpointing on or off", "the same batches, weights and records")
@promise(
    "Training",
    "the clock jumps, the time zone changes, the current folder is elsewhere",
    "the same run; nothing is written beside the sources",
)
@without("unet3d.training.trainer.time.perf_counter", wall_clock)
@pytest.mark.slow
def test_one_seed_is_one_run_whatever_the_workers_the_checkpointing_and_the_clock(whole: Path, tmp_path: Path) -> None:
    before = sources()
    assert train(tmp_path, *RUN, "workers=2", "ckpt=0", hook=odd_clock).code == 0
    assert same(tmp_path / "run", whole) and sources() == before
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert min(line.get("time/step_s", 0) for line in lines) >= 0


@pytest.mark.parametrize(
    ("changes", "first"),
    [({}, 3), ({"measured_segments": ["inc", "up1"]}, 5), ({"kind": "cuda allocated"}, 5)],
    ids=["the same", "other segments", "another device"],
)
def test_the_first_step_is_that_of_the_process_that_began_the_run(tmp_path: Path, changes: dict, first: int) -> None:
    """A later one has the optimizer's state already, which the very first step makes."""
    measured = {"peak_bytes": 7, "kind": "ledger", "phases": {"forward": {"first": 5, "steady": 7}}}
    earlier = measured | {"kind": changes.get("kind", "ledger"), "phases": {"forward": {"first": 3, "steady": 7}}}
    before = {"measured": earlier, "measured_segments": ["inc"], "segments": ["inc"]} | changes
    (tmp_path / "memory.json").write_text(json.dumps(before))
    memory = read_memory(tmp_path)
    run_folder.add_measured(tmp_path, memory, before, 1, measured)
    assert read_memory(tmp_path) == memory
    assert memory["measured"]["phases"]["forward"] == {"first": first, "steady": 7}


def swap_labels(phantom: Path) -> None:
    first, second = sorted(phantom.glob("*/labelsTr/*"))[:2]
    first.rename(phantom / "aside")
    second.rename(first)
    (phantom / "aside").rename(second)


def exchange_held_out(phantom: Path) -> None:
    """Else a training case would be scored, without a word."""
    split = json.loads((phantom.parents[1] / "run" / "split.json").read_text())
    (phantom.parents[1] / "split.json").write_text(json.dumps({"train": split["val"], "val": split["train"]}))


@promise(
    "Resume",
    "images or labels that changed since the run began, swapped labels, other held-out cases",
    "refused with the cases; a warning where only a sample was compared",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "change", "said"),
    [
        ("steps=3", None, r"steps=3: .*\b4\b"),
        ("device=cuda", None, "device=cuda"),
        ("seed=0", swap_labels, r"resume: labels of phantom_000, phantom_001 changed"),
        ("data.split=split.json", exchange_held_out, r"held-out cases: \['phantom_\d+', .* -> \['phantom"),
    ],
    ids=["fewer steps", "a device that is not there", "swapped labels", "other cases"],
)
def test_a_refused_resume_leaves_no_trace(word: str, change: object, said: str, copy: Path) -> None:
    if callable(change):
        change(copy.parent / "data" / "phantom")
    before = contents(copy)
    done = resume(copy, word)
    assert done.code == 2 and re.search(f"^error: .*{said}.*\n$", done.err, re.MULTILINE), done.err
    assert contents(copy) == before and status(copy) == "running\n"


@promise("Resume", "`resume=` with another width ...")
@without("unet3d.config.compose.options_with", none)
def test_another_network_is_refused_and_another_rate_is_reported() -> None:
    before = {"model": {"features": [4, 8]}, "data": {"patch": [16]}, "optim": {"lr": 0.1}, "resume": None}
    now = before | {"model": {"features": [8, 8]}, "data": {"patch": [8]}, "resume": "run"}
    with pytest.raises(UserError, match=r"data.patch: \[16\] -> \[8\]; model.features: \[4, 8\] -> \[8, 8\]"):
        refuse_changes(before, now)
    for option in ("weight_decay", "betas", "momentum"):  # which the checkpoint's optimizer keeps
        with pytest.raises(UserError, match=f"optim.{option}: 1 -> 2"):
            refuse_changes({"optim": {option: 1}}, {"optim": {option: 2}})
    assert refuse_changes(before, before | {"optim": {"lr": 0.2}, "resume": "run"}) == ["optim.lr: 0.1 -> 0.2"]
    assert refuse_changes({"batch_timeout": 1}, {"batch_timeout": 2}), "an option that only begins like a fixed one"
    precisions = [{"files": {}, "mixed precision": f"torch.{name}"} for name in ("bfloat16", "float16")]
    with pytest.raises(UserError, match=r"torch\.bfloat16 -> torch\.float16"):
        refuse_other_data(*precisions)


@pytest.mark.slow
def test_an_option_added_on_resuming_is_kept(copy: Path) -> None:
    """Here of a run cut to the steps it has taken, which is validated as at its end."""
    done = resume(copy, "steps=4")
    assert done.code == 0 and "hd95_mm/" in (copy / "scores.csv").read_text(), done.err
    assert steps_with(copy, "val/dice_mean") == [2, 4]
    assert compose.resumed(copy, compose.compose_tree([])).steps == 4


@promise("Resume", "`resume=` of a run that is done", '"nothing to do", exit 0')
@pytest.mark.slow
def test_a_run_that_is_done_is_left_as_it_is(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole.parent, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "run"
    before = contents(folder)
    done = resume(folder)
    assert done.code == 0 and "steps=N" in done.out
    assert {path.name for path in before if before[path] != path.read_bytes()} <= {"overrides.yaml"}
    stopped = resume(folder, hook=when("unet3d.run.run.prepare_data", 1, partial(send, signal.SIGTERM)))
    assert stopped.code == 75 and status(folder).encode() == before[folder / "STATUS"]


@promise(
    "Resume",
    "a kill beside a save, or in the last validation",
    "no step is lost, no validation lost or recorded twice",
)
@pytest.mark.slow
def test_killed_beside_a_save_no_validation_is_lost_or_recorded_twice(copy: Path, whole: Path) -> None:
    """Just before the save after the last validation, whose record is newer than the checkpoint."""
    assert resume(copy, hook=when(SAVE_LAST, 2, kill)).code == KILLED and saved_step(copy) == 6
    assert steps_with(copy, "val/dice_mean") == [2, 4, 6]
    assert resume(copy).code == 0 and same(copy, whole)
    assert (copy / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()


@promise("Resume", "a kill beside a ...")
def test_records_of_a_repeated_validation_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 3, "train/loss": 1}', '{"step": 3, "val/dice_mean": 1}', '{"step": 4, "train/loss": 1}']
    for validated, kept in ((0, lines[:1]), (3, lines[:2])):
        path.write_text("\n".join([*lines, '{"step": 5, "tr']))
        assert run_folder.forget_after(path.parent, 3, validated) == 4
        assert path.read_text().splitlines() == kept


@promise("Checkpoints", "a file cut to ...")
@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(copy: Path, whole: Path) -> None:
    """The records are cut to the checkpoint that was used, and what killed saves left is removed."""
    damage(copy / "checkpoints" / "last.pt")
    assert resume(copy, hook=partial(at_step, 5)).code == KILLED
    assert (saved_step(copy), saved_step(copy, "previous.pt")) == (4, 2), (
        "a save outlives the one after the damaged one"
    )
    damage(copy / "checkpoints" / "last.pt")
    orphans = ["checkpoints/last.tmp", "checkpoints/best.tmp", ".memory.json.tmp", "predictions/.a.nii.gz.7.tmp"]
    for orphan in orphans:
        (copy / orphan).write_bytes(b"half")
    done = resume(copy)
    assert done.code == 0 and not any((copy / orphan).exists() for orphan in orphans)
    (line,) = done.err.splitlines()
    assert "last.pt" in line and numbers(line.partition("previous.pt")[2]) == [2, 3, 5]
    assert same(copy, whole)


@promise("What scripts rely on", "exit code 3 ...")
@promise("Checkpoints", "another format; parts missing ...")
@promise("Checkpoints", "a file cut to ...")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [({"format": checkpoint.FORMAT + 1}, ["last.pt"]), (None, ["last.pt", "previous.pt", "best.pt"])],
    ids=["another format", "none is whole"],
)
def test_where_no_checkpoint_can_be_taken_nothing_starts_over(change: dict | None, named: list, copy: Path) -> None:
    """Nor is an older one taken for one that does not fit."""
    last = copy / "checkpoints" / "last.pt"
    if change:
        torch.save(checkpoint.load_checkpoint(last) | change, last)
    else:
        for path in last.parent.iterdir():
            path.write_bytes(b"")
    before = contents(copy)
    done = resume(copy)
    assert done.code == 3 and done.err.count("\n") == 1, done.err
    assert re.findall(r"\w+\.pt\b", done.err) == named
    assert contents(copy) == before


@promise("Resume", "a kill beside a ...")
@promise(
    "Resume",
    "a run that was killed, or lost a data worker, before its first checkpoint, then the same command",
    "it starts over; a run with a result, or perhaps alive, is untouched",
)
@pytest.mark.slow
def test_the_same_command_begins_or_goes_on(tmp_path: Path, whole: Path) -> None:
    """With `resume=auto` also after a kill that leaves a checkpoint: here one older than the last validation."""
    folder = tmp_path / "run"
    assert train(tmp_path, *RUN, hook=partial(at_step, 1)).code == KILLED
    assert not list(folder.glob("checkpoints/*")) and records(folder)
    over = train(tmp_path, *RUN, "resume=auto", hook=when(SAVE_LAST, 3, kill))
    assert over.code == KILLED and str(folder) in over.err and over.err.count("\n") == 1, over.err
    assert saved_step(folder) == 2 and steps_with(folder, "val/dice_mean") == [2, 4]
    done = train(tmp_path, *RUN, "resume=auto")
    assert done.code == 0 and same(folder, whole), done.err


SIGKILLED = (f"failed: {lifecycle.describe_exit(137)}", 137)


@promise("Resume", "a run that was ...")
@without("unet3d.cli.lifecycle.RUNNING", "other\n", only="killed before its end")
@without("unet3d.cli.lifecycle.CUT_SHORT", ("",), only="own error")
@pytest.mark.parametrize(
    ("end", "files", "starts_over"),
    [
        pytest.param(("out of memory", 5), [], False, id="out of memory"),
        pytest.param(("failed: ValueError('my own loss')", 1), [], False, id="own error"),
        pytest.param(("error: the loss is nan", 4), [], False, id="nan"),
        pytest.param(None, ["checkpoints/previous.pt"], False, id="checkpoint"),
        pytest.param((), [], False, id="no status"),
        pytest.param(None, [], True, id="killed before its end"),
        pytest.param(SIGKILLED, [], True, id="killed job"),
        pytest.param(("stopped by SIGTERM after step 0", 75), [], True, id="stopped"),
        pytest.param(("error: loss.weights=[1]", 2), [], True, id="mistake"),
        pytest.param(("failed: no batch of a: no room in shared memory", 1), [], True, id="lost worker"),
    ],
)
def test_a_run_with_a_result_or_perhaps_alive_is_left_alone(
    end: tuple | None, files: list[str], starts_over: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Where nothing can be locked, a run may be alive; and a prediction starts nothing over."""
    for name in ("metrics.jsonl", *files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    if end is None:
        (tmp_path / "STATUS").write_text("running\n")
    elif end:
        run_folder.write_status(tmp_path, *end)
    for is_dry, is_locked in ((False, False), (True, True), *([] if starts_over else [(False, True)])):
        with pytest.raises(UserError, match=re.escape(str(tmp_path))) as caught:
            lifecycle.refuse_used(tmp_path, is_dry, is_locked)
        assert ("resume" in str(caught.value)) is bool(files)
    if starts_over:
        lifecycle.refuse_used(tmp_path, is_dry=False, is_locked=True)
        assert str(tmp_path) in capsys.readouterr().err
