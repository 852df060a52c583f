"""One run over several ranks: equal to one process, in one folder, and ended by a word whatever happens to a rank."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import nothing, without
from promises import promise
from ranked import train_ranks
from torch import nn
from torch.distributed import HashStore
from training import (
    PLAIN,
    ROOT,
    TINY,
    Hook,
    at_step,
    fail,
    kill,
    pixels_alone,
    same,
    saved_step,
    send,
    status,
    train,
    weights,
    when,
)

from unet3d import build
from unet3d.base import ranks
from unet3d.base.errors import NotSaved, OutOfMemory, RankLost, UserError
from unet3d.config import compose, rules
from unet3d.run import checkpoint
from unet3d.training import trainer

PAIRED = [*TINY, "batch=2", "data.phantom.cases=7", "data.val_fraction=0.4"]  # three cases to validate: not even
SGD = [*PAIRED, "optim=sgd", "optim.lr=0.01"]
REGIONS = ("data.regions={body:[1,2,3],lesion:3}", "data.regions_class_order=[1,3]", "loss.batch_dice=false")
STEP = "unet3d.training.trainer.train_step"
TERMINATE = partial(send, signal.SIGTERM)


def squares(logits: torch.Tensor, label: torch.Tensor, options: object) -> torch.Tensor:
    """A loss of a user's own: a mean over images, which each rank has as many of."""
    return (logits.softmax(1)[:, 1] - (label == 1).float()).square().mean()


def importable() -> None:
    sys.path.insert(0, str(Path(__file__).parent))


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def train_alone(place: Path, *words: str, folder: str = "alone", hook: Hook | None = importable) -> int | None:
    """The same run as `train_ranks` makes, in one process; return its exit code."""
    return train(place, *words, f"data.root={place / 'phantom'}", f"hydra.run.dir={folder}", hook=hook).code


def check_equal_but_for_rounding(one: Path, two: Path) -> None:
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    pairs = zip(weights(one).values(), weights(two).values(), strict=True)
    assert max((x - y).abs().max().item() for x, y in pairs) < 1e-5
    assert (one / "scores.csv").read_bytes() == (two / "scores.csv").read_bytes()
    names = {path.name for path in (one / "predictions").iterdir()}
    assert len(names) == 3 and names == {path.name for path in (two / "predictions").iterdir()}


@promise(
    "Ranks",
    "another number of ranks for the same batches, also in a resumed run",
    "losses and weights are identical up to rounding; with as many ranks bit-identical (on the CPU), with dropout",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ("recompute=tiles", "accumulate=2"),
        ("ckpt=2", "model.deep_supervision=true", "model.features=[4,4,4]", "optim.average=0.9", *REGIONS),
        (f"loss.path={__name__}:squares", "loss.batch_dice=false"),
    ],
    ids=["tiles", "segments", "averaged"],
)
def test_two_ranks_with_one_patch_each_are_one_with_two(tmp_path: Path, way: tuple[str, ...]) -> None:
    words = [*SGD, *way, "steps=2"]
    assert train_alone(tmp_path, *words) == 0
    both = train_ranks(tmp_path, *words, hooks=dict.fromkeys(range(2), importable))
    assert [rank.code for rank in both] == [0, 0], both[0].err + both[1].err
    check_equal_but_for_rounding(tmp_path / "alone", tmp_path / "run")
    assert both[1].out == "" == both[1].err


@pytest.mark.slow
def test_adamw_steps_by_the_sign_of_rounding_where_a_gradient_is_next_to_nothing(tmp_path: Path) -> None:
    """A bias before a norm, whose gradient is 0 in exact arithmetic, moves by at most its rate in a step."""
    words = [*PAIRED, "optim=adamw", "optim.lr=0.001", "optim.schedule=constant", "steps=3", "eval_every=0"]
    assert train_alone(tmp_path, *words) == 0
    train_ranks(tmp_path, *words)
    one, two = weights(tmp_path / "alone"), weights(tmp_path / "run")
    apart = {name: (one[name] - two[name]).abs().max().item() for name in one}
    assert max(apart.values()) < 2 * 3 * 0.001  # twice the rate a step
    assert max(apart[name] for name in apart if not name.endswith("conv.bias")) < 0.001
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)


