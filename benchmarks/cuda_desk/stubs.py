"""Builds the libraries that torch's CUDA build looks for: the C files of this folder, and functions that return 0."""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = {  # by the beginning of a library's name; all others are generated
    "libcudart.so": ("cudart.c", "memory.c"),
    "libcudnn.so": ("cudnn.c",),
    "libnccl.so": ("nccl.c",),
    "libcuda.so": ("driver.c",),
    "libnvidia-ml.so": ("nvml.c",),
}
OPENED_BY_NAME = "libnvidia-ml.so.1"  # no library names it as needed
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
UNVERSIONED = (  # names of functions, of libraries without versions of symbols
    ("nccl", "libnccl.so"),
    ("nvshmem", "libnvshmem_host.so"),
    ("cusparseLt", "libcusparseLt.so"),
    ("cuFile", "libcufile.so"),
    ("cu", "libcuda.so"),
)


class Library:
    """What is asked of one library: its functions, and the version of its symbols, or ""."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.version = ""


def include_folders(headers: Path) -> list[Path]:
    """Return the folders below `headers` that a compiler searches for CUDA's; none if some are not there."""
    folders = {path.parent for path in headers.rglob("cuda_runtime_api.h")}
    folders |= {path.parent.parent for path in headers.rglob("crt/host_defines.h")}
    has_all = any((folder / "crt").is_dir() for folder in folders) and any(headers.rglob("cuda_runtime_api.h"))
    return sorted(folders) if has_all else []


def build(users: Sequence[Path], headers: Iterable[Path], place: Path) -> None:
    """Build every CUDA library that the `users`, libraries themselves, need, into a folder."""
    place.mkdir(parents=True, exist_ok=True)
    asked = asked_of(users)
    asked[OPENED_BY_NAME] = Library()
    for name, library in asked.items():
        build_one(name, library, headers, place)


def asked_of(users: Sequence[Path]) -> dict[str, Library]:
    """Return what the users ask of each CUDA library, by its name such as libcudart.so.13."""
    found: dict[str, Library] = defaultdict(Library)
    for user in users:
        for name in needed(user):
            if CUDA_LIBRARY.fullmatch(name):
                found[name] = found[name]
    for user in users:
        for function, version in undefined(user):
            name = owner(function, version, found)
            if name is None:
                continue
            found[name].functions.add(function)
            found[name].version = version or found[name].version
    return dict(found)


def needed(user: Path) -> list[str]:
    """Return the names of the libraries that a library is linked with."""
    printed = subprocess.run(["readelf", "-d", user], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", printed)


def undefined(user: Path) -> list[tuple[str, str]]:
    """Return the functions that a library asks of others, each with the version of its symbol or ""."""
    printed = subprocess.run(["nm", "-D", "--undefined-only", user], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-1].replace("@@", "@").partition("@") for line in printed.splitlines()]
    return [(function, version) for function, _, version in symbols]


def owner(function: str, version: str, libraries: Mapping[str, Library]) -> str | None:
    """Return the CUDA library that has a function, None for a function of another library."""
    if version in libraries:
        return version
    if version and version != "NVSHMEM":
        return None
    for beginning, library in UNVERSIONED:
        if function.startswith(beginning):
            return next((name for name in libraries if name.startswith(f"{library}.")), None)
    return None


def build_one(name: str, library: Library, headers: Iterable[Path], place: Path) -> None:
    """Compile a library from its C files, if it has any, and functions that return 0 for the rest."""
    compiler = ["gcc", "-fPIC", "-O1", "-w", "-fno-builtin", *(f"-I{folder}" for folder in headers)]
    rest = library.functions
    objects = []
    for file in next((files for beginning, files in SOURCES.items() if name.startswith(f"{beginning}.")), ()):
        compiled = place / f"{file}.o"
        subprocess.run([*compiler, "-c", FOLDER / file, "-o", compiled], check=True)
        objects.append(compiled)
        rest = rest - defined(compiled)  # by what was compiled: headers may rename functions
    generated = place / f"{name}.c"
    lines = [f"int {function}(void) {{ return 0; }}" for function in sorted(rest)]
    generated.write_text("\n".join(["int desk_stub;", *lines, ""]))
    versions = []
    if library.version:
        path = place / f"{name}.map"
        path.write_text(f"{library.version} {{ global: *; }};\n")
        versions.append(f"-Wl,--version-script={path}")
    linked = ["-shared", f"-Wl,-soname,{name}", *versions, "-o", place / name]
    subprocess.run([*compiler, generated, *objects, *linked], check=True)


def defined(compiled: Path) -> set[str]:
    """Return the names that a compiled file has for others."""
    printed = subprocess.run(
        ["nm", "--defined-only", "-g", compiled], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in printed.splitlines()}
