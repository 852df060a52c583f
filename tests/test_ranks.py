"""One run over several ranks: equal to one process, in one folder, and ended by a word whatever happens to a rank."""

import functools
import json
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import nothing, without
from promises import promise
from ranked import predict_without_pictures, torchrun, train_ranks
from torch.distributed import HashStore
from training import PLAIN, ROOT, TINY, at_step, call, records, same, send, status, train, weights

from unet3d.base import ranks
from unet3d.base.errors import NotSaved, OutOfMemory, RankLost, UserError
from unet3d.cli import lifecycle
from unet3d.config import compose, rules
from unet3d.memory import prediction
from unet3d.run import checkpoint
from unet3d.training import trainer
from unet3d.training.inference import Predictor

PAIRED = [*TINY, "batch=2", "data.phantom.cases=7", "data.val_fraction=0.4"]  # three cases to validate: not even
SGD = ("optim=sgd", "optim.lr=0.01")
WAYS = {
    "segments": ("accumulate=2", "ckpt=2"),
    "tiles": (
        "recompute=tiles",
        "accumulate=2",
        "model.features=[4,6,8]",
        "model.deep_supervision=true",
        "optim.average=0.9",
    ),
    "regions": ("data.regions={body:[1,2,3],lesion:3}", "data.regions_class_order=[1,3]", "loss.batch_dice=false"),
    "averaged": (f"loss.path={__name__}:squares", "loss.batch_dice=false"),
}
SLOW = ("segments", "tiles")
RESUMED = [*PAIRED, *SGD, "steps=4", "eval_every=4"]


