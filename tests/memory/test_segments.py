"""What a cut costs, told from a step without one, against the dry run of the cut itself."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from evenly import evenly
from training import PLAIN

from unet3d import build, compose
from unet3d.config import Config
from unet3d.memory.segments import (
    StageProfile,
    best_starts,
    choose_segments,
    estimated_peak,
    partitions,
    profile_stages,
    recompute_fraction,
    simulated_peak,
)
from unet3d.memory.simulate import SegmentStarts, simulate

NETS = [
    ("model=unet_tiny",),
    ("model=unet_tiny", "amp=true", "model.norm=batch"),
    ("model=unet_tiny", "accumulate=2", "optim=sgd"),
    ("model=unet_small", "amp=true"),
    ("model=nnunet_hippocampus", "model.features=[8,16,32]"),
    ("model=unet_tiny", "model.activation=swish_lean", "model.upsampling=trilinear", "model.downsampling=strided_conv"),
]
NEAR = (-0.02, 0.11)  # relative errors of the profile
TINY = ("model=unet_tiny", *PLAIN)


@cache
def config(*overrides: str) -> Config:
    found = compose.compose(["data.patch=[32,32,32]", *overrides])
    found.model.in_channels, found.model.classes = 1, 3
    return found


@cache
def profiled(*overrides: str) -> StageProfile:
    return profile_stages(config(*overrides), config(*overrides).model)


def starts_of(options: Config) -> SegmentStarts:
    return choose_segments(options, options.model).starts


@cache
def true_peak(starts: SegmentStarts, *overrides: str) -> int:
    return simulate(config(*overrides), config(*overrides).model, starts, steps=2).ledger.peak_bytes()


@cache
def lowest(*overrides: str) -> SegmentStarts:
    return starts_of(replace(config(*overrides), ckpt="auto"))


@pytest.mark.parametrize("overrides", NETS, ids=" ".join)
def test_the_peak_of_a_cut_is_told_without_a_rehearsal_of_it(overrides: tuple[str, ...]) -> None:
    found = profiled(*overrides)
    count = len(found.forward)
    assert estimated_peak(found, (0,)) == true_peak((), *overrides)
    every = list(partitions(count, count))
    for starts in every[:: len(every) // 3]:
        error = estimated_peak(found, starts) / true_peak(starts, *overrides) - 1
        assert NEAR[0] < error < NEAR[1], starts


@pytest.mark.parametrize("overrides", NETS[1:5], ids=" ".join)
def test_more_segments_never_need_more_memory(overrides: tuple[str, ...]) -> None:
    chosen = [starts_of(replace(config(*overrides), ckpt=most)) for most in (2, 5)]
    assert [len(starts) <= most for most, starts in zip((2, 5), chosen, strict=True)] == [True] * 2
    peaks = [true_peak((), *overrides), *(true_peak(starts, *overrides) for starts in chosen)]
    assert all(later <= earlier for earlier, later in pairwise(peaks))
    assert peaks[-1] < 0.8 * peaks[0]


def test_even_segments_are_not_like_that() -> None:
    """As torch cuts, a further segment may need more memory: the last one is kept, and the last stages are large."""
    peaks = [true_peak(evenly(6, segments), *TINY) for segments in range(2, 7)]
    assert any(later > earlier for earlier, later in pairwise(peaks))


def test_the_choice_is_the_best_of_all_cuts() -> None:
    best = min(true_peak(starts, *TINY) for starts in partitions(6, 4))
    assert true_peak(starts_of(replace(config(*TINY), ckpt=4)), *TINY) == best


@pytest.mark.parametrize("share", [0.05, 0.35, 0.65])
def test_with_a_budget_auto_recomputes_as_little_as_fits(share: float) -> None:
    """Between the lowest peak and the whole: no cut that computes less again would have fitted."""
    overrides = (*TINY, "model.features=[8,16]")
    tiny, found = config(*overrides), profiled(*overrides)
    low, whole = true_peak(lowest(*overrides), *overrides), true_peak((), *overrides)
    budget = int(low + share * (whole - low)) // 2**10 * 2**10
    frugal = starts_of(replace(tiny, ckpt="auto", budget=f"{budget / 2**20}MiB"))
    assert true_peak(frugal, *overrides) <= budget
    cheaper = [s for s in partitions(4, 4) if recompute_fraction(found, s) < recompute_fraction(found, frugal)]
    assert all(true_peak(starts, *overrides) > budget for starts in cheaper)


def test_cuts_that_just_do_not_fit_hide_none_that_recomputes_more() -> None:
    """Ten stages; 29 cuts that recompute six of them are 1 byte over the budget."""
    count = 10
    even = StageProfile(
        peak=100,
        forward=[0] * count,
        backward=[10 * (stage + 1) for stage in range(count)],
        waiting=[0] * count,
        beyond=0,
        update=0,
        saved=[10 * stage for stage in range(count + 1)],
        states=[frozenset()] * count,
        sizes={},
        flops=[1] * count,
        later=0,
    )
    starts = best_starts(even, 1, count, lambda starts: estimated_peak(even, starts), budget=39)
    assert estimated_peak(even, starts) <= 39 and recompute_fraction(even, starts) == 0.7


def test_with_room_enough_auto_cuts_nothing_and_with_none_it_cuts_for_the_lowest_peak() -> None:
    overrides = (*TINY, "model.features=[8,16]")
    assert starts_of(replace(config(*overrides), ckpt="auto", budget="100GiB")) == ()
    assert starts_of(replace(config(*overrides), ckpt="auto", budget="1MiB")) == lowest(*overrides)


def test_where_weights_set_the_peak_auto_recomputes_nothing_and_a_number_as_little_as_it_can() -> None:
    """No cut lowers what the optimizer's step needs: weights, gradients and Adam's moments."""
    overrides = ("model=unet_tiny", "model.features=[4,8,256]", "data.patch=[8,8,8]", "batch=1")
    wide, found = config(*overrides), profiled(*overrides)
    assert found.update > max(*found.forward, *found.backward)
    assert starts_of(replace(wide, ckpt="auto")) == ()
    asked = starts_of(replace(wide, ckpt=3))
    assert len(asked) > 1
    assert true_peak(asked, *overrides) == true_peak((), *overrides)


def test_ckpt_says_how_many() -> None:
    tiny = config(*TINY)
    assert starts_of(tiny) == ()
    assert len(starts_of(replace(tiny, ckpt=2))) == 2
    assert lowest(*TINY) == starts_of(replace(tiny, ckpt=6))


def test_the_rehearsal_of_one_step_tells_the_peak_of_later_ones() -> None:
    """What `cut` compares with a budget is what the run will be predicted to need."""
    overrides = ("model=unet_tiny", "amp=true")
    tiny, found = config(*overrides), profiled(*overrides)
    seen = []
    best_starts(found, 2, 3, lambda starts: seen.append(starts) or 1)
    assert len(seen) == 2
    for starts in seen:
        assert simulated_peak(tiny, tiny.model, starts, found) == true_peak(starts, *overrides)


def test_flops_are_two_for_each_product() -> None:
    """Against torch's own counter."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    found = config("model=unet_tiny", "model.upsampling=transposed")
    model = build.model(found.model, 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(found.batch, 1, *found.data.patch))
    assert sum(profiled("model=unet_tiny", "model.upsampling=transposed").flops) == counter.get_total_flops()
