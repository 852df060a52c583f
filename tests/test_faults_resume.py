"""A run that was killed, stopped or moved goes on to the same weights and the same records, to the bit."""

import functools
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from guards import none, without
from promises import promise
from training import TINY, Ended, at_step, call, numbers, records, same, send, status, train, weights

from unet3d.base.errors import UserError
from unet3d.cli import lifecycle
from unet3d.config import compose
from unet3d.config.compose import refuse_changes
from unet3d.run import checkpoint, run_folder
from unet3d.run import run as job
from unet3d.run.run_folder import read_memory
from unet3d.run.training_state import CheckpointManager, refuse_other_data
from unet3d.run.validation import Validator

KILL = signal.SIGKILL
# 3 training cases: steps 4 and 5 are within an epoch
RUN = [*TINY, "steps=6", "amp=true", "amp_dtype=fp16", "model.dropout=0.2", "ckpt=2", "optim=adam"]
RUN += ["optim.average=0.9", "data.phantom.shape=[18,16,16]", "data.root=../phantom", "hydra.run.dir=run"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing interrupted."""
    done = train(place / "whole", *RUN)
    assert done.code == 0, done.err
    return place / "whole" / "run"


@pytest.fixture(scope="module")
def killed(place: Path, whole: Path) -> Path:
    """A run killed at step 5, with its checkpoint of step 4."""
    assert train(place / "killed", *RUN, hook=functools.partial(at_step, 5)).code == -KILL
    return place / "killed" / "run"


@pytest.fixture
def copy(killed: Path) -> Path:
    """Of the killed run, for one test."""
    folder = killed.parent.with_name("copy")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(killed.parent, folder)
    return folder / "run"


def resume(run: Path, *options: str, **hook: functools.partial[None]) -> Ended:
    return train(run.parent, "resume=run", *options, **hook)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def trained(run: Path) -> list[dict]:
    return [record for record in records(run) if "train/loss" in record]


@promise(
    "Resume",
    "SIGKILL at any step, then `resume=`",
    "weights and records are bit-identical to an uninterrupted run's (on the CPU, or with "
    "`deterministic=true`), with fp16, dropout, checkpointing, other `workers`, and as many threads",
)
@pytest.mark.slow
def test_killed_twice_a_run_ends_as_if_it_were_not(copy: Path, killed: Path, whole: Path) -> None:
    """Mid-epoch, with other workers; the lock of a killed run does not live on in its workers."""
    assert records(killed) == records(whole)[: len(records(killed))] and len(trained(killed)) == 5
    (copy / "report.html").write_text("of an earlier end")
    second = resume(copy, "workers=2", "save_every=5", hook=functools.partial(at_step, 6))
    assert not (copy / "report.html").exists(), "it would say how an earlier end was"
    third = resume(copy, "workers=1")
    assert (second.code, third.code, third.err) == (-KILL, 0, ""), third.err
    assert same(copy, whole) and status(copy) == status(whole) and status(whole).startswith("done\n")
    (line,) = (line for line in third.out.splitlines() if "workers: 2 -> 1" in line)
    assert numbers(line)[0] == 5, "the step from which on"


@pytest.mark.parametrize(("kind", "segments"), [("cuda allocated", ["inc"]), ("ledger", ["inc", "up1"])])
def test_the_first_step_of_another_device_or_other_segments_is_not_kept(
    tmp_path: Path, kind: str, segments: list[str]
) -> None:
    measured = {"peak_bytes": 7, "kind": "ledger", "phases": {"forward": {"first": 5, "steady": 7}}}
    earlier = measured | {"phases": {"forward": {"first": 3, "steady": 7}}}
    for before, first in (
        ({"measured": earlier | {"kind": kind}, "measured_segments": segments, "segments": ["inc"]}, 5),
        ({}, 5),
        ({"measured": earlier, "measured_segments": ["inc"], "segments": ["inc"]}, 3),
    ):
        (tmp_path / "memory.json").write_text(json.dumps(before))
        memory = read_memory(tmp_path)
        run_folder.update_memory(tmp_path, memory, {"segments": ["inc"]})
        run_folder.add_measured(tmp_path, memory, before, 1, measured)
        assert read_memory(tmp_path) == memory
        assert memory["measured"]["phases"]["forward"] == {"first": first, "steady": 7}


@promise(
    "Resume",
    "random state, loss scale or optimizer state lost from a checkpoint",
    "the result differs, so the tests above notice",
)
@pytest.mark.slow
@pytest.mark.parametrize("part", ["rng", "scaler", "optimizer"])
def test_each_part_of_a_checkpoint_matters(part: str, copy: Path, whole: Path) -> None:
    path = copy / "checkpoints" / "last.pt"
    state = checkpoint.load_checkpoint(path)
    if part == "rng":
        state["rng"] = torch.Generator().manual_seed(1).get_state()
    elif part == "scaler":
        state["scaler"]["scale"] *= 2.0**10
    else:
        state["optimizer"]["state"][0]["exp_avg"].zero_()
    checkpoint.save_checkpoint(path, state)
    assert resume(copy).code == 0
    assert not same(copy, whole)


def contents(run: Path) -> dict[Path, bytes]:
    """Return the content of each file of a run, but for what Hydra and the lock write on each attempt."""
    files = (path for path in run.rglob("*") if path.is_file() and ".hydra" not in path.parts)
    return {path: path.read_bytes() for path in files if path.name not in (".lock", "train.log")}


@pytest.mark.slow
def test_a_refused_resume_leaves_no_trace(copy: Path) -> None:
    """Fewer steps than were taken, or a device that is not there."""
    before = contents(copy)
    fewer = resume(copy, "steps=3")
    assert fewer.code == 2 and "steps=3" in fewer.err and numbers(fewer.err) == [4] and fewer.err.count("\n") == 1
    if not torch.cuda.is_available():
        assert resume(copy, "device=cuda").code == 2
    assert contents(copy) == before and status(copy) == "running\n"


@promise("Resume", "`resume=` with another width ...")
@without("unet3d.config.compose.options_with", none)
def test_another_network_is_refused_and_another_rate_is_reported() -> None:
    before = {"model": {"features": [4, 8]}, "data": {"patch": [16]}, "optim": {"lr": 0.1}, "steps": 4, "resume": None}
    now = {"model": {"features": [8, 8]}, "data": {"patch": [8]}, "optim": {"lr": 0.1}, "steps": 4, "resume": "run"}
    with pytest.raises(UserError, match=r"data.patch: \[16\] -> \[8\]; model.features: \[4, 8\] -> \[8, 8\]"):
        refuse_changes(before, now)
    for option in ("weight_decay", "betas", "momentum"):  # which the checkpoint's optimizer keeps
        with pytest.raises(UserError, match=f"optim.{option}: 1 -> 2"):
            refuse_changes({"optim": {option: 1}}, {"optim": {option: 2}})
    assert refuse_changes(before, before | {"optim": {"lr": 0.2}, "resume": "run"}) == ["optim.lr: 0.1 -> 0.2"]
    assert refuse_changes({"batch_timeout": 1}, {"batch_timeout": 2}), "an option that only begins like a fixed one"
    with pytest.raises(UserError, match=r"torch\.bfloat16 -> torch\.float16"):
        refuse_other_data(
            {"files": {}, "mixed precision": "torch.bfloat16"}, {"files": {}, "mixed precision": "torch.float16"}
        )


@promise("Resume", "images or labels that ...")
def test_other_cases_are_another_run(copy: Path, place: Path, tmp_path: Path) -> None:
    """Else a training case would be scored, without a word."""
    ids = sorted(path.name.removesuffix(".nii.gz") for path in (place / "phantom").glob("*/imagesTr/*.nii.gz"))
    known = json.loads((copy / "split.json").read_text())["val"]
    others = [next(case for case in ids if case not in known)]
    split = tmp_path / "split.json"
    split.write_text(json.dumps({"train": [case for case in ids if case not in others], "val": others}))
    done = resume(copy, f"data.split={split}")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert f"{known} -> {others}" in done.err


@promise(
    "Resume",
    "images or labels that changed since the run began, swapped labels, other held-out cases",
    "refused with the cases; a warning where only a sample was compared",
)
@pytest.mark.slow
def test_labels_that_were_swapped_are_another_run(copy: Path, place: Path, whole: Path, tmp_path: Path) -> None:
    """Files that are made again or moved, of the same bytes, are not; nor is another way to compare them."""
    moved = tmp_path / "phantom"
    shutil.copytree(place / "phantom", moved)
    first, second = sorted(moved.glob("*/labelsTr/*"))[:2]
    first.rename(moved / "aside"), second.rename(first), (moved / "aside").rename(second)
    before = contents(copy)
    done = resume(copy, f"data.root={moved}")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert "labels" in done.err and "images" not in done.err
    assert re.findall(r"phantom_\d+", done.err) == ["phantom_000", "phantom_001"]
    assert contents(copy) == before
    shutil.rmtree(moved)
    done = resume(copy, f"data.root={moved}", "data.fingerprint=full")
    assert (done.code, done.err) == (0, "") and same(copy, whole)


@pytest.mark.slow
def test_an_option_added_on_resuming_is_kept(copy: Path) -> None:
    """Here of a run cut to the steps it has taken, which is validated as at its end."""
    done = resume(copy, "steps=4")
    assert done.code == 0 and "hd95_mm/" in (copy / "scores.csv").read_text(), done.err
    assert [line["step"] for line in records(copy) if "val/dice_mean" in line] == [2, 4]
    assert compose.resumed(copy, compose.compose_tree([])).steps == 4


@promise("Resume", "another number of data workers, checkpointing on or off", "the same batches, weights and records")
@pytest.mark.slow
@pytest.mark.parametrize("changed", ["workers=2", pytest.param("ckpt=0", marks=pytest.mark.slow)])
def test_one_seed_is_one_run_whatever_the_workers_and_checkpointing(
    changed: str, whole: Path, place: Path, tmp_path: Path
) -> None:
    """Dropout, augmentation and mixed precision on; equal weights and equal records, to the bit."""
    assert train(tmp_path, *RUN, f"data.root={place / 'phantom'}", changed).code == 0
    assert same(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_run_stopped_before_its_last_validation_still_reports_what_it_measured(copy: Path, whole: Path) -> None:
    """Its first step is the run's own: a resumed one begins with the optimizer's state, which the very first makes."""
    assert resume(copy, hook=functools.partial(at_step, 6, signal.SIGTERM)).code == 75
    assert resume(copy).code == 0 and same(copy, whole)
    measured = [json.loads((run / "memory.json").read_text())["measured"] for run in (copy, whole)]
    assert measured[0] == measured[1]
    forward = measured[0]["phases"]["forward"]
    assert forward["first"] < forward["steady"]
    for part in ("memory", "figures"):
        assert {path.name for path in (copy / part).iterdir()} == {path.name for path in (whole / part).iterdir()}
    logged = [(run / "metrics.jsonl").read_text().splitlines() for run in (copy, whole)]
    peaks = [[line for line in lines if "memory/peak_allocated_bytes" in line] for lines in logged]
    assert peaks[0] == peaks[1] and len(peaks[0]) == 1


@promise("Resume", "`resume=` of a run that is done", '"nothing to do", exit 0')
@pytest.mark.slow
def test_a_run_that_is_done_is_left_as_it_is(whole: Path) -> None:
    before = contents(whole)
    done = resume(whole)
    assert done.code == 0 and "steps=N" in done.out
    assert {path.name for path in before if before[path] != path.read_bytes()} <= {"overrides.yaml"}
    assert resume(whole, hook=stop_reading).code == 75 and status(whole).encode() == before[whole / "STATUS"]


def stop_reading() -> None:
    call(job, "prepare_data", 1, functools.partial(send, signal.SIGTERM))


def die_saving(number: int) -> None:
    """Just before the save of this number."""
    call(CheckpointManager, "save_last", number, functools.partial(send, KILL))


@promise(
    "Resume",
    "a kill beside a save, or in the last validation",
    "no step is lost, no validation lost or recorded twice",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "number", "step"),
    [(RUN, 3, 2), (["resume=run"], 2, 6)],
    ids=["after the validation of step 4", "after the last one"],
)
def test_killed_beside_a_save_no_validation_is_lost_or_recorded_twice(
    words: list[str], number: int, step: int, copy: Path, whole: Path
) -> None:
    """Its record is newer than the checkpoint."""
    if words is RUN:
        shutil.rmtree(copy)
    assert train(copy.parent, *words, hook=functools.partial(die_saving, number)).code == -KILL
    assert checkpoint.load_checkpoint(copy / "checkpoints" / "last.pt")["step"] == step
    assert [line["step"] for line in records(copy) if "val/dice_mean" in line][-1] > step - (step == 6)
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


@promise("Resume", "a kill after the last step", "resume writes what is missing")
@pytest.mark.slow
def test_a_run_killed_after_its_last_step_is_finished(copy: Path, whole: Path) -> None:
    assert resume(copy, hook=die_finishing).code == -KILL
    assert status(copy) == "running\n" and not (copy / "figures" / "prediction.png").exists()
    done = resume(copy)
    assert done.code == 0 and same(copy, whole) and status(copy).startswith("done")
    assert [path.name for path in (copy / "predictions").iterdir()]
    assert (copy / "figures" / "prediction.png").exists()


def die_finishing() -> None:
    call(Validator, "complete", 1, functools.partial(send, KILL))


@promise("Checkpoints", "a file cut to ...")
@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(copy: Path, whole: Path) -> None:
    """The records are cut to the checkpoint that was used, and what killed saves left is removed."""
    cut(copy / "checkpoints" / "last.pt")
    orphans = [copy / "checkpoints" / "last.tmp", copy / "checkpoints" / "best.tmp", copy / ".memory.json.tmp"]
    orphans.append(copy / "predictions" / ".a.nii.gz.7.tmp")
    for orphan in orphans:
        orphan.write_bytes(b"half")
    done = resume(copy)
    assert done.code == 0 and not any(orphan.exists() for orphan in orphans)
    (line,) = done.err.splitlines()
    assert "last.pt" in line and numbers(line.partition("previous.pt")[2]) == [2, 3, 5]
    assert same(copy, whole)


@promise("Checkpoints", "a file cut to ...")
def test_the_whole_checkpoint_outlives_the_save_after_the_damaged_one(copy: Path) -> None:
    last, previous = (copy / "checkpoints" / name for name in ("last.pt", "previous.pt"))
    cut(last)
    assert resume(copy, hook=functools.partial(at_step, 5)).code == -KILL
    assert [checkpoint.load_checkpoint(path)["step"] for path in (last, previous)] == [4, 2]


@promise("Checkpoints", "a file cut to ...")
def test_without_a_whole_checkpoint_nothing_starts_over(copy: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        path.write_bytes(b"")
    before = status(copy), (copy / "metrics.jsonl").read_bytes()
    done = resume(copy)
    assert done.code == 3 and done.err.count("\n") == 1
    assert all(name in done.err for name in ("last.pt", "previous.pt", "best.pt"))
    assert (status(copy), (copy / "metrics.jsonl").read_bytes()) == before


@promise("What scripts rely on", "exit code 3 ...")
@promise("Checkpoints", "another format; parts missing ...")
@pytest.mark.parametrize(
    "change",
    [
        {"format": checkpoint.FORMAT + 1},
        pytest.param({"model": {}}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_exit_3_and_no_other_is_taken(change: dict, copy: Path) -> None:
    path = copy / "checkpoints" / "last.pt"
    torch.save(checkpoint.load_checkpoint(path) | change, path)
    done = resume(copy)
    assert done.code == 3, done.err
    assert "Traceback" not in done.err and "last.pt: " in done.err


@promise(
    "Resume",
    "a run that was killed, or lost a data worker, before its first checkpoint, then the same command",
    "it starts over; a run with a result, or perhaps alive, is untouched",
)
@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over(place: Path, whole: Path) -> None:
    early = place / "early"
    assert train(early, *RUN, hook=functools.partial(at_step, 1)).code == -KILL
    assert not list((early / "run").glob("checkpoints/*")) and records(early / "run")
    with pytest.raises(UserError):  # a prediction starts nothing over
        lifecycle.refuse_used(early / "run", is_dry=True, is_locked=True)
    assert train(early, *RUN, "loss.weights=[1]").code == 2, "a mistake before the first step"
    done = train(early, *RUN)
    assert done.code == 0 and str(early / "run") in done.err and done.err.count("\n") == 1, done.err
    assert same(early / "run", whole)


@promise("Resume", "a run that was ...")
@pytest.mark.slow
def test_a_job_that_may_have_begun_begins_or_goes_on(place: Path, whole: Path) -> None:
    """The same command each time: after a data worker that was killed early, and after a kill."""
    job = [*RUN, "resume=auto"]
    folder = place / "auto" / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 9}\n')
    run_folder.write_status(folder, "failed: no batch of a: no room in shared memory", 1)
    assert train(place / "auto", *job, hook=functools.partial(at_step, 5)).code == -KILL
    assert len(trained(folder)) == 5
    done = train(place / "auto", *job)
    assert done.code == 0 and same(folder, whole), done.err


KILLED = (f"failed: {lifecycle.describe_exit(137)}", 137)


@promise("Resume", "a run that was ...")
@without("unet3d.cli.lifecycle.RUNNING", "other\n", only="killed before its end")
@without("unet3d.cli.lifecycle.CUT_SHORT", ("",), only="own error")
@pytest.mark.parametrize(
    ("end", "files", "is_locked"),
    [
        pytest.param(("out of memory", 5), ["metrics.jsonl"], True, id="out of memory"),
        pytest.param(("failed: ValueError('my own loss')", 1), ["metrics.jsonl"], True, id="own error"),
        pytest.param(("error: the loss is nan", 4), ["metrics.jsonl"], True, id="nan"),
        pytest.param(None, ["metrics.jsonl", "checkpoints/previous.pt"], True, id="checkpoint and records"),
        pytest.param(None, ["checkpoints/best.pt"], True, id="checkpoint"),
        pytest.param((), ["metrics.jsonl"], True, id="no status"),
        pytest.param(None, ["metrics.jsonl"], False, id="killed before its end"),
        pytest.param(KILLED, ["metrics.jsonl"], False, id="killed job"),
        pytest.param(("stopped by SIGTERM after step 0", 75), ["metrics.jsonl"], False, id="stopped"),
    ],
)
def test_a_run_with_a_result_or_perhaps_alive_is_left_alone(
    end: tuple, files: list[str], is_locked: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Where nothing can be locked, a run may be alive."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    if end is None:
        (tmp_path / "STATUS").write_text("running\n")
    elif end:
        run_folder.write_status(tmp_path, *end)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))) as caught:
        lifecycle.refuse_used(tmp_path, is_dry=False, is_locked=is_locked)
    assert ("resume" in str(caught.value)) is any(name.endswith(".pt") for name in files)
    if not is_locked:
        lifecycle.refuse_used(tmp_path, is_dry=False, is_locked=True)
        assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_between_validations(place: Path, whole: Path) -> None:
    """Of a run that validates only at its end, killed at step 5 of 6: it goes on from step 3. Step 6 is saved once."""
    saved = place / "saved"
    options = [*RUN, "eval_every=0", "save_every=3"]
    assert train(saved, *options, hook=functools.partial(at_step, 5)).code == -KILL
    assert checkpoint.load_checkpoint(saved / "run" / "checkpoints" / "last.pt")["step"] == 3
    assert resume(saved / "run").code == 0
    assert trained(saved / "run") == trained(whole)
    assert all(torch.equal(a, b) for a, b in zip(weights(saved / "run").values(), weights(whole).values(), strict=True))
