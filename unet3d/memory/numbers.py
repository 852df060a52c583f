"""The layers of a predicted peak, each with its kind: exact, table or bracket, replay, constant."""

import torch

from unet3d.memory.allocator import replay
from unet3d.memory.kernels import bracket, place, read
from unet3d.memory.ledger import Ledger, levels
from unet3d.table import Table, mib


def layers(ledger: Ledger, target: str) -> Table:
    """A row a layer, for a run on `target`, cpu or cuda."""
    kind = "exact (ledger)" if target == "cpu" else "ledger, not yet verified on CUDA"
    rows = [["tensors", mib(max(levels(ledger))), kind]]
    rows += _cuda(ledger) if target == "cuda" else _cpu(ledger)
    return Table(["predicted peak of a step", "MiB", "kind"], rows)


def _cpu(ledger: Ledger) -> list[list[str]]:
    found = bracket(ledger, read(place(torch.device("cpu"))))
    calls = found.known + found.missing
    size = mib(found.low) if found.low == found.high else f"{mib(found.low)} to {mib(found.high)}"
    kind = "table" if not found.missing else f"bracket: {found.known} of {calls} convolutions measured"
    return [["with convolution kernels' scratch", size, kind]]


def _cuda(ledger: Ledger) -> list[list[str]]:
    native, expandable = replay(ledger.events), replay(ledger.events, expandable=True)
    return [
        ["allocated: blocks given out", mib(native.allocated_bytes), "replay"],
        ["reserved by the allocator", mib(native.reserved_bytes), "replay"],
        ["reserved, PYTORCH_ALLOC_CONF=expandable_segments:True", mib(expandable.reserved_bytes), "replay"],
        ["convolution workspaces", "", "not known here: they are the GPU's"],
        ["CUDA context", "", "constant of the GPU, outside of the allocator; not measured here"],
    ]
