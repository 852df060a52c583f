"""Our network beside others: parameters, seconds a step, peak memory, side by side in one run.

    pip install -c constraints.txt -e ".[bench]"
    python tests/bench/peers.py --amp bf16

Every network trains with the same `train_step`, patch, loss and optimizer, each in processes of its own; the rounds
take turns, so that a machine that slows down slows all of them. Seconds are the median of a round, the fastest round
counts. The first row is what the ratios are to.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

from unet3d import compose
from unet3d.memory.meter import STEADY, open_meter
from unet3d.model.unet import UNet3D
from unet3d.train.losses import SegmentationLoss, dice_ce
from unet3d.train.policy import MemoryPolicy, amp_dtype
from unet3d.train.step import train_step
from unet3d.types import Batch

WIDTHS = [32, 64, 128, 256]


class FinestFirst(nn.Module):
    """Deep supervision's outputs as our loss takes them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        output = self.network(image)
        return tuple(output) if isinstance(output, list | tuple) else output


def plain_conv_unet() -> nn.Module:
    """nnU-Net's network for Task04."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return PlainConvUNet(
        *(1, 4, WIDTHS, nn.Conv3d, 3, [1, 2, 2, 2], 2, 3, 2),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )


def ours(name: str) -> nn.Module:
    options = compose.compose([f"model={name}"]).model
    options.in_channels, options.classes = 1, 3
    return UNet3D(options)


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 3, [3] * 4, [1, 2, 2, 2], [2, 2, 2], filters=WIDTHS, norm_name=("INSTANCE", {"affine": True}))


def basic_unet() -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(3, 1, 3, features=(32, 32, 64, 128, 256, 32))


def pytorch_3dunet() -> nn.Module:
    from pytorch3dunet.unet3d.model import UNet3D as Theirs

    return Theirs(1, 3, f_maps=32, num_levels=4)


NETWORKS = {
    "nnU-Net PlainConvUNet": plain_conv_unet,
    "unet3d nnunet_hippocampus": lambda: ours("nnunet_hippocampus"),
    "unet3d unet": lambda: ours("unet"),
    "MONAI DynUNet": dynunet,
    "MONAI BasicUNet": basic_unet,
    "pytorch-3dunet UNet3D": pytorch_3dunet,
}


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the steps after the first measured ones, and the ledger's (or the allocator's) peak."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = nn.Sequential(FinestFirst(NETWORKS[name]())).to(device)
    policy = MemoryPolicy(device, None if options.amp == "off" else amp_dtype(options.amp, device))
    optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
    meter, loss, scaler = open_meter(network, optimizer), SegmentationLoss(dice_ce), policy.scaler()
    batch = Batch(torch.randn(options.batch, 1, *options.patch), torch.randint(0, 3, (options.batch, *options.patch)))
    seconds = []
    for _ in range(STEADY + options.steps):
        started = time.perf_counter()
        train_step(network, loss, optimizer, scaler, policy, [batch], meter.mark, clip=12.0)
        seconds.append(time.perf_counter() - started)  # the loss was read: the device has finished
    parameters = sum(p.numel() for p in network.parameters())
    return {"parameters": parameters, "s": statistics.median(seconds[STEADY:]), "peak": meter.summary()["peak_bytes"]}


def in_own_process(name: str) -> dict[str, float] | None:
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """Markdown; ratios are to the first network that ran."""
    best = {name: {key: min(r[key] for r in rounds) for key in rounds[0]} for name, rounds in results.items()}
    base = next(iter(best.values()))
    size = "x".join(map(str, options.patch))
    lines = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, amp {options.amp}, "
        f"patch {size} voxels, batch {options.batch}, measured",
        "",
        "| network | parameters | s/step | ratio | peak MiB | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, r in best.items():
        seconds, peak = (
            f"{r['s']:.3f} | {r['s'] / base['s']:.3f}",
            f"{r['peak'] / 2**20:.1f} | {r['peak'] / base['peak']:.3f}",
        )
        lines.append(f"| {name} | {int(r['parameters']):,} | {seconds} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--patch", type=int, nargs=3, default=[40, 56, 40], help="voxels")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--only", choices=NETWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for name in options.networks:
            found = in_own_process(name)
            if found:
                results.setdefault(name, []).append(found)
    print(table(results, options))


if __name__ == "__main__":
    main()
