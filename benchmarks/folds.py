"""A cross-validation of Task04 checked by hand: its table from the label files, and its ensemble on cases kept apart.

    python benchmarks/folds.py DATA OUT   DATA: Task04_Hippocampus; what is in OUT is not made again

30 cases are kept apart from all folds. Five tiny networks of 150 steps learn from the others. Prints the Dice of all
out-of-fold cases as `folds` has it and as computed here from label maps and labels, and the Dice of each network and
of all five as one on the cases kept apart. Takes as long as 750 steps and 600 predictions of a volume.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import nibabel as nib
import numpy as np

APART = 30
LABELS = {"Anterior": 1, "Posterior": 2}
RECIPE = [
    *("experiment=five_folds", "model=unet_tiny", "data.patch=[32,40,32]", "data.augment.mirror=[0]"),
    *("data.augment.rotation=0", "batch=2", "steps=150", "eval_every=75", "workers=0", "device=cpu"),
    "wandb.mode=disabled",
]


def link_data(data: Path, folder: Path, entries: list[dict]) -> list[str]:
    """A data set of these entries of dataset.json, whose volumes are links; the options that name it."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("imagesTr", "labelsTr"):
        if not (folder / part).exists():
            (folder / part).symlink_to(data / part)
    content = json.loads((data / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**content, "training": entries, "test": []}))
    return ["data=decathlon", f"data.root={folder}", "data.allow_outside=true"]


def unet3d(*words: object) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "unet3d", *map(str, words)], check=True)


def dice_of(prediction: Path, truth: Path) -> dict[str, float]:
    """The Dice of each class of a label map, from the two files alone."""
    ours, theirs = (np.asanyarray(nib.load(path).dataobj) for path in (prediction, truth))
    assert ours.shape == theirs.shape
    values = {}
    for name, label in LABELS.items():
        sizes = np.count_nonzero(ours == label) + np.count_nonzero(theirs == label)
        values[name] = 2 * np.count_nonzero((ours == label) & (theirs == label)) / sizes
    return values


def check_table(data: Path, sweep: Path, tables: Path) -> None:
    """Compare the table with one that is computed here."""
    by_case = {}
    for path in sorted(sweep.glob("*/predictions/*.nii.gz")):
        assert path.name not in by_case, "a case that two folds hold out"
        by_case[path.name] = dice_of(path, data / "labelsTr" / path.name)
    with (tables / "cross_validation.csv").open() as file:
        rows = {row["class"]: row for row in csv.DictReader(file) if row["score"] == "dice"}
    for name in LABELS:
        values = [scores[name] for scores in by_case.values()]
        row = rows[name]
        print(f"{name}: {len(values)} cases, by hand {fmean(values):.12f} ± {stdev(values):.12f}")
        print(f"{' ' * len(name)}  {row['cases']} cases, folds   {float(row['mean']):.12f} ± {float(row['sd']):.12f}")
        assert abs(fmean(values) - float(row["mean"])) < 1e-12 and abs(stdev(values) - float(row["sd"])) < 1e-12


def apart_dice(checkpoint: Path, out: Path, words: list[str]) -> list[float]:
    """The mean Dice of each class on the cases kept apart."""
    if not (out / "scores.csv").exists():
        unet3d("score", checkpoint, *words, "-o", out)
    with (out / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [fmean(float(row[f"dice/{name}"]) for row in rows) for name in LABELS]


def main(data: Path, out: Path) -> None:
    """Make what is missing, compare, and print the scores."""
    entries = sorted(json.loads((data / "dataset.json").read_text())["training"], key=lambda entry: entry["image"])
    apart = entries[3::7][:APART]
    others = [entry for entry in entries if entry not in apart]
    sweep, published, tables = out / "sweep", out / "net.pt", out / "tables"
    words = link_data(data, out / "train", others)
    if not (sweep / "compare.csv").exists():
        unet3d("train", *RECIPE, *words, "resume=auto", f"hydra.sweep.dir={sweep}")
    if not published.exists():
        unet3d("folds", sweep, "-o", tables, "--publish", published)
    check_table(data, sweep, tables)
    words = link_data(data, out / "apart", [others[0], *apart])
    first, *ids = [Path(entry["image"]).name.removesuffix(".nii.gz") for entry in (others[0], *apart)]
    (out / "split.json").write_text(json.dumps({"train": [first], "val": ids}))
    words.append(f"data.split={out / 'split.json'}")
    members = [
        apart_dice(sweep / str(fold) / "checkpoints" / "last.pt", out / f"scores-{fold}", words) for fold in range(5)
    ]
    for fold, scores in enumerate(members):
        print(f"fold {fold}: {', '.join(f'{score:.4f}' for score in scores)}, mean {fmean(scores):.4f}")
    means = [fmean(column) for column in zip(*members, strict=True)]
    print(f"mean of the five: {', '.join(f'{score:.4f}' for score in means)}, mean {fmean(means):.4f}")
    together = apart_dice(published, out / "scores-ensemble", words)
    print(f"the five as one: {', '.join(f'{score:.4f}' for score in together)}, mean {fmean(together):.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
