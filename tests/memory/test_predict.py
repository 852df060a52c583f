"""What is predicted is what is measured, to the byte, without an allocation."""

from itertools import product
from typing import Any

import pytest
import torch
from evenly import evenly
from training import PLAIN

from unet3d import build, compose
from unet3d.config import Config
from unet3d.errors import UserError
from unet3d.memory.budget import resized
from unet3d.memory.meter import ENOUGH, STEADY, LedgerMeter
from unet3d.memory.preflight import preflight
from unet3d.memory.segments import choose_segments, predict
from unet3d.memory.simulate import SegmentStarts, fake_mode, simulate
from unet3d.training import optim
from unet3d.training.step import train_step
from unet3d.types import IGNORE, Batch

VARIANTS = [
    *product(["model.norm=instance", "model.norm=batch", "model.norm=group"], ["ckpt=0", "ckpt=3"]),
    *product(["amp=true", "amp_dtype=fp16"], ["ckpt=0", "ckpt=4"]),
    ("model.norm=group", "amp=true"),
    ("model.upsampling=trilinear", "model.activation=silu"),
    ("model.downsampling=strided_conv", "model.deep_supervision=true", "model.features=[4,8,8]"),
    ("accumulate=2", "optim=sgd"),
    ("optim.average=0.99", "ckpt=3"),
    ("model.norm=none", "optim.clip=null"),
    ("loss=ce", "model.activation=swish_lean"),
    ("model.residual=true", "model.inplace=true"),
    ("lean=true", "accumulate=2", "model.dropout=0.2"),
    ("lean=true", "amp_dtype=bf16", "model.norm=batch", "model.upsampling=nearest"),
    ("slab=4", "model.features=[4,8,8]", "model.deep_supervision=true", "optim.average=0.99"),
    ("slab=2", "amp_dtype=fp16", "model.residual=true", "model.downsampling=strided_conv"),
]
NET = ["model=unet_tiny", "model.features=[4,8]", "model.groups=4", "data.patch=[16,8,8]"]


def config(*overrides: str) -> Config:
    found = compose.compose([*NET, *overrides])
    found.amp = found.amp or found.amp_dtype != "auto"
    found.model.in_channels, found.model.classes = 2, 3
    return found


def measure(options: Config, starts: SegmentStarts, steps: int) -> dict[str, Any]:
    """The summary of the same steps on real tensors."""
    model = build.model(options.model, options.seed)
    policy = build.policy(options, "cpu", starts)
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
    starts = evenly(len(build.model(options.model, 0)), int(options.ckpt))
    predicted = simulate(options, options.model, starts, steps=ENOUGH).summary()
    measured = measure(options, starts, ENOUGH)
    if options.model.inplace:  # without data, autograd replays an in-place change of a view by other operations
        for summary in (predicted, measured):
            summary.pop("layers")
    assert predicted == measured


@pytest.mark.parametrize("overrides", VARIANTS, ids=" ".join)
def test_predicted_equals_measured_to_the_byte(overrides: tuple[str, ...]) -> None:
    assert_equal(config(*overrides))


@pytest.mark.parametrize("words", [("amp=false",), ("amp=true", "ckpt=3", *PLAIN), ("slab=16",)], ids=" ".join)
@pytest.mark.parametrize("name", compose.choices("model"))
def test_every_named_network_is_predicted_to_the_byte(name: str, words: tuple[str, ...]) -> None:
    """A small fraction of the widths, and patches just large enough."""
    patch = {"cicek2016": "[92,92,92]", "cicek2016_no_bn": "[92,92,92]", "cicek2016_2d": "[92,92,4]"}.get(
        name, "[36,16,16]"
    )
    options = compose.compose([f"model={name}", f"data.patch={patch}", *words, "batch=1"])
    options.model = resized(options.model, lambda level, width: max(2, width // 16))
    options.model.in_channels, options.model.classes = 2, 3
    assert_equal(options)


def test_a_prediction_chooses_segments_as_a_run_does() -> None:
    options = config("ckpt=3")
    predicted = predict(options, options.model)
    measured = measure(options, choose_segments(options, options.model).segment_starts, STEADY)
    assert predicted.pop("parameters") == sum(p.numel() for p in build.model(options.model, 0).parameters())
    assert predicted == measured


def test_a_full_width_forum_net_is_predicted_without_its_gigabytes() -> None:
    """320 x 150 x 26 voxels, batch 2: the smaller net needs more, because it joins 192 channels at full resolution."""
    forum = ["data.patch=[320,150,26]", "batch=2", "amp=true"]
    large, mid = (compose.compose([f"model=forum_{name}", *forum]) for name in ("large", "mid"))
    peaks = [simulate(c, c.model, (), steps=1).ledger.peak_bytes() for c in (large, mid)]
    assert peaks[1] > peaks[0] > 2**31


def test_a_run_over_its_budget_stops_and_one_within_goes_on() -> None:
    options = config()
    peak = predict(options, options.model)["peak_bytes"]
    options.budget = f"{(peak - 4) / 2**20}MiB"
    with pytest.raises(UserError, match="does not fit"):
        preflight(options, options.model)
    options.budget = f"{peak / 2**20}MiB"
    assert preflight(options, options.model).memory["predicted"]["peak_bytes"] == peak


def test_a_step_that_the_machine_cannot_hold_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = config()
    for size, is_said in ((2**40, False), (2**18, True)):
        monkeypatch.setattr("unet3d.memory.preflight.host_bytes", lambda size=size: size)
        preflight(options, options.model)
        assert ("this machine has 0.2 MiB of memory, which is less" in capsys.readouterr().out) == is_said


def test_predicting_leaves_the_random_state_alone() -> None:
    before, options = torch.get_rng_state(), config()
    simulate(options, options.model, (), steps=1)
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