@promise("Ranks", "another number of ranks ...")
@pytest.mark.slow
def test_a_run_of_one_process_goes_on_over_two_ranks(tmp_path: Path) -> None:
    words = [*SGD, "eval_every=4"]
    assert train_alone(tmp_path, *words) == 0
    assert train_alone(tmp_path, *words, folder="run", hook=partial(at_step, 2, signal.SIGTERM)) == 75
    resumed = train_ranks(tmp_path, *words, f"resume={tmp_path / 'run'}")
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].err
    check_equal_but_for_rounding(tmp_path / "alone", tmp_path / "run")


@promise("Ranks", "another number of ranks ...")
@promise("Ranks", "SIGTERM from torchrun to an ending rank", "its exit code says why the run ended")
@pytest.mark.slow
def test_a_run_goes_on_with_as_many_ranks_to_the_bit(tmp_path: Path) -> None:
    """Dropout of each rank included. The first one alone has got the signal; the other gets one as it ends."""
    words, folder = [*SGD, "eval_every=4", "model.dropout=0.3"], tmp_path / "parts" / "run"
    train_ranks(tmp_path / "whole", *words)
    stopped = train_ranks(tmp_path / "parts", *words, hooks={0: signalled_again, 1: signalled_at_exit})
    assert [rank.code for rank in stopped] == [75, 75], stopped[0].err
    text = status(folder)
    assert re.match(r"stopped.*SIGTERM\D*\b2\D*\b4\b", text) and f"resume={folder}" in text
    resumed = train_ranks(tmp_path / "parts", *words, f"resume={folder}")
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].err
    assert same(tmp_path / "whole" / "run", folder)


def signalled_again() -> None:
    """In step 2, and as it ends."""
    at_step(2, signal.SIGTERM)
    signalled_as_it_ends()


def signalled_as_it_ends() -> None:
    """As its last line says how to go on, and as Python ends."""
    when("unet3d.cli.lifecycle.how_to_go_on", 1, TERMINATE)()
    signalled_at_exit()


def signalled_at_exit() -> None:
    """From torchrun, as the first of the others has ended."""
    Finalize(None, TERMINATE, exitpriority=0)


@pytest.mark.slow
def test_what_is_predicted_is_what_each_rank_holds(tmp_path: Path) -> None:
    hooks = dict.fromkeys(range(2), pixels_alone)
    done = train_ranks(tmp_path, *SGD, *PLAIN, "recompute=lean", "eval_every=0", hooks=hooks, frills=True)[0]
    assert done.code == 0, done.err
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    peak = memory["predicted"]["peak_bytes"]
    assert memory["error_bytes"] == 0 and memory["measured"]["rank_peak_bytes"] == [peak, peak]
    assert f"{peak / 2**20:.1f}, {peak / 2**20:.1f} MiB" in done.out, "a number for each rank"


def not_waited_for() -> None:
    """There is no third rank whose answer the first would wait for."""
    ranks.GRACE = 0.0


@promise(
    "Ranks",
    "a rank raises, runs out of memory, is killed, or hangs longer than `rank_timeout`",
    "all end; STATUS names the rank and the cause; the run resumes from its checkpoint",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "said", "code"),
    [
        pytest.param(partial(fail, KeyError("of rank 1")), r"KeyError.*of rank 1", 1, id="raises"),
        pytest.param(partial(fail, OutOfMemory("at once")), "at once", 5, id="out of memory"),
        pytest.param(kill, "", 1, id="is killed"),
        pytest.param(partial(send, signal.SIGSTOP), "rank_timeout", 1, id="hangs"),
    ],
)
def test_however_a_rank_ends_the_first_says_so_and_keeps_the_checkpoint(
    act: Hook, said: str, code: int, tmp_path: Path
) -> None:
    hooks = {1: when(STEP, 4, act)} | ({0: not_waited_for} if said == "rank_timeout" else {})
    done = train_ranks(tmp_path, *SGD, "rank_timeout=5", hooks=hooks)[0]
    text = status(tmp_path / "run")
    assert re.match(rf"failed: rank 1: .*{said}", text), text
    assert ("rank_timeout" in text) == (said == "rank_timeout"), "a longer one is no remedy for a rank that is gone"
    assert f"train.py resume={tmp_path / 'run'}" in text
    assert done.code == code and text.endswith(f"exit code {code}\n") and "Traceback" not in done.err
    assert saved_step(tmp_path / "run") == 2


