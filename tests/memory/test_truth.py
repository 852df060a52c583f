"""The predicted ledger against the CPU allocator, for each option that a user may set: 16, 32 channels, 32^3, batch 2.

The profiler's `[memory]` events are the CPU allocator's own record of every allocation and release. Unlike a ledger it
holds things that are no operation's result:

- convolution scratch, above all inputs, gradients and weights in oneDNN's blocked layouts;
- one spare map in the backward of batch and instance norm, whose kernel allocates its result twice and drops the first;
- numbers of a few bytes that a kernel makes on its way.

The spare map never sets the allocator's peak, but with the scratch dropped it can stand 256 bytes above the ledger's.
With both dropped, the rows of plain networks below are exact, and those of odd ones within NUMBERS. How large the
scratch is depends on the CPU, so no test says; without oneDNN a convolution unfolds its input into 27 maps, and then
every peak lies in a convolution.

`test_predict.py` holds that a prediction is the ledger of the real run; here it stands for both.
"""

from functools import cache

import pytest
import torch
from allocator import Events, peak_bytes, recorded
from evenly import evenly

from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.ledger import most_held
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique
from unet3d.recomputing.program import Technique
from unet3d.training import optim
from unet3d.training.step import train_step

STEPS = 2  # the optimizer's state appears in the first
MAP = 4 * 2 * 16 * 32**3  # bytes of one float32 map at full resolution
RNG_STATE = 5056  # bytes
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
NORM_BACKWARD = "aten::native_batch_norm_backward"
NUMBERS = 512  # bytes


def config(*overrides: str) -> Config:
    found = compose.compose(["model=unet", "model.features=[16,32]", "data.patch=[32,32,32]", "optim=adam", *overrides])
    found.model.in_channels, found.model.classes = found.model.in_channels or 1, found.model.classes or 3
    return found


def technique(options: Config) -> Technique:
    """Return the schedule of a run, or segments of equal length: choosing them takes many simulations."""
    if not options.ckpt:
        return choose_technique(options, options.model)
    return Technique(evenly(len(build.model(options.model, 0)), int(options.ckpt)))


@cache
def ledger_peak(*overrides: str) -> int:
    found = config(*overrides)
    return most_held(simulate(found, found.model, technique(found), steps=STEPS).ledger.events)


def allocators_record(*overrides: str) -> Events:
    """What the allocator did while a network was built and trained."""
    options = config(*overrides)
    size, channels, classes = (options.batch, *options.data.patch), options.model.in_channels, options.model.classes
    assert channels and classes
    chosen = technique(options)

    def steps() -> None:
        model = build.model(options.model, options.seed)
        loss = build.loss(options, classes, regions=options.model.output_regions)
        policy, optimizer = build.policy(options, "cpu", chosen), optim.optimizer(options.optim, model)
        for _ in range(STEPS):
            image = (options.batch, channels, *options.data.patch)
            batches = [
                Batch(torch.randn(image), torch.zeros(size, dtype=torch.int16)) for _ in range(options.accumulate)
            ]
            train_step(model, loss, optimizer, policy.scaler(), policy, batches, clip=options.optim.clip)
            del batches

    return recorded(steps)


def random_states(record: Events) -> int:
    return sum(event["name"] == "[memory]" and event["args"]["Bytes"] == RNG_STATE for event in record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "segments"),
    [
        (("model.inplace=true", "model.activation=leaky_relu"), 0),
        (("model.inplace=true", "ckpt=2"), 1),  # at the peak one segment waits for its recomputation
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_where_the_peak_lies_in_no_convolution_the_ledger_has_every_byte(
    overrides: tuple[str, ...], segments: int
) -> None:
    """In place on instance norm's view, autograd clones maps in backward: more than a convolution's scratch.

    Scratch depends on the CPU: with AVX2 alone and checkpointing it takes more than those clones.
    """
    record = allocators_record(*overrides)
    assert peak_bytes(record, CONVOLUTIONS) == ledger_peak(*overrides)
    if not segments:
        assert peak_bytes(record) == ledger_peak(*overrides)
    assert random_states(record) == STEPS * 2 * segments  # one in forward, one put aside while recomputing


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.norm=group", "ckpt=3"),
        ("model.norm=batch", "amp=true"),
        ("amp=true", "amp_dtype=fp16", "data.patch=[16,16,16]"),  # PyTorch's own convolution, which is slow
    ],
    ids=" ".join,
)
def test_where_it_lies_in_a_convolution_all_that_the_ledger_lacks_is_scratch(overrides: tuple[str, ...]) -> None:
    record = allocators_record(*overrides)
    truth = peak_bytes(record)
    assert truth > ledger_peak(*overrides) == peak_bytes(record, (NORM_BACKWARD, *CONVOLUTIONS))
    assert peak_bytes(record, [NORM_BACKWARD]) == truth, "the spare map is not what is lacking"


