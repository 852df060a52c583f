"""Workspaces of convolutions: what they may add to a prediction for CUDA, and what a GPU's allocator says of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import PLAIN

from unet3d.base.types import MIB, Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import predict, tables
from unet3d.memory.budget import Candidate
from unet3d.memory.counters import Counters
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS, CudaMeter
from unet3d.memory.out_of_memory import warn_over_card
from unet3d.memory.preflight import preflight
from unet3d.training.losses import SegmentationLoss, ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step

WORDS = ("model=unet_tiny", "model.features=[8]", "data.patch=[8,8,8]", "model.in_channels=1", "model.classes=3")
WEIGHTS = (32, 16)  # bytes of the two layers'
IMAGE, BETWEEN, OUTPUT = 512, 1024, 256  # bytes of the maps


def config(*words: str) -> Config:
    return compose.compose([*WORDS, "dry_run=true", *PLAIN, *words])


def two_layers() -> tuple[nn.Sequential, torch.Tensor]:
    """Return convolutions of 2, 4 and 1 channels, and an image of 4 x 4 x 4 voxels."""
    layers = [nn.Conv3d(2, 4, 1, bias=False), nn.Conv3d(4, 1, 1, bias=False)]
    return nn.Sequential(*layers), torch.zeros(1, 2, 4, 4, 4)


def test_a_workspace_is_as_large_as_the_maps_of_a_convolution_that_runs() -> None:
    network, image = two_layers()
    with Ledger() as ledger, torch.no_grad():
        output = network(image)
    assert output.nbytes == OUTPUT
    peak = IMAGE + BETWEEN + OUTPUT + sum(WEIGHTS)
    assert ledger.peak_bytes() == peak
    of_first = IMAGE + BETWEEN + WEIGHTS[0] + (IMAGE + BETWEEN)
    of_second = peak + (BETWEEN + OUTPUT)
    assert ledger.workspace_bound() == max(of_first, of_second) - peak


def test_backward_has_workspaces_as_well() -> None:
    network, image = two_layers()
    with Ledger() as ledger:
        output = network(image)
        forward = len(ledger.workspaces)
        output.backward(torch.ones_like(output))
    held = IMAGE + BETWEEN + 2 * OUTPUT + sum(WEIGHTS)
    peak = held + BETWEEN + WEIGHTS[1]  # gradients of the second layer's input and weights
    assert ledger.peak_bytes() == peak
    assert [size for _, size in ledger.workspaces[forward:]] == [OUTPUT + BETWEEN, BETWEEN + IMAGE]
    assert ledger.workspace_bound() == OUTPUT + BETWEEN


def test_what_fits_below_a_peak_elsewhere_adds_nothing() -> None:
    network, image = two_layers()
    with Ledger() as ledger, torch.no_grad():
        large = torch.zeros(MIB)
        del large
        network(image)
    assert ledger.workspace_bound() == 0


def test_half_precision_halves_it() -> None:
    bounds = {}
    for dtype in (torch.float32, torch.bfloat16):
        network, image = two_layers()
        with Ledger() as ledger, torch.no_grad():
            network.to(dtype)(image.to(dtype))
        bounds[dtype] = ledger.workspace_bound()
    assert bounds[torch.float32] == 2 * bounds[torch.bfloat16] > 0


def test_a_prediction_for_a_gpu_states_it_and_one_for_the_cpu_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "cuda"):
        asked = config(f"device={device}")
        found = preflight(asked, asked.model).memory["predicted"]
        said = capsys.readouterr().out
        assert ("workspace_bound_bytes" in found) is (device == "cuda")
        for line in (tables.workspace_bound(found), tables.cuda_sizes(found)):
            assert bool(line) is (device == "cuda")
            assert line in said
        assert ("nvidia-smi" in said) is (device == "cuda")


def test_an_explanation_for_a_gpu_states_it() -> None:
    network, image = two_layers()
    network[1] = nn.Conv3d(4, 3, 1)
    shown = {device: str(predict(network, image, device=device)) for device in ("cpu", "cuda")}
    assert "workspaces not included" in shown["cuda"] and "MiB more (" in shown["cuda"]
    assert shown["cuda"].count("nvidia-smi") == 1
    assert "workspace" not in shown["cpu"] and "nvidia-smi" not in shown["cpu"]


def test_a_step_that_fits_only_without_workspaces_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    asked = config("device=cuda")
    option = Candidate((), "nothing", asked, asked.model, reserved_bytes=5 * MIB)
    warn_over_card(option, MIB, 6 * MIB)
    assert not capsys.readouterr().err
    warn_over_card(option, MIB, 6 * MIB - 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning:") and "5.0 of 6.0 MiB" in line and "at most 1.0 MiB" in line


class Allocator:
    """What CUDA's allocator would count: bytes now, and at most since the last reset."""

    def __init__(self) -> None:
        self.now = self.peak = 1000
        self.resets = 0

    def request(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def stats(self, device: torch.device) -> dict[str, int]:
        names = ("allocated_bytes", "requested_bytes", "reserved_bytes")
        found = {f"{name}.all.peak": self.peak for name in names} | {f"{name}.all.current": self.now for name in names}
        return found | {"num_alloc_retries": 0}

    def reset(self, device: torch.device) -> None:
        self.peak = self.now
        self.resets += 1


class Kernels(TorchDispatchMode):
    """Convolutions with a workspace: as many bytes as the name of the operation has letters, times 1000."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("convolution"):
            self._allocator.request(1000 * len(name))
            self._allocator.request(-1000 * len(name))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """An allocator in the place of torch's."""
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats", made.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    return made


def test_an_operation_measured_by_itself_leaves_the_peaks_around_it(allocator: Allocator) -> None:
    counters = Counters(torch.device("cuda"))
    counters.restart()
    allocator.request(500)
    allocator.request(-400)

    def compute() -> str:
        for size in (50, 70, -70):
            allocator.request(size)
        return "result"

    assert counters.excess(compute) == ("result", 70)
    assert counters.read()["requested_bytes.all.peak"] == 1500, "of before the operation"
    assert counters.excess(lambda: allocator.request(900)) == (None, 0), "a result is no excess"
    assert counters.read()["requested_bytes.all.peak"] == 2050, "within the operation"
    counters.restart()
    assert counters.read()["requested_bytes.all.peak"] == allocator.now


def measured(allocator: Allocator, steps: int) -> dict[str, Any]:
    """Return what a meter for CUDA says of a network with workspaces."""
    network, image = two_layers()
    network[1] = nn.Conv3d(4, 3, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    meter = CudaMeter(network, optimizer)
    batch = Batch(image, torch.zeros(1, 4, 4, 4, dtype=torch.int64))
    policy = MemoryPolicy()
    with Kernels(allocator):
        for _ in range(steps):
            train_step(network, SegmentationLoss(ce), optimizer, policy.scaler(), policy, [batch], meter.mark)
    return meter.summary()


def test_a_gpus_allocator_tells_the_workspaces_of_each_layer(allocator: Allocator) -> None:
    found = measured(allocator, MEASURED_STEPS)
    backward, forward = (1000 * len(name) for name in ("convolution_backward", "convolution"))
    sizes = {
        ("backward", "1"): backward,
        ("backward", "0"): backward,
        ("forward", "0"): forward,
        ("forward", "1"): forward,
    }
    rows = [{"module": module, "phase": phase, "bytes": size} for (phase, module), size in sizes.items()]
    assert found["workspaces"] == rows, "the largest first"
    assert found["requested_bytes"] == allocator.now + backward, "the peak of all, as without this measurement"
    assert found["phases"]["forward"]["steady"] == allocator.now + forward
    said = tables.largest_workspaces(found)
    assert "measured" in said and said.count("backward of") == 2 and said.count("forward of") == 1
    assert tables.workspaces(found).rows[0] == ["1", "backward", "0.0"]


def test_steps_after_the_ledgers_are_not_measured_one_by_one(allocator: Allocator) -> None:
    resets = []
    for steps in (MEASURED_STEPS, MEASURED_STEPS + 1, MEASURED_STEPS + 2):
        allocator.resets = 0
        measured(allocator, steps)
        resets.append(allocator.resets)
    marks = resets[2] - resets[1]
    assert resets[1] - resets[0] == marks == len(("data", "forward", "loss", "backward", "step", "end"))


def test_convolutions_without_workspaces_are_said_to_have_none() -> None:
    rows = [{"module": "inc.conv1", "phase": "forward", "bytes": 0}]
    assert tables.largest_workspaces({"workspaces": rows}).endswith(": none.")
    assert tables.largest_workspaces({}) == ""
