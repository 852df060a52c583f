"""The layers of the package: imports go down only, and each library stays in its rooms."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "unet3d"
FACE = "unet3d"  # the package itself: what `import unet3d` offers
# Lowest first. `data` and `training` stand side by side; the format of a run folder stands below `report`.
LAYERS = (
    ("base",),
    ("config.schema",),
    ("model",),
    ("config",),
    ("recomputing",),
    ("data", "training"),
    ("build",),
    ("memory",),
    ("planning",),
    ("run.run_folder", "run.record"),
    ("report",),
    ("run",),
    ("cli", "__main__"),
    (FACE,),
)
LIBRARIES = {
    "hydra": {"config.compose", "config.words", "cli"},
    "wandb": {"report.loggers"},
    "tensorboard": {"report.loggers"},
    "nibabel": {"data"},
    "nilearn": {"data.layouts.generated"},
    "monai": {"training.metrics", "data.patches"},
    "matplotlib": {"report"},
    "rich": {"base.progress", "base.terminal", "report.loggers"},
    "jinja2": {"report.report"},
}
WITHOUT_TORCH = (
    *("base", "config"),
    *("model.geometry", "model.architecture", "data.cases", "memory", "training"),
    *("cli.main", "cli.commands", "cli.memory"),
    *("cli.train", "cli.lifecycle", "cli.sweep"),
)


@functools.cache
def modules() -> dict[str, Path]:
    """Each module by its name below `unet3d`; a package by that of its folder, and unet3d/__init__.py as FACE."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        paths[".".join(parts) or FACE] = path
    return paths


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, also within functions and for type checkers only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner == f"{FACE}.__version__":
                    continue  # a text, which needs nothing else of the package
                names.add(inner if inner.removeprefix("unet3d.") in modules() else node.module)
    return frozenset(names)


@functools.cache
def uses(name: str) -> frozenset[str]:
    """The modules of the package that a module imports."""
    names = imports(modules()[name])
    return frozenset(other for other in modules() if (FACE if other == FACE else f"unet3d.{other}") in names)


def room(name: str) -> str:
    return name.partition(".")[0]


def layer(name: str) -> int:
    return next(level for level, rooms in enumerate(LAYERS) if name in rooms or room(name) in rooms)


def test_no_import_goes_up() -> None:
    pairs = [(name, other) for name in modules() for other in uses(name)]
    assert not [f"{name} -> {other}" for name, other in pairs if layer(other) > layer(name)]
    beside = {("recomputing",), ("data", "training"), ("training", "data")}
    assert not [f"{name} -> {other}" for name, other in pairs if (room(name), room(other)) in beside]


def test_no_import_circle() -> None:
    left = {name: uses(name) for name in modules()}
    while free := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in free}
    assert not left


def test_what_packages_import_is_seen() -> None:
    """A face may import late, by `__getattr__`: such an import counts too."""
    assert {"cli.train", "run.predict", "memory"} <= uses(FACE)
    assert "memory.any_network" in uses("memory")


def test_libraries_stay_in_their_rooms() -> None:
    strays = [
        f"{name} imports {library}"
        for name, path in modules().items()
        for library, rooms in LIBRARIES.items()
        if any(i.split(".")[0] == library for i in imports(path)) and not {name, room(name)} & rooms
    ]
    assert not strays


def printed_by(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys; before = {*sys.modules}; import unet3d; print({*sys.modules} - before)"
    assert printed_by(program) == "{'unet3d'}\n"


def test_what_answers_a_typo_loads_no_torch() -> None:
    names = "torch", "monai", "matplotlib", "wandb", "nilearn"
    wanted = ", ".join(f"unet3d.{name}" for name in WITHOUT_TORCH)
    program = f"import sys, {wanted}; print([name for name in {names} if name in sys.modules])"
    assert printed_by(program) == "[]\n"


def test_a_run_is_imported_without_what_only_some_runs_use() -> None:
    names = "monai", "scipy.ndimage", "scipy.interpolate", "scipy.spatial", "matplotlib", "wandb", "torch._dynamo"
    program = f"import sys, unet3d.run.run; print([name for name in {names} if name in sys.modules])"
    assert printed_by(program) == "[]\n"
