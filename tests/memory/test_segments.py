"""Checkpointed segments, chosen from one simulated step without them, against simulated steps with them."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from training import PLAIN

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
def test_splits_are_ranked_from_a_step_without_them() -> None:
    overrides = (*SMALL, "model.activation=swish_lean", "model.upsampling=trilinear", "accumulate=2")
    profile = profiled(*overrides)
    every = all_partitions(len(profile.forward))
    assert ranking_peak(profile, (0,)) == profile.step.tensors == true_peak((), *overrides)
    for segment_starts in every[len(every) // 4 :: len(every) // 2]:
        error = ranking_peak(profile, segment_starts) / true_peak(segment_starts, *overrides) - 1
        assert NEAR[0] < error < NEAR[1], segment_starts


@pytest.mark.slow
def test_the_choice_is_the_best_of_all() -> None:
    best = min(true_peak(segment_starts, *SMALL) for segment_starts in all_partitions(4))
    assert true_peak(chosen(4, *SMALL), *SMALL) == best


def test_more_segments_than_stages_are_refused() -> None:
    with pytest.raises(UserError, match=r"ckpt=5\b.*\b4\b"):
        chosen(5, *SMALL)