def squares(logits: torch.Tensor, label: torch.Tensor, options: object) -> torch.Tensor:
    """A loss of a user's own: a mean over images, which each rank has as many of."""
    return (logits.softmax(1)[:, 1] - (label == 1).float()).square().mean()


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def furthest(a: Path, b: Path) -> float:
    """The largest difference of two runs' weights."""
    pairs = zip(weights(a).values(), weights(b).values(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


@promise(
    "Ranks",
    "another number of ranks for the same batches, also in a resumed run",
    "losses and weights are identical up to rounding; with as many ranks bit-identical (on the CPU), with dropout",
)
@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_two_ranks_with_one_patch_each_are_one_with_two(tmp_path: Path, way: str) -> None:
    words = [*PAIRED, *SGD, *WAYS[way], "eval_every=4"]
    alone = train(tmp_path, *words, f"data.root={tmp_path / 'phantom'}", "hydra.run.dir=alone", hook=importable)
    assert alone.code == 0, alone.err
    both = train_ranks(tmp_path, *words, hooks=dict.fromkeys(range(2), importable))
    assert [rank.code for rank in both] == [0, 0], both[0].err + both[1].err
    one, two = tmp_path / "alone", tmp_path / "run"
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    assert furthest(one, two) < 1e-5
    assert (one / "scores.csv").read_bytes() == (two / "scores.csv").read_bytes()
    names = {path.name for path in (one / "predictions").iterdir()}
    assert len(names) == 3 and names == {path.name for path in (two / "predictions").iterdir()}
    assert both[1].out == "" == both[1].err


def importable() -> None:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.slow
def test_adamw_makes_steps_of_rounding_where_a_gradient_is_next_to_nothing(tmp_path: Path) -> None:
    """A convolution's bias before a norm has the gradient 0 in exact arithmetic: AdamW steps by the sign of an error.

    It never moves a weight further than its rate in a step; what has a gradient of its own stays within one.
    """
    words = [*PAIRED, "optim=adamw", "optim.lr=0.001", "optim.schedule=constant", "steps=6", "eval_every=0"]
    assert train(tmp_path, *words, f"data.root={tmp_path / 'phantom'}", "hydra.run.dir=alone").code == 0
    train_ranks(tmp_path, *words)
    one, two = weights(tmp_path / "alone"), weights(tmp_path / "run")
    apart = {name: (one[name] - two[name]).abs().max().item() for name in one}
    assert max(apart, key=lambda name: apart[name]).endswith("conv.bias")
    assert max(apart.values()) < 2 * 6 * 0.001  # twice the steps times the rate
    assert max(apart[name] for name in apart if not name.endswith("conv.bias")) < 0.001
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)


@pytest.mark.slow
def test_what_is_predicted_is_what_each_rank_holds(tmp_path: Path) -> None:
    hooks = dict.fromkeys(range(2), predict_without_pictures)
    done = train_ranks(tmp_path, *PAIRED, *SGD, "recompute=lean", hooks=hooks, frills=True)[0]
    assert done.code == 0, done.err
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    peak = memory["predicted"]["peak_bytes"]
    assert memory["error_bytes"] == 0 and memory["measured"]["rank_peak_bytes"] == [peak, peak]
    assert f"{peak / 2**20:.1f}, {peak / 2**20:.1f} MiB" in done.out, "a number for each rank"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that was not stopped."""
    place = tmp_path_factory.mktemp("whole")
    train_ranks(place, *RESUMED)
    return place / "run"


@promise("Ranks", "another number of ranks ...")
@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 2), (2, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(
    tmp_path: Path, request: pytest.FixtureRequest, counts: tuple[int, int]
) -> None:
    """With as many, equal to the bit, dropout of each rank included."""
    if counts == (2, 2):
        words = [*RESUMED, "model.dropout=0.3"]
        train_ranks(tmp_path / "whole", *words)
        assert same(tmp_path / "whole" / "run", resume_after_a_signal(tmp_path / "parts", words, counts))
        return
    resumed = resume_after_a_signal(tmp_path, RESUMED, counts)
    whole = request.getfixturevalue("whole")
    assert furthest(whole, resumed) < 1e-5
    assert len(records(whole)) == len(records(resumed))


def resume_after_a_signal(place: Path, words: list[str], counts: tuple[int, int]) -> Path:
    """Train with two numbers of ranks, before and after a signal in the second of four steps; return the folder."""
    folder = place / "run"
    stopped = train_ranks(place, *words, count=counts[0], hooks=stop())
    assert [rank.code for rank in stopped] == [75] * counts[0], stopped[0].err
    text = status(folder)
    assert text.startswith("stopped") and re.search(r"SIGTERM\D*\b2\D*\b4\b", text) and f"resume={folder}" in text
    resumed = train_ranks(place, *words, f"resume={folder}", count=counts[1])
    assert [rank.code for rank in resumed] == [0] * counts[1], resumed[0].err
    return folder


def stop() -> dict:
    """Of the first rank alone: SIGTERM as it logs step 2."""
    return {0: functools.partial(at_step, 2, signal.SIGTERM)}


@promise("Ranks", "SIGTERM from torchrun to an ending rank", "its exit code says why the run ended")
@pytest.mark.slow
def test_a_signal_to_a_rank_that_is_ending_leaves_its_exit_code(tmp_path: Path) -> None:
    """From torchrun, as the first of the others has ended."""
    ended = train_ranks(tmp_path, *PAIRED, *SGD, hooks={0: stop_twice, 1: signalled_at_exit})
    assert [rank.code for rank in ended] == [75, 75], ended[0].err


@promise("Ranks", "SIGTERM from torchrun to ...")
def test_a_signal_to_a_rank_that_has_predicted_leaves_its_exit_code(tmp_path: Path) -> None:
    hooks = {0: signalled_as_it_says_why, 1: signalled_at_exit}
    ended = train_ranks(tmp_path, *PAIRED, "dry_run=true", "budget=0.5MiB", hooks=hooks)
    assert [rank.code for rank in ended] == [2, 2], ended[0].err


def stop_twice() -> None:
    at_step(2, signal.SIGTERM)
    signalled_at_exit()


def signalled_as_it_says_why() -> None:
    prediction.preflight = functools.partial(fail, UserError("budget=0.5MiB"))
    call(lifecycle, "how_to_go_on", 1, functools.partial(send, signal.SIGTERM))  # its last line names that
    signalled_at_exit()


def signalled_at_exit() -> None:
    Finalize(None, functools.partial(send, signal.SIGTERM), exitpriority=0)


def in_step(number: int, act: Callable[[], None]) -> None:
    """`act` instead of a rank's step of this number, within which the others wait for it."""
    call(trainer, "train_step", number, act)


def fail(error: BaseException, *_: object) -> None:
    raise error


def not_waited_for() -> None:
    """There is no third rank whose answer the first would wait for."""
    ranks.GRACE = 0.0


ENDS = {  # what a rank does, what the others say of it, and the exit code
    "raises": (functools.partial(fail, KeyError("of rank 1")), ("KeyError", "of rank 1"), 1),
    "out_of_memory": (functools.partial(fail, OutOfMemory("at once")), ("at once",), 5),
    "is_killed": (functools.partial(send, signal.SIGKILL), (), 1),
    "hangs": (functools.partial(send, signal.SIGSTOP), ("rank_timeout",), 1),
}


@promise(
    "Ranks",
    "a rank raises, runs out of memory, is killed, or hangs longer than `rank_timeout`",
    "all end; STATUS names the rank and the cause; the run resumes from its checkpoint",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=[pytest.mark.slow] * (end in ("is_killed", "hangs"))) for end in ENDS]
)
def test_however_a_rank_ends_the_first_says_so_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, end: str
) -> None:
    """All ends leave the same checkpoint; it is resumed after the one that leaves no time."""
    act, said, code = ENDS[end]
    words = [*PAIRED, *SGD, "rank_timeout=5"]
    hooks = {1: functools.partial(in_step, 4, act)} | ({0: not_waited_for} if end == "hangs" else {})
    done = train_ranks(tmp_path, *words, hooks=hooks)
    text = status(tmp_path / "run")
    assert text.startswith("failed: rank 1: ") and all(part in text for part in said), text
    assert ("rank_timeout" in text) == (end == "hangs"), "a longer one is no remedy for a rank that is gone"
    assert f"train.py resume={tmp_path / 'run'}" in text
    assert done[0].code == code and text.endswith(f"exit code {code}\n") and "Traceback" not in done[0].err
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert checkpoint["step"] == 2
    if end == "is_killed":
        resumed = train_ranks(tmp_path, *words, f"resume={tmp_path / 'run'}")
        assert [rank.code for rank in resumed] == [0, 0], resumed[0].err
        assert len(losses(tmp_path / "run")) == 4


