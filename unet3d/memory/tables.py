"""memory.json's entries as tables of text and sentences, for the terminal, the report and wandb."""

from collections.abc import Iterator, Mapping, Sequence
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
MOST_IN_SENTENCE = 3  # workspaces or places in a sentence
WORKSPACES = "Workspaces of convolutions (measured: requested minus tensors)"
# How the sizes of a step on CUDA differ, from the smallest to the largest.
CUDA_SIZES = (
    "On CUDA: tensors (held by the program) <= requested (with scratch inside operations) "
    "<= allocated (multiples of 512 bytes) <= reserved (segments from the driver) "
    "< nvidia-smi (with its context and kernels, a few hundred MiB, not predicted)."
)


def on_cuda(entry: Entry) -> Iterator[str]:
    """Yield what else is known of a step on CUDA: what its allocator holds, and the workspaces of convolutions."""
    if "allocated_bytes" in entry:
        allocated = f"{mib(entry['allocated_bytes'])} MiB allocated"
        yield f"with workspaces: {allocated}, {mib(entry['reserved_bytes'])} MiB reserved (replay of CUDA's allocator)"
    if "workspace_bytes" in entry:
        requested = mib(entry["peak_bytes"] + entry["workspace_bytes"])
        raised = f"workspaces of convolutions raise the peak by {mib(entry['workspace_bytes'])} MiB (estimate)"
        yield f"requested on CUDA: {requested} MiB; {raised}"
    if "workspaces" in entry:
        largest = [row for row in entry["workspaces"][:MOST_IN_SENTENCE] if row["bytes"]]
        sizes = [f"{mib(row['bytes'])} MiB in {row['phase']} of {row['module']}" for row in largest]
        yield f"{WORKSPACES}, the largest: {', '.join(sizes) or 'none'}."
    if "workspace_bytes" in entry or "reserved_bytes" in entry:
        yield CUDA_SIZES


def workspaces(entry: Entry) -> Table:
    """Return one row per layer and phase, largest workspace first."""
    rows = [[row["module"], row["phase"], mib(row["bytes"])] for row in entry.get("workspaces", [])]
    return Table(["layer", "phase", "workspace (MiB)"], rows)


def guessed(guesses: Sequence[str]) -> Iterator[str]:
    """Yield why a prediction with these guesses is one, and what to do."""
    places = places_read(guesses)
    reasons = []
    if places:
        shown = ", ".join(places[:MOST_IN_SENTENCE])
        if len(places) > MOST_IN_SENTENCE:
            shown = f"{shown} and {len(places) - MOST_IN_SENTENCE} more"
        reasons.append(
            f"a tensor's value is read at {shown}, which a prediction does not have, and was taken as 0. Where it "
            f"decides what runs, the memory differs, perhaps several times"
        )
    if LSTM in guesses:
        reasons.append(f"{LSTM} is not in it: its library alone knows the size, which may be most of such a layer's")
    if reasons:
        advice = "measure it, with unet3d.memory.explain (--measure beside --module) or a run"
        yield f"A GUESS: {'; and '.join(reasons)}: {advice}"


def predicted_kind(entry: Entry) -> str:
    """Return what a predicted peak counts, for the terminal, and that it is guessed where it is."""
    words = "tensor bytes, counted on a simulated step"
    return f"{words}, GUESSED" if entry.get("guesses") else words


def places_read(guesses: Sequence[str]) -> list[str]:
    """Return the guesses of a prediction that name a place where a tensor's value is read."""
    return [guess for guess in guesses if guess != LSTM]


def folded(entry: Entry, most: int) -> dict[str, Any]:
    """Return the entry with at most `most` layers: the largest, in order, and the sum of the others."""
    if "ledger" in entry:
        return {**entry, "ledger": folded(entry["ledger"], most)}
    rows = entry.get("layers", [])
    if len(rows) <= most:
        return dict(entry)
    others = sorted(rows, key=lambda row: -row["bytes"])[most - 1 :]
    layers = [row for row in rows if row not in others]
    rest = {name: sum(row[name] for row in others) for name in rows[0] if name not in ("module", "level")}
    rest = {"module": f"{len(others)} smaller layers", "level": None, **rest}
    return {**entry, "layers": [*layers, rest]}


def moment(entry: Entry) -> str:
    """Return when most bytes are held: `backward of up3.conv2 (convolution_backward)`."""
    words = entry["moment"]["words"]
    return f"{words} ({entry['moment']['operation']})"


def peak_location(entry: Entry) -> dict[str, Any]:
    """Return the level with most bytes at the peak, "other" in a network without levels, and what most are for."""
    row = max(entry["levels"], key=lambda row: (row["level"] != "other", row["bytes"]))
    largest_category = max(NAMES, key=lambda category: row[category])
    return {
        "level": row["level"],
        "bytes": row["bytes"],
        "mostly": largest_category,
        "mostly_bytes": row[largest_category],
    }


