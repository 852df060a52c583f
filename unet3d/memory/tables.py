"""memory.json's entries as tables of text and sentences, for the terminal, the report and wandb."""

from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.base.types import Table, mib, percent

Entry = Mapping[str, Any]  # what memory.json holds under "predicted" or "measured"
NAMES = {
    "params": "weights",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporaries": "temporaries",
    "inputs": "batch",
}

LSTM = "what an LSTM keeps for backward in a workspace"  # a guess: oneDNN's on the CPU, cuDNN's on a GPU
LARGEST = 3  # workspaces or places in a sentence
WORKSPACES = "Workspaces of convolutions (measured: requested less tensors)"
# How the sizes of a step on CUDA differ, from the smallest to the largest.
CUDA_SIZES = (
    "tensors (held by the program) <= requested (with scratch inside operations) <= allocated (multiples of 512 bytes) "
    "<= reserved (segments from the driver) "
    "< nvidia-smi (with its context and kernels, a few hundred MiB, not predicted)"
)


def workspace_bound(entry: Entry) -> str:
    """Return what convolutions' workspaces may add to a predicted peak on CUDA; "" for another entry."""
    if "workspace_bound_bytes" not in entry:
        return ""
    more = mib(entry["workspace_bound_bytes"])
    return f"convolutions' workspaces not included: at most {more} MiB more (bound, input + output of a layer)"


def largest_workspaces(entry: Entry) -> str:
    """Return which convolutions had the largest workspaces on a GPU; "" for another entry."""
    if "workspaces" not in entry:
        return ""
    rows = [row for row in entry["workspaces"][:LARGEST] if row["bytes"]]
    sizes = [f"{mib(row['bytes'])} MiB in {row['phase']} of {row['module']}" for row in rows]
    return f"{WORKSPACES}, the largest: {', '.join(sizes) or 'none'}."


def workspaces(entry: Entry) -> Table:
    """A row a layer and phase, largest workspace first."""
    rows = [[row["module"], row["phase"], mib(row["bytes"])] for row in entry.get("workspaces", [])]
    return Table(["layer", "phase", "workspace (MiB)"], rows)


def cuda_sizes(entry: Entry) -> str:
    """Return how the sizes of a step differ, if it is on CUDA; else ""."""
    is_on_cuda = "workspace_bound_bytes" in entry or "reserved_bytes" in entry
    return f"On CUDA: {CUDA_SIZES}." if is_on_cuda else ""


def guessed(entry: Entry) -> str:
    """Return why a prediction is a guess, where and what to do; "" for another entry."""
    places = places_read(entry.get("guesses", []))
    reasons = []
    if places:
        shown = ", ".join(places[:LARGEST]) + (f" and {len(places) - LARGEST} more" if len(places) > LARGEST else "")
        reasons.append(
            f"a tensor's value is read at {shown}, which a prediction does not have, and was taken as 0. Where it "
            f"decides what runs, the memory differs, perhaps several times"
        )
    if LSTM in entry.get("guesses", []):
        reasons.append(f"{LSTM} is not in it: its library alone knows the size, which may be most of such a layer's")
    advice = "measure it, with unet3d.memory.explain (--measure beside --module) or a run"
    return f"A GUESS: {'; and '.join(reasons)}: {advice}" if reasons else ""


def places_read(guesses: Sequence[str]) -> list[str]:
    """Return those of a prediction's guesses that name a place where a tensor's value is read."""
    return [guess for guess in guesses if guess != LSTM]


def folded(entry: Entry, most: int) -> dict[str, Any]:
    """The entry with at most so many layers: the largest, in order, and the sum of the others."""
    if "ledger" in entry:
        return {**entry, "ledger": folded(entry["ledger"], most)}
    rows = entry.get("layers", [])
    if len(rows) <= most:
        return dict(entry)
    others = sorted(rows, key=lambda row: -row["bytes"])[most - 1 :]
    kept = [row for row in rows if row not in others]
    sums = {name: sum(row[name] for row in others) for name in rows[0] if name not in ("module", "level")}
    return {**entry, "layers": [*kept, {"module": f"{len(others)} smaller layers", "level": None, **sums}]}


def moment(entry: Entry) -> str:
    """When most bytes are held: `backward of up3.conv2 (convolution_backward)`."""
    return f"{entry['moment']['words']} ({entry['moment']['operation']})"