# Each option that changes what a step holds, in networks of odd sizes.
ODD = {
    "deep supervision, accumulated, checkpointed, averaged": "model.features=[8,12,20] model.classes=7 "
    "model.activation=silu model.deep_supervision=true model.strides=[[1,2,2],[2,2,2]] "
    "model.kernels=[[1,3,3],3,3] optim.average=0.99 data.patch=[9,20,28] ckpt=2 batch=1 accumulate=2",
    "batch norm, in place, fp16, checkpointed": "model.features=[6,10] model.classes=4 model.norm=batch "
    "model.activation=leaky_relu model.inplace=true optim=sgd data.patch=[12,14,11] ckpt=3 accumulate=2 amp=true "
    "amp_dtype=fp16",
    "valid, dropout, class weights, ckpt=3": "model.features=[4,8] model.norm=batch_current model.padding=valid "
    "model.widen=second model.dropout=0.3 model.classes=7 model.up_reduce=false optim.average=0.9 optim.clip=null "
    "loss.weights=[1,2,3,4,5,6,7] data.patch=[28,24,24] ckpt=3 batch=1 accumulate=2",
    "no norm, nearest, cross-entropy": "model.features=[5,9] model.norm=none model.activation=silu model.classes=2 "
    "model.upsampling=nearest model.conv_bias=false model.strides=[[3,2,1]] model.kernels=[[3,5,1],[3,3,3]] "
    "optim=adamw optim.average=0.5 loss=ce data.patch=[17,21,29] ckpt=2 batch=3 accumulate=2",
    "the peak in the update": "model.features=[16,256] optim.average=0.99 data.patch=[8,8,16] batch=1",
    "tiles, group norm, residual, trilinear, forty classes": "model.features=[8,16] model.groups=4 model.norm=group "
    "model.classes=40 model.residual=true model.upsampling=trilinear optim=sgd data.patch=[32,20,24] recompute=tiles "
    "batch=1",
    "tiles, batch norm, strided, fp16, dropout, deep supervision": "model.features=[8,16,24] model.norm=batch "
    "model.dropout=0.2 model.downsampling=strided_conv model.deep_supervision=true optim=sgd data.patch=[13,11,16] "
    "recompute=tiles amp=true amp_dtype=fp16 batch=1",
    "lean, batch norm, two input channels, a flat level, residual, bf16, accumulated": "model.features=[6,10] "
    "model.in_channels=2 model.kernels=[[1,3,3],3] model.strides=[[1,2,2]] model.residual=true model.norm=batch "
    "model.activation=leaky_relu optim=adamw data.patch=[7,22,18] recompute=lean accumulate=2 amp=true",
    "auto with a budget, instance norm in place, strides of three, bf16": "model.features=[8,12] "
    "model.inplace=true model.activation=leaky_relu model.strides=[[3,2,1]] model.kernels=[[5,3,1],3] "
    "model.classes=5 data.patch=[27,14,11] recompute=auto budget=0.9MiB amp=true",
    "regions at three scales, weighted, tiles, nearest, swish": "model.features=[4,8,12] model.classes=2 "
    "model.regions=[[1,2],[2]] model.regions_class_order=[1,2] model.deep_supervision=true loss.weights=[1,2] "
    "model.norm=none model.upsampling=nearest model.activation=swish optim=sgd data.patch=[24,16,20] recompute=tiles",
    "twelve regions, whose loss is the peak, lean": "model.features=[2,4] model.classes=12 "
    "model.regions=[[1,2],[2],[3],[4],[5],[6],[7],[8],[9],[10],[11],[12]] "
    "model.regions_class_order=[1,2,3,4,5,6,7,8,9,10,11,12] optim=sgd data.patch=[32,20,24] recompute=lean batch=1",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", ODD.values(), ids=[*ODD])
def test_of_odd_networks_all_that_the_ledger_lacks_is_scratch(words: str) -> None:
    """Sums of gradients above all: autograd adds them in place, but under a ledger it makes a new map for each."""
    overrides = tuple(words.split())
    truth = peak_bytes(allocators_record(*overrides), [NORM_BACKWARD, *CONVOLUTIONS])
    assert truth - NUMBERS <= ledger_peak(*overrides) <= truth


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "maps"), [("instance", 2), ("batch", 0), ("group", 0)])
def test_in_place_costs_two_maps_after_instance_norm_and_nothing_after_the_others(norm: str, maps: int) -> None:
    """Instance norm returns a view; autograd replays an in-place change of a view on clones of the whole."""
    plain, in_place = (ledger_peak(f"model.norm={norm}", f"model.inplace={on}") for on in ("false", "true"))
    assert in_place == plain + maps * MAP
    assert abs(plain - ledger_peak("model.norm=instance", "model.inplace=false")) < 16 * 1024, "but for statistics"


@pytest.mark.slow
def test_an_activation_that_keeps_its_input_keeps_a_third_map() -> None:
    """ReLU keeps only its result, which the next convolution keeps anyway; four units are at full resolution."""
    deep = ("model.norm=group", "model.features=[16,32,64]")
    relu, leaky, silu = (ledger_peak(*deep, f"model.activation={name}") for name in ("relu", "leaky_relu", "silu"))
    assert leaky == silu >= relu + 4 * MAP
    assert ledger_peak(*deep, "model.activation=leaky_relu", "model.inplace=true") == relu
