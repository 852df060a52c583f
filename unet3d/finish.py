"""What a finished run leaves behind: memory.json, predictions of the held-out cases, a picture, wandb's summary."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from unet3d import figures, record
from unet3d.apply import Segmenter
from unet3d.data import sparse
from unet3d.data.cases import Case
from unet3d.memory import figures as memory_figures
from unet3d.resuming import flat
from unet3d.run import Run


def finish(run: Run) -> None:
    """Write everything that is known at the end; predictions are those of the last weights, or of their average."""
    run.keep_measured()
    if "measured" in (memory := record.memory(run.folder)):  # by steps taken before the run was stopped, perhaps
        _tell_memory(run, memory)
    with run.averaged():
        _predict_held_out(run)
    record.end(run.folder, "done", 0)


def _tell_memory(run: Run, memory: Mapping[str, Any]) -> None:
    """Files and pictures of the measured steps; the same to the sinks, as tables, pictures and summary."""
    measured, pictures = memory["measured"], run.folder / "figures"
    memory_figures.phases(measured, pictures / "memory_phases.png")
    seen = measured.get("ledger", measured)
    memory_figures.along_the_u(seen, pictures / "memory_layers.png")
    for name in ("phases", "timeline", "layers"):
        if (path := pictures / f"memory_{name}.png").exists():
            run.sinks.image(f"memory/{name}_picture", path, run.trainer.step)
    rows = [[phase, peaks["first"], peaks["steady"]] for phase, peaks in measured["phases"].items()]
    run.sinks.table("memory/phases", ["phase", "first step (bytes)", "later steps (bytes)"], rows)
    for name in ("levels", "layers"):
        head = [key if key in ("level", "module", "bytes") else f"{key} (bytes)" for key in seen[name][0]]
        run.sinks.table(f"memory/{name}", head, [list(row.values()) for row in seen[name]])
    run.sinks.scalars({"memory/peak_allocated_bytes": measured["peak_bytes"]}, run.trainer.step)
    scalars = {key: value for key, value in flat(memory, "/", "memory/").items() if not isinstance(value, list)}
    run.sinks.summary(scalars)


def _predict_held_out(run: Run) -> None:
    """A label map for each scored case, and a picture of the first."""
    segmenter = Segmenter(run.predictor, run.data.read.intensity, run.config.data.spacing, run.data.read.leniency)
    for index, case in enumerate(run.data.val):
        volume, labels = segmenter.to_file(case, run.folder / "predictions" / f"{case.id}.nii.gz")
        if index == 0:
            path = run.folder / "figures" / "prediction.png"
            layers = _annotation(run, case) | {"prediction": labels.numpy()}
            where, classes = _plane_of_scores(run, case), run.data.task.classes
            figures.segmentation(volume.image[0], layers, volume.spacing, classes, path, case.id, where)
            run.sinks.image("val/prediction", path, run.trainer.step)


def _annotation(run: Run, case: Case) -> dict[str, np.ndarray]:
    """The dense truth, and before it what of it was learned, if that was less."""
    learned = {"learned": run.data.learn(case).label.numpy()} if run.config.data.semi else {}
    return learned | {"truth": run.data.read(case).label.numpy()}


def _plane_of_scores(run: Run, case: Case) -> list[int] | None:
    """A voxel where slices cross that were scored, not learned; None where whole volumes are scored."""
    if not run.config.data.semi:
        return None
    label = run.data.read(case).label
    middle = [(low + high) // 2 for low, high in sparse.extent(label)]
    slices = sparse.scored_slices(label, run.config.data)
    return [min(found, key=lambda index: abs(index - m), default=m) for found, m in zip(slices, middle, strict=True)]
