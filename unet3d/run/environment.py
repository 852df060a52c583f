"""env.json: versions, the device and how torch computes; nothing that names the machine or its user."""

import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.base.errors import UserError
from unet3d.base.files import read_text

if TYPE_CHECKING:
    import torch

PACKAGES = ("unet3d", "torch", "monai", "hydra-core", "nibabel", "numpy", "scipy", "wandb")
SOURCE = Path(__file__).resolve().parents[2]  # of this package, where it is not installed
MAX_HEAD_BYTES = 2**12  # of a file of git that names one commit


def environment(device: "torch.device") -> dict[str, Any]:
    """Return the contents of env.json for a run on this device."""
    import torch

    values: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        **dict.fromkeys(PACKAGES),
        "commit": commit(SOURCE),
    }
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # unet3d run from a checkout that was never installed
            values[name] = metadata.version(name)
    values["device"] = device.type
    values["threads"] = torch.get_num_threads()
    values["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return values | (_cpu() if device.type == "cpu" else _gpu(device))


def _cpu() -> dict[str, Any]:
    import torch

    from unet3d.model.half_precision import emulates_bf16

    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": f"{capability}, bf16 emulated" if emulates_bf16() else capability}


def _gpu(device: "torch.device") -> dict[str, Any]:
    import torch

    precisions = {
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "matmul": torch.backends.cuda.matmul.fp32_precision,
    }
    return {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": ", ".join(name for name, precision in precisions.items() if precision == "tf32") or "off",
    }


def commit(tree: Path) -> str | None:
    """Return the commit that is checked out in a source tree, without changes since; None where there is no commit.

    Git is not run: its config can name code.
    """
    try:
        git = tree / ".git"
        if git.is_file():  # of a second work tree: "gitdir: PATH"
            git = tree / _line(git).removeprefix("gitdir:").strip()
        head = _line(git / "HEAD")
        branch = head.removeprefix("ref:").strip()
        if branch != head:
            shared = git / (_line(git / "commondir") or ".")
            packed = re.search(f"^([0-9a-f]+) {re.escape(branch)}$", read_text(shared / "packed-refs"), re.MULTILINE)
            head = _line(shared / branch) or (packed[1] if packed else "")
    except (UserError, OSError, ValueError):  # a file that cannot be read
        return None
    return head if re.fullmatch("[0-9a-f]{40,64}", head) else None


def _line(path: Path) -> str:
    return read_text(path, MAX_HEAD_BYTES).strip()
