"""Ways to damage one file of a run folder at random: the trials of `fuzz.py` on runs and checkpoints."""

import io
import itertools
import json
import pickletools
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from damage import JSON, NIFTI, ODD, bit_flips, duplicate_block, in_file, noise, remove_block, spots, truncate

Change = Callable[[random.Random, Path], None]
TENSORS = (
    *(torch.zeros(()), torch.zeros(0), torch.zeros(3, 2), torch.full((8,), float("nan")), torch.tensor([1e38] * 8)),
    *(torch.zeros(1).expand(2**40), torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.complex64)),
    *(torch.eye(3).to_sparse(), torch.zeros(4, device="meta"), torch.zeros(5056, dtype=torch.uint8)),
)
LINES = (
    *("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]", "_target_: os.system", "hydra: {run: {dir: /tmp}}", "? [a]\n: b"),
    *("x: !!python/object/apply:os.system ['exit 7']", "device: ${oc.env:HOME}", "steps: 9.9e999", "data: {root: /}"),
    *("x: " + "{a: " * 900, "x: " + "[" * 9999, "seed: " + "9" * 5000, "\t", "x: 2020-01-01", "steps: 0x10", "- a"),
    *("x: !!bool a", 'x: !!int ""', "x: !!timestamp a", "x: 0x" + "f" * 5000, "x: " + "1:" * 999 + "1", '- !!float ""'),
)


def change_yaml(rng: random.Random, path: Path) -> None:
    """The structure of YAML, or a line more."""
    text = path.read_text()
    if rng.random() < 0.5:
        lines = text.splitlines()
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(LINES))
        path.write_text("\n".join(lines))
        return
    content = yaml.safe_load(text)
    JSON[rng.choice([*JSON])](rng, content if isinstance(content, dict) else {"0": content})
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8", errors="surrogatepass")


def change_json(rng: random.Random, path: Path) -> None:
    """The structure of JSON; of a file of records, of one of them."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = rng.randrange(len(lines))
    content = json.loads(lines[at])
    JSON[rng.choice([*JSON])](rng, content)
    lines[at] = json.dumps(content)
    path.write_text("\n".join(lines))


def change_cells(rng: random.Random, path: Path) -> None:
    """Cells of a CSV file."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = rng.choice(rows)
    row[rng.randrange(len(row))] = rng.choice(("", "x", "nan", "1e999", "\x1b[2J", "=1+1", '"', "9" * 5000, "a\0b"))
    path.write_text("\n".join(",".join(row) for row in rows))


def rewrite(path: Path, change: Callable[[str, bytes], bytes], rename: Callable[[str], str] = str) -> None:
    """The same archive with other content of its entries, and right checksums."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(rename(name), change(name, content))


def change_pickle(rng: random.Random, path: Path) -> None:
    """Opcodes of the pickle: left out, repeated, exchanged, or bytes of them changed."""

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        places = [at for _, _, at in pickletools.genops(content)] + [len(content)]
        parts = [content[a:b] for a, b in itertools.pairwise(places)]
        a, b = rng.randrange(len(parts)), rng.randrange(len(parts))
        act = rng.choice(("drop", "repeat", "swap", "bytes"))
        if act == "drop":
            del parts[min(a, b) : min(a, b) + rng.choice((1, 1, 9))]
        elif act == "repeat":
            parts[a:a] = parts[b : b + 9] * rng.choice((1, 1, 99))
        elif act == "swap":
            parts[a], parts[b] = parts[b], parts[a]
        else:
            part = bytearray(parts[a])
            bit_flips(rng, part)
            parts[a] = bytes(part)
        return b"".join(parts)

    rewrite(path, change)


def change_storage(rng: random.Random, path: Path) -> None:
    """Numbers of tensors, some of which become NaN; or an entry's name."""
    with zipfile.ZipFile(path) as archive:
        renamed = rng.choice([*archive.namelist(), *[""] * 50])
    odd = rng.choice(("x/\x1b[2J", "../../outside", "a" * 300, "."))

    def change(name: str, content: bytes) -> bytes:
        damaged = bytearray(content)
        if damaged and not name.endswith("data.pkl") and rng.random() < 0.2:
            rng.choice((bit_flips, truncate, remove_block, duplicate_block))(rng, damaged)
        return bytes(damaged)

    rewrite(path, change, lambda name: odd if name == renamed else name)


def change_state(rng: random.Random, path: Path) -> None:
    """A value of the checkpoint: another value, another tensor, or itself many times over."""
    state = torch.load(path, weights_only=True)
    node, key = rng.choice([*spots(state)])
    shared: Any = node[key]
    for _ in range(60):
        shared = {"a": shared, "b": shared}
    node[key] = rng.choice((*ODD, *TENSORS, shared))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


ANY: dict[str, Change] = {
    **{f.__name__: in_file(f) for f in (bit_flips, truncate, duplicate_block, remove_block, noise)},
    **{name: NIFTI[name] for name in ("link", "not_a_file")},
}
STRUCTURE: dict[str, tuple[Change, ...]] = {
    ".yaml": (change_yaml,),
    ".json": (change_json,),
    ".jsonl": (change_json,),
    ".csv": (change_cells,),
    ".pt": (change_pickle, change_pickle, change_storage, change_state),
}


def damage_run(rng: random.Random, folder: Path) -> str:
    """Damage one file of a run folder. Returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and ".hydra" not in path.parts)
    files += [path for path in files if path.suffix == ".pt"] * 2  # the most complicated ones
    path = rng.choice(files)
    structures = STRUCTURE.get(path.suffix, ())
    if structures and rng.random() < 0.7:
        change = rng.choice(structures)
        try:
            change(rng, path)
        except (RecursionError, UnicodeEncodeError, yaml.YAMLError, ValueError, OverflowError):  # not to be written
            path.write_text("[" * rng.choice((1000, 100_000)))
        return f"{path.name} {change.__name__}"
    name = rng.choice([*ANY])
    ANY[name](rng, path)
    return f"{path.name} {name}"
