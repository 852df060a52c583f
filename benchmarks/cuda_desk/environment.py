"""An environment with torch's CUDA build and without a GPU: its place, its packages, its stub libraries."""

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path

from cuda_desk import stubs

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA_TORCH = "libtorch_cuda.so"  # in the folder of a CUDA build, not in that of a CPU build


class Environment:
    """Everything in one folder, which can be used again."""

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()
        self.python = self.place / "venv" / "bin" / "python"
        self.stubs = self.place / "stubs"

    @property
    def torch(self) -> Path:
        """Return the folder of the installed torch."""
        return next((self.place / "venv").glob("lib/python*/site-packages/torch"))

    @property
    def cuda(self) -> str:
        """Return the version of CUDA that torch was built for, such as 13.0. ValueError for a CPU build."""
        if not (self.torch / "lib" / CUDA_TORCH).exists():
            raise ValueError("pip installed a build of torch without CUDA: choose an index that has one (pip config)")
        return self._said("cuda")

    @property
    def headers(self) -> Path:
        """Return the folder of CUDA's headers, of torch's version of CUDA."""
        return self.place / f"headers-{self.cuda}"

    @property
    def version(self) -> str:
        """Return torch's version with that of its build, such as 2.13.0+cu130."""
        return self._said("__version__")

    @property
    def cudnn(self) -> str:
        """Return the version of cuDNN that this torch is installed with, in cuDNN's own writing: 91002 for 9.10.2."""
        (metadata,) = self.torch.parent.glob("torch-*.dist-info/METADATA")
        pinned = re.search(r"^Requires-Dist: nvidia-cudnn-cu\d+==(\d+)\.(\d+)\.(\d+)", metadata.read_text(), re.M)
        assert pinned is not None, "torch does not say its cuDNN"
        major, minor, patch = map(int, pinned.groups())
        return str(major * 10_000 + minor * 100 + patch)

    def make(self, torch: str) -> None:
        """Install torch of that version, what the project needs, and CUDA's headers; build the stubs."""
        if not self.python.exists():
            venv.create(self.place / "venv", with_pip=True)
        if not self._is_installed(torch):
            self._install(*packages_without(ROOT / "constraints.txt", ("torch",)))
            self._install(f"torch=={torch}")  # without its dependencies: the nvidia libraries would win over the stubs
        if not stubs.include_folders(self.headers):
            self._install(*header_packages(self.cuda), f"--target={self.headers}")
        shutil.rmtree(self.stubs, ignore_errors=True)  # those of another torch have other names
        stubs.build(sorted((self.torch / "lib").glob("*.so")), stubs.include_folders(self.headers), self.stubs)

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment of a process on the desk."""
        found = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "CUDA_"))}
        found.setdefault("DESK_CUDNN", self.cudnn)  # torch takes no older one, and chooses kernels by it
        found |= {"LD_LIBRARY_PATH": str(self.stubs), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return found | {"PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "disabled"} | more

    def _said(self, name: str) -> str:
        """Return a value of torch's version.py, which is read and not run: torch is not loaded for it."""
        found = re.search(rf"^{name}\b.*= '(.*)'", (self.torch / "version.py").read_text(), re.MULTILINE)
        assert found is not None, f"torch does not say its {name}"
        return found[1]

    def _is_installed(self, torch: str) -> bool:
        found = list((self.place / "venv").glob("lib/python*/site-packages/torch/version.py"))
        return bool(found) and self.version.partition("+")[0] == torch.partition("+")[0]

    def _install(self, *words: str) -> None:
        command = [self.python, "-m", "pip", "install", "--quiet", "--no-deps", *words]
        subprocess.run(command, check=True)


def packages_without(constraints: Path, names: Iterable[str]) -> list[str]:
    """Return the pinned packages of a constraints file, each `name==version`, but some."""
    lines = [line.strip() for line in constraints.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line.split("==")[0] not in names]


def header_packages(cuda: str) -> list[str]:
    """Return the packages with the headers of a version of CUDA, `13.0`."""
    major, minor = cuda.split(".")
    wish = f">={major}.{minor},<{major}.{int(minor) + 1}"
    if int(major) >= 13:
        return [f"nvidia-cuda-runtime{wish}", f"nvidia-cuda-crt{wish}"]
    return [f"nvidia-cuda-runtime-cu{major}{wish}", f"nvidia-cuda-nvcc-cu{major}{wish}"]
