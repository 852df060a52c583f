"""Numbers and texts that rearranging the code must not change: python tests/bench/oracle.py FILE [--compare FILE]

Writes to FILE, a JSON, all by public commands and functions: predicted peaks, phases and categories of 60 configs on
the CPU and on CUDA (exact integers), losses of three short trainings, predicted bytes and hashes of gradients of 12
networks with `unet3d.recompute`, hashes of six prepared data sets, and the texts of five run folders. `--compare`
prints each value that differs from those of another FILE, made before a change on the same machine, and ends with 1 if
any does; names that only FILE has are not compared. `--only NAME` makes one section; all take 12 minutes of one core.

tests/golden/numbers.json has what is equal on every machine. `--golden` compares with it too, `--write` makes it again.
It leaves out losses and hashes of gradients and voxels, whose last bits are the CPU's, and mixed precision on the CPU,
which is predicted in another way where the CPU has no bf16.
"""

import argparse
import hashlib
import json
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from torch import Tensor, nn

import unet3d
from unet3d.config.compose import compose
from unet3d.data.prepare import prepare_data
from unet3d.recomputing.module import schedules_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "numbers.json"
SMALL = ("wandb.mode=disabled", "workers=0", "data.phantom.shape=[40,40,24]", "data.patch=[32,32,16]")
TINY = (*SMALL, "model=unet_tiny", "model.features=[4,8]", "data.phantom.cases=5", "batch=2", "device=cpu")

NETWORKS_OF_CONFIGS = (
    "model=unet_small",
    "model=unet_tiny",
    "model=unet_tiny model.norm=batch model.upsampling=trilinear",
    "model=unet_tiny model.norm=instance model.blocks=[2,2,2] model.downsampling=strided_conv",
    "model=unet_tiny model.deep_supervision=true model.activation=swish",
    "model=cicek2016 data.patch=[92,92,92] data.phantom.shape=[92,92,92] data.phantom.cases=2",
)
TECHNIQUES = (
    "",
    "amp=true",
    "ckpt=2",
    "ckpt=2 amp=true",
    "recompute=lean",
    "recompute=tiles",
    "recompute=lean amp=true optim=sgd",
    "batch=4 optim=sgd accumulate=2",
    "optim=adam loss=ce",
    "loss=dice optim.clip=null",
)
TRAININGS = {
    "plain": (),
    "half precision, checkpoints": ("amp=true", "ckpt=2", "loss=ce"),
    "recomputed, accumulated": ("recompute=tiles", "accumulate=2", "optim=sgd"),
}


def run(folder: Path, *words: str) -> int:
    """Run `python train.py WORDS` in the folder, in a fork that has torch loaded; return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["train.py", *words]
    code = 1
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def peaks(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield what memory.json predicts of each network with each technique."""
    for device in ("cpu", "cuda"):
        for network in NETWORKS_OF_CONFIGS:
            for technique in TECHNIQUES:
                words = f"device={device} {network} {technique}".strip()
                folder = place / hashlib.sha256(words.encode()).hexdigest()[:12]
                code = run(folder, *SMALL, *words.split(), "dry_run=true", "hydra.run.dir=run")
                written = folder / "run" / "memory.json"
                if code or not written.exists():
                    yield words, {"code": code, "error": (folder / "err").read_text()[-300:]}
                    continue
                memory = json.loads(written.read_text())
                yield words, {name: memory.get(name) for name in ("parameters", "predicted", "validation", "technique")}


