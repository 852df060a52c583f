"""The receipt of a run that kept a plan: what was planned beside what was measured, and both errors."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from unet3d.base.types import Table, mib
from unet3d.config.schema import options_with
from unet3d.run.shapes import as_number

TITLE = "Receipt: plan against run (planned minus measured)"


class Promise(NamedTuple):
    """A number that was planned, and the same one measured."""

    name: str  # with its unit
    key: str  # in compare.csv
    planned: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Return planned minus measured, as a share of what was measured."""
        if self.planned is None or not self.measured:
            return None
        return self.planned / self.measured - 1

    def text(self, value: float | None) -> str:
        """Return one of its numbers for people."""
        if value is None:
            return ""
        if self.name.endswith("(MiB)"):
            return mib(value)
        return f"{value:,.3g}"


def plan_entry(options: Mapping[str, Any], promise: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory.json's entry of a plan: what it promised, and which of its options the run has otherwise.

    `values` are the run's options by their dotted names.
    """
    changed = []
    for name, value in options.items():
        changes_the_run = name != "budget" and options_with("untold").get(name) != "place"
        if changes_the_run and values.get(name) != value:
            changed.append(name)
    return {**promise, "changed": changed}


def promises(memory: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Promise]:
    """Return what a plan promised beside what memory.json and the records measured; [] without a plan."""
    plan = memory.get("plan")
    if not plan:
        return []
    planned = {name: as_number(value) for name, value in plan.items()}
    rows = [
        *_peaks(planned, memory.get("measured", {})),
        *_seconds(planned, memory, records),
    ]
    return [row for row in rows if row.planned is not None]


def _peaks(planned: Mapping[str, float | None], measured: Mapping[str, Any]) -> list[Promise]:
    """Return the peaks of a step: of tensors, and where the run was on a GPU those of its allocator."""
    tensors = measured.get("ledger", measured)
    of_tensors = Promise(
        "peak of tensors (MiB)",
        "tensors",
        planned=planned.get("peak_bytes"),
        measured=tensors.get("peak_bytes"),
    )
    if "ledger" not in measured:
        return [of_tensors]
    allocated = Promise(
        "peak allocated (MiB)",
        "allocated",
        planned=planned.get("allocated_bytes"),
        measured=measured.get("peak_bytes"),
    )
    reserved = Promise(
        "peak reserved (MiB)",
        "reserved",
        planned=planned.get("reserved_bytes"),
        measured=as_number(measured.get("reserved_bytes")),
    )
    return [of_tensors, allocated, reserved]


def _seconds(
    planned: Mapping[str, float | None],
    memory: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> list[Promise]:
    """Return the time of a step, and of all steps and validations where the run has as many as were planned."""
    steps = _numbers(records, "time/step_s")
    validations = _numbers(records, "time/val_s")
    of_step = Promise(
        "step (s)",
        "step",
        planned=planned.get("step_s"),
        measured=median(steps) if steps else None,
    )
    is_as_planned = options_with("pace").keys().isdisjoint(_changed(memory))
    total = sum(steps) + sum(validations)
    of_all = Promise(
        "steps and validations (s)",
        "seconds",
        planned=planned.get("seconds") if is_as_planned else None,
        measured=total or None,
    )
    return [of_step, of_all]


def _numbers(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    values = (as_number(record.get(key)) for record in records)
    return [value for value in values if value is not None]


def receipt(memory: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the receipt as a table; None without a plan."""
    rows = []
    for row in promises(memory, records):
        planned = row.text(row.planned)
        measured = row.text(row.measured)
        error = "" if row.error is None else f"{row.error:+.1%}"
        rows.append([row.name, planned, measured, error])
    if not rows:
        return None
    return Table(["of a step, and in all", "planned", "measured", "error"], rows)


def changes(memory: Mapping[str, Any]) -> str:
    """Return a sentence on the options that the run has otherwise than its plan; "" where there are none."""
    changed = _changed(memory)
    if not changed:
        return ""
    return f"The command line changed what was planned: {', '.join(changed)}."


def _changed(memory: Mapping[str, Any]) -> list[str]:
    plan = memory.get("plan", {})
    names = plan.get("changed")
    if not isinstance(names, list):
        return []
    return [str(name) for name in names]


def compared_numbers(memory: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the receipt as numbers of compare.csv; {} without a plan."""
    numbers: dict[str, Any] = {}
    for row in promises(memory, records):
        numbers[f"plan_{row.key}"] = row.planned
        numbers[f"plan_{row.key}_error"] = row.error
    return numbers
