"""A run that was killed, stopped or moved goes on to the same weights and the same records, to the bit."""

import functools
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import TINY, Ended, records, status, train, weights

from unet3d import build
from unet3d.cli import lifecycle
from unet3d.compose import refuse_changes
from unet3d.errors import UserError
from unet3d.report import run_folder
from unet3d.run.resume import refuse_other_data
from unet3d.train import checkpoint
from unet3d.train.trainer import Trainer

KILL = signal.SIGKILL
RUN = [*TINY, "steps=12", "eval_every=3", "amp=true", "amp_dtype=fp16", "model.dropout=0.2", "ckpt=2", "optim=adam"]
RUN += ["optim.average=0.9", "data.root=../phantom", "hydra.run.dir=run"]


def at_step(step: int, number: signal.Signals, threads: int = 1) -> None:
    """Signal the process itself, once it has told of its step `step`."""
    from unet3d.train.trainer import Trainer

    torch.set_num_threads(threads)
    log = Trainer._log

    def then_signal(self: Trainer, *of: object) -> None:
        log(self, *of)
        if self.step == step:
            os.kill(os.getpid(), number)

    Trainer._log = then_signal


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing befell."""
    done = train(place / "whole", *RUN)
    assert done.code == 0, done.err
    return place / "whole" / "run"


@pytest.fixture(scope="module")
def killed(place: Path, whole: Path) -> Path:
    """A run killed at step 7, with its snapshot of step 6."""
    assert train(place / "killed", *RUN, hook=functools.partial(at_step, 7, KILL)).code == -KILL
    return place / "killed" / "run"


@pytest.fixture
def copy(killed: Path) -> Path:
    """Of the killed run, for one test."""
    folder = killed.parent.with_name("copy")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(killed.parent, folder)
    return folder / "run"


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """A run that SIGTERM reached in its last step: what is left to do is its last validation."""
    hook = functools.partial(at_step, 12, signal.SIGTERM)
    assert train(tmp_path, *RUN, f"data.root={whole.parent.parent / 'phantom'}", hook=hook).code == 75
    return tmp_path / "run"


def resume(run: Path, *options: str, **hook: functools.partial[None]) -> Ended:
    return train(run.parent, "resume=run", *options, **hook)


def same(a: Path, b: Path) -> bool:
    equal = [torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True)]
    return all(equal) and records(a) == records(b)


def test_the_first_step_that_is_told_is_the_runs_own(copy: Path, whole: Path) -> None:
    """A resumed one begins with the optimizer's state, which the very first one makes."""
    assert resume(copy).code == 0
    phases, again = (json.loads((run / "memory.json").read_text())["measured"]["phases"] for run in (whole, copy))
    assert phases == again and phases["forward"]["first"] < phases["forward"]["steady"]


@pytest.mark.parametrize(("kind", "segments"), [("cuda allocated", ["inc"]), ("ledger", ["inc", "up1"])])
def test_the_first_step_of_another_step_is_not_taken_over(tmp_path: Path, kind: str, segments: list[str]) -> None:
    """On resuming, the device may change, and `ckpt`."""
    measured = {"peak_bytes": 7, "kind": "ledger", "phases": {"forward": {"first": 5, "steady": 7}}}
    earlier = measured | {"phases": {"forward": {"first": 3, "steady": 7}}}
    run_folder.update_memory(tmp_path, {"segments": ["inc"]})
    for before, first in (
        ({"measured": earlier | {"kind": kind}, "measured_segments": segments, "segments": ["inc"]}, 5),
        ({}, 5),
        ({"measured": earlier, "measured_segments": ["inc"], "segments": ["inc"]}, 3),
    ):
        run_folder.add_measured(tmp_path, 1, measured, before)
        assert run_folder.read_memory(tmp_path)["measured"]["phases"]["forward"] == {"first": first, "steady": 7}