@promise("Ranks", "a rank raises, runs ...")
@without("unet3d.base.ranks.publish_failure", nothing)
def test_a_rank_says_how_the_first_ended(tmp_path: Path) -> None:
    hooks = {0: functools.partial(in_step, 2, functools.partial(fail, KeyError("of rank 0")))}
    first, second = train_ranks(tmp_path, *PAIRED, *SGD, hooks=hooks)
    assert first.code == 1 and second.code == 1
    assert second.err.startswith("rank 1: failed: rank 0: ") and "KeyError: 'of rank 0'" in second.err


@promise("Ranks", "a full disk under the first rank", "as in a run of one process, on all ranks")
@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_stops_all_ranks_at_the_end(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, *PAIRED, *SGD, hooks={0: no_room})
    assert [rank.code for rank in done] == [2, 2], done[0].err + done[1].err
    assert status(tmp_path / "run").startswith("error: best.pt: not saved")
    warnings = [line for line in done[0].err.splitlines() if line.startswith("warning: ")]
    assert [line.partition(": not saved")[0].split()[-1] for line in warnings] == ["last.pt", "best.pt", "last.pt"]


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
    done = train_ranks(tmp_path, *PAIRED, *SGD, hooks={1: signalled_validation})
    assert [rank.code for rank in done] == [75, 75], done[0].err + done[1].err
    assert re.match(r"stopped.*SIGTERM\D*\b2\D*\b4\b", status(tmp_path / "run"))


def signalled_validation() -> None:
    strips = Predictor.strips

    def signalled(self: Predictor, image: torch.Tensor, name: str) -> object:
        send(signal.SIGTERM)
        return strips(self, image, name)

    Predictor.strips = signalled  # type: ignore[method-assign,assignment]


