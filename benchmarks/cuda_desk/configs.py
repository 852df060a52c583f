"""The configurations of the desk's tables: words of a command line, and the patch that they train on."""

from typing import NamedTuple

SHORT = {
    "bf16": "amp=true amp_dtype=bf16",
    "fp16": "amp=true amp_dtype=fp16",
    "lean": "recompute=lean",
    "tiles": "recompute=tiles",
}


class Row(NamedTuple):
    """One configuration, with 1 channel, 3 classes and, unless the words say otherwise, batch 2."""

    section: str
    words: str  # `bf16` and others of SHORT stand for options
    patch: str = "32,32,32"  # small, so that each byte shows

    @property
    def options(self) -> list[str]:
        """Return the words of the command line."""
        return " ".join(SHORT.get(word, word) for word in self.words.split()).split()


def rows(section: str, common: str, text: str, patch: str = "32,32,32") -> list[Row]:
    """Return a row for each line of a text; `common` are words of all of them."""
    return [Row(section, f"{common} {line.strip()}".strip(), patch) for line in text.strip().splitlines()]


PLANS = """
    bf16
    bf16 lean
    bf16 tiles
"""

LEVERS = rows(
    "Precision, norms and ways to save memory",
    "model.features=[16,32,64]",
    """
    amp=false
    bf16
    fp16
    model.norm=batch
    model.norm=batch bf16
    model.norm=batch fp16
    model.norm=group
    model.norm=group bf16
    model.norm=none
    lean
    lean bf16
    tiles
    tiles bf16
    ckpt=2
    ckpt=2 bf16
    ckpt=4 fp16
    """,
)

OPTIONS = rows(
    "One option each",
    "model.features=[8,16]",
    """
    model.activation=leaky_relu bf16
    model.activation=leaky_relu model.inplace=true fp16
    model.activation=leaky_relu model.inplace=true model.norm=batch
    model.activation=prelu
    model.activation=prelu bf16
    model.activation=silu bf16
    model.activation=swish bf16
    model.activation=swish_lean fp16
    model.residual=true bf16
    model.dropout=0.2 bf16
    model.dropout=0.2 ckpt=2
    model.upsampling=trilinear
    model.upsampling=trilinear bf16
    model.upsampling=nearest fp16
    model.norm=batch_current bf16
    model.conv_bias=false
    model.norm_affine=false
    optim=adam
    optim=sgd
    optim.average=0.99
    optim.average=0.99 fp16
    optim.clip=null
    accumulate=2 bf16
    batch=1 bf16
    batch=4
    loss.weights=[1,2,3]
    loss=dice
    loss=ce loss.batch_dice=false
    """,
) + rows(
    "One option each",
    "model.features=[8,16,32]",
    """
    model.deep_supervision=true bf16
    model.deep_supervision=true lean bf16
    model.deep_supervision=true tiles
    model.downsampling=strided_conv model.residual=true
    """,
)

MIXTURES = rows(
    "Mixtures",
    "model.features=[8,16] model.groups=4",
    """
    model.norm=instance model.activation=relu lean model.dropout=0.1
    model.norm=instance model.activation=relu lean accumulate=2
    model.norm=instance model.activation=leaky_relu bf16 tiles batch=1
    model.norm=instance model.activation=prelu fp16 lean accumulate=2
    model.norm=instance model.activation=silu tiles model.residual=true
    model.norm=instance model.activation=swish bf16 lean batch=1
    model.norm=instance model.activation=swish_lean fp16 tiles
    model.norm=instance model.activation=swish_lean fp16 tiles model.upsampling=nearest
    model.norm=batch model.activation=relu ckpt=2 model.residual=true
    model.norm=batch model.activation=leaky_relu bf16 lean accumulate=2
    model.norm=batch model.activation=leaky_relu bf16 lean model.residual=true
    model.norm=batch model.activation=prelu fp16 ckpt=2 model.upsampling=nearest
    model.norm=batch model.activation=silu lean model.widen=second
    model.norm=batch model.activation=swish bf16 ckpt=2 batch=1
    model.norm=batch model.activation=swish_lean fp16 lean model.conv_bias=false
    model.norm=group model.activation=relu tiles model.downsampling=strided_conv
    model.norm=group model.activation=leaky_relu bf16 ckpt=2 batch=1
    model.norm=group model.activation=prelu fp16 tiles model.widen=second
    model.norm=group model.activation=prelu fp16 tiles model.norm_affine=false
    model.norm=group model.activation=silu ckpt=2 model.up_reduce=false
    model.norm=group model.activation=swish bf16 tiles model.widen=second
    model.norm=group model.activation=swish_lean fp16 ckpt=2
    model.norm=none model.activation=relu model.downsampling=strided_conv
    model.norm=none model.activation=leaky_relu bf16 tiles model.widen=second
    model.norm=none model.activation=prelu fp16 model.widen=second
    model.norm=none model.activation=silu tiles
    model.norm=none model.activation=silu tiles model.widen=second
    model.norm=none model.activation=swish bf16 model.widen=second
    model.norm=none model.activation=swish_lean fp16 tiles
    model.norm=batch_current model.activation=relu tiles model.up_reduce=false
    model.norm=batch_current model.activation=leaky_relu bf16 model.downsampling=strided_conv
    model.norm=batch_current model.activation=prelu fp16 tiles model.upsampling=trilinear
    model.norm=batch_current model.activation=silu batch=1
    model.norm=batch_current model.activation=swish bf16 tiles
    model.norm=batch_current model.activation=swish bf16 tiles model.residual=true
    model.norm=batch_current model.activation=swish_lean fp16 model.upsampling=trilinear
    """,
)