def losses(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield the losses and scores of three trainings."""
    for name, words in TRAININGS.items():
        folder = place / name.replace(" ", "_")
        code = run(folder, *TINY, "steps=12", "eval_every=6", *words, "hydra.run.dir=run")
        if code:
            yield name, {"code": code, "error": (folder / "err").read_text()[-300:]}
            continue
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        for record in records:
            kept = {key: value for key, value in record.items() if re.search("loss|dice|hd95", key)}
            if kept:
                yield f"{name}, step {record['step']}", kept


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Return 12 networks and the images (N C D H W) that they get."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
    from monai.networks import nets
    from pytorch3dunet.unet3d.model import ResidualUNetSE3D

    from unet3d.model.unet import UNet3D

    def ours(*words: str) -> Callable[[], nn.Module]:
        options = compose(["model=unet_tiny", "model.features=[4,8,8]", *words]).model
        return lambda: UNet3D(replace(options, in_channels=1, classes=3))

    def dyn() -> nn.Module:
        kernels, strides = [3, 3, 3], [1, 2, 2]
        return nets.DynUNet(3, 1, 3, kernels, strides, strides[1:], filters=[4, 6, 8], norm_name="INSTANCE")

    def nnunet(kind: type[nn.Module], blocks: object, decoder: object) -> Callable[[], nn.Module]:
        options = {"norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU, "conv_bias": True}
        return lambda: kind(1, 3, [4, 6, 8], nn.Conv3d, 3, [1, 2, 2], blocks, 3, decoder, **options)

    return {
        "UNet3D": (ours("model.norm=instance"), (2, 1, 16, 16, 12)),
        "UNet3D, batch norm": (ours("model.norm=batch", "model.upsampling=trilinear"), (2, 1, 16, 16, 12)),
        "UNet3D, blocks": (ours("model.blocks=[1,2,1]", "model.downsampling=strided_conv"), (1, 1, 16, 12, 16)),
        "SegResNet": (lambda: nets.SegResNet(3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)), (1, 1, 16, 16, 16)),
        "UNet": (lambda: nets.UNet(3, 1, 3, (4, 8), (2,), num_res_units=2), (2, 1, 16, 12, 16)),
        "DynUNet": (dyn, (1, 1, 16, 16, 16)),
        "BasicUNet": (lambda: nets.BasicUNet(3, 1, 3, features=(4, 4, 4, 4, 4, 4)), (1, 1, 32, 32, 32)),
        "AttentionUnet": (lambda: nets.AttentionUnet(3, 1, 3, (4, 8), (2,)), (1, 1, 16, 16, 12)),
        "UNETR": (lambda: nets.UNETR(1, 3, (16, 16, 16), 4, 8, 8, 2), (1, 1, 16, 16, 16)),
        "PlainConvUNet": (nnunet(PlainConvUNet, 2, 2), (1, 1, 16, 16, 16)),
        "ResidualEncoderUNet": (nnunet(ResidualEncoderUNet, [1, 2, 2], [1, 1]), (1, 1, 16, 16, 16)),
        "ResidualUNetSE3D": (
            lambda: ResidualUNetSE3D(1, 2, f_maps=[4, 8], num_groups=2, num_levels=2),
            (1, 1, 16, 16, 16),
        ),
    }


def recomputed(_: Path) -> Iterator[tuple[str, Any]]:
    """Yield predicted bytes of a step, and hashes of logits and gradients, with `unet3d.recompute`."""
    for name, (make, size) in networks().items():
        for plan in ("lean", "tiles"):
            torch.manual_seed(0)
            network = unet3d.recompute(make().train(), plan=plan)
            predicted = unet3d.memory.predict(network, size)
            image = torch.randn(size, generator=torch.Generator().manual_seed(1))
            outputs = network(image)
            logits = outputs if isinstance(outputs, Tensor) else outputs[0]
            logits.square().mean().backward()
            gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
            schedule = schedules_of(network).program(image).schedule
            yield (
                f"{name}, {plan}",
                {
                    "peak bytes": predicted.peak_bytes,
                    "hash": _hash([logits.detach(), *gradients]),
                    "schedule": [len(schedule.instructions), schedule.peak_bytes, round(schedule.work, 6)],
                },
            )


def _hash(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _nnunet(root: Path, channels: Sequence[str]) -> Path:
    """Write a raw data set of nnU-Net's layout, five cases of different voxel sizes."""
    draw = np.random.default_rng(0)
    for case in range(5):
        shape = (18 + case, 16, 12)
        affine = np.diag([1.0 + 0.1 * case, 1, 1.5, 1])
        where = draw.normal(size=shape)
        label = (where > 0.5).astype(np.uint8) + (where > 1)
        files = {f"labelsTr/c{case}.nii.gz": label}
        for channel in range(len(channels)):
            voxels = 100 * label + draw.normal(50, 20, shape)
            files[f"imagesTr/c{case}_{channel:04d}.nii.gz"] = voxels.astype(np.float32)
        for name, voxels in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(voxels, affine), root / name)
    info = {
        "channel_names": {str(index): name for index, name in enumerate(channels)},
        "labels": {"background": 0, "one": 1, "two": 2},
        "numTraining": 5,
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(info))
    return root


