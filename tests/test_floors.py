"""Imports go down only, and each library stays in its rooms."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [  # lowest first; a module may import from any floor below its own
    {
        "averaging",
        "config",
        "errors",
        "half_precision",
        "metrics",
        "page",
        "privacy",
        "progress",
        "slices",
        "table",
        "memory.attribution",
        "memory.once",
    },
    {
        *(
            "lock",
            "outlet",
            "policy",
            "signals",
            "model.geometry",
            "schedules",
            "snapshot",
            "tracker",
            "figures",
            "console",
        ),
        *("checks_data", "data.nifti", "memory.ledger", "memory.tables"),
    },
    {
        "checks",
        "compare_figures",
        "model.layers",
        "process",
        "readback",
        "resuming",
        "sinks",
        "memory.allocator",
        "memory.breakdown",
        "memory.cuda",
        "memory.dry",
        "memory.estimates",
        "memory.figures",
        "data.intensity",
        "data.manifest",
        "data.generated",
        "data.splits",
    },
    {"compose", "model.stages", "scored", "data.mni152", "data.phantom", "data.voxels", "memory.bounds"},
    {"losses", "model.unet", "step", "record", "report", "compare_rows", "data.cases", "memory.kernels"},
    {
        *("checkpoints", "trainer", "inference", "published", "memory.explain", "memory.numbers"),
        *("data.augment", "data.volumes"),
    },
    {"compare", "memory.export", "memory.meter", "data.patches", "data.check"},
    {"data.loader", "data.reader", "data.sparse", "evaluation", "memory.save"},
    {"build"},
    {"grounds", "trained", "memory.rehearsal"},
    {"apply", "moment"},
    {"publish", "memory.profile", "memory.validation"},
    {"score", "memory.segments"},
    {"memory.predict", "memory.advise"},
    {"memory.look", "memory.plan"},
    {"memory.facts", "memory.fit", "memory.show", "memory.spread", "memory.forecast", "memory.distress"},
    {"predictions"},
    {"run"},
    {"finish"},
    {"guard"},
    {"command", "__main__"},
]
ROOMS = {
    "hydra": {"compose", "command"},
    "wandb": {"tracker"},
    "nibabel": {"data.nifti", "data.generated", "data.volumes", "data.voxels", "data.check"},
    "nilearn": {"data.mni152"},
    "monai": {"metrics", "data.augment"},
    "matplotlib": {"compare_figures", "figures", "slices", "memory.figures"},
    "rich": {"console", "progress"},
}
LIGHT = {
    *("config", "resuming", "errors", "checks", "checks_data", "compose", "command", "model.geometry", "progress"),
    *(
        "sinks",
        "tracker",
        "console",
        "data.cases",
        "data.mni152",
        "process",
        "lock",
        "signals",
        "guard",
        "outlet",
    ),
}


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def modules() -> dict[str, Path]:
    package = ROOT / "unet3d"
    paths = {".".join(p.relative_to(package).with_suffix("").parts): p for p in package.rglob("*.py")}
    return {name: path for name, path in paths.items() if not name.endswith("__init__")}


def test_every_module_has_a_floor_and_imports_from_below() -> None:
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    found = modules()
    assert not found.keys() - floor.keys(), "modules without a floor"
    climbing = [
        f"{name} -> {other}"
        for name, path in found.items()
        for other in found
        if f"unet3d.{other}" in imports(path) and floor[other] >= floor[name]
    ]
    assert not climbing


def test_libraries_stay_in_their_rooms() -> None:
    strays = [
        f"{name} imports {library}"
        for name, path in modules().items()
        for library, rooms in ROOMS.items()
        if any(i.split(".")[0] == library for i in imports(path)) and name not in rooms
    ]
    assert not strays


def test_what_answers_a_typo_loads_no_torch() -> None:
    heavy = {"torch", "monai", "matplotlib", "wandb", "nilearn"}
    found = {name: {i.split(".")[0] for i in imports(modules()[name], top_level_only=True)} & heavy for name in LIGHT}
    assert not {name: libraries for name, libraries in found.items() if libraries}


def test_a_run_is_imported_without_what_only_some_runs_use() -> None:
    names = "monai", "scipy.ndimage", "scipy.interpolate", "scipy.spatial", "matplotlib", "wandb", "torch._dynamo"
    program = f"import sys, unet3d.run; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
