"""What is predicted is what is measured, to the byte, without an allocation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from evenly import evenly

from unet3d import build
from unet3d.base.types import IGNORE, Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.remedies import resized
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique
from unet3d.recomputing.program import Technique
from unet3d.training import optim
from unet3d.training.step import train_step

VARIANTS = [
    ("model.norm=instance", "ckpt=3", "optim.average=0.99"),
    ("optim=adam", "optim.fused=true", "model.features=[4,64]", "data.patch=[8,4,4]"),
    ("channels_last=true", "model.norm=batch", "optim.fused=true"),
    ("channels_last=true", "model.norm=instance", "ckpt=3", "amp_dtype=bf16", "model.upsampling=trilinear"),
    ("model.downsampling=strided_conv", "model.deep_supervision=true", "model.features=[4,8,8]", "amp_dtype=fp16"),
    ("model.norm=instance", "model.inplace=true", "optim=sgd", "accumulate=2", "model.residual=true"),
    ("recompute=lean", "accumulate=2", "model.dropout=0.2"),
    ("recompute=tiles", "amp_dtype=fp16", "model.residual=true", "model.downsampling=strided_conv"),
]
NAMED = [  # one of each kind
    "model=cicek2016 data.patch=[92,92,92]",
    "model=cicek2016_2d data.patch=[92,92,4] amp=true ckpt=3",
    "model=forum_mid data.patch=[36,16,16]",
    "model=nnunet_hippocampus data.patch=[36,16,16] amp=true ckpt=3",
    "model=nnunet_resenc_m data.patch=[64,32,32] model.blocks=[1,2,2,2,2,2]",
    "model=unet data.patch=[36,16,16]",
]
NET = ["model=unet_tiny", "model.features=[4,8]", "model.groups=4", "data.patch=[16,8,8]"]


def config(*overrides: str) -> Config:
    found = compose.compose([*NET, *overrides])
    found.amp = found.amp or found.amp_dtype != "auto"
    found.model.in_channels, found.model.classes = 2, 3
    return found


def measure(options: Config, technique: Technique, steps: int) -> dict[str, Any]:
    """The summary of the same steps on real tensors."""
    policy = build.policy(options, "cpu", technique)
    model = policy.formatted(build.model(options.model, options.seed))
    optimizer = optim.optimizer(options.optim, model)
    meter, loss, scaler = LedgerMeter(model, optimizer), build.loss(options, 3), policy.scaler()
    size = (options.batch, *options.data.patch)
    for _ in range(steps):
        batches = [
            Batch(torch.randn(options.batch, 2, *size[1:]), torch.full(size, IGNORE, dtype=torch.int16))
            for _ in range(options.accumulate)
        ]
        train_step(model, loss, optimizer, scaler, policy, batches, meter.mark, options.optim.clip)
    return meter.summary()


def assert_equal(options: Config) -> None:
    """Every entry of both summaries. Segments are of equal length here: choosing them takes many simulations."""
    technique = choose_technique(replace(options, ckpt=0), options.model)
    if options.ckpt:
        technique = Technique(evenly(len(build.model(options.model, 0)), int(options.ckpt)))
    predicted = simulate(options, options.model, technique, steps=STEPS_FOR_PEAK).summary()
    measured = measure(options, technique, STEPS_FOR_PEAK)
    if options.model.inplace:  # without data, autograd replays an in-place change of a view by other operations
        for summary in (predicted, measured):
            summary.pop("layers")
    assert predicted == measured


@pytest.mark.parametrize(
    "overrides", [*VARIANTS[:3], *(pytest.param(words, marks=pytest.mark.slow) for words in VARIANTS[3:])], ids=" ".join
)
def test_predicted_equals_measured_to_the_byte(overrides: tuple[str, ...]) -> None:
    assert_equal(config(*overrides))


@pytest.mark.slow
@pytest.mark.parametrize("words", NAMED)
def test_a_named_network_is_predicted_to_the_byte(words: str) -> None:
    """A small fraction of the widths, and patches just large enough."""
    options = compose.compose([*words.split(), "batch=1"])
    options.model = resized(options.model, lambda level, width: max(2, width // 16))
    options.model.in_channels, options.model.classes = 2, 3
    assert_equal(options)
