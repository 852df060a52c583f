"""nnU-Net's ResEnc networks: their numbers of parameters, and the logits of the package that nnU-Net has them from."""

import re
from collections.abc import Callable

import pytest
import torch
from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
from torch import Tensor, nn

from unet3d import build
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.memory.technique import choose_technique
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.training import optim
from unet3d.training.step import train_step

PRESETS = {"nnunet_resenc_m": 102_350_575, "nnunet_resenc_l": 102_350_575}  # with a channel and three classes
NARROW = "model.features=[4,8,12,16,20,20]"
FLAT = ("model.kernels=[[3,3,1],[3,3,1],3,3,3,3]", "model.strides=[[2,2,1],[2,2,1],2,2,[1,2,2]]")
THEIR_NAMES = (  # of parts of our names, and what they are called in the package; N is one less than our number
    (r"^inc\.block\.stem\.", "encoder.stem.convs.0."),
    (r"^inc\.block\.block(\d+)\.", "encoder.stages.0.blocks.N."),
    (r"^down(\d+)\.block\.block(\d+)\.", r"encoder.stages.\1.blocks.N."),
    (r"^up(\d+)\.up\.", "decoder.transpconvs.N."),
    (r"^up(\d+)\.block\.conv1\.", "decoder.stages.N.convs.0."),
    (r"^up(\d+)\.head\.", "decoder.seg_layers.N."),
    (r"^outc\.conv\.", "decoder.seg_layers.-1."),
)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def package_network(model: Model) -> nn.Module:
    """Return the network that nnU-Net makes of a plan with these options."""
    levels = len(model.features)
    return ResidualEncoderUNet(
        *(model.in_channels, levels, list(model.features), nn.Conv3d),
        kernel_sizes=geometry.kernels(model),
        strides=[geometry.ONES, *geometry.strides(model)],
        n_blocks_per_stage=list(model.blocks or []),
        num_classes=model.classes,
        n_conv_per_stage_decoder=[1] * (levels - 1),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )


def their_name(name: str, theirs: dict[str, Tensor], levels: int) -> str:
    """Return what the package calls a parameter of ours."""
    for pattern, replacement in THEIR_NAMES:
        match = re.match(pattern, name)
        if match is None:
            continue
        number = int(match.groups()[-1]) - 1 if match.groups() else 0
        start = match.expand(replacement.replace("N", str(number)).replace("-1", str(levels - 2)))
        end = name[match.end() :]
        shortcuts = [end.replace("project.", f"skip.{index}.") for index in (1, 0)]  # after the mean; without one
        return next(start + end for end in shortcuts if start + end in theirs)
    raise AssertionError(f"{name} has no name in the package")


def take_weights(ours: UNet3D, theirs: nn.Module) -> None:
    """Fill our network with the weights of the package's."""
    weights = theirs.state_dict()
    names = dict.fromkeys(name for name, _ in theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        there = their_name(name, weights, len(ours.options.features))
        del names[there]
        weight = weights[there]
        if re.match(r"up\d+\.block\.conv1\.conv\.weight", name):
            weight = weight.roll(len(weight), 1)  # they join the skip behind, we before
        parameter.data.copy_(weight)
    assert not names


@pytest.mark.parametrize(("name", "expected"), PRESETS.items())
def test_parameters_of_a_preset(options: Callable[..., Model], name: str, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(UNet3D(options(f"model={name}"))) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_the_package_has_as_many_parameters(options: Callable[..., Model], name: str) -> None:
    model = options(f"model={name}", in_channels=4, classes=5)
    with torch.device("meta"):
        assert parameters(UNet3D(model)) == parameters(package_network(model))


@pytest.mark.parametrize(
    "words",
    [
        ("model=nnunet_resenc_m", NARROW),
        ("model=nnunet_resenc_l", NARROW, *FLAT),
        ("model=nnunet_resenc_l", "model.features=[4,8,8]", "model.blocks=[2,1,1]", "model.strides=1"),
    ],
    ids=" ".join,
)
def test_logits_are_those_of_the_package_with_its_weights(network: Callable[..., UNet3D], words: tuple) -> None:
    ours = network("data.patch=[64,64,32]", *words)
    theirs = package_network(ours.options).train()
    take_weights(ours, theirs)
    image = torch.randn(1, 1, 64, 64, 32)
    with torch.no_grad():
        for logits, expected in zip(ours(image), theirs(image), strict=True):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(33, 17, 5), (31, 40, 24), (9, 8, 5), (64, 32, 50)])
@pytest.mark.parametrize("downsampling", ["max_pool", "strided_conv"])
def test_blocks_return_the_size_of_any_input(network: Callable[..., UNet3D], size: tuple, downsampling: str) -> None:
    words = ("model.features=[2,4,4,4]", "model.blocks=[1,2,1,1]", "model.norm=none")
    model = network("model=unet_tiny", *words, f"model.downsampling={downsampling}")
    assert model(torch.randn(1, 1, *size)).shape == (1, 3, *size)


def test_a_block_begins_as_its_shortcut(network: Callable[..., UNet3D]) -> None:
    block = network("model=nnunet_resenc_m", NARROW, "model.inplace=false").down1.block.block1
    x = torch.randn(1, 4, 8, 8, 8)
    mean = nn.functional.avg_pool3d(x, 2)
    assert torch.equal(block.project(x), block.project.norm(block.project.conv(mean)))
    assert torch.equal(block(x), nn.functional.leaky_relu(block.project(x)))


def test_other_networks_have_no_zero_scale(network: Callable[..., UNet3D]) -> None:
    model = network("model=unet_tiny", "model.residual=true")
    assert all(parameter.all() for name, parameter in model.named_parameters() if name.endswith("norm.weight"))


def losses(*words: str, steps: int = 3) -> list[float]:
    """Return the loss of each step of a training of a preset with half of its levels."""
    levels = ("model.features=[4,8,12]", "model.blocks=[1,3,2]", "model.kernels=3", "model.strides=2")
    small = (*levels, "model.in_channels=1", "model.classes=3", "data.patch=[32,16,16]", "batch=1")
    config = compose.compose(["model=nnunet_resenc_m", *small, *words])
    policy = build.policy(config, "cpu", choose_technique(config, config.model))
    model = build.model(config.model, config.seed)
    optimizer = optim.optimizer(config.optim, model)
    loss = build.loss(config, 3)
    scaler = policy.scaler()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        image = torch.randn(1, 1, 32, 16, 16, generator=generator)
        batches.append(Batch(image, torch.randint(0, 3, (1, 32, 16, 16), generator=generator).short()))
    results = [train_step(model, loss, optimizer, scaler, policy, [batch]) for batch in batches]
    return [result.loss for result in results]


@pytest.mark.slow
def test_a_training_that_recomputes_has_the_same_losses_to_rounding() -> None:
    plain = losses()
    assert len(set(plain)) == len(plain), "nothing was learned"
    assert losses("recompute=lean") == pytest.approx(plain, abs=1e-5)
