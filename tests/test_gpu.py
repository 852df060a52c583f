"""What only a GPU can show: `pytest -m gpu`."""

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from monai.networks.nets import BasicUNet, DynUNet
from torch import Tensor, nn
from training import probabilities

import unet3d
from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.memory.ledger import most_held
from unet3d.memory.meter import MEASURED_STEPS
from unet3d.memory.simulate import fitted, simulate
from unet3d.memory.technique import choose_technique
from unet3d.recomputing.rules import normalisation
from unet3d.training import optim
from unet3d.training.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU, or tests hide it without -m gpu"),
]
TRAIN = Path(__file__).parent.parent / "train.py"
RUN = (
    *("model=unet_tiny", "device=cuda", "data.patch=[16,16,16]", "data.phantom.shape=[32,32,32]"),
    *("data.phantom.cases=4", "batch=2", "eval_every=4", "workers=1", "hydra.run.dir=run"),
)
STRIDES = (1, 2, 2)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "DynUNet": lambda: DynUNet(3, 1, 2, [3] * 3, STRIDES, STRIDES[1:], filters=[32, 64, 128]),
    "BasicUNet": lambda: BasicUNet(3, 1, 2, features=(32, 32, 64, 64, 128, 32), norm=("group", {"num_groups": 4})),
}
WORDS = ("device=cuda", "model=unet", "data.patch=[64,64,64]", "batch=2", "amp=true", "amp_dtype=bf16")


@pytest.mark.parametrize("word", ["ckpt=0", "ckpt=2", "recompute=lean", "recompute=tiles", "optim.fused=true"])
def test_a_step_requests_what_was_predicted(word: str) -> None:
    config = compose.compose([*WORDS, word])
    config.model = build.model_config_from_headers(config)
    technique = choose_technique(config, config.model)
    ledger = simulate(config, config.model, technique).ledger
    policy = build.policy(config, "cuda", technique)
    model = build.model(config.model, 0).cuda()
    optimizer = optim.optimizer(config.optim, model)
    loss = build.loss(config, config.model.classes or 0, "cuda")
    batch = Batch(torch.randn(2, 1, 64, 64, 64), torch.zeros(2, 64, 64, 64, dtype=torch.int16))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(MEASURED_STEPS):
        train_step(model, loss, optimizer, policy.scaler(), policy, [batch], clip=12.0)
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before + weights
    assert requested == pytest.approx(most_held(ledger.requests()), rel=0.01)


def test_probabilities_are_those_of_single_windows_with_sums_on_the_host() -> None:
    config = compose.compose(["device=cuda", "model=unet_small", "data.patch=[32,32,32]", "inference.batch=3"])
    config.model = build.model_config_from_headers(config)
    policy = build.policy(config, "cuda")
    predictor = fitted(build.predictor(config, [build.model(config.model, 0).cuda()], config.model, policy))
    image = torch.randn(1, 70, 50, 40)
    together = probabilities(replace(predictor, sums_on_device=True), image)
    single = probabilities(replace(predictor, batch=1, sums_on_device=False), image)
    torch.testing.assert_close(together, single, atol=1e-2, rtol=0)  # TF32


@pytest.mark.parametrize("large", [normalisation.LARGE, 1])
@pytest.mark.parametrize("plan", ["lean", "tiles"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_recomputed_network_are_autograds(
    name: str, plan: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with more than one tile, and in bf16, whose rounding is compared with autograd's own.

    `large`: numbers from which on normalisations run in pieces; 1: all do.
    """
    monkeypatch.setattr(normalisation, "LARGE", large)
    torch.manual_seed(0)
    image = torch.randn(1, 1, 64, 64, 64, device="cuda")
    network = NETWORKS[name]().cuda()
    recomputed = unet3d.recompute(copy.deepcopy(network), image, plan)
    exact = gradients(copy.deepcopy(network).double(), image.double())
    as_double = unet3d.recompute(copy.deepcopy(network).double(), image.double(), plan)
    assert relative_error(gradients(as_double, image.double()), exact) < 1e-10
    with torch.autocast("cuda", torch.bfloat16):
        of_autograd = relative_error(gradients(network, image), exact)
        of_recompute = relative_error(gradients(recomputed, image), exact)
    assert of_recompute < 1.5 * of_autograd


def gradients(network: nn.Module, image: Tensor) -> Tensor:
    """Return all gradients of a step in a vector."""
    output = network.train()(image)
    output = torch.cat([scale.flatten() for scale in output]) if isinstance(output, list | tuple) else output
    (output.double() * torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)).sin().mean().backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in network.parameters()])


def relative_error(vector: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over that of the exact vector."""
    return ((vector - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("words", ["amp=true amp_dtype=bf16 recompute=lean", "amp=true amp_dtype=fp16 ckpt=2"])
def test_a_run_ends_with_its_predicted_peak(words: str, tmp_path: Path) -> None:
    process = started(tmp_path, *words.split(), "steps=8")
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    predicted = memory["predicted"]["peak_bytes"]
    assert memory["measured"]["ledger"]["peak_bytes"] == pytest.approx(predicted, rel=1e-4)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    process = started(tmp_path, "steps=100000", "eval_every=0")
    assert process.stdout is not None
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.stdout.readline(), "it ended"
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 75, printed
    steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    resumed = started(tmp_path, "resume=auto", "eval_every=0", f"steps={steps + 5}")
    printed, _ = resumed.communicate()
    assert resumed.returncode == 0, printed
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) > steps


def test_memory_that_runs_out_ends_a_run_with_what_would_need_less(tmp_path: Path) -> None:
    program = f"import torch; torch.cuda.set_per_process_memory_fraction({256 * 2**20} / {total_bytes()})\n"
    program += f"import runpy; runpy.run_path({str(TRAIN)!r}, run_name='__main__')"
    words = ("data.patch=[32,32,32]", "model.features=[32,64]", "batch=32", "steps=4")
    process = started(tmp_path, *words, program=["-c", program])
    printed, _ = process.communicate()
    assert process.returncode == 5, printed
    assert "Traceback" not in printed
    status = (tmp_path / "run" / "STATUS").read_text()
    assert "out of memory" in status


def started(folder: Path, *words: str, program: Sequence[str] = (str(TRAIN),)) -> subprocess.Popen[str]:
    """Return a run of train.py on the GPU, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *program, *RUN, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{TRAIN.parent}:{os.environ.get('PYTHONPATH', '')}", "WANDB_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def total_bytes() -> int:
    """Return the bytes of the GPU's memory."""
    return torch.cuda.get_device_properties(0).total_memory