def test_r1_killed_twice_a_run_ends_as_if_it_were_not(copy: Path, whole: Path) -> None:
    assert resume(copy, hook=functools.partial(at_step, 11, KILL)).code == -KILL
    done = resume(copy)
    assert done.code == 0 and done.err == "", done.err
    assert same(copy, whole) and status(copy) == status(whole) == "done\nexit code 0\n"


def test_r2_r7_killed_mid_epoch_with_other_workers_and_threads(copy: Path, whole: Path) -> None:
    """3 cases to an epoch: steps 7 and 11 are within one. The lock of a killed run does not live on in its workers."""
    second = resume(copy, "workers=2", hook=functools.partial(at_step, 11, KILL, threads=2))
    third = resume(copy, "workers=1")
    assert (second.code, third.code) == (-KILL, 0), third.err
    assert same(copy, whole)
    assert "from step 9 on with other options: workers: 2 -> 1" in third.out


@pytest.mark.parametrize("part", ["rng", "scaler", "optimizer"])
def test_r3_each_part_of_a_snapshot_matters(part: str, copy: Path, whole: Path) -> None:
    path = copy / "checkpoints" / "last.pt"
    state = checkpoint.load_snapshot(path)
    if part == "rng":
        state["rng"] = torch.Generator().manual_seed(1).get_state()
    elif part == "scaler":
        state["scaler"]["scale"] *= 2.0**10
    else:
        state["optimizer"]["state"][0]["exp_avg"].zero_()
    checkpoint.save_snapshot(path, state)
    assert resume(copy).code == 0
    assert not same(copy, whole)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing to refuse")
def test_r6_what_a_refused_resume_asked_for_is_not_remembered(copy: Path, whole: Path) -> None:
    before = (copy / "overrides.yaml").read_text()
    assert resume(copy, "device=cuda").code == 2
    assert (copy / "overrides.yaml").read_text() == before and status(copy) == "running\n"
    assert resume(copy).code == 0 and same(copy, whole)


def test_r6_another_network_is_refused_and_another_rate_is_told() -> None:
    before = {"model": {"features": [4, 8]}, "data": {"patch": [16]}, "optim": {"lr": 0.1}, "steps": 4, "resume": None}
    now = {"model": {"features": [8, 8]}, "data": {"patch": [8]}, "optim": {"lr": 0.1}, "steps": 4, "resume": "run"}
    with pytest.raises(UserError, match=r"data.patch: \[16\] -> \[8\]; model.features: \[4, 8\] -> \[8, 8\]"):
        refuse_changes(before, now)
    assert refuse_changes(before, before | {"optim": {"lr": 0.2}, "resume": "run"}) == ["optim.lr: 0.1 -> 0.2"]


@pytest.mark.parametrize("option", ["optim.weight_decay=0.1", "optim.betas=[0.5,0.9]", "optim.momentum=0.5"])
def test_r6_what_the_snapshots_optimizer_keeps_is_not_said_to_change(option: str, copy: Path) -> None:
    done = resume(copy, option)
    assert done.code == 2 and f"start a new one to change {option.partition('=')[0]}: " in done.err


def test_r6_other_cases_are_another_run(place: Path, whole: Path, tmp_path: Path) -> None:
    """Else a case that was learned from is scored, without a word."""
    ids = sorted(path.name.removesuffix(".nii.gz") for path in (place / "phantom").glob("*/imagesTr/*.nii.gz"))
    split = tmp_path / "split.json"
    split.write_text(json.dumps({"train": ids[1:], "val": ids[:1]}))
    words = [*RUN, f"data.root={place / 'phantom'}", "data.split=split.json"]
    assert train(tmp_path, *words, hook=functools.partial(at_step, 4, KILL)).code == -KILL
    split.write_text(json.dumps({"train": ids[:-1], "val": ids[-1:]}))
    done = resume(tmp_path / "run")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert f"held-out cases: {ids[:1]} -> {ids[-1:]}" in done.err
    split.write_text(json.dumps({"train": ids[1:], "val": ids[:1]}))
    assert resume(tmp_path / "run").code == 0


