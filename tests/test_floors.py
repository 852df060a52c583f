"""The layers of the package: imports go down only, and each library stays in its rooms."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "unet3d"
LAYERS = (  # lowest first; `model.geometry` holds plain integers, `data` and `train` stand side by side
    ("errors", "types", "files", "signals", "progress", "ranks", "config"),
    ("model",),
    ("checks", "compose"),
    ("data", "train"),
    ("build",),
    ("memory",),
    ("report",),
    ("run",),
    ("cli", "__main__"),
)
LIBRARIES = {
    "hydra": {"compose", "cli.train"},
    "wandb": {"report.wandb_logger"},
    "tensorboard": {"report.tensorboard_logger"},
    "nibabel": {"data"},
    "nilearn": {"data.synthetic"},
    "monai": {"train.metrics", "data.augment"},
    "matplotlib": {"report"},
    "rich": {"progress", "report.loggers"},
}
WITHOUT_TORCH = (
    *("errors", "types", "signals", "progress", "ranks", "config", "checks", "compose", "model.geometry", "data.cases"),
    *("cli.main", "cli.options", "cli.train", "cli.lifecycle", "cli.sweep"),
)


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


@functools.cache
def modules() -> dict[str, Path]:
    paths = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name: path for name, path in paths.items() if not name.endswith("__init__")}


@functools.cache
def uses(name: str) -> frozenset[str]:
    """The modules of the package that a module imports, also within functions."""
    return frozenset(other for other in modules() if f"unet3d.{other}" in imports(modules()[name]))


def layer(name: str) -> int:
    return next(level for level, rooms in enumerate(LAYERS) if name.partition(".")[0] in rooms)


def test_no_import_goes_up() -> None:
    assert not [f"{name} -> {other}" for name in modules() for other in uses(name) if layer(other) > layer(name)]
    beside = {("data", "train"), ("train", "data")}
    pairs = [(name, other) for name in modules() for other in uses(name)]
    assert not [pair for pair in pairs if (pair[0].partition(".")[0], pair[1].partition(".")[0]) in beside]


def test_no_import_circle() -> None:
    left = {name: uses(name) for name in modules()}
    while free := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in free}
    assert not left


def test_the_house_stays_small() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    assert sum("." not in name for name in modules()) <= 11
    assert len(modules()) <= 75
    assert lines <= 14_700


def test_no_public_name_is_defined_in_more_than_two_modules() -> None:
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in found.items() if len(places) > 2 and name != "main"}


def test_the_prose_is_plain_english() -> None:
    """Words of an older grammar of this project, which readers stumbled over."""
    old = re.compile(
        r"\b(to" r"ld|an" r"ew|men" r"ded?|leave aw" r"ay|came t" r"o|let pa" r"ss|at ha" r"nd|of othe" r"rs)\b"
    )
    root = PACKAGE.parent
    pages = [path for suffix in ("py", "md", "yaml", "html") for path in root.rglob(f"*.{suffix}")]
    ours = [p for p in pages if p.relative_to(root).parts[0] in ("unet3d", "tests", "docs", "configs", "train.py")]
    ours += [root / "README.md", root / "CONTRIBUTING.md", root / "SECURITY.md", root / "data" / "README.md"]
    assert not {str(path): found for path in ours if (found := old.findall(path.read_text()))}


def test_libraries_stay_in_their_rooms() -> None:
    strays = [
        f"{name} imports {library}"
        for name, path in modules().items()
        for library, rooms in LIBRARIES.items()
        if any(i.split(".")[0] == library for i in imports(path)) and not {name, name.partition(".")[0]} & rooms
    ]
    assert not strays


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys; before = {*sys.modules}; import unet3d; print({*sys.modules} - before)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "{'unet3d'}\n"


def test_what_answers_a_typo_loads_no_torch() -> None:
    names = "torch", "monai", "matplotlib", "wandb", "nilearn"
    wanted = ", ".join(f"unet3d.{name}" for name in WITHOUT_TORCH)
    program = f"import sys, {wanted}; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_run_is_imported_without_what_only_some_runs_use() -> None:
    names = "monai", "scipy.ndimage", "scipy.interpolate", "scipy.spatial", "matplotlib", "wandb", "torch._dynamo"
    program = f"import sys, unet3d.run.run; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
