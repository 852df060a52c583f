"""Workspaces of cuDNN's convolutions on a GPU, beside the rule that predicts them.

    python benchmarks/workspaces.py

Each convolution of a grid runs alone, and so do the gradients of its input and of its filter. What the allocator is
asked for within each, minus its results, is compared with `unet3d.recomputing.workspaces`. Prints a Markdown table;
`--json` writes all bytes.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.base.types import MIB
from unet3d.recomputing import workspaces

aten = torch.ops.aten
PASSES = ("forward", "gradient of the input", "gradient of the filter")
WANTED = {PASSES[1]: [True, False, False], PASSES[2]: [False, True, False]}
CHANNELS = ((1, 16), (1, 32), (4, 32), (16, 16), (24, 24), (32, 16), (32, 32), (32, 64), (48, 24), (64, 32), (64, 64))
CHANNELS += ((128, 64), (128, 128), (256, 128), (256, 256), (320, 320), (32, 3), (16, 5))
SIZES = ((64, 64, 64), (32, 32, 32), (16, 16, 16), (40, 56, 40), (44, 128, 128), (96, 96, 96), (8, 8, 8))
MOST_NUMBERS = 2**28  # of an input
CLOSE = 4096  # bytes
NEAR = 0.01  # of the workspace, or so many bytes:
NEAR_BYTES = 2 * MIB


class Kind(NamedTuple):
    """A convolution's geometry."""

    name: str
    kernel: tuple[int, ...]
    stride: int
    padding: tuple[int, ...]
    is_transposed: bool = False


KINDS = (
    Kind("3x3x3", (3, 3, 3), 1, (1, 1, 1)),
    Kind("3x3x3, stride 2", (3, 3, 3), 2, (1, 1, 1)),
    Kind("2x2x2, transposed, stride 2", (2, 2, 2), 2, (0, 0, 0), True),
    Kind("1x3x3", (1, 3, 3), 1, (0, 1, 1)),
    Kind("1x1x1", (1, 1, 1), 1, (0, 0, 0)),
)


class Precision(NamedTuple):
    """A type of numbers, and whether float32 may be computed in TF32."""

    name: str
    dtype: torch.dtype
    tf32: bool = True


PRECISIONS = (
    Precision("bfloat16", torch.bfloat16),
    Precision("float16", torch.float16),
    Precision("TF32", torch.float32),
    Precision("float32", torch.float32, False),
)


class Measured(NamedTuple):
    """Bytes of one workspace."""

    case: str
    group: tuple[str, str]  # precision and pass
    measured: int
    predicted: int


def workspace_of(call: Callable[[], object]) -> int:
    """Return what a call requests of the allocator at once, beyond its result."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    stats = torch.cuda.memory_stats()
    del result
    return int(stats["requested_bytes.all.peak"] - max(before, stats["requested_bytes.all.current"]))


def measure(precision: Precision, kind: Kind, channels: tuple[int, int], size: Sequence[int]) -> Iterator[Measured]:
    """Yield the workspaces of a convolution of two images."""
    inputs, outputs = channels
    image = torch.randn(2, inputs, *size, device="cuda", dtype=precision.dtype)
    shape = (inputs, outputs) if kind.is_transposed else (outputs, inputs)
    weight = torch.randn(*shape, *kind.kernel, device="cuda", dtype=precision.dtype)
    geometry = ([kind.stride] * 3, list(kind.padding), [1, 1, 1], kind.is_transposed, [0, 0, 0], 1)
    output = aten.convolution(image, weight, None, *geometry)
    gradient = torch.randn_like(output)

    def backward(wanted: list[bool]) -> tuple[Tensor | None, ...]:
        results: tuple[Tensor | None, ...] = aten.convolution_backward(gradient, image, weight, [0], *geometry, wanted)
        return results

    predicted = [
        workspaces.forward_bytes(image, weight, output, kind.is_transposed),
        workspaces.image_gradient_bytes(image, weight, output, kind.is_transposed),
        workspaces.weight_gradient_bytes(image, weight, output),
    ]
    measured = [workspace_of(lambda: aten.convolution(image, weight, None, *geometry))]
    measured += [workspace_of(lambda wanted=wanted: backward(wanted)) for wanted in WANTED.values()]
    case = f"{precision.name} {kind.name}, {inputs} to {outputs} channels, {'x'.join(map(str, size))}"
    for name, seen, expected in zip(PASSES, measured, predicted, strict=True):
        yield Measured(case, (precision.name, name), seen, expected)


def grid() -> Iterator[tuple[Kind, tuple[int, int], tuple[int, ...]]]:
    """Yield geometry, channels and size of each convolution."""
    for size, channels, kind in itertools.product(SIZES, CHANNELS, KINDS):
        is_head = kind.kernel == (1, 1, 1)
        if is_head and channels[1] > 8:
            continue
        if kind.is_transposed and min(channels) < 16:
            continue
        if 2 * max(channels) * torch.Size(size).numel() > MOST_NUMBERS:
            continue
        yield kind, channels, size


def row(group: tuple[str, str], members: Sequence[Measured]) -> str:
    """Return the table's line of a precision and pass."""
    errors = [member.predicted - member.measured for member in members]
    close = sum(abs(error) <= CLOSE for error in errors)
    near = sum(
        abs(error) <= max(NEAR_BYTES, NEAR * member.measured) for member, error in zip(members, errors, strict=True)
    )
    cells = [*group, str(len(members)), f"{close / len(members):.0%}", f"{near / len(members):.0%}"]
    cells += [f"{max(0, -min(errors)) / MIB:,.1f}", f"{max(0, *errors) / MIB:,.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for all bytes")
    parser.add_argument("--seconds", type=float, default=60, help="for each precision, at most")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this torch sees no CUDA device", file=sys.stderr)
        return 2
    results: list[Measured] = []
    for precision in PRECISIONS:
        torch.backends.cudnn.allow_tf32 = precision.tf32
        end = time.monotonic() + options.seconds
        for kind, channels, size in grid():
            if time.monotonic() < end:
                results += measure(precision, kind, channels, size)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}\n")
    print("| precision | pass | convolutions | within 4 KiB | within 1 % or 2 MiB | most short, MiB | most over, MiB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for group, members in itertools.groupby(
        sorted(results, key=lambda result: result.group), lambda result: result.group
    ):
        print(row(group, list(members)))
    if options.json is not None:
        options.json.write_text(json.dumps([member._asdict() for member in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