def test_r6_another_arithmetic_is_another_run() -> None:
    with pytest.raises(UserError, match=r"mixed precision: torch\.bfloat16 -> torch\.float16"):
        refuse_other_data({"mixed precision": "torch.bfloat16"}, {"mixed precision": "torch.float16"})


def test_r6_fewer_steps_than_were_taken_are_refused(copy: Path, whole: Path) -> None:
    done = resume(copy, "steps=5")
    assert done.code == 2 and done.err == "error: steps=5: the run is at step 6 already; give as many or more\n"
    assert resume(copy).code == 0 and same(copy, whole)


def test_what_was_added_on_resuming_is_remembered(copy: Path) -> None:
    assert resume(copy, "steps=13").code == 0
    again = resume(copy)
    assert again.code == 0 and "nothing to do: step 13 of 13 is done" in again.out


@pytest.mark.parametrize("changed", [["workers=2"], ["ckpt=0"]])
def test_one_seed_one_run_whatever_the_workers_and_checkpointing(
    changed: list[str], whole: Path, tmp_path: Path
) -> None:
    """Dropout, augmentation and mixed precision on; equal weights and equal records, to the bit."""
    assert train(tmp_path, *RUN, f"data.root={whole.parent.parent / 'phantom'}", *changed).code == 0
    assert same(tmp_path / "run", whole)


def test_a_run_cut_to_the_steps_it_has_taken_is_validated_as_at_its_end(copy: Path) -> None:
    done = resume(copy, "steps=6")
    assert done.code == 0 and "hd95_mm/" in (copy / "scores.csv").read_text(), done.err
    assert [line["step"] for line in records(copy) if "val/dice_mean" in line] == [3, 6]


def test_a_run_stopped_before_its_last_validation_still_tells_what_it_measured(stopped: Path, whole: Path) -> None:
    assert resume(stopped).code == 0
    measured = [json.loads((run / "memory.json").read_text())["measured"] for run in (stopped, whole)]
    assert measured[0] == measured[1]
    for part in ("memory", "figures"):
        assert {path.name for path in (stopped / part).iterdir()} == {path.name for path in (whole / part).iterdir()}
    told = [(run / "metrics.jsonl").read_text().splitlines() for run in (stopped, whole)]
    peaks = [[line for line in lines if "memory/peak_allocated_bytes" in line] for lines in told]
    assert peaks[0] == peaks[1] and len(peaks[0]) == 1


def test_r8_a_run_that_is_done_is_left_as_it_is(whole: Path) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file() and ".hydra" not in path.parts}
    again = resume(whole)
    assert again.code == 0 and "nothing to do: step 12 of 12 is done" in again.out
    after = {path: path.read_bytes() for path in before}
    assert {path.name for path in before if before[path] != after[path]} <= {".lock", "overrides.yaml"}


def test_r8_a_signal_undoes_no_run_that_is_done(whole: Path) -> None:
    again = resume(whole, hook=stop_reading)
    assert again.code == 75 and status(whole) == "done\nexit code 0\n"


def stop_reading() -> None:

    build.data = lambda config: os.kill(os.getpid(), signal.SIGTERM)


def die_saving(pause: int, after: bool) -> None:
    """In this pause, the first being 1, just before or just after last.pt is there, which it once is before them."""
    from unet3d.run.resume import Checkpoints

    save, count = Checkpoints.save_last, iter(range(9))

    def dying(self: Checkpoints) -> None:
        is_here = next(count) == pause
        if after or not is_here:
            save(self)
        if is_here:
            os.kill(os.getpid(), KILL)

    Checkpoints.save_last = dying


