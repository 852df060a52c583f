"""Checkpointed segments, chosen from one simulated step without them, against simulated steps with them."""

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
import torch
from evenly import evenly
from torch.utils.flop_counter import FlopCounterMode
from training import PLAIN

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.ledger import most_held
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import (
    SegmentStarts,
    StageProfile,
    choose_segments,
    profile_stages,
    ranking_peak,
)
from unet3d.recomputing.program import Technique

SMALL = ("model=unet_tiny", "model.features=[8,16]", *PLAIN)  # 4 stages
DEEP = ("model=unet_tiny", "amp=true", "model.norm=batch", *PLAIN)  # 6 stages
NETS = [
    DEEP,
    ("model=unet_tiny", "model.features=[8,16]", "accumulate=2", "optim=sgd"),
    (*SMALL, "model.activation=swish_lean", "model.upsampling=trilinear", "model.downsampling=strided_conv"),
]
NEAR = (-0.02, 0.11)  # relative errors of estimated peaks


@cache
def config(*overrides: str) -> Config:
    return compose.compose(["data.patch=[16,16,16]", "model.in_channels=1", "model.classes=3", *overrides])


@cache
def profiled(*overrides: str) -> StageProfile:
    return profile_stages(config(*overrides), config(*overrides).model)


@cache
def chosen(ckpt: int, *overrides: str) -> SegmentStarts:
    asked = replace(config(*overrides), ckpt=ckpt)
    return choose_segments(asked, asked.model).segment_starts


@cache
def true_peak(segment_starts: SegmentStarts, *overrides: str) -> int:
    return most_held(
        simulate(config(*overrides), config(*overrides).model, Technique(segment_starts), steps=2).ledger.events
    )


def all_partitions(stages: int) -> list[SegmentStarts]:
    """Return all ways to split so many stages into two segments or more."""
    return [(0, *later) for count in range(1, stages) for later in combinations(range(1, stages), count)]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", NETS[1:], ids=" ".join)
def test_splits_are_ranked_from_a_step_without_them(overrides: tuple[str, ...]) -> None:
    profile = profiled(*overrides)
    every = all_partitions(len(profile.forward))
    assert ranking_peak(profile, (0,)) == profile.step.tensors == true_peak((), *overrides)
    for segment_starts in every[len(every) // 4 :: len(every) // 2]:
        error = ranking_peak(profile, segment_starts) / true_peak(segment_starts, *overrides) - 1
        assert NEAR[0] < error < NEAR[1], segment_starts


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [NETS[1]], ids=" ".join)
def test_more_segments_never_need_more_memory(overrides: tuple[str, ...]) -> None:
    few, many = chosen(2, *overrides), chosen(4, *overrides)
    assert len(few) == 2 and len(many) <= 4
    peaks = [true_peak(segment_starts, *overrides) for segment_starts in ((), few, many)]
    assert all(later <= earlier for earlier, later in pairwise(peaks))
    assert peaks[-1] < 0.8 * peaks[0]


def test_with_segments_of_equal_length_another_one_may_need_more() -> None:
    """As torch splits: the last segment is kept, and the last stages are large."""
    assert true_peak(evenly(4, 3), *SMALL) > true_peak(evenly(4, 2), *SMALL)


@pytest.mark.slow
def test_the_choice_is_the_best_of_all() -> None:
    best = min(true_peak(segment_starts, *SMALL) for segment_starts in all_partitions(4))
    assert true_peak(chosen(4, *SMALL), *SMALL) == best


@pytest.mark.slow
def test_where_weights_set_the_peak_no_segments_lower_it() -> None:
    """What the optimizer's step needs: weights, gradients and Adam's moments."""
    wide = ("model=unet_tiny", "model.features=[4,256]", "data.patch=[8,8,8]", "batch=1")
    found = profiled(*wide)
    assert found.update > max(*found.forward, *found.backward)
    asked = chosen(3, *wide)
    assert len(asked) > 1 and true_peak(asked, *wide) == true_peak((), *wide)


def test_more_segments_than_stages_are_refused() -> None:
    with pytest.raises(UserError, match=r"ckpt=5\b.*\b4\b"):
        chosen(5, *SMALL)


def test_flops_are_two_for_each_product() -> None:
    """Against torch's own counter."""
    asked = config(*SMALL, "model.upsampling=transposed")
    model = build.model(asked.model, 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(asked.batch, 1, *asked.data.patch))
    assert sum(profiled(*SMALL, "model.upsampling=transposed").flops) == counter.get_total_flops()
