"""A run on a disk with too little room finishes, or goes on to the same bits once there is room.

As root, by hand: python tests/bench/full_disk.py. It tries every free size in steps of a sixteenth of a checkpoint, from
none to what the whole run needs, each with the same run on a tmpfs of its own.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import TINY, same, status, train

WORDS = [*TINY, "data.root=../phantom", "resume=auto"]
OTHER_FILES = 2**17  # bytes of a run's files but its checkpoints, generously


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of this many bytes."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def trial(root: Path, size: int, wandb: str) -> str:
    """What came of a run with this many bytes; begins with "FAILED" where it was not as it should be."""
    with disk(root / "disk", size) as place:
        run = place / "run"
        first = train(root / "small", *WORDS, f"hydra.run.dir={run}", wandb=wandb, frills=True)
        said = status(run).partition("\n")[0] if (run / "STATUS").exists() else "no STATUS"
        if first.code not in (0, 2) or "Traceback" in first.err or [*place.rglob("*.tmp")]:
            return f"FAILED: exit code {first.code}, {said}, {first.err[-500:]}"
        subprocess.run(["mount", "-o", f"remount,size={2**27}", place], check=True)
        second = train(root / "small", *WORDS, f"hydra.run.dir={run}", wandb=wandb, frills=True)
        if second.code or not same(run, root / "whole" / "run"):
            return f"FAILED: exit code {second.code} once there was room, {second.err[-500:]}"
        return f"exit code {first.code}: {said[:90]}"


def main() -> int:
    """Prints a line a size; returns 1 where one failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        whole = train(root / "whole", *WORDS, "hydra.run.dir=run", frills=True)
        assert whole.code == 0, whole.err
        checkpoint = (root / "whole" / "run" / "checkpoints" / "last.pt").stat().st_size
        everything = sum(path.stat().st_size for path in (root / "whole" / "run").rglob("*") if path.is_file())
        for size in range(4096, OTHER_FILES + everything, checkpoint // 16):
            found = trial(root, size, "offline" if size // 4096 % 4 == 0 else "disabled")
            failed += found.startswith("FAILED")
            print(f"{size / 2**10:8.0f} KiB  {found}", flush=True)
    print(f"{failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
