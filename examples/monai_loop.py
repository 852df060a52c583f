"""A training loop of MONAI's, in which `unet3d.recompute` is the one line more (docs/coming-from-monai.md).

python examples/monai_loop.py --data Task04_Hippocampus --steps 50 --plan lean
torchrun --nproc-per-node 2 examples/monai_loop.py --data Task04_Hippocampus --amp bf16
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from monai.data import DataLoader, Dataset, load_decathlon_datalist
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import SegResNet
from monai.networks.utils import one_hot
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    NormalizeIntensityd,
    RandCropByPosNegLabeld,
    RandFlipd,
    SpatialPadd,
)
from monai.utils import set_determinism
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import unet3d

KEYS = ("image", "label")
DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def datasets(data: Path, patch: Sequence[int], validation_cases: int) -> tuple[Dataset, Dataset]:
    """Return the training set, of random patches, and the validation set, of whole cases."""
    cases = load_decathlon_datalist(str(data / "dataset.json"), is_segmentation=True, data_list_key="training")
    read = [LoadImaged(KEYS), EnsureChannelFirstd(KEYS), NormalizeIntensityd("image")]
    crop = [SpatialPadd(KEYS, patch), RandCropByPosNegLabeld(KEYS, "label", patch, pos=2, neg=1, num_samples=2)]
    flip = [RandFlipd(KEYS, prob=0.5, spatial_axis=axis) for axis in range(3)]
    training = Dataset(cases[validation_cases:], Compose([*read, *crop, *flip]))
    return training, Dataset(cases[:validation_cases], Compose(read))


def forever(loader: DataLoader) -> Iterator[dict[str, Any]]:
    """Yield batches, epoch after epoch."""
    epoch = 0
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def mean_dice(model: torch.nn.Module, loader: DataLoader, patch: Sequence[int], device: torch.device) -> float:
    """Return the mean Dice of the foreground classes of whole cases, of all ranks."""
    metric = DiceMetric(include_background=False)
    model.eval()
    with torch.no_grad():
        for batch in loader:
            logits = sliding_window_inference(batch["image"].to(device), patch, sw_batch_size=2, predictor=model)
            classes = logits.shape[1]
            predicted = one_hot(logits.argmax(1, keepdim=True), classes)
            metric(predicted, one_hot(batch["label"].to(device), classes))
    return float(metric.aggregate())


def main(words: Sequence[str] | None = None) -> list[float]:
    """Train, print the Dice, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a data set in Decathlon's layout")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--plan", choices=("none", "lean", "tiles"), default="lean")
    parser.add_argument("--amp", choices=DTYPES, default="off")
    parser.add_argument("--patch", type=int, nargs=3, default=(32, 48, 32))
    parser.add_argument("--filters", type=int, default=16)
    parser.add_argument("--validation-cases", type=int, default=4)
    options = parser.parse_args(words)

    set_determinism(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    training, validation = datasets(options.data, options.patch, options.validation_cases)
    sampler = DistributedSampler(training) if ranks > 1 else None
    batches = forever(DataLoader(training, batch_size=1, shuffle=sampler is None, sampler=sampler))

    classes = len(json.loads((options.data / "dataset.json").read_text())["labels"])
    model = SegResNet(init_filters=options.filters, out_channels=classes).to(device)
    if options.plan != "none":
        model = unet3d.recompute(model, plan=options.plan)
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
    dtype = DTYPES[options.amp]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    losses: list[float] = []
    model.train()
    for step, batch in zip(range(options.steps), batches, strict=False):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            logits = model(batch["image"].to(device))
            loss = loss_function(logits, batch["label"].to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}/{options.steps}  loss {losses[-1]:.6f}")
    network = model.module if ranks > 1 else model
    sampler = DistributedSampler(validation, shuffle=False) if ranks > 1 else None
    dice = mean_dice(network, DataLoader(validation, batch_size=1, sampler=sampler), options.patch, device)
    if rank == 0:
        print(f"mean Dice of {len(validation)} cases: {dice:.4f}")
    if ranks > 1:
        # Before the group: as its last owner, on the CPU, the model would wait for gloo's thread while that waits for
        # the interpreter's lock.
        del model
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
