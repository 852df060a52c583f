"""Plans of three kinds of data for several budgets, each predicted, and some trained for two steps and measured.

    python benchmarks/plans.py FOLDER
    python benchmarks/plans.py FOLDER --kinds ct --budgets 8 --cuda --train 1 4

Writes data sets of thin-sliced MR, large CT and a four-channel brain with regions below FOLDER (once; they compress
well), plans each for each budget, and prints a row a plan. Exit code 1: a plan needs more than its budget, or less
than 80 % of it though the patch is not the whole volume. FOLDER keeps plans, runs and their output; plans that are
there are not made again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/planning"))

from phantoms import KINDS, write_data_set  # noqa: E402

from unet3d.base.types import MIB, mib  # noqa: E402

CASES = {"mr": 100, "ct": 12, "brain": 100}
TRAINED = 2  # cases that a measured run learns from
REGIONS = ("data.regions={whole:[1,2,3],core:[2,3],enhancing:3}", "data.regions_class_order=[1,2,3]")
WORDS = {"mr": (), "ct": (), "brain": REGIONS}
GIB = 1024  # MiB
LEAST = 0.8  # share of the budget
WHOLE = "the patch is the whole volume"  # the words of a plan that has a reason to leave more
HEAD = ("data", "device", "budget", "patch", "batch", "schedule", "predicted", "share", "measured", "left, because")


def data_set(folder: Path, name: str) -> Path:
    """Return the folder of a kind's data set, which is written where it is not there."""
    root = folder / name
    if not (root / "dataset.json").exists():
        write_data_set(root, KINDS[name], CASES[name], small=1)
    return root


def call(words: list[str], log: Path) -> None:
    """Run a command of unet3d, whose output goes into a file. Exit with what it printed where it fails."""
    with log.open("w") as out:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{log.read_text()[-2000:]}")


def plan(folder: Path, name: str, budget: int, device: str) -> Path:
    """Write a plan for so many GiB, where it is not there; return its file."""
    path = folder / f"{name}_{device}_{budget}.yaml"
    if path.exists():
        return path
    root = data_set(folder, name)
    words = ["data=decathlon", f"data.root={root}", f"device={device}", f"budget={budget}GiB", *WORDS[name]]
    call(["-m", "unet3d", "plan", *words, "-o", str(path)], path.with_suffix(".log"))
    return path


def trained(folder: Path, name: str, path: Path) -> dict[str, Any]:
    """Train a plan for two steps, and score it on a small case; return memory.json."""
    about = json.loads((folder / name / "dataset.json").read_text())
    ids = [Path(case["image"]).name.removesuffix(".nii.gz") for case in about["training"]]
    split = folder / f"{name}_split.json"
    split.write_text(json.dumps({"train": ids[:TRAINED], "val": ids[-1:]}))
    run = path.with_suffix("")
    words = [f"plan={path}", f"data.split={split}", "steps=2", "workers=0", f"hydra.run.dir={run}"]
    call(["train.py", *words], run.with_suffix(".run.log"))
    memory: dict[str, Any] = json.loads((run / "memory.json").read_text())
    return memory


def row(folder: Path, name: str, budget: int, device: str, is_trained: bool) -> tuple[list[str], bool]:
    """Return the cells of a plan, and whether its share of the budget is as it should be."""
    path = plan(folder, name, budget, device)
    text = path.read_text()
    content = yaml.safe_load(text)
    options = content["options"]
    promise = content["promise"]
    peak = max(promise["peak_bytes"], promise.get("reserved_bytes", 0), promise["validation_bytes"])
    share = peak / (budget * GIB * MIB)
    (line,) = [line for line in text.splitlines() if line.startswith("# peak: ")]
    reason = line.partition(" stay unused: ")[2]
    is_sound = share <= 1 and (share > LEAST or WHOLE in reason)
    measured = ""
    if is_trained:
        memory = trained(folder, name, path)
        bytes_measured = memory["measured"]["peak_bytes"]
        is_sound = is_sound and bytes_measured == promise["peak_bytes"]
        measured = f"{mib(bytes_measured)}"
    batch = str(options["batch"])
    if options["accumulate"] > 1:
        batch = f"{options['accumulate']} by {options['batch']}"
    patch = "x".join(map(str, options["data"]["patch"]))
    schedule = options["recompute"]
    cells = [name, device, f"{budget} GiB", patch, batch, schedule, mib(peak), f"{share:.1%}", measured, reason]
    return cells, is_sound


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--budgets", nargs="*", type=int, default=[1, 4, 8, 24], metavar="GIB")
    parser.add_argument("--cuda", nargs="*", type=int, default=[8, 24], metavar="GIB", help="plans for a GPU as well")
    parser.add_argument("--train", nargs="*", type=int, default=[], metavar="GIB", help="of --budgets: train these")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"| {' | '.join(HEAD)} |\n|---|---|---:|---|---:|---|---:|---:|---:|---|", flush=True)
    failed = 0
    for name in arguments.kinds:
        asked = [(budget, "cpu") for budget in arguments.budgets] + [(budget, "cuda") for budget in arguments.cuda]
        for budget, device in asked:
            cells, is_sound = row(folder, name, budget, device, device == "cpu" and budget in arguments.train)
            failed += not is_sound
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{failed} plans fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
