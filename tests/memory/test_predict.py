"""What is predicted is what is measured, to the byte, without an allocation."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from evenly import evenly
from training import PLAIN

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import IGNORE, Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import most_held
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.prediction import MemoryEstimate, preflight
from unet3d.memory.remedies import resized
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.recomputing.program import Technique
from unet3d.training import optim
from unet3d.training.step import train_step

VARIANTS = [
    ("model.norm=instance", "ckpt=3", "optim.average=0.99"),
    ("model.norm=batch", "ckpt=3", "amp=true", "optim=sgd"),
    ("optim=adam", "optim.fused=true", "model.features=[4,64]", "data.patch=[8,4,4]"),
    ("channels_last=true", "model.norm=batch", "optim.fused=true"),
    ("channels_last=true", "model.norm=instance", "ckpt=3", "amp_dtype=bf16", "model.upsampling=trilinear"),
    ("optim=sgd", "optim.fused=true", "optim.average=0.99", "amp_dtype=fp16", "recompute=tiles"),
    ("model.norm=group", "amp_dtype=fp16", "ckpt=4", "model.upsampling=trilinear", "model.activation=silu"),
    ("model.norm=none", "optim.clip=null", "loss=ce", "model.activation=swish_lean"),
    ("model.downsampling=strided_conv", "model.deep_supervision=true", "model.features=[4,8,8]", "amp_dtype=fp16"),
    ("model.norm=instance", "model.inplace=true", "optim=sgd", "accumulate=2", "model.residual=true"),
    ("recompute=lean", "accumulate=2", "model.dropout=0.2"),
    ("recompute=lean", "amp_dtype=bf16", "model.norm=batch", "model.upsampling=nearest"),
    ("recompute=tiles", "amp_dtype=fp16", "model.residual=true", "model.downsampling=strided_conv"),
]
WAYS = {
    "plain": ("amp=false",),
    "checkpointed": ("amp=true", "ckpt=3", *PLAIN),
    "tiles": ("recompute=tiles",),
}
NAMED = {  # each network in one way; each way for each kind of network
    "cicek2016": "plain",
    "cicek2016_2d": "checkpointed",
    "cicek2016_no_bn": "plain",
    "forum_32": "plain",
    "forum_large": "checkpointed",
    "forum_mid": "plain",
    "forum_small": "plain",
    "nnunet_hippocampus": "checkpointed",
    "nnunet_resenc_l": "checkpointed",
    "nnunet_resenc_m": "plain",
    "unet": "plain",
    "unet_small": "tiles",
    "unet_tiny": "plain",
}
PATCHES = {
    "cicek2016": "[92,92,92]",
    "cicek2016_no_bn": "[92,92,92]",
    "cicek2016_2d": "[92,92,4]",
    "nnunet_resenc_l": "[64,32,32]",
    "nnunet_resenc_m": "[64,32,32]",
}
SHALLOW = {  # of residual encoders: fewer blocks, which are all alike
    "nnunet_resenc_l": ("model.blocks=[1,2,2,2,2,2]",),
    "nnunet_resenc_m": ("model.blocks=[1,2,2,2,2,2]",),
}
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
    "overrides", [*VARIANTS[:4], *(pytest.param(words, marks=pytest.mark.slow) for words in VARIANTS[4:])], ids=" ".join
)
def test_predicted_equals_measured_to_the_byte(overrides: tuple[str, ...]) -> None:
    assert_equal(config(*overrides))


@pytest.mark.slow
@pytest.mark.parametrize("name", compose.choices("model"))
def test_every_named_network_is_predicted_to_the_byte(name: str) -> None:
    """A small fraction of the widths, and patches just large enough."""
    patch = PATCHES.get(name, "[36,16,16]")
    words = [f"model={name}", f"data.patch={patch}", *WAYS[NAMED[name]], *SHALLOW.get(name, ()), "batch=1"]
    options = compose.compose(words)
    options.model = resized(options.model, lambda level, width: max(2, width // 16))
    options.model.in_channels, options.model.classes = 2, 3
    assert_equal(options)


@pytest.mark.slow
def test_a_prediction_chooses_segments_as_a_run_does() -> None:
    options = config("ckpt=3")
    meter = MemoryEstimate(options, options.model).meter
    measured = measure(options, choose_technique(options, options.model), MEASURED_STEPS)
    assert meter.summary() == measured


@pytest.mark.slow
def test_a_full_width_forum_net_is_predicted_without_its_gigabytes() -> None:
    """320 x 150 x 26 voxels, batch 2: the smaller net needs more, because it joins 192 channels at full resolution."""
    forum = ["data.patch=[320,150,26]", "batch=2", "amp=true"]
    large, mid = (compose.compose([f"model=forum_{name}", *forum]) for name in ("large", "mid"))
    peaks = [most_held(simulate(c, c.model, steps=1).ledger.events) for c in (large, mid)]
    assert peaks[1] > peaks[0] > 2**31


@pytest.mark.slow
def test_a_run_over_its_budget_stops_and_one_within_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.memory.remedies.WITH_BUDGET", ())
    monkeypatch.setattr("unet3d.memory.remedies.PLANS", ())  # what would need less: without recompute, which takes long
    options = config("batch=1", *PLAIN)
    peak = step_peak(options, options.model).tensors
    options.budget = f"{(peak - 4) / 2**20}MiB"
    with pytest.raises(UserError, match=rf"budget={re.escape(options.budget)}"):
        preflight(options, options.model)
    options.budget = f"{peak / 2**20}MiB"
    assert preflight(options, options.model).memory["predicted"]["peak_bytes"] == peak


def test_a_step_that_the_machine_cannot_hold_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = config(*PLAIN)
    said = []
    for size in (2**40, 2**17):
        monkeypatch.setattr("unet3d.memory.prediction.host_bytes", lambda size=size: size)
        preflight(options, options.model)
        said.append(capsys.readouterr().out.splitlines())
    plenty, little = said
    (lacks,) = (line for line in little if line not in plenty)
    assert "0.1 MiB" in lacks


def test_predicting_leaves_the_random_state_alone() -> None:
    before, options = torch.get_rng_state(), config()
    simulate(options, options.model, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_data_numbers_read_are_zero_and_steps_still_count() -> None:
    with fake_mode():
        assert torch.empty(3).sum().item() == 0
        parameter = torch.nn.Parameter(torch.empty(2))
        optimizer = torch.optim.Adam([parameter], foreach=False)
        for _ in range(2):
            parameter.sum().backward()
            optimizer.step()
        assert next(iter(optimizer.state.values()))["step"].item() == 2
