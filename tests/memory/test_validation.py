"""Validation's peak is predicted, to the byte of a real window."""

import pytest
import torch

from unet3d import build, compose
from unet3d.memory.ledger import Ledger
from unet3d.memory.simulate import validation_peak


@pytest.mark.parametrize("overrides", [(), ("amp=true",), ("inference.mirror=true", "data.augment.mirror=[0,2]")])
def test_a_window_is_predicted_to_the_byte(overrides: tuple[str, ...]) -> None:
    config = compose.compose(["model=unet_tiny", "data.patch=[24,16,16]", *overrides])
    config.model.in_channels, config.model.classes = 1, 3
    model = build.model(config.model, 0).eval()
    predictor = build.predictor(config, [model], config.model, build.policy(config, "cpu", ()))
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.claim(parameter, "params", "")
    with ledger, torch.no_grad():
        predictor.window_logits(torch.zeros(1, 1, 24, 16, 16))
    assert validation_peak(config, config.model, 1000) == ledger.peak_bytes() + 1000
