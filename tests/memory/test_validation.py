"""Validation's peak is predicted, to the byte of a real window."""

import pytest
import torch

from unet3d import build
from unet3d.config import compose
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.simulate import simulate, validation_peak
from unet3d.memory.technique import choose_technique

MIRRORED = ("inference.mirror=true", "data.augment.mirror=[0,2]")
REGIONS = ("model.regions=[[1,2,3],[2,3],[3]]", "model.regions_class_order=[1,2,3]")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("amp=true",),
        (*REGIONS, "amp=true", "inference.batch=2", *MIRRORED),
    ],
)
def test_windows_are_predicted_to_the_byte(overrides: tuple[str, ...]) -> None:
    config = compose.compose(["model=unet_tiny", "data.patch=[24,16,16]", *overrides])
    config.model.in_channels, config.model.classes = 1, 3
    model = build.model(config.model, 0).eval()
    predictor = build.predictor(config, [model], config.model, build.policy(config, "cpu"))
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.claim(parameter, "params", "")
    with ledger, torch.no_grad():
        predictor.window_logits(torch.zeros(predictor.batch, 1, 24, 16, 16))
    assert validation_peak(config, config.model, 1000) == most_held(ledger.events) + 1000


def test_the_windows_of_a_micro_batch_need_less_than_its_step() -> None:
    config = compose.compose(["model=unet_tiny", "data.patch=[24,16,16]", "batch=3", "device=cuda", "ckpt=2"])
    config.model.in_channels, config.model.classes = 1, 3
    technique = choose_technique(config, config.model)
    meter = simulate(config, config.model, technique, steps=STEPS_FOR_PEAK)
    state = meter.summary()["state"]["optimizer"]
    assert validation_peak(config, config.model, state) < most_held(meter.ledger.events)


def test_a_validation_on_cuda_has_the_windows_of_a_micro_batch() -> None:
    words = ["model=unet_tiny", "data.patch=[24,16,16]", "batch=3"]
    config, asked = (compose.compose([*words, "device=cuda", *more]) for more in ((), ("inference.batch=3",)))
    alone = compose.compose([*words, "device=cuda", "inference.batch=1"])
    for found in (config, asked, alone):
        found.model.in_channels, found.model.classes = 1, 3
    peak = validation_peak(config, config.model, 0)
    assert peak == validation_peak(asked, asked.model, 0) > 2 * validation_peak(alone, alone.model, 0)
