"""A LightningModule whose network trains in less memory: `unet3d.recompute` is the one line more.

python examples/lightning_module.py --data Task04_Hippocampus --steps 50 --precision bf16-mixed
python examples/lightning_module.py --data Task04_Hippocampus --devices 2 --strategy ddp
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from monai.data import DataLoader
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss, DiceLoss
from monai.networks.nets import DynUNet
from monai_loop import datasets

import unet3d


class Segmentation(lightning.LightningModule):
    """MONAI's nnU-Net, trained with Dice and cross-entropy."""

    def __init__(self, classes: int, filters: Sequence[int], patch: Sequence[int], plan: str) -> None:
        super().__init__()
        strides = [2] * (len(filters) - 1)
        network = DynUNet(3, 1, classes, [3] * len(filters), [1, *strides], strides, filters, norm_name="instance")
        if plan != "none":
            network = unet3d.recompute(network, plan=plan)
        self.network = network
        self.patch = patch
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)
        self.soft_dice_loss = DiceLoss(include_background=False, to_onehot_y=True, softmax=True)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.loss(self.network(batch["image"]), batch["label"])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        """Log the soft Dice of a whole case."""
        logits = sliding_window_inference(batch["image"], self.patch, sw_batch_size=2, predictor=self.network)
        self.log("soft_dice", 1 - self.soft_dice_loss(logits, batch["label"]), batch_size=1, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with nnU-Net's settings."""
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.99, nesterov=True)


def main(words: Sequence[str] | None = None) -> list[float]:
    """Train, validate, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a data set in Decathlon's layout")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--plan", choices=("none", "lean", "tiles"), default="lean")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", "16-mixed"), default="32-true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", choices=("auto", "ddp"), default="auto")
    parser.add_argument("--patch", type=int, nargs=3, default=(32, 48, 32))
    parser.add_argument("--filters", type=int, nargs="+", default=(16, 32, 64))
    parser.add_argument("--validation-cases", type=int, default=4)
    options = parser.parse_args(words)

    lightning.seed_everything(0)
    training, validation = datasets(options.data, options.patch, options.validation_cases)
    classes = len(json.loads((options.data / "dataset.json").read_text())["labels"])
    module = Segmentation(classes, options.filters, options.patch, options.plan)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        precision=options.precision,
        devices=options.devices,
        strategy=options.strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(training, batch_size=1, shuffle=True)
    validation_loader = DataLoader(validation, batch_size=1)
    trainer.fit(module, loader, validation_loader)
    trainer.validate(module, validation_loader)
    if trainer.is_global_zero:
        print(f"losses: {' '.join(f'{loss:.6f}' for loss in module.losses)}")
    return module.losses


if __name__ == "__main__":
    main()
