"""Published networks: the 3D U-Net paper's (Cicek et al. 2016, arXiv:1606.06650), and nnU-Net's ResEnc."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
from torch import Tensor, nn

from unet3d import build
from unet3d.base.types import IGNORE, Batch
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.data.patches import prepare
from unet3d.memory.technique import choose_technique
from unet3d.model import geometry
from unet3d.model.blocks import crop
from unet3d.model.unet import UNet3D
from unet3d.training import optim
from unet3d.training.losses import LossOptions, SegmentationLoss, ce
from unet3d.training.step import train_step

Network = Callable[..., UNet3D]
Options = Callable[..., Model]
PATCH = "data.patch=[132,132,116]"
HEADERS = {path.stem: path.read_text().partition(" parameters")[0] for path in compose.config_folder().glob("model/*")}
COUNTED = {name: header.split()[-1] for name, header in HEADERS.items() if re.search(r"\d{3}$", header)}
PAPERS = ("cicek2016", "cicek2016_no_bn", "cicek2016_2d")


def on_meta(options: Model) -> UNet3D:
    with torch.device("meta"):
        return UNet3D(options)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_as_many_as_the_header_says(options: Options, name: str) -> None:
    assert f"{count(on_meta(options(f'model={name}', PATCH))):,}" == COUNTED[name]
    assert len(COUNTED) == 10


def test_scale_and_shift_of_the_batch_norm_give_the_papers_other_count(options: Options) -> None:
    assert count(on_meta(options("model=cicek2016", "model.norm_affine=true", PATCH))) == 19_074_627


@pytest.mark.parametrize("name", PAPERS)
def test_channel_plan_of_figure_2(options: Options, name: str) -> None:
    """The other columns of the tables differ from it in nothing else but these options."""
    changes = {"cicek2016_no_bn": {"norm": "none"}, "cicek2016_2d": {"kernels": [3, 3, 1], "strides": [2, 2, 1]}}
    model = on_meta(options(f"model={name}", PATCH))
    assert model.options == replace(options("model=cicek2016", PATCH), **changes.get(name, {}))
    modules = [*model.modules()]
    encoder = [(3, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512)]
    decoder = [(768, 256), (256, 256), (384, 128), (128, 128), (192, 64), (64, 64), (64, 3)]
    assert [(m.in_channels, m.out_channels) for m in modules if isinstance(m, nn.Conv3d)] == encoder + decoder
    raised = [(m.in_channels, m.out_channels) for m in modules if isinstance(m, nn.ConvTranspose3d)]
    assert raised == [(512, 512), (256, 256), (128, 128)]
    norm = [] if name == "cicek2016_no_bn" else [nn.BatchNorm3d]
    units = [[type(layer) for layer in m] for m in modules if isinstance(m, nn.Sequential) and hasattr(m, "act")]
    assert units == [[nn.Conv3d, *norm, nn.ReLU]] * 14


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("cicek2016", (132, 132, 116), (44, 44, 28)),
        ("cicek2016_no_bn", (132, 132, 116), (44, 44, 28)),
        ("cicek2016_2d", (132, 92, 1), (44, 4, 1)),
    ],
)
def test_tile_sizes(options: Options, name: str, size: tuple, expected: tuple) -> None:
    model = on_meta(options(f"model={name}", PATCH))
    assert model(torch.empty(1, 3, *size, device="meta")).shape == (1, 3, *expected)


def test_batch_norm_takes_the_current_statistics_in_evaluation_too(network: Network) -> None:
    model = network("model=cicek2016", PATCH, "model.features=[4,4]").requires_grad_(False)
    image = torch.randn(1, 3, 28, 28, 28)
    training, evaluation = model.train()(image), model.eval()(image)
    assert torch.equal(training, evaluation)
    torch.testing.assert_close(model(1 + 2 * image), evaluation, atol=1e-4, rtol=0)
    assert {name.rpartition(".")[2] for name in model.state_dict()} == {"weight", "bias"}


def learn(model: UNet3D, image: Tensor, label: Tensor) -> tuple[Tensor, ...]:
    """The paper's loss with weights of ours, its gradient by the logits and by the parameters."""
    logits = model(image)
    loss = SegmentationLoss(ce, LossOptions(torch.tensor([1.0, 2.0, 0.2])))(logits, label)
    return loss.detach(), *torch.autograd.grad(loss, [logits, *model.parameters()])


