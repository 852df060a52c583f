"""`unet3d.memory.explain` and `predict` on other people's networks, against the CPU allocator's own record.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/explain.py

The record is of the same steps with no dispatch mode and no hook: the profiler's `[memory]` events. It also holds
scratch, which no tensor does: a block that one operation takes and gives back. "Tensors" is the record's peak without
scratch, "allocator" with it. Exits with an error where predicted or measured is off by more than 1 % of the tensors.
"""

import argparse
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from allocator import Events, recorded

import unet3d.memory
from unet3d.base.types import Batch, mib
from unet3d.memory.user_step import segmentation_loss
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step

STEPS, CLASSES = 3, 3
Shape = tuple[int, ...]


def basic_unet() -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(3, 1, CLASSES)


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    widths = [32, 64, 128, 256]
    return DynUNet(
        3, 1, CLASSES, [3] * 4, [1, 2, 2, 2], [2, 2, 2], filters=widths, norm_name=("INSTANCE", {"affine": True})
    )


def segresnet() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(3, 16, 1, CLASSES, blocks_down=(1, 2, 2, 4), blocks_up=(1, 1, 1))


def swin_unetr() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(1, CLASSES, feature_size=24)


def unetr() -> nn.Module:
    from monai.networks.nets import UNETR

    return UNETR(1, CLASSES, (64, 64, 64), hidden_size=384, mlp_dim=1536, num_heads=6)


def unet3d_of_wolny() -> nn.Module:
    from pytorch3dunet.unet3d.model import UNet3D

    return UNet3D(1, CLASSES, f_maps=32, num_levels=4)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MONAI BasicUNet": basic_unet,
    "MONAI DynUNet": dynunet,
    "MONAI SegResNet": segresnet,
    "MONAI SwinUNETR": swin_unetr,
    "MONAI UNETR": unetr,
    "pytorch-3dunet UNet3D": unet3d_of_wolny,
}


def unobserved(
    make: Callable[[], nn.Module], shape: Shape, policy: MemoryPolicy | None = None, count: int = STEPS
) -> tuple[int, int]:
    """The allocator's peak in bytes without scratch, and with it, of the same steps, with no mode and no hook."""
    policy = policy or MemoryPolicy()

    def steps() -> None:
        model = make().train()
        batch = Batch(torch.randn(shape), torch.zeros(shape[0], *shape[2:], dtype=torch.int64))
        optimizer = AdamW(model.parameters())
        for _ in range(count):
            train_step(model, segmentation_loss, optimizer, policy.scaler(), policy, [batch])

    blocks = list(blocks_of(recorded(steps)))
    return peak(block for block in blocks if not block[3]), peak(blocks)


def blocks_of(events: Events) -> Iterator[tuple[float, float, int, bool]]:
    """Of each block: when it was taken and given back, its bytes, and whether it is scratch of one operation."""
    calls, births = operations(events), dict[int, tuple[float, int]]()
    begins = [begun for begun, _ in calls]

    def call(time: float) -> int:
        at = bisect_right(begins, time) - 1
        return at if at >= 0 and time <= calls[at][1] else -1

    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            births[address] = event["ts"], size
        elif address in births:
            begun, size = births.pop(address)
            yield begun, event["ts"], size, call(begun) == call(event["ts"]) != -1
    for begun, size in births.values():
        yield begun, float("inf"), size, False


def operations(events: Events) -> list[tuple[float, float]]:
    """Begin and end of each operation that a dispatch mode would see: those that torch composes are seen as parts."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {f"{s.name}.{s.overload_name}".rstrip(".") for s in torch._C._jit_get_all_schemas() if s.name[:4] == "aten"}
    known = [name for name in names if torch._C._dispatch_has_kernel(name)]
    made_of_others = {name.partition(".")[0] for name in known if has(name, "CompositeImplicitAutograd")}
    found: list[tuple[float, float]] = []
    spans = ((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X" and e["name"][:4] == "aten")
    for begun, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if name not in made_of_others and (not found or begun >= found[-1][1]):
            found.append((begun, end))
    return found


def peak(blocks: Any) -> int:
    """Most bytes alive at once."""
    changes = [change for begun, end, size, _ in blocks for change in ((begun, size), (end, -size))]
    alive = most = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        alive += change
        most = max(most, alive)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=64, help="voxels along each axis; a multiple of 32, 64 for UNETR")
    parser.add_argument("--only", choices=[*NETWORKS], action="append", help="one network; may be repeated")
    options = parser.parse_args()
    shape, worst = (1, 1, *[options.side] * 3), 0.0
    print("| network | parameters | predicted, MiB | measured, MiB | tensors, MiB | error | allocator, MiB | peak in |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name in options.only or NETWORKS:
        make = NETWORKS[name]
        tensors, allocator = unobserved(make, shape)
        model = make()
        predicted, measured = (face(model, shape) for face in (unet3d.memory.predict, unet3d.memory.explain))
        error = measured.peak_bytes / tensors - 1
        worst = max(worst, abs(error), abs(predicted.peak_bytes / tensors - 1))
        sizes = [mib(size) for size in (predicted.peak_bytes, measured.peak_bytes, tensors)]
        where = measured.ledger["moment"]["words"]
        print(
            f"| {name} | {measured.parameters:,} | {' | '.join(sizes)} | {error:+.2%} | {mib(allocator)} | {where} |",
            flush=True,
        )
    sys.exit(f"off by {worst:.2%}: more than 1 %" if worst > 0.01 else 0)


if __name__ == "__main__":
    main()