@promise("Ranks", "a rank raises, runs ...")
@without("unet3d.base.ranks.publish_failure", nothing)
@pytest.mark.slow
def test_a_rank_says_how_the_first_ended(tmp_path: Path) -> None:
    first, second = train_ranks(tmp_path, *SGD, hooks={0: when(STEP, 2, partial(fail, KeyError("of rank 0")))})
    assert first.code == 1 and second.code == 1
    assert second.err.startswith("rank 1: failed: rank 0: ") and "KeyError: 'of rank 0'" in second.err


@promise("Ranks", "a full disk under the first rank", "as in a run of one process, on all ranks")
@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_stops_all_ranks_at_the_end(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, *SGD, hooks={0: no_room})
    assert [rank.code for rank in done] == [2, 2], done[0].err + done[1].err
    assert status(tmp_path / "run").startswith("error: best.pt: not saved")
    assert re.findall(r"warning: .*?(\w+)\.pt: not saved", done[0].err) == ["last", "best", "last"]


def no_room() -> None:
    checkpoint.save_checkpoint = _refuse


def _refuse(path: Path, *_: object) -> None:
    raise NotSaved(f"{path.name}: not saved (No space left on device)")


def of_first(number: int) -> int:
    """Return the first rank's number, in place of that on which all agree."""
    return ranks.gather(number)[0]


@promise(
    "Ranks",
    "SIGTERM to one rank, in a step or an uneven validation",
    "all stop after the same step; exit 75, which torchrun turns into 1",
)
@pytest.mark.slow
@without("unet3d.base.ranks.all_reduce_max", of_first)
def test_a_signal_within_a_validation_ends_it_on_all_ranks(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, *SGD, hooks={1: when("unet3d.training.inference.Predictor.strips", 1, TERMINATE)})
    assert [rank.code for rank in done] == [75, 75], done[0].err + done[1].err
    assert re.match(r"stopped.*SIGTERM\D*\b2\D*\b4\b", status(tmp_path / "run"))


@promise("Ranks", "a loss that is not finite on one rank", "all refuse the update; all ranks' patches are kept")
@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_and_keeps_the_patches_of_all_ranks(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, *SGD, hooks={1: poisoned})
    assert [rank.code for rank in done] == [4, 4], done[0].err
    kept = torch.load(tmp_path / "run" / "nan_batch.pt", weights_only=True)["batches"]
    assert [len(batch["cases"]) for batch in kept] == [1, 1]
    text = status(tmp_path / "run")
    assert text.startswith("error: loss nan,") and all(case in text for batch in kept for case in batch["cases"])