def test_unlabelled_voxels_teach_nothing_and_labelled_ones_only_what_they_see(network: Network) -> None:
    """Label 3 is unlabelled. The labelled voxels 0 to 3 along x see the input's voxels 0 to 43."""
    model = network("model=cicek2016_no_bn", PATCH, "model.features=[4,4,4]")
    rng = np.random.default_rng(0)
    stored = np.full((52, 44, 44), 3, dtype=np.uint8)
    stored[20:24] = rng.integers(0, 4, (4, 44, 44))
    case = prepare("kidney", rng.standard_normal((3, 52, 44, 44), np.float32), stored, (1.0, 1.0, 1.0), ignore=3)
    images, labels = case.image[None], case.label[None]
    beyond, within = images.clone(), images.clone()
    beyond[:, :, 44:] += 100
    within[:, :, 36:44] += 100
    loss, by_logits, *by_parameters = learn(model, images, labels)
    labelled = crop(labels, by_logits.shape[2:]) != IGNORE
    assert 0 < labelled.sum() < 64 and torch.equal(by_logits.abs().amax(1) > 0, labelled)
    same, _, *same_by_parameters = learn(model, beyond, labels)
    assert torch.equal(same, loss) and all(map(torch.equal, same_by_parameters, by_parameters))
    assert not torch.equal(learn(model, within, labels)[0], loss)


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
    pattern, replacement = next(pair for pair in THEIR_NAMES if re.match(pair[0], name))
    match = re.match(pattern, name)
    number = int(match.groups()[-1]) - 1 if match.groups() else 0
    start = match.expand(replacement.replace("N", str(number)).replace("-1", str(levels - 2)))
    end = name[match.end() :]
    shortcuts = [end.replace("project.", f"skip.{index}.") for index in (1, 0)]  # after the mean; without one
    return next(start + end for end in shortcuts if start + end in theirs)


def take_weights(ours: UNet3D, theirs: nn.Module) -> None:
    """Fill our network with the weights of the package's."""
    weights = theirs.state_dict()
    names = {name for name, _ in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        there = their_name(name, weights, len(ours.options.features))
        names.remove(there)
        weight = weights[there]
        if re.match(r"up\d+\.block\.conv1\.conv\.weight", name):
            weight = weight.roll(len(weight), 1)  # they join the skip behind, we before
        parameter.data.copy_(weight)
    assert not names


@pytest.mark.parametrize(
    "words",
    [
        ("model=nnunet_resenc_m", NARROW),
        ("model=nnunet_resenc_l", NARROW, *FLAT),
        ("model=nnunet_resenc_l", "model.features=[4,8,8]", "model.blocks=[2,1,1]", "model.strides=1"),
    ],
    ids=" ".join,
)
def test_logits_are_those_of_the_package_with_its_weights(network: Network, words: tuple) -> None:
    ours = network("data.patch=[64,64,32]", *words)
    theirs = package_network(ours.options).train()
    take_weights(ours, theirs)
    image = torch.randn(1, 1, 64, 64, 32)
    torch.testing.assert_close([*ours(image)], [*theirs(image)], atol=1e-5, rtol=0)


def test_a_block_of_these_networks_alone_begins_as_its_shortcut(network: Network) -> None:
    block = network("model=nnunet_resenc_m", NARROW, "model.inplace=false").down1.block.block1
    x = torch.randn(1, 4, 8, 8, 8)
    assert torch.equal(block(x), nn.functional.leaky_relu(block.project(x)))
    assert network("model=unet_tiny", "model.residual=true").inc.block.conv2.norm.weight.all()


@pytest.mark.slow
def test_a_training_that_recomputes_has_the_same_losses_to_rounding() -> None:
    levels = ("model.features=[4,8,12]", "model.blocks=[1,3,2]", "model.kernels=3", "model.strides=2")
    small = (*levels, "model.in_channels=1", "model.classes=3", "data.patch=[32,16,16]", "batch=1")
    losses = []
    for word in ("ckpt=0", "recompute=lean"):
        config = compose.compose(["model=nnunet_resenc_m", *small, word])
        policy = build.policy(config, "cpu", choose_technique(config, config.model))
        model, loss, scaler = build.model(config.model, config.seed), build.loss(config, 3), policy.scaler()
        optimizer = optim.optimizer(config.optim, model)
        torch.manual_seed(0)
        for _ in range(3):
            batch = Batch(torch.randn(1, 1, 32, 16, 16), torch.randint(0, 3, (1, 32, 16, 16)).short())
            losses.append(train_step(model, loss, optimizer, scaler, policy, [batch]).loss)
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-5) and len({*losses[:3]}) == 3, "something was learned"