def peak_location(entry: Entry) -> dict[str, Any]:
    """The level with most bytes at the peak, "other" in a network without levels, and what most of them are for."""
    row = max(entry["levels"], key=lambda row: (row["level"] != "other", row["bytes"]))
    return {"level": row["level"], "bytes": row["bytes"], "mostly": max(NAMES, key=lambda kind: row[kind])}


def sentence(advice: Entry, peak: int) -> str:
    """What `peak_location` found: what dominates the peak (bytes), at which level, and what half its width saves."""
    level = {0: "at full resolution (level 0), ", "other": ""}.get(advice["level"], f"at level {advice['level']}, ")
    share = f"{advice['bytes'] / peak:.0%} of the peak ({mib(advice['bytes'])} of {mib(peak)} MiB)"
    found = f"{share} is {level}mostly {NAMES[advice['mostly']]}"
    if (halved := advice.get("halved_peak_bytes")) is None:
        return f"{found}."
    lower = f"{mib(halved)} MiB, {1 - halved / peak:.0%} less" if halved < peak else "no less"
    return f"{found}; half the width there ({advice['override']}) would need {lower} (predicted)."


def single_techniques(without: Mapping[str, int], peak: int) -> Table:
    """A row for each way to save memory that a step uses: its peak without that, and what that takes away."""
    rows = [[word, mib(size), mib(size - peak), percent(size - peak, size)] for word, size in without.items()]
    return Table(["way to save memory", "peak without it (MiB, predicted)", "takes away (MiB)", "share"], rows)


def phases(entry: Entry) -> Table:
    """A row a phase: its peak, and where known the bytes alive as it ends, in the first step and in later ones."""
    firsts = {phase: mib(peak["first"]) if "first" in peak else "unknown" for phase, peak in entry["phases"].items()}
    rows = [[phase, firsts[phase], mib(peak["steady"])] for phase, peak in entry["phases"].items()]
    columns = ["phase", "peak, first step (MiB)", "peak, later steps (MiB)"]
    if not (ends := entry.get("phase_ends")):
        return Table(columns, rows)
    rows = [[*row, mib(ends[row[0]]["first"]), mib(ends[row[0]]["steady"])] for row in rows]
    return Table([*columns, "at its end, first (MiB)", "at its end, later (MiB)"], rows)


def categories(entry: Entry) -> Table:
    """A row a category of tensors with its bytes at the peak."""
    found = entry.get("categories", {}).items()
    rows = [[NAMES.get(name, name), mib(size), percent(size, entry["peak_bytes"])] for name, size in found]
    return Table(["at the peak", "MiB", "share"], rows)


def levels(entry: Entry) -> Table:
    """A row a level of the U with its bytes at the peak."""
    rows = entry.get("levels", [])
    names = [["0 (full)" if row["level"] == 0 else str(row["level"])] for row in rows]
    return _by_category(["level"], names, rows)


def layers(entry: Entry) -> Table:
    """A row a layer with its bytes at the peak, in the order of the network."""
    rows = entry.get("layers", [])
    names = [[row["module"], "" if row["level"] is None else str(row["level"])] for row in rows]
    return _by_category(["layer", "level"], names, rows)


def _by_category(columns: list[str], names: Sequence[list[str]], rows: Sequence[Entry]) -> Table:
    """Each row's bytes, share and bytes by category, without the categories that no row has."""
    kinds = [kind for kind in NAMES if any(mib(row[kind]) != "0.0" for row in rows)]
    total = sum(row["bytes"] for row in rows)
    sizes = [[mib(row["bytes"]), percent(row["bytes"], total)] for row in rows]
    cells = [[mib(row[kind]) if row[kind] else "" for kind in kinds] for row in rows]
    columns = [*columns, "MiB", "share", *(f"{NAMES[kind]} (MiB)" for kind in kinds)]
    return Table(columns, [a + b + c for a, b, c in zip(names, sizes, cells, strict=True)])


def state(entry: Entry, parameters: int) -> Table:
    """What parameters cost: weights, gradients, optimizer state, in bytes per parameter and MiB."""
    rows = [[NAMES[role], f"{size / parameters:.2f}", mib(size)] for role, size in entry.get("state", {}).items()]
    return Table(["held for each parameter", "B/parameter", "MiB"], rows)


def estimates(found: Mapping[str, int], peak: int) -> Table:
    """A row a usual estimate with its error against the peak; the last row is the peak."""
    rows = [[name, mib(size), f"{size / peak - 1:+.0%}"] for name, size in found.items()]
    return Table(["estimate", "MiB", "error"], [*rows, ["unet3d: the step itself, without data", mib(peak), "+0%"]])
