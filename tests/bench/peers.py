"""Our network, with each way to save memory, beside others: seconds a step, peak memory, side by side in one run.

    pip install -c constraints.txt -e ".[bench]"
    python tests/bench/peers.py --amp bf16

The rows of nnU-Net's network are one architecture with the same weights: equal logits are checked before it is timed.
Every network trains with the same `train_step`, patch, loss and optimizer, each in processes of its own; the rounds
take turns, so that a machine that slows down slows all of them. Seconds are the median of a round, the fastest round
counts. Tensors are the ledger's peak (on CUDA what the allocator gave out); resident is how much the process grew in
steps without a ledger, before that. The first row is what the ratios are to. `--predict` simulates ours instead.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.checkpoint_plan import choose_segments
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter, open_meter
from unet3d.memory.simulate import simulate
from unet3d.training.losses import CUDA_CHUNK, LossOptions, SegmentationLoss, dice_ce
from unet3d.training.policy import MemoryPolicy, amp_dtype
from unet3d.training.step import train_step

WIDTHS = [32, 64, 128, 256]
NNUNETS = ["model.activation=leaky_relu", "model.inplace=true", "model.downsampling=strided_conv"]
WAYS = ("", "ckpt=2", "lean=true", "slab=auto")  # to run nnU-Net's network
FIRST = "nnU-Net PlainConvUNet"


class FinestFirst(nn.Module):
    """Deep supervision's outputs as our loss takes them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        output = self.network(image)
        return tuple(output) if isinstance(output, list | tuple) else output


def plain_conv_unet(options: argparse.Namespace) -> nn.Module:
    """nnU-Net's network for Task04, without the heads of deep supervision unless asked for."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    widths, stages = options.widths, len(options.widths)
    return PlainConvUNet(
        *(1, stages, widths, nn.Conv3d, 3, [1] + [2] * (stages - 1), 2, options.classes, 2),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=options.deep_supervision,
    )


def config_of(name: str, options: argparse.Namespace) -> Config:
    """Of one of our rows, `unet3d WORDS`."""
    words = name.split()[1:]
    words = words if words[:1] == ["model=unet"] else ["model=unet", *NNUNETS, *words]
    words += [f"model.features={options.widths}", f"model.deep_supervision={options.deep_supervision}"]
    words += [f"data.patch={options.patch}", f"batch={options.batch}", "optim=sgd", "optim.lr=0.01"]
    if options.amp != "off":
        words += ["amp=true", f"amp_dtype={options.amp}"]
    config = compose.compose(words)
    config.model.in_channels, config.model.classes = 1, options.classes
    return config


def ours(name: str, options: argparse.Namespace) -> nn.Module:
    """Our network; with the weights of nnU-Net's where that is the same."""
    config = config_of(name, options)
    found = build.model(config.model, 0)
    if "model=unet" not in name and not options.deep_supervision:
        take_weights(found, plain_conv_unet(options))
    return found


def take_weights(found: nn.Module, theirs: Any) -> None:
    """Fill ours with the weights of nnU-Net's network. ValueError if the logits then differ."""
    blocks = [(stage[0].convs, found[level].block) for level, stage in enumerate(theirs.encoder.stages)]
    depth = len(blocks)
    for step, (convs, up) in enumerate(zip(theirs.decoder.stages, theirs.decoder.transpconvs, strict=True)):
        stage = found[depth + step]
        stage.up.load_state_dict(up.state_dict())
        blocks.append((convs.convs, stage.block))
    for convs, block in blocks:
        for unit, own in zip(convs, (block.conv1, block.conv2), strict=True):
            weight = unit.conv.weight
            if len(weight) * 2 == weight.shape[1] and block is not blocks[0][1]:  # they join the skip behind, we before
                weight = weight.roll(len(weight), 1)
            own.conv.weight.data.copy_(weight.detach())
            own.conv.bias.data.copy_(unit.conv.bias.detach())
            own.norm.load_state_dict(unit.norm.state_dict())
    found[-1].conv.load_state_dict(theirs.decoder.seg_layers[-1].state_dict())
    image = torch.randn(1, 1, 32, 32, 32)
    with torch.no_grad():
        if not torch.allclose(found(image), theirs(image), rtol=1e-3, atol=1e-4):
            raise ValueError("nnU-Net's network and ours differ")


def dynunet(options: argparse.Namespace) -> nn.Module:
    from monai.networks.nets import DynUNet

    widths, norm = options.widths, ("INSTANCE", {"affine": True})
    strides = [1] + [2] * (len(widths) - 1)
    return DynUNet(3, 1, options.classes, [3] * len(widths), strides, strides[1:], filters=widths, norm_name=norm)


def basic_unet(options: argparse.Namespace) -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(3, 1, options.classes, features=(32, 32, 64, 128, 256, 32))


def pytorch_3dunet(options: argparse.Namespace) -> nn.Module:
    from pytorch3dunet.unet3d.model import UNet3D as Theirs

    return Theirs(1, options.classes, f_maps=options.widths[0], num_levels=len(options.widths))