@pytest.mark.parametrize(("pause", "after"), [(3, False), (3, True), (4, False), (4, True)])
def test_r1_killed_beside_a_save_no_validation_is_lost_or_told_twice(
    pause: int, after: bool, place: Path, whole: Path
) -> None:
    where = place / f"saving{pause}{after}"
    assert train(where, *RUN, hook=functools.partial(die_saving, pause, after)).code == -KILL
    assert checkpoint.load_snapshot(where / "run" / "checkpoints" / "last.pt")["step"] == 3 * (
        pause if after else pause - 1
    )
    assert resume(where / "run").code == 0 and same(where / "run", whole)
    assert (where / "run" / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()


def test_records_of_a_validation_that_is_taken_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 3, "train/loss": 1}', '{"step": 3, "val/dice_mean": 1}', '{"step": 4, "train/loss": 1}']
    for paused, kept in ((0, lines[:1]), (3, lines[:2])):
        path.write_text("\n".join([*lines, '{"step": 5, "tr']))
        assert run_folder.forget_after(path, 3, paused) == 4
        assert path.read_text().splitlines() == kept


def test_a_run_killed_after_its_last_step_is_finished(copy: Path, whole: Path) -> None:
    assert resume(copy, hook=die_finishing).code == -KILL
    assert status(copy) == "running\n" and not (copy / "figures" / "prediction.png").exists()
    done = resume(copy)
    assert done.code == 0 and same(copy, whole) and status(copy).startswith("done")
    assert [path.name for path in (copy / "predictions").iterdir()]
    assert (copy / "figures" / "prediction.png").exists()


def die_finishing() -> None:
    from unet3d.run.validate import Predictions

    Predictions.complete = lambda *_: os.kill(os.getpid(), KILL)  # type: ignore[method-assign,assignment]


def test_orphans_of_killed_saves_are_swept(copy: Path) -> None:
    orphans = [copy / "checkpoints" / "last.tmp", copy / "checkpoints" / "best.tmp", copy / ".memory.json.tmp"]
    orphans.append(copy / "predictions" / ".a.nii.gz.7.tmp")
    for orphan in orphans:
        orphan.write_bytes(b"half")
    assert resume(copy, hook=functools.partial(at_step, 7, KILL)).code == -KILL
    assert not any(orphan.exists() for orphan in orphans)


def test_t7_a_killed_run_has_told_of_every_step(killed: Path, whole: Path) -> None:
    told = records(killed)
    assert [line["step"] for line in told if "train/loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert told == records(whole)[: len(told)]


def test_c1_a_damaged_snapshot_gives_way_to_the_one_before(copy: Path, whole: Path) -> None:
    """The records are cut to the snapshot that was used."""
    last = copy / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:1000])
    done = resume(copy, hook=functools.partial(at_step, 4, KILL))
    assert done.code == -KILL
    (line,) = done.err.splitlines()
    assert "last.pt: not a readable snapshot" in line
    assert line.endswith("going on from previous.pt, step 3; steps 4 to 7 are taken again")
    assert [line["step"] for line in records(copy) if "train/loss" in line] == [1, 2, 3, 4]
    assert resume(copy).code == 0 and same(copy, whole)


def test_c1_the_whole_snapshot_outlives_the_save_after_the_damaged_one(copy: Path) -> None:
    last, previous = (copy / "checkpoints" / name for name in ("last.pt", "previous.pt"))
    last.write_bytes(last.read_bytes()[:1000])
    assert resume(copy, hook=functools.partial(at_step, 7, KILL)).code == -KILL
    assert [checkpoint.load_snapshot(path)["step"] for path in (last, previous)] == [6, 3]


