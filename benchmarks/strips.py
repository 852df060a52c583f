"""The sliding window beside MONAI's: CPU time, memory, and 105 classes on a large volume, as Markdown.

    python benchmarks/strips.py

A 1x1x1 convolution stands in for the network, so that what is measured is the window. Each figure is of a process of
its own with one thread: CPU seconds, the fewest of its rounds, and the peak of resident memory less what was resident
before, with image, network and libraries. It takes minutes, and twice the memory of the dense sums of 40 classes.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from unet3d.base.types import mib
from unet3d.config.schema import Model
from unet3d.data.restore import ArgmaxCollector
from unet3d.training.inference import Predictor
from unet3d.training.policy import MemoryPolicy

WINDOW = (64, 64, 64)
SMALL, LARGE = [40, 160, 160, 160], [105, 512, 512, 200]  # classes, voxels
LIMIT = 2 * 2**30  # bytes, of the large volume
ROUNDS = 4


def labels_of(way: str, network: nn.Conv3d) -> Callable[[Tensor], object]:
    """Image C X Y Z to labels X Y Z."""
    if way == "MONAI":
        from monai.inferers import SlidingWindowInferer

        slide = SlidingWindowInferer(WINDOW, 1, 0.5, "gaussian")
        return lambda image: slide(image[None], network)[0].argmax(0)
    predictor = Predictor((network,), Model(classes=network.out_channels), MemoryPolicy(), WINDOW)
    if way == "strips":
        return lambda image: ArgmaxCollector(predictor.strips(image)).whole()

    def dense(image: Tensor) -> Tensor:
        whole = torch.empty(predictor.options.classes or 0, *image.shape[1:])
        for strip in predictor.strips(image):
            whole[(slice(None), *strip.box)] = strip.probabilities
        return whole.max(0).indices

    return dense


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 2**10


@torch.no_grad()
def measure(way: str, rounds: int, classes: int, *size: int) -> None:
    """Print CPU seconds and bytes of one way, as JSON. The first round is the memory's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    image, network = torch.randn(1, *size), nn.Conv3d(1, classes, 1).eval()
    seconds, peaks = list[float](), list[int]()
    labels = labels_of(way, network)
    labels(image[:, :64, :64, :64].contiguous())  # loads what is loaded late
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    for _ in range(rounds):
        began = time.process_time()
        labels(image)
        seconds.append(time.process_time() - began)
        peaks.append(resident("VmHWM"))
    print(json.dumps([min(seconds), peaks[0] - before]))


def measured(way: str, rounds: int, shape: list[int]) -> tuple[float, int]:
    """In a process of its own."""
    command = [sys.executable, __file__, way, str(rounds), *map(str, shape)]
    seconds, size = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seconds, size


def main() -> None:
    print("| volume | classes | way | CPU s | peak of resident memory, MiB more | K maps of the volume, MiB |")
    print("|---|---|---|---|---|---|")
    for way, rounds, shape in [(way, ROUNDS, SMALL) for way in ("strips", "dense", "MONAI")] + [("strips", 1, LARGE)]:
        classes, *size = shape
        seconds, extra = measured(way, rounds, shape)
        volume, maps = "x".join(map(str, size)), mib(4 * torch.Size(shape).numel())
        print(f"| {volume} | {classes} | {way} | {seconds:.1f} | {mib(extra)} | {maps} |", flush=True)
    print(f"\nThe limit for the large volume is {mib(LIMIT)} MiB: {'kept' if extra <= LIMIT else 'NOT KEPT'}.")


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        main()