def sentence(advice: Entry, peak: int) -> str:
    """Return `peak_location` in words: what dominates the peak (bytes), where, and what half the width there saves."""
    share = f"{advice['bytes'] / peak:.0%} of the peak ({mib(advice['bytes'])} of {mib(peak)} MiB)"
    place = "at full resolution (level 0)" if advice["level"] == 0 else f"at level {advice['level']}"
    dominant = f"{share} is {place}, mostly {NAMES[advice['mostly']]}"
    if advice["level"] == "other":
        part = advice.get("mostly_bytes", 0) / peak
        much = "Most" if part > 0.5 or not part else "The largest part"
        dominant = f"{much} of the peak is {NAMES[advice['mostly']]}" + (f" ({part:.1%})" if part else "")
    halved = advice.get("halved_peak_bytes")
    if halved is None:
        return f"{dominant}."
    lower = "no less"
    if halved < peak:
        lower = f"{mib(halved)} MiB, {1 - halved / peak:.0%} less"
    return f"{dominant}; half the width there ({advice['override']}) would need {lower} (predicted)."


def single_techniques(without: Mapping[str, int], peak: int) -> Table:
    """Return one row per memory option that a step uses: its peak without the option, and what the option saves."""
    rows = [[option, mib(size), mib(size - peak), percent(size - peak, size)] for option, size in without.items()]
    return Table(["option", "peak without it (MiB, predicted)", "saved (MiB)", "share"], rows)


def phase_name(phase: str) -> str:
    """Return what people read of a phase: `step` is the optimizer's, and would be taken for the whole step."""
    return "optimizer" if phase == "step" else phase


def phases(entry: Entry) -> Table:
    """Return one row per phase: its peak, and where known the bytes alive as it ends, in the first and later steps."""
    columns = ["phase", "peak, first step (MiB)", "peak, later steps (MiB)"]
    ends = entry.get("phase_ends")
    if ends:
        columns += ["held at end of phase, step 1 (MiB)", "held at end of phase, later (MiB)"]
    rows = []
    for phase, peak in entry["phases"].items():
        first = mib(peak["first"]) if "first" in peak else "unknown"
        row = [phase_name(phase), first, mib(peak["steady"])]
        if ends:
            row += [mib(ends[phase]["first"]), mib(ends[phase]["steady"])]
        rows.append(row)
    return Table(columns, rows)


def categories(entry: Entry) -> Table:
    """Return one row per category of tensors with its bytes at the peak."""
    rows = []
    for category, size in entry.get("categories", {}).items():
        rows.append([NAMES.get(category, category), mib(size), percent(size, entry["peak_bytes"])])
    return Table(["at the peak", "MiB", "share"], rows)


def levels(entry: Entry) -> Table:
    """Return one row per level of the U with its bytes at the peak."""
    return _by_category(entry.get("levels", []), {"level": "level"}, {0: "0 (full)"})


def layers(entry: Entry) -> Table:
    """Return one row per layer with its bytes at the peak, in the order of the network."""
    return _by_category(entry.get("layers", []), {"layer": "module", "level": "level"}, {None: ""})


def _by_category(rows: Sequence[Entry], columns: Mapping[str, str], names: Mapping[Any, str]) -> Table:
    """Return of each row what the columns' keys hold, bytes, share and bytes by category, where any row has these.

    `names`: what stands for some values.
    """
    shown = [category for category in NAMES if any(mib(row[category]) != "0.0" for row in rows)]
    total = sum(row["bytes"] for row in rows)
    cells = []
    for row in rows:
        values = [names.get(row[key], str(row[key])) for key in columns.values()]
        sizes = [mib(row[category]) if row[category] else "" for category in shown]
        cells.append([*values, mib(row["bytes"]), percent(row["bytes"], total), *sizes])
    headings = [f"{NAMES[category]} (MiB)" for category in shown]
    return Table([*columns, "MiB", "share", *headings], cells)


def state(entry: Entry, parameters: int) -> Table:
    """Return what parameters cost: weights, gradients, optimizer state, in bytes per parameter and MiB."""
    sizes = entry.get("state", {})
    rows = [[NAMES[role], f"{size / parameters:.2f}", mib(size)] for role, size in sizes.items()]
    return Table(["held for each parameter", "B/parameter", "MiB"], rows)


def estimates(sizes: Mapping[str, int], peak: int) -> Table:
    """Return one row per usual estimate, in bytes, with its error against the peak; the last row is the peak."""
    rows = [[name, mib(size), f"{size / peak - 1:+.0%}"] for name, size in sizes.items()]
    rows.append(["unet3d: the step itself, without data", mib(peak), "+0%"])
    return Table(["estimate", "MiB", "error"], rows)