def test_c1_without_a_whole_snapshot_nothing_starts_anew(copy: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        path.write_bytes(b"")
    before = status(copy), (copy / "metrics.jsonl").read_bytes()
    done = resume(copy)
    assert done.code == 3 and done.err.count("\n") == 1
    assert all(name in done.err for name in ("last.pt", "previous.pt", "best.pt"))
    assert (status(copy), (copy / "metrics.jsonl").read_bytes()) == before


@pytest.mark.parametrize("change", [{"format": 3}, {"scaler": None}, {"model": {}}])
def test_c6_a_snapshot_that_does_not_fit_is_exit_3(change: dict, copy: Path) -> None:
    """And none before it is taken instead."""
    path = copy / "checkpoints" / "last.pt"
    state = {**checkpoint.load_snapshot(path), **change}
    torch.save({key: value for key, value in state.items() if value is not None}, path)
    done = resume(copy)
    assert done.code == 3, done.err
    assert "Traceback" not in done.err and "last.pt: " in done.err


def test_a_run_killed_before_its_first_snapshot_begins_anew(place: Path, whole: Path) -> None:
    early = place / "early"
    assert train(early, *RUN, hook=functools.partial(at_step, 2, KILL)).code == -KILL
    assert not list((early / "run").glob("checkpoints/*")) and records(early / "run")
    refused = train(early, *RUN, "dry_run=true")
    assert refused.code == 2 and records(early / "run"), "predicting begins nothing"
    assert train(early, *RUN, "loss.weights=[1]").code == 2, "a mistake before the first step"
    done = train(early, *RUN)
    assert done.code == 0 and "ended before its first snapshot; it begins anew" in done.err
    assert same(early / "run", whole)


@pytest.mark.parametrize(
    ("status", "files"),
    [
        ("out of memory\nexit code 5\n", ["metrics.jsonl"]),
        ("error: the loss is nan\nexit code 4\n", ["metrics.jsonl"]),
        ("running\n", ["metrics.jsonl", "checkpoints/previous.pt"]),
        ("running\n", ["checkpoints/best.pt"]),
        (None, ["metrics.jsonl"]),
    ],
)
def test_what_came_to_something_or_is_not_ours_is_left_alone(
    status: str | None, files: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    if status:
        (tmp_path / "STATUS").write_text(status)
    with pytest.raises(UserError, match="holds a run already"):
        lifecycle._refuse_used(tmp_path, is_dry=False, is_locked=True)


@pytest.mark.parametrize(
    "status",
    ["running\n", "failed: killed by SIGKILL\nexit code 137\n", "stopped by SIGTERM after step 0\nexit code 75\n"],
)
def test_where_nothing_can_be_locked_nothing_begins_anew(status: str, tmp_path: Path) -> None:
    for name, text in (("metrics.jsonl", "{}"), ("STATUS", status)):
        (tmp_path / name).write_text(text)
    lifecycle._refuse_used(tmp_path, is_dry=False, is_locked=True)
    with pytest.raises(UserError, match="holds a run already"):
        lifecycle._refuse_used(tmp_path, is_dry=False, is_locked=False)


def test_snapshots_between_validations(place: Path, whole: Path) -> None:
    """Of a run that validates only at its end, killed at step 7 of 12: it goes on from step 5."""
    saved = place / "saved"
    options = [*RUN, "eval_every=0", "save_every=5"]
    assert train(saved, *options, hook=functools.partial(at_step, 7, KILL)).code == -KILL
    assert checkpoint.load_snapshot(saved / "run" / "checkpoints" / "last.pt")["step"] == 5
    assert resume(saved / "run").code == 0
    trained = [record for record in records(whole) if "train/loss" in record]
    assert [record for record in records(saved / "run") if "train/loss" in record] == trained
    assert all(torch.equal(a, b) for a, b in zip(weights(saved / "run").values(), weights(whole).values(), strict=True))


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """`save_every` adds nothing where a validation, or the end, saves anyway."""
    calls = []
    trainer = SimpleNamespace(step=0, paused=0, model=torch.nn.Identity())
    trainer._train = lambda stream: setattr(trainer, "step", trainer.step + 1)
    Trainer.fit(trainer, iter(()), 5, 2, lambda: None, between=lambda: calls.append(trainer.step))  # type: ignore[arg-type]
    assert calls == [1, 3]
