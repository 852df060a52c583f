"""What only a GPU can show: `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.memory.meter import MEASURED_STEPS
from unet3d.memory.simulate import fitted, simulate
from unet3d.memory.technique import choose_technique
from unet3d.training import optim
from unet3d.training.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU, or tests hide it without -m gpu"),
]
WORDS = ("device=cuda", "model=unet_small", "data.patch=[32,32,32]", "batch=2", "amp=true", "amp_dtype=bf16")


@pytest.mark.parametrize("word", ["ckpt=0", "ckpt=2", "recompute=lean", "recompute=tiles", "optim.fused=true"])
def test_a_step_requests_what_was_predicted_and_at_most_the_workspaces_more(word: str) -> None:
    config = compose.compose([*WORDS, word])
    config.model = build.model_config_from_headers(config)
    technique = choose_technique(config, config.model)
    ledger = simulate(config, config.model, technique).ledger
    policy = build.policy(config, "cuda", technique)
    model = build.model(config.model, 0).cuda()
    optimizer = optim.optimizer(config.optim, model)
    loss = build.loss(config, config.model.classes or 0, "cuda")
    batch = Batch(torch.randn(2, 1, 32, 32, 32), torch.zeros(2, 32, 32, 32, dtype=torch.int16))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(MEASURED_STEPS):
        train_step(model, loss, optimizer, policy.scaler(), policy, [batch], clip=12.0)
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before + weights
    predicted = ledger.peak_bytes()
    assert 0.999 * predicted <= requested <= 1.001 * predicted + ledger.workspace_bound()


def test_probabilities_are_those_of_single_windows_with_sums_on_the_host() -> None:
    config = compose.compose(["device=cuda", "model=unet_small", "data.patch=[32,32,32]", "inference.batch=3"])
    config.model = build.model_config_from_headers(config)
    policy = build.policy(config, "cuda")
    predictor = fitted(build.predictor(config, [build.model(config.model, 0).cuda()], config.model, policy))
    image = torch.randn(1, 70, 50, 40)
    together = replace(predictor, sums_on_device=True).probabilities(image)
    single = replace(predictor, batch=1, sums_on_device=False).probabilities(image)
    torch.testing.assert_close(together, single, atol=1e-2, rtol=0)  # TF32