NETWORKS = (
    rows(
        "Networks",
        "",
        """
        model=unet_small ckpt=2 bf16
        model=unet_small ckpt=2 fp16
        model=unet
        model=unet lean
        model=unet tiles
        model=unet bf16
        model=unet bf16 ckpt=2
        model=unet bf16 ckpt=4
        model=unet bf16 lean
        model=unet bf16 tiles
        model=unet bf16 accumulate=4
        model=unet bf16 model.deep_supervision=true
        model=unet bf16 model.norm=batch
        model=unet fp16 model.norm=batch
        model=nnunet_hippocampus bf16
        model=nnunet_hippocampus fp16
        model=nnunet_hippocampus bf16 lean
        model=nnunet_hippocampus bf16 tiles
        model=forum_32 bf16
        model=forum_small
        """,
        "64,64,64",
    )
    + rows(
        "Networks",
        "model=nnunet_hippocampus bf16 optim=sgd",
        """
        model.deep_supervision=true
        lean
        tiles
        """,
        "96,96,96",
    )
    + rows("Networks", "", "model=cicek2016 batch=1", "132,132,116")
)

FIELD = [
    *rows("Networks of MONAI", "model.path=field_networks:dynunet", PLANS, "192,160,64"),
    *rows("Networks of MONAI", "model.path=field_networks:segresnet batch=1", PLANS, "224,224,144"),
    *rows("Networks of MONAI", "model.path=field_networks:basic_unet batch=8 model.classes=2", PLANS, "96,96,96"),
    *rows("Networks of MONAI", "model.path=field_networks:unet batch=8 model.classes=2", PLANS, "96,96,96"),
    *rows("Networks of MONAI", "model.path=field_networks:vnet model.classes=2", PLANS, "128,128,64"),
    *rows("Networks of MONAI", "model.path=field_networks:unetr batch=4 model.classes=14", PLANS, "96,96,96"),
]

ROWS = LEVERS + OPTIONS + MIXTURES + NETWORKS + FIELD

COUNTED = rows(
    "Counted",
    "",
    """
    model=unet
    model=unet bf16
    model=unet fp16
    model=unet bf16 accumulate=4
    model=unet bf16 model.norm=batch
    model=unet bf16 ckpt=2
    model=unet bf16 lean
    model=unet bf16 tiles
    model=nnunet_hippocampus bf16
    model=nnunet_hippocampus bf16 lean
    model=nnunet_hippocampus bf16 tiles
    model=nnunet_hippocampus model.norm=batch
    model=unet bf16 model.norm=group model.activation=swish_lean model.upsampling=trilinear loss.weights=[1,2,3]
    model=unet_small bf16 model.norm=none model.activation=prelu model.upsampling=nearest optim=sgd model.dropout=0.2
    model=unet_small model.activation=silu model.downsampling=strided_conv model.residual=true optim=adam loss=dice
    """,
    "64,64,64",
) + rows(
    "Counted",
    "model=unet bf16",
    """
    batch=2
    lean
    tiles
    """,
    "128,128,128",
)
