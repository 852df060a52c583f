"""nnU-Net's trainer as it is and with `unet3d.recompute`: memory, seconds, losses and Dice, side by side.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/nnunet_trainer.py --data Task04_Hippocampus --minutes 10

The data set is in Decathlon's layout. nnU-Net's own commands convert, plan and preprocess it below `--out`, once. Then
each trainer trains fold 0 of 3d_fullres on the CPU for the same time, in a process of its own, from the same weights on
the same augmented patches: random numbers are seeded before each. The peak is what torch's CPU allocator gave out in a
step after the others, with weights and momentum; the process is the most memory that training needed, by VmHWM. Seconds
are the median of all steps but the first, which finds the schedule. The Dice is nnU-Net's pseudo-Dice, of validation
patches. Each trainer leaves its checkpoint, numbers and log below `--out`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
DATASET = "1"
CONFIGURATION = "3d_fullres"
FOLDERS = ("raw", "preprocessed", "results")
PLANS = {"plain": "nnUNetTrainer", "lean": "nnUNetTrainer_unet3d", "tiles": "nnUNetTrainer_unet3d"}
COMPARED = 10  # losses
Numbers = dict[str, Any]  # bytes, seconds, losses


def environment(out: Path, loaders: int, plan: str = "lean") -> dict[str, str]:
    """Return the variables by which nnU-Net finds its folders and this project's trainer.

    `loaders`: processes that augment; with 0 patches are drawn where they are used.
    """
    folders = {f"nnUNet_{name}": str(out / name) for name in FOLDERS}
    own = {"nnUNet_extTrainer": str(ROOT / "examples" / "nnunet"), "UNET3D_PLAN": plan}
    processes = {"nnUNet_n_proc_DA": str(loaders), "nnUNet_def_n_proc": "1"}
    return os.environ | folders | own | processes


def prepare(data: Path, out: Path) -> None:
    """Convert, plan and preprocess a data set in Decathlon's layout."""
    finished = out / "prepared"
    if finished.exists():
        return
    for name in (*FOLDERS, "decathlon"):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
    copy = out / "decathlon" / f"Task{DATASET}_Data"
    (copy / "imagesTs").mkdir(parents=True)  # nnU-Net expects it, and the entry "test"
    for name in ("imagesTr", "labelsTr"):
        (copy / name).symlink_to((data / name).resolve())
    about = json.loads((data / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps({"test": [], **about}))
    _command(out, "nnUNetv2_convert_MSD_dataset", "-i", str(copy), "-np", "1")
    _command(out, "nnUNetv2_plan_and_preprocess", "-d", DATASET, "-c", CONFIGURATION, "-npfp", "1", "-np", "1")
    finished.touch()


def _command(out: Path, name: str, *options: str) -> None:
    """Run a command of nnU-Net's; its output is appended to prepare.log."""
    with (out / "prepare.log").open("a") as log:
        command = [str(Path(sys.executable).with_name(name)), *options]
        subprocess.run(command, env=environment(out, loaders=1), stdout=log, stderr=log, check=True)


class Seeded:
    """Batches of nnU-Net's loader, each drawn with random numbers that depend on its place alone."""

    def __init__(self, loader: Iterator[Any]) -> None:
        self.loader = loader
        self.count = 0

    def __next__(self) -> Any:
        """Return the next batch."""
        seed(self.count)
        self.count += 1
        return next(self.loader)


def seed(number: int) -> None:
    """Seed all that nnU-Net draws numbers from."""
    import numpy as np
    import torch

    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def measure(plan: str, iterations: int | None, minutes: float, patches: int) -> Numbers:
    """Return what training takes and where it gets in this process, whose environment is nnU-Net's."""
    import torch
    from nnunetv2.run.run_training import get_trainer_from_args
    from steps import forget_resident_peak, resident_bytes

    seed(0)
    trainer = get_trainer_from_args(DATASET, CONFIGURATION, 0, PLANS[plan], device=torch.device("cpu"))
    trainer.on_train_start()
    trainer.on_train_epoch_start()
    batches = Seeded(trainer.dataloader_train)
    forget_resident_peak()
    losses: list[float] = []
    seconds: list[float] = []
    end = time.perf_counter() + 60 * minutes
    while len(losses) < iterations if iterations else time.perf_counter() < end:
        batch = next(batches)
        started = time.perf_counter()
        losses.append(float(trainer.train_step(batch)["loss"]))
        seconds.append(time.perf_counter() - started)
    process = resident_bytes("VmHWM")
    peak = step_peak(trainer, next(batches))
    dice = pseudo_dice(trainer, patches)
    trainer.save_checkpoint(str(Path(trainer.output_folder, "checkpoint_final.pth")))
    return {
        "peak": peak,
        "process": process,
        "seconds": seconds,
        "losses": losses,
        "dice": dice,
        "folder": trainer.output_folder,
    }


def step_peak(trainer: Any, batch: Any) -> int:
    """Return the most bytes of tensors in a step, by torch's CPU allocator, with those that are there before it."""
    from allocator import peak_bytes, recorded
    from torch.utils._pytree import tree_leaves

    tensors = [*trainer.network.parameters(), *trainer.network.buffers()]
    held = sum(tensor.nbytes for tensor in tensors)
    for leaf in tree_leaves([list(trainer.optimizer.state.values()), batch]):
        held += getattr(leaf, "nbytes", 0)
    return held + peak_bytes(recorded(lambda: trainer.train_step(batch)))


def pseudo_dice(trainer: Any, patches: int) -> list[float]:
    """Return nnU-Net's Dice of each foreground class, of all voxels of so many batches of validation patches."""
    import torch

    batches = Seeded(trainer.dataloader_val)
    trainer.on_validation_epoch_start()
    with torch.no_grad():
        outputs = [trainer.validation_step(next(batches)) for _ in range(patches)]
    trainer.on_validation_epoch_end(outputs)
    return [float(dice) for dice in trainer.logger.get_value("dice_per_class_or_region", step=-1)]


def in_own_process(plan: str, out: Path, arguments: list[str]) -> Numbers:
    """Return what `measure` returns in a process of its own; its output goes to PLAN.log."""
    result = out / f"{plan}.json"
    command = [sys.executable, __file__, "--out", str(out), "--only", plan, *arguments]
    with (out / f"{plan}.log").open("w") as log:
        subprocess.run(command, env=environment(out, loaders=0, plan=plan), stdout=log, stderr=log, check=True)
    numbers: Numbers = json.loads(result.read_text())
    return numbers


def table(results: dict[str, Numbers]) -> str:
    """Return Markdown: a row for each trainer, and the first losses."""
    import torch

    from unet3d.base.types import mib

    first = next(iter(results.values()))
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, measured", ""]
    lines.append("| trainer | tensors MiB | ratio | process MiB | s/step | steps | last loss | pseudo-Dice |")
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for plan, numbers in results.items():
        cells = [f"{PLANS[plan]}, {plan}", mib(numbers["peak"]), f"{numbers['peak'] / first['peak']:.3f}"]
        cells += [mib(numbers["process"]), f"{statistics.median(numbers['seconds'][1:] or numbers['seconds']):.2f}"]
        cells += [str(len(numbers["losses"])), f"{numbers['losses'][-1]:.5f}"]
        cells.append(" ".join(f"{dice:.4f}" for dice in numbers["dice"]))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for plan, numbers in results.items():
        losses = numbers["losses"][:COMPARED]
        lines.append(f"first losses, {plan}: {' '.join(f'{loss:.6f}' for loss in losses)}")
        pairs = zip(losses, first["losses"], strict=False)
        difference = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
        lines.append(f"largest relative difference from the first row: {difference:.1e}")
    return "\n".join(lines)


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="PATH", help="a data set in Decathlon's layout")
    parser.add_argument("--minutes", type=float, default=10, help="of training, for each trainer")
    parser.add_argument("--iterations", type=int, help="in place of minutes")
    parser.add_argument("--val-batches", type=int, default=20, help="of which the pseudo-Dice is")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=["plain", "lean"])
    parser.add_argument("--out", type=Path, default=Path("outputs/nnunet"), help="nnU-Net's folders")
    parser.add_argument("--only", choices=PLANS, help=argparse.SUPPRESS)  # in this process
    options = parser.parse_args()
    out = options.out.resolve()
    if options.only:
        numbers = measure(options.only, options.iterations, options.minutes, options.val_batches)
        (out / f"{options.only}.json").write_text(json.dumps(numbers))
        return 0
    if options.data is None:
        parser.error("--data PATH is needed")
    prepare(options.data, out)
    arguments = ["--minutes", str(options.minutes), "--val-batches", str(options.val_batches)]
    if options.iterations:
        arguments += ["--iterations", str(options.iterations)]
    print(table({plan: in_own_process(plan, out, arguments) for plan in options.plans}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