@promise("Ranks", "a loss that is not finite on one rank", "all refuse the update; all ranks' patches are kept")
def test_a_loss_that_is_not_finite_names_and_keeps_the_patches_of_all_ranks(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, *PAIRED, *SGD, hooks={1: poisoned})
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


def test_what_ranks_cannot_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train_ranks(tmp_path, *PAIRED, "model.norm=batch")
    assert done[0].code == 2 and "model.norm=instance" in status(tmp_path / "run")
    monkeypatch.setattr(ranks, "SIZE", 2)
    with pytest.raises(UserError, match=r"^batch=3: .*\b2 ranks"):
        rules.check(compose.compose(["batch=3"]))
    with pytest.raises(UserError, match=r"^recompute=lean and model.norm=batch: .*model.norm=instance"):
        rules.check(compose.compose(["recompute=lean", "model.norm=batch"]))


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_one_run(tmp_path: Path) -> None:
    """Its command, with train.py as a program: the first rank alone speaks and writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*PAIRED, *PLAIN, "dry_run=true", "hydra.run.dir=run"]
    done = subprocess.run(
        [*command, str(ROOT / "train.py"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    parameters = json.loads((tmp_path / "run" / "memory.json").read_text())["parameters"]
    assert done.stdout.count(f"{parameters:,} ") == 1, done.stdout


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
def test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on_by_itself(tmp_path: Path) -> None:
    """`--max-restarts` repeats the command; with resume=auto, ranks go on from the last checkpoint.

    Nor does a thread of the group outlive the run: at Python's end it would abort a rank that is done.
    """
    run, phantom = tmp_path / "run", tmp_path / "phantom"
    words = [*PAIRED, *SGD, *UNCHANGED, "resume=auto", f"hydra.run.dir={run}", f"data.root={phantom}"]
    assert torchrun(tmp_path, *words, restarts=1, hook=be_killed_once) == 0, (tmp_path / "rank0/err").read_text()
    assert (tmp_path / "rank1/killed").exists() and status(run).startswith("done")
    assert len(losses(run)) == 4
    ends = [line for line in (tmp_path / "rank0/out").read_text().splitlines() if line.endswith(f": {run}")]
    assert len(ends) == 1, "the folder, named by the first rank, and by its second start"
    threads = [(tmp_path / f"rank{rank}/threads").read_text() for rank in range(2)]
    assert all(names and "gloo" not in names for names in threads), threads


UNCHANGED = [f"data.augment.{name}_p=0" for name in ("spatial", "noise", "blur", "contrast", "gamma", "low_resolution")]


def be_killed_once() -> None:
    """The second rank is killed in its third step, and not once more when it is started again."""
    killed = Path("killed")

    def be_killed() -> None:
        killed.touch()
        send(signal.SIGKILL)

    if ranks.RANK == 1 and not killed.exists():
        call(trainer, "train_step", 3, be_killed)


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


@pytest.mark.slow
def test_a_budget_is_of_each_rank_and_what_would_need_less_is_of_all(tmp_path: Path) -> None:
    """Smaller batches would change nothing else; one for both ranks is none."""
    words = [*PAIRED, "batch=4", "amp=true", "loss=dice", "loss.batch_dice=false", "dry_run=true", "budget=0.8MiB"]
    done = train_ranks(tmp_path, *words, frills=True)
    assert [rank.code for rank in done] == [2, 2] and "Traceback" not in done[0].err, done[0].err
    assert "budget=0.8MiB" in status(tmp_path / "run")
    assert "batch=2 accumulate=2" in done[0].err and "batch=1" not in done[0].err


def test_what_is_no_run_leaves_no_rank_waiting(tmp_path: Path) -> None:
    assert [rank.code for rank in train_ranks(tmp_path, "--help")] == [0, 0]
    assert [rank.code for rank in train_ranks(tmp_path, "chkpt=2")] in ([2, 0], [2, 75])
