"""unet3d's `like=nnunet` beside nnU-Net's own planner, on data sets of given sizes and on random ones.

    pip install -c constraints.txt -e ".[bench]" nnunetv2
    python benchmarks/nnunet_planner.py --random 40

nnU-Net's planner plans `3d_fullres` from a fingerprint written into a temporary folder; no volume is read. A row is
"equal" if spacing, patch, batch, kernels and strides are. Exit code 1: a row is not.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unet3d.planning.steps import NnunetPlan, nnunet_plan

TARGETS = (8, 24)  # GB
CASES = 100
NAME = "Dataset999_Sizes"
SPACING_DIGITS = 4


class Sizes(NamedTuple):
    """A data set's sizes, axes z, y, x as nnU-Net reads them."""

    name: str
    shapes: list[tuple[int, ...]]
    spacings: list[tuple[float, ...]]
    channels: int
    classes: int


KNOWN = (
    ("hippocampus", (36, 50, 35), (1, 1, 1), 1, 3),
    ("brain tumour", (138, 169, 138), (1, 1, 1), 4, 4),
    ("heart", (115, 320, 232), (1.37, 1.25, 1.25), 1, 2),
    ("prostate", (20, 320, 319), (3.6, 0.62, 0.62), 2, 3),
    ("pancreas", (96, 512, 512), (2.5, 0.8, 0.8), 1, 3),
    ("spleen", (187, 512, 512), (1.6, 0.79, 0.79), 1, 2),
    ("liver", (482, 512, 512), (1, 0.77, 0.77), 1, 3),
    ("thin slices", (26, 320, 150), (3, 1, 1), 1, 5),
)


def data_sets(count: int, seed: int) -> Iterator[Sizes]:
    """Yield the known data sets, then `count` random ones whose cases differ."""
    for name, shape, spacing, channels, classes in KNOWN:
        yield Sizes(name, [shape] * CASES, [spacing] * CASES, channels, classes)
    draw = random.Random(seed)
    for number in range(count):
        shape = [round(2 ** draw.uniform(3.5, 9)) for _ in range(3)]
        spacing = [round(2 ** draw.uniform(-1, 1), 2) for _ in range(3)]
        coarse = draw.randrange(3)
        if draw.random() < 0.5:
            spacing[coarse] *= draw.choice((2, 4, 8))
            shape[coarse] = round(2 ** draw.uniform(3.5, 6))
        shapes = []
        spacings = []
        for _ in range(CASES):
            shapes.append(tuple(max(8, round(length * draw.uniform(0.8, 1.25))) for length in shape))
            spacings.append(tuple(mm * draw.choice((0.5, 1, 1, 1, 1.5)) for mm in spacing))
        yield Sizes(f"random {number}", shapes, spacings, draw.choice((1, 2, 4)), draw.choice((2, 3, 5)))


def theirs(sizes: Sizes, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Return nnU-Net's plan, axes z, y, x."""
    raw = folder / "raw" / NAME
    preprocessed = folder / "preprocessed" / NAME
    for place in (raw / "imagesTr", raw / "labelsTr", preprocessed):
        place.mkdir(parents=True, exist_ok=True)
    labels = {"background": 0} | {f"class {number}": number for number in range(1, sizes.classes)}
    dataset = {
        "channel_names": {str(number): "MR" for number in range(sizes.channels)},
        "labels": labels,
        "numTraining": CASES,
        "file_ending": ".nii.gz",
    }
    fingerprint = {
        "spacings": sizes.spacings,
        "shapes_after_crop": sizes.shapes,
        "median_relative_size_after_cropping": 1.0,
        "foreground_intensity_properties_per_channel": {},
    }
    (raw / "dataset.json").write_text(json.dumps(dataset))
    (preprocessed / "dataset_fingerprint.json").write_text(json.dumps(fingerprint))
    from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import (
        ExperimentPlanner,
        compute_new_shape,
    )

    planner = ExperimentPlanner(NAME, gpu_memory_target_in_gb=gigabytes)
    spacing = planner.determine_fullres_target_spacing()
    order, back = planner.determine_transpose()
    shapes = [compute_new_shape(shape, mm, spacing) for shape, mm in zip(sizes.shapes, sizes.spacings, strict=True)]
    shape = np.median(shapes, 0)[order]
    voxels = float(np.prod(shape) * CASES)
    plan = planner.get_plans_for_configuration(spacing[order], shape, "plans", voxels, {})
    network = plan["architecture"]["arch_kwargs"]
    return {
        "spacing": _at(spacing[order], back, SPACING_DIGITS),
        "patch": _at(plan["patch_size"], back),
        "batch": int(plan["batch_size"]),
        "kernels": [_at(kernel, back) for kernel in network["kernel_sizes"]],
        "strides": [_at(stride, back) for stride in network["strides"][1:]],
        "features": list(network["features_per_stage"]),
    }


def _at(values: Any, order: list[int], digits: int = 0) -> list[float]:
    return [round(float(values[axis]), digits) for axis in order]


def ours(plan: NnunetPlan) -> dict[str, Any]:
    """Return unet3d's plan in the same words, axes z, y, x."""
    back = [2, 1, 0]
    return {
        "spacing": _at(plan.spacing, back, SPACING_DIGITS),
        "patch": _at(plan.patch, back),
        "batch": plan.batch,
        "kernels": [_at(kernel, back) for kernel in plan.levels.kernels],
        "strides": [_at(stride, back) for stride in plan.levels.strides],
        "features": plan.levels.features,
    }


def main() -> int:
    """Compare all and print a row each. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--random", type=int, default=0, metavar="N", help="data sets of random sizes, too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    differing = 0
    print("| data | target | patch z, y, x | batch | levels | nnU-Net's plan |")
    print("|---|---|---|---:|---:|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variable in ("raw", "preprocessed", "results"):
            os.environ[f"nnUNet_{variable}"] = str(folder / variable)
        for sizes in data_sets(arguments.random, arguments.seed):
            shapes = [shape[::-1] for shape in sizes.shapes]
            spacings = [spacing[::-1] for spacing in sizes.spacings]
            for gigabytes in TARGETS:
                plan = nnunet_plan(shapes, spacings, sizes.classes, gigabytes)
                with redirect_stdout(sys.stderr):
                    expected = theirs(sizes, gigabytes, folder)
                got = ours(plan)
                different = [key for key, value in expected.items() if got[key] != value]
                differing += bool(different)
                patch = "x".join(map(str, plan.patch[::-1]))
                answer = ", ".join(f"{key} {expected[key]}" for key in different) or "equal"
                row = (sizes.name, f"{gigabytes} GB", patch, plan.batch, len(plan.levels.kernels), answer)
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    print(f"\n{differing} rows differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
