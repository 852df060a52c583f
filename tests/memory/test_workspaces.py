"""Workspaces of convolutions: what they may add to a prediction for CUDA, and what a GPU's allocator says of them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import PLAIN

from unet3d.base.types import MIB, Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import tables
from unet3d.memory.allocator import EMPTY_CACHE
from unet3d.memory.ledger import ModuleScope, most_held
from unet3d.memory.meter import MEASURED_STEPS, CudaLedger, CudaMeter, GpuLedger
from unet3d.memory.simulate import simulate
from unet3d.recomputing import workspaces
from unet3d.training.losses import SegmentationLoss, ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step

WORDS = ("model=unet_tiny", "model.features=[8]", "data.patch=[8,8,8]", "model.in_channels=1", "model.classes=3")


def config(*words: str) -> Config:
    return compose.compose([*WORDS, "dry_run=true", *PLAIN, *words])


BF16 = torch.bfloat16
# Bytes of the workspaces that an H100 was asked for, with cuDNN 9.19: of a forward pass, of the gradients of its input
# and of its filter. `python benchmarks/workspaces.py` measures more.
ON_H100 = """
dtype | images, inputs, outputs, size | kernel | stride | transposed | TF32 | forward, image gradient, filter gradient
bfloat16 | 2 16 16 64  | 3 3 3 | 1 | no  | yes | 33568272 33568272 41434687
bfloat16 | 2 48 24 64  | 3 3 3 | 1 | no  | yes | 75559696 75559696 97192059
bfloat16 | 2 64 32 64  | 3 3 3 | 1 | no  | yes | 100773904 100774035 102543859
bfloat16 | 2 32 64 32  | 3 3 3 | 2 | no  | yes | 5353488 5353619 5353488
bfloat16 | 2 128 64 32 | 2 2 2 | 2 | yes | yes | 84017299 84017168 85852783
bfloat16 | 2 1 32 64   | 3 3 3 | 1 | no  | yes | 0 41956880 41989823
bfloat16 | 2 32 32 64  | 1 3 3 | 1 | no  | yes | 0 0 69044903
float16  | 2 32 16 64  | 3 3 3 | 1 | no  | yes | 50359312 50359312 64125419
float32  | 2 16 16 64  | 3 3 3 | 1 | no  | yes | 67136528 67136659 70695515
float32  | 2 16 16 64  | 3 3 3 | 1 | no  | no  | 0 0 67136528
"""
NEAR = 0.07  # of what was measured: how many parts a filter's gradient is summed up in is not known for all shapes


def without_data(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


@pytest.mark.parametrize("row", ON_H100.strip().splitlines()[1:])
def test_workspaces_are_those_of_a_gpu(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, sizes, kernel_size, step, transposed, tf32, seen_on_gpu = map(str.strip, row.split("|"))
    images, inputs, outputs, side = integers(sizes)
    dtype, kernel, stride, is_transposed = getattr(torch, name), integers(kernel_size), int(step), transposed == "yes"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32 == "yes")
    measured = integers(seen_on_gpu)
    padding = [0 if is_transposed else (size - 1) // 2 for size in kernel]
    image = without_data(images, inputs, side, side, side, dtype=dtype)
    shape = (inputs, outputs) if is_transposed else (outputs, inputs)
    weight = without_data(*shape, *kernel, dtype=dtype)
    geometry = ([stride] * 3, padding, [1] * 3, is_transposed, [0] * 3, 1)
    output = torch.ops.aten.convolution(image, weight, None, *geometry)
    gradients = torch.ops.aten.convolution_backward(output, image, weight, [0], *geometry, [True, True, False])
    forward = (image, weight, None, *geometry)
    backward = (output, image, weight, [0], *geometry, None)
    found = workspaces.bytes_of_call(workspaces.CONVOLUTION, forward, output)
    found += workspaces.bytes_of_call(workspaces.CONVOLUTION_BACKWARD, backward, gradients)
    assert found.pop() == 0, "a bias's gradient is a sum"
    for predicted, seen in zip(found, measured, strict=True):
        assert predicted == pytest.approx(seen, rel=NEAR)
    assert found[0] == pytest.approx(measured[0], abs=1024)
    assert found[1] == pytest.approx(measured[1], abs=1024)


@pytest.mark.parametrize("channels", [16, 15])
def test_maps_with_channels_last_are_not_transposed(channels: int) -> None:
    image = without_data(2, channels, 32, 32, 32, dtype=BF16).to(memory_format=torch.channels_last_3d)
    weight = without_data(channels, channels, 3, 3, 3, dtype=BF16)
    assert workspaces.forward_bytes(image, weight, image, False) == 0
    assert workspaces.image_gradient_bytes(image, weight, image, False) == 0
    assert 0 < workspaces.weight_gradient_bytes(image, weight, image) < 2 * MIB


@pytest.mark.parametrize("precision, uses_it", [("ieee", False), ("tf32", True)])
def test_whichever_flag_says_how_float32_is_computed(precision: str, uses_it: bool) -> None:
    """torch refuses to read the older flag once its newer ones differ."""
    program = f"""if True:
        import torch
        from unet3d.recomputing import workspaces
        torch.backends.cudnn.conv.fp32_precision = {precision!r}
        torch.backends.cudnn.rnn.fp32_precision = "ieee"
        image = torch.empty(1, 8, 8, 8, 8, device="meta")
        weight = torch.empty(8, 8, 3, 3, 3, device="meta")
        print(workspaces.forward_bytes(image, weight, image, False) > 0)
    """
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.stdout.strip() == str(uses_it), process.stderr


def convolved(large: int) -> GpuLedger:
    """Return the ledger of a layer of 8 to 16 channels in bf16, before which `large` bytes are there and gone."""
    image = torch.zeros(1, 8, 4, 4, 4, dtype=BF16)
    weight = torch.zeros(16, 8, 3, 3, 3, dtype=BF16)
    with GpuLedger() as ledger:
        gone = torch.zeros(large, dtype=torch.uint8)
        del gone
        torch.ops.aten.convolution(image, weight, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    return ledger


IMAGE = 2 * 8 * 64
OUTPUT = 2 * 16 * 64
WEIGHT = 2 * 16 * 8 * 27


def test_a_workspace_is_requested_while_the_results_are_there_and_released_at_once() -> None:
    ledger = convolved(large=1)
    assert most_held(ledger.events) == IMAGE + WEIGHT + OUTPUT
    assert most_held(ledger.requests()) == most_held(ledger.events) + IMAGE + OUTPUT + WEIGHT
    assert sum(change for _, change in ledger.requests()) == sum(change for _, change in ledger.events)
    elsewhere = convolved(large=MIB)
    assert most_held(elsewhere.requests()) == most_held(elsewhere.events), "it fits below a peak elsewhere"


def test_a_simulated_run_empties_the_cache_before_its_last_step() -> None:
    asked = config("device=cuda", "amp=true")
    ledger = simulate(asked, asked.model).ledger
    (moment,) = [number for number, (index, _) in enumerate(ledger.requests()) if index == EMPTY_CACHE]
    ends = [event for event, name in ledger.marks if name == "end"]
    before = [change for index, change in ledger.requests()[:moment] if index < len(ledger.storages)]
    assert sum(before) == sum(change for _, change in ledger.events[: ends[-2]])
    assert len(before) == ends[-2]


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
    ledger = CudaLedger(lambda: ModuleScope(""), torch.device("cuda"))
    ledger.restart()
    allocator.request(500)
    allocator.request(-400)

    def compute() -> str:
        for size in (50, 70, -70):
            allocator.request(size)
        return "result"

    assert ledger.excess(compute) == ("result", 70)
    assert ledger.counters()["requested_bytes.all.peak"] == 1500, "of before the operation"
    assert ledger.excess(lambda: allocator.request(900)) == (None, 0), "a result is no excess"
    assert ledger.counters()["requested_bytes.all.peak"] == 2050, "within the operation"
    ledger.restart()
    assert ledger.counters()["requested_bytes.all.peak"] == allocator.now


def measured(allocator: Allocator, steps: int) -> dict[str, Any]:
    """Return what a meter for CUDA says of a network with workspaces."""
    network = nn.Sequential(nn.Conv3d(2, 4, 1, bias=False), nn.Conv3d(4, 3, 1))
    image = torch.zeros(1, 2, 4, 4, 4)
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
    (said,) = (line for line in tables.on_cuda(found) if "measured" in line)
    assert said.count("backward of") == 2 and said.count("forward of") == 1
    assert tables.workspaces(found).rows[0] == ["1", "backward", "0.0"]