def prepared(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield hashes of the images and labels that the network sees, case by case."""
    one, two = _nnunet(place / "one", ["CT"]), _nnunet(place / "two", ["T1", "T2"])
    sets = {
        "phantom": ("data=phantom", "data.phantom.cases=5"),
        "CT": ("data=nnunet", f"data.root={one}", "data.intensity=ct"),
        "two channels, resampled": ("data=nnunet", f"data.root={two}", "data.spacing=[1,1,1]"),
        "from disk": ("data=nnunet", f"data.root={two}", "data.cache=disk", f"data.cache_root={place / 'cache'}"),
        "merged classes": ("data=nnunet", f"data.root={one}", "data.label_map={1:[1,2]}", "data.classes=[bg,all]"),
        "sparse slices": ("data=nnunet", f"data.root={two}", "data.sparse=[2,2,2]"),
    }
    for name, words in sets.items():
        data = prepare_data(compose([*SMALL, *words]).data)
        for case in (*data.train, *data.val):
            read = data.read_train if case in data.train else data.read_val
            ready = read(case)
            image = ready.image.double()
            yield (
                f"{name}, {case.id}",
                {
                    "image": _hash([ready.image]),
                    "label": _hash([ready.label]),
                    "channels, voxels": [*image.shape],
                    "labels": torch.stack(ready.label.unique(return_counts=True)).tolist(),
                    "mean, sd": [round(image.mean().item(), 3) + 0.0, round(image.std().item(), 3)],
                },
            )


NAMES, ENDINGS = ("STATUS", "out", "err"), (".csv", ".html", ".md", ".tex", ".txt", ".yaml")
RUN_FOLDERS = {
    "finished": ("steps=4", "eval_every=2"),
    "dry": ("steps=4", "dry_run=true"),
    "recomputed, in half precision": ("steps=4", "recompute=lean", "amp=true"),
    "cross-validation": ("-m", "steps=2", "data.fold=0,1", "data.folds=2", "hydra.sweep.dir=run"),
    "out of options": ("steps=4", "optim.lr=-1"),
}


def folders(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield the texts of run folders and of what was printed, without times, ids, versions and seconds."""
    for name, words in RUN_FOLDERS.items():
        folder = place / re.sub(r"\W+", "_", name)
        where = () if "-m" in words else ("hydra.run.dir=run",)
        yield f"{name}: exit code", run(folder, *TINY, *words, *where)
        for file in sorted(folder.rglob("*")):
            if file.name in NAMES or file.suffix in ENDINGS:
                yield f"{name}: {file.relative_to(folder)}", _plain(file.read_text(), place)


def _plain(text: str, place: Path) -> str:
    text = text.replace(str(place), "PLACE").replace(str(ROOT), "ROOT")
    text = re.sub(r"data:image/[^\"')]+", "PICTURE", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[ T_]\d\d[:-]\d\d([:-]\d\d)?(\.\d+)?", "TIME", text)
    text = re.sub(r"\d+(\.\d+)?(e-\d+)?(?= ?(s|ms|seconds?)\b)", "N", text)
    return re.sub(r"\b[0-9a-f]{7,64}\b", "HASH", text)


def figures(memory: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction in memory.json as golden numbers: bytes, and a hash of those that others are sums of."""
    predicted = memory["predicted"]
    rest = {name: predicted[name] for name in ("phase_categories", "phase_ends", "levels", "layers", "state")}
    return {
        "parameters": memory["parameters"],
        "peak": {name: size for name, size in predicted.items() if name.endswith("_bytes")},
        "moment": predicted["moment"]["words"],
        "phases": {name: [*peaks.values()] for name, peaks in predicted["phases"].items()},
        "categories": predicted["categories"],
        "layers": {layer["module"]: layer["bytes"] for layer in predicted["layers"]},
        "all of it": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16],
    }


def golden(result: dict[str, Any]) -> dict[str, Any]:
    """Return what is equal on every machine."""
    found: dict[str, Any] = {}
    for words, memory in result.get("peaks", {}).items():
        if not words.startswith("device=cpu") or "amp=true" not in words:
            found.setdefault("peaks", {})[words] = memory if "error" in memory else figures(memory)
    for section, left_out in (("recomputed", {"hash"}), ("prepared", {"image", "label"})):
        for name, values in result.get(section, {}).items():
            kept = {key: value for key, value in values.items() if key not in left_out}
            found.setdefault(section, {})[name] = kept
    return found


def _lines(found: dict[str, Any]) -> str:
    """Return JSON with a line for each number or short list of numbers."""
    sections = []
    for section, entries in found.items():
        blocks = []
        for name, values in entries.items():
            lines = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
            blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


SECTIONS = {function.__name__: function for function in (peaks, losses, recomputed, prepared, folders)}


def differences(before: dict[str, Any], after: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield a line for each value of `before` that differs."""
    for name, old in before.items():
        new = after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{path}{name} / ")
        elif old != new:
            yield f"{path}{name}: {old!r} -> {new!r}"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--golden", action="store_true", help="compare with tests/golden/numbers.json")
    parser.add_argument("--write", action="store_true", help="make tests/golden/numbers.json again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    for name in [arguments.only] if arguments.only else SECTIONS:
        with tempfile.TemporaryDirectory() as place:
            result[name] = dict(SECTIONS[name](Path(place)))
    arguments.file.write_text(json.dumps(result, indent=1))
    kept = json.loads(GOLDEN.read_text())
    lines: list[str] = []
    if arguments.compare:
        before = json.loads(arguments.compare.read_text())
        lines += differences({name: before.get(name, {}) for name in result}, result)
    if arguments.golden:
        found = golden(result)
        lines += differences({name: kept[name] for name in found}, found)
    if arguments.write:
        GOLDEN.write_text(_lines(kept | golden(result)))
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
