"""What `unet3d.recompute` says and refuses, and what of networks uses (test_uses.py) cannot show."""

import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality import drawn_schedules
from promises import promise
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from uses import Light, Net, gained, image, light, made, own

from unet3d.base.errors import UserError
from unet3d.recomputing.module import Recomputed, recompute, schedules_of
from unet3d.recomputing.program import describe
from unet3d.recomputing.trace import cannot_take


@pytest.fixture(autouse=True)
def any_schedule() -> Iterator[None]:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=2, tiles=5):
        yield


class Branching(Light):
    """What forward does depends on numbers."""

    def forward(self, x: Tensor) -> Any:
        """Return logits."""
        if x.mean() > 0:
            x = x * 2
        return super().forward(x)


@promise(
    "What is seen, what is refused, what runs plain",
    "`forward` depends on numbers of a map (`if x.mean() > 0`, `.item()`) or of a counter, changes the image in "
    "place, or a map that another is a view of",
    "refused, with the line",
)
def test_a_forward_that_depends_on_numbers_is_refused_with_its_place() -> None:
    _, first = inspect.getsourcelines(Branching.forward)
    with pytest.raises(UserError, match=re.escape(f"{__file__}:{first + 2}")):
        Recomputed(made(Branching))(image())


@pytest.mark.parametrize(("ranks", "words"), ((1, "SyncBatchNorm expected"), (2, "1: SyncBatchNorm would exchange")))
def test_statistics_that_ranks_exchange_are_refused(ranks: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch has none, so that the network's own error comes from one rank."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    with pytest.raises(UserError, match=words):
        Recomputed(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.SyncBatchNorm(4)))(image().float())


def test_distributed_data_parallel() -> None:
    """Its hooks see each gradient; one rank, since a second one adds nothing that the network could do wrong."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = light()
        model = DistributedDataParallel(Recomputed(light()))
        for network in (plain, model, model):
            network.zero_grad()
            network(image()).square().mean().backward()
    finally:
        dist.destroy_process_group()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_compiled_after_but_not_before() -> None:
    network, plain = Recomputed(light()), light()
    torch.compile(network, backend="eager")(image()).square().sum().backward()
    plain(image()).square().sum().backward()
    torch.testing.assert_close(network.first.weight.grad, plain.first.weight.grad)
    with pytest.raises(UserError, match=r"torch\.compile"):
        Recomputed(torch.compile(plain, backend="eager"))


@promise("Resume", "an operation that `recompute` ...")
@pytest.mark.parametrize(("layer", "is_named"), ((nn.Linear(5, 5), True), (nn.ReLU(), False)))
def test_operations_without_a_rule_are_named(layer: nn.Module, is_named: bool) -> None:
    network = Recomputed(own(lambda self, x: self.mix(self.first(x)), mix=layer.double()))
    line = describe(schedules_of(network).program(image()), "lean")
    assert ("linear in mix" in line) is is_named
    assert ("checkpointed" in line) is is_named


def test_without_an_example_the_line_comes_with_the_first_training_pass(capsys: pytest.CaptureFixture[str]) -> None:
    network = recompute(made(), held=2**20)
    with torch.no_grad():
        network(image())
    assert not capsys.readouterr().out
    network(image())
    network(image(2, 1, 5, 12, 4))
    said = capsys.readouterr()
    assert said.out.count("recompute=lean: ") == 1
    assert re.findall(r"finding a schedule for (.*)", said.err) == ["1x1x9x6x5, float64", "2x1x5x12x4, float64"]
    peaks = [schedules_of(each).program(image()).peak_bytes for each in (network, Recomputed(made()))]
    assert peaks[0] - peaks[1] == 2**20


@pytest.mark.parametrize("is_within", [True, False])
def test_an_example_outside_of_autocast_costs_a_second_search(
    is_within: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=is_within):
        network = recompute(made().float(), image().float())
    with torch.autocast("cpu", torch.bfloat16):
        network(image().float())
    said = capsys.readouterr().err
    assert said.count("finding a schedule") == 2 - is_within
    assert ("give the example within your autocast" in said) is not is_within


@pytest.mark.parametrize(
    ("given", "options", "words"),
    (
        (lambda: None, {}, "NoneType is no network"),
        (lambda: torch.jit.script(nn.Conv3d(1, 2, 1)), {}, r"torch\.jit"),
        (lambda: nn.DataParallel(light()), {}, "DataParallel"),
        (lambda: nn.Sequential(nn.LazyConv3d(2, 1)), {}, "lazy layers"),
        (light, {"plan": "auto", "budget": ["6GiB"]}, "budget"),
        (light, {"plan": "auto"}, "plan="),
        (light, {"budget": "3GiB"}, "plan="),
        (light, {"plan": "smallest"}, "plan="),
        (light, {"held": 1.5}, "held"),
        (light, {"example": image(0, 1, 9, 6, 5)}, "is empty"),
    ),
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_is_no_plain_network_or_no_size_is_refused(given: Any, options: dict[str, Any], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated.
        model = given()
    with pytest.raises(UserError, match=words):
        recompute(model, **options)


@promise(
    "What is seen, what is refused, what runs plain",
    "an image of other channels, another type, or a size that the network cannot take",
    "refused, with what `forward` raises, and lengths that it takes",
)
@pytest.mark.parametrize(
    ("size", "words"),
    (
        ((1, 1, 8, 4, 4), None),
        ((1, 1, 9, 8, 7), "; it takes 1x1x12x8x8, lengths of multiples of 4"),
        ((1, 3, 8, 4, 4), "cannot take an image of 1x3x8x4x4, float64.* to have 1 channels"),
    ),
)
def test_what_a_network_cannot_take_is_said(size: tuple[int, ...], words: str | None) -> None:
    network = own(lambda self, x: self.first(F.interpolate(F.max_pool3d(x, 4), scale_factor=4) + x))
    line = cannot_take(network, size, torch.float64)
    assert line is None if words is None else re.search(words, line or "")
    if words is not None:
        with pytest.raises(UserError, match=words):
            Recomputed(network)(image(*size))


def test_an_attribute_that_changes_each_step_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.recomputing.module.MANY_PROGRAMS", 2)
    network = Recomputed(gained(gain=1.0))
    network(image())
    network.gain = 2.0
    with pytest.warns(UserWarning, match="such as a counter"):
        network(image())


def test_no_more_schedules_are_kept_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.recomputing.module.MOST_PROGRAMS", 2)
    schedules = schedules_of(Recomputed(made(Net)))
    programs = [schedules.program(image(1, 1, length, 4, 4)) for length in (5, 6, 7)]
    assert list(schedules.programs.values()) == programs[1:]
    assert len(schedules.prepared) == 2


def test_more_objects_than_a_pass_can_look_through_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.recomputing.readable.MOST_OBJECTS", 200)
    with pytest.raises(UserError, match="more than 200 objects"):
        Recomputed(gained(gain=[[1.0] for _ in range(300)]))(image())