NETWORKS: dict[str, Any] = {
    FIRST: plain_conv_unet,
    **{f"unet3d {way}".strip(): None for way in WAYS},
    "unet3d model=unet": None,  # our default network of these widths: max-pooling, ReLU
    "MONAI DynUNet": dynunet,
    "MONAI BasicUNet": basic_unet,
    "pytorch-3dunet UNet3D": pytorch_3dunet,
}


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and growth of the process in steps without a ledger, then the peak of tensors in others."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if NETWORKS[name] is None:
        config = config_of(name, options)
        network: nn.Module = ours(name, options).to(device)
        starts = choose_segments(config, config.model).segment_starts
        config.device = device
        policy = build.policy(config, device, starts)
    else:
        network = nn.Sequential(FinestFirst(NETWORKS[name](options))).to(device)
        policy = MemoryPolicy(device, None if options.amp == "off" else amp_dtype(options.amp, device))
    optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
    loss = SegmentationLoss(dice_ce, LossOptions(chunk=CUDA_CHUNK if device == "cuda" else None))
    scaler, size = policy.scaler(), (options.batch, *options.patch)
    batch = Batch(torch.randn(options.batch, 1, *options.patch), torch.randint(0, options.classes, size).short())
    seconds, before = [], resident()
    for _ in range(1 + options.steps):
        started = time.perf_counter()
        train_step(network, loss, optimizer, scaler, policy, [batch], clip=12.0)
        seconds.append(time.perf_counter() - started)  # the loss was read: the device has finished
    grown, meter = resident(peak=True) - before, open_meter(network, optimizer)
    for _ in range(
        MEASURED_STEPS + (device == "cuda")
    ):  # on CUDA, the allocator's counters are read after the ledger's steps
        train_step(network, loss, optimizer, scaler, policy, [batch], meter.mark, clip=12.0)
    parameters = sum(p.numel() for p in network.parameters())
    found = {"parameters": parameters, "s": statistics.median(seconds[1:]), "peak": meter.summary()["peak_bytes"]}
    return found | {"resident": grown}


def resident(peak: bool = False) -> int:
    """Bytes of memory that this process has, or at most had."""
    status = Path("/proc/self/status").read_text()
    name = "VmHWM" if peak else "VmRSS"
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) * 1024


def predict(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Parameters and peak of one of our rows, without its memory."""
    config = config_of(name, options)
    starts = choose_segments(config, config.model).segment_starts
    meter = simulate(config, config.model, starts, steps=STEPS_FOR_PEAK)
    return {"parameters": sum(p.numel() for p in meter.model.parameters()), "peak": meter.ledger.peak_bytes()}


def predict_theirs(name: str, options: argparse.Namespace) -> dict[str, float]:
    """The same of another library's network."""
    with fake_mode():
        network = nn.Sequential(FinestFirst(NETWORKS[name](options)))
        optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
        policy = MemoryPolicy("cpu", None if options.amp == "off" else amp_dtype(options.amp, "cpu"))
        meter, loss, size = LedgerMeter(network, optimizer), SegmentationLoss(dice_ce), (options.batch, *options.patch)
        for _ in range(STEPS_FOR_PEAK):
            batch = Batch(torch.empty(options.batch, 1, *options.patch), torch.zeros(size, dtype=torch.int16))
            train_step(network, loss, optimizer, policy.scaler(), policy, [batch], meter.mark, clip=12.0)
        return {"parameters": sum(p.numel() for p in network.parameters()), "peak": meter.ledger.peak_bytes()}


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
    base, size = next(iter(best.values())), "x".join(map(str, options.patch))
    lines = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, amp {options.amp}, patch {size} voxels, "
        f"batch {options.batch}, {options.classes} classes, {'predicted' if options.predict else 'measured'}",
        "",
    ]
    columns = {"peak": ("tensors MiB", 2**20, ".1f")}
    if not options.predict:
        columns |= {"resident": ("resident MiB", 2**20, ".0f"), "s": ("s/step", 1, ".3f")}
    lines.append(f"| network | parameters |{''.join(f' {head} | ratio |' for head, _, _ in columns.values())}")
    lines.append("|---|---:|" + "---:|---:|" * len(columns))
    for name, r in best.items():
        cells = [f"{r[key] / unit:,{form}} | {r[key] / base[key]:.3f}" for key, (_, unit, form) in columns.items()]
        lines.append(f"| {name} | {int(r['parameters']):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--patch", type=int, nargs=3, default=[96, 96, 32], help="voxels")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="channels of each level")
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--deep-supervision", action="store_true")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--predict", action="store_true", help="simulate a step instead: tensors alone, any size")
    parser.add_argument("--only", choices=NETWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        way = measure if not options.predict else predict if NETWORKS[options.only] is None else predict_theirs
        print(json.dumps(way(options.only, options)))
        return
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 if options.predict else options.rounds):
        for name in options.networks:
            found = in_own_process(name)
            if found:
                results.setdefault(name, []).append(found)
    print(table(results, options))


if __name__ == "__main__":
    main()