def poisoned() -> None:
    """A NaN in the first step's patch of this rank."""
    take = trainer.train_step

    def poison(model: torch.nn.Module, *of: Any) -> object:
        of[4][0].image.fill_(float("nan"))
        return take(model, *of)

    trainer.train_step = poison  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("batch=3", r"^batch=3: .*\b2 ranks"),
        ("recompute=lean model.norm=batch", "^recompute=lean and model.norm=batch: .*model.norm=instance"),
    ],
)
def test_what_ranks_cannot_share_is_refused(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SIZE", 2)
    with pytest.raises(UserError, match=said):
        rules.check(compose.compose(words.split()))


@pytest.mark.parametrize("norm", [nn.BatchNorm3d(1), nn.InstanceNorm3d(1, track_running_stats=True)])
def test_statistics_that_ranks_without_gpus_cannot_share_are_refused(
    norm: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "count", lambda: 2)
    with pytest.raises(UserError, match="instance"):
        build.prepare_for_ranks(nn.Sequential(nn.Conv3d(1, 1, 1), norm))


# train.py, whose second rank is killed in its third step, and not once more when it is started again. It leaves the
# names of the threads that it ends with.
KILLED_ONCE = f"""
import os, runpy, sys
from pathlib import Path
from training import call, kill, without_frills
from unet3d.training import trainer

def be_killed():
    Path("killed").touch()
    kill()

without_frills()
rank = os.environ["RANK"]
if rank == "1" and not Path("killed").exists():
    call(trainer, "train_step", 3, be_killed)
try:
    runpy.run_path("{ROOT / "train.py"}", run_name="__main__")
finally:
    Path("threads" + rank).write_text(" ".join(path.read_text() for path in Path("/proc/self/task").glob("*/comm")))
"""


@promise("Ranks", "a rank raises, runs ...")
@promise(
    "Ranks",
    "`torchrun --max-restarts` starts killed ranks again",
    "with `resume=auto` they go on from the last checkpoint",
)
@promise(
    "Ranks",
    "a rank is done while a thread of torch.distributed still works",
    "exit 0: no such thread outlives Python",
)
@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--max-restarts` repeats the command. The first rank alone speaks and writes.

    Nor does a thread of the group outlive the run: at Python's end it would abort a rank that is done.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    script, run = tmp_path / "killed_once.py", tmp_path / "run"
    script.write_text(KILLED_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [str(script), *SGD, "resume=auto", f"hydra.run.dir={run}"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and (tmp_path / "killed").exists(), done.stderr
    assert status(run).startswith("done") and len(losses(run)) == 4
    ends = [line for line in done.stdout.splitlines() if line.endswith(": run")]
    assert len(ends) == 1, "the folder, named by the first rank, and by its second start"
    threads = [(tmp_path / f"threads{rank}").read_text() for rank in range(2)]
    assert all(names and "gloo" not in names for names in threads), threads


@promise(
    "Ranks",
    "a rank is killed while another's GPU waits for it",
    "the other notices within a second or two; STATUS names the killed one",
)
@without("unet3d.base.ranks._ended", nothing)
def test_a_rank_that_waits_for_its_gpu_notices_that_another_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's collectives wait for it without end."""
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    store = HashStore()
    store.set("process 1", f"{killed.pid} {platform.node()}")
    for name, value in {"SIZE": 2, "_stores": [store], "_stuck": [], "LOOK": 0.0}.items():
        monkeypatch.setattr(ranks, name, value)
    looks = iter([False] * 3 + [True])
    with pytest.raises(RankLost, match=r"^rank 1\b.*killed"):
        ranks.wait_until(lambda: next(looks))


def test_a_sweep_is_not_for_ranks(tmp_path: Path) -> None:
    done = train(tmp_path, "-m", "batch=2,4", hook=one_of_two)
    assert done.code == 2 and "torchrun" in done.err and done.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out", "err"}


def one_of_two() -> None:
    ranks.SIZE = 2


@promise("Ranks", "SIGTERM from torchrun to ...")
@pytest.mark.slow
def test_a_budget_is_of_each_rank_and_what_would_need_less_is_of_all(tmp_path: Path) -> None:
    """Smaller batches would change nothing else; one for both ranks is none."""
    words = [*PAIRED, "batch=4", "amp=true", "loss=dice", "loss.batch_dice=false", "dry_run=true", "budget=0.8MiB"]
    hooks = {0: signalled_as_it_ends, 1: signalled_at_exit}
    done = train_ranks(tmp_path, *words, hooks=hooks, frills=True)
    assert [rank.code for rank in done] == [2, 2] and "Traceback" not in done[0].err, done[0].err
    assert "budget=0.8MiB" in status(tmp_path / "run")
    assert "batch=2 accumulate=2" in done[0].err and "batch=1" not in done[0].err


def test_what_is_no_run_leaves_no_rank_waiting(tmp_path: Path) -> None:
    assert [rank.code for rank in train_ranks(tmp_path, "--help")] == [0, 0]
    assert [rank.code for rank in train_ranks(tmp_path, "chkpt=2")] in ([2, 0], [2, 75])
