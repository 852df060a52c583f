"""A training killed many times by SIGKILL at random moments ends with the weights of one that was left alone.

By hand: python tests/bench/soak.py [kills] [seed]
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import TINY, Ended, records, start, train, weights

STEPS, EVERY = 300, 3
RUN = [*TINY, f"steps={STEPS}", f"eval_every={EVERY}", "amp=true", "amp_dtype=fp16", "model.dropout=0.2", "workers=2"]
RUN += ["optim.average=0.9", "accumulate=2", "data.sparse=[4,4,4]", "data.root=../phantom", "hydra.run.dir=run"]


WAYS = ([], ["recompute=lean"], ["recompute=tiles"])


def digest(run: Path) -> str:
    """Of the last weights."""
    found = hashlib.sha256()
    for value in weights(run).values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def recorded_steps(run: Path) -> int:
    """Lines of metrics.jsonl, which grow with the steps."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_somewhere(place: Path, words: list[str], rng: random.Random) -> None:
    """Start or go on, and kill after some more records, at any moment of a step."""
    child, _ = start(place, *words)
    wanted = recorded_steps(place / "run") + rng.randint(0, 2 * STEPS // 30)
    while child.is_alive() and recorded_steps(place / "run") < wanted:
        time.sleep(0.001)
    time.sleep(rng.random() * 0.3)
    if child.pid and child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    ended = Ended(child, place)
    print(
        f"exit code {ended.code} with {recorded_steps(place / 'run')} records, last line: {ended.err.strip()[-200:]}",
        flush=True,
    )


def is_equal(root: Path, way: list[str], kills: int, rng: random.Random) -> bool:
    """Whether a run that is killed so often ends as one that was left alone."""
    words = [*RUN, *way]
    whole = train(root / "whole", *words)
    assert whole.code == 0, whole.err
    place, run = root / "killed", root / "killed" / "run"
    for count in range(kills):
        print(f"{' '.join(way)} {count + 1:3}", end=" ")
        kill_somewhere(place, [*words, "resume=auto"], rng)
    done = train(place, *words, "resume=auto")
    assert done.code == 0, done.err
    digests = digest(root / "whole" / "run"), digest(run)
    same = digests[0] == digests[1] and records(root / "whole" / "run") == records(run)
    print(f"left alone {digests[0]}\nkilled     {digests[1]}\n{'equal, records too' if same else 'DIFFERENT'}")
    return same


def main() -> int:
    """Prints a line a kill and both digests; returns 1 where they differ."""
    kills, seed = map(int, [*sys.argv[1:], *["30", "0"][len(sys.argv) - 1 :]])
    rng, same = random.Random(seed), True
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            same &= is_equal(Path(folder), way, kills // len(WAYS), rng)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
