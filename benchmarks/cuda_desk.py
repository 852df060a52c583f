"""What unet3d claims about CUDA, with torch's CUDA build and without a GPU.

    pip install -c constraints.txt -e .
    python benchmarks/cuda_desk.py --out desk.md

torch's dispatcher, autocast, autograd and caching allocator are the real ones; under them lie libraries that compute
nothing (`cuda_desk/`), so losses are 0 and no number here is a GPU's time. Kernels' and cuDNN's own scratch memory is
not there either. Needs Linux, gcc, g++, and an index of packages that has a CUDA build of torch for this machine: the
first run installs it into `--place`, without the libraries of CUDA, which are 3 GB. Later runs use it again.

Parts: `rows` compares predicted and real peaks, `allocator` the replay with the allocator under its settings;
`launches` counts what a step asks of the device; `runs` are whole runs of train.py, and how they end. The Markdown file
is written after each part. Exit code 1: something differs or failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from cuda_desk import configs, stubs, tables
from cuda_desk.configs import Row
from cuda_desk.environment import ROOT, Environment
from cuda_desk.runs import RUNS, Place
from cuda_desk.streams import SETTINGS, Torch, UnknownSetting, differing, replayed
from cuda_desk.tables import Line, Section
from on_cuda import save


def measured(desk: Environment, kind: str, rows: Sequence[Row], limit: int) -> Iterator[tuple[Row, tables.Found]]:
    """Yield each row with what `measure.py` found, in order."""
    variables = desk.variables(PYTHONPATH=f"{ROOT}:{Path(__file__).parent}")
    command = [str(desk.python), "-m", "cuda_desk.measure", kind, str(limit)]
    asked = "".join(json.dumps([row.options, row.patch]) + "\n" for row in rows)
    with tempfile.TemporaryFile("w+") as requests, tempfile.TemporaryFile() as errors:
        requests.write(asked)
        requests.seek(0)
        with subprocess.Popen(command, stdin=requests, stdout=subprocess.PIPE, stderr=errors, env=variables) as process:
            assert process.stdout is not None
            for row in rows:
                line = process.stdout.readline()
                found = json.loads(line) if line else {"failed": "the process that starts the rows has ended"}
                print(f"{row.words}, {row.patch}: {found.get('failed', 'done')}", file=sys.stderr, flush=True)
                yield row, found


def matching(among: Sequence[Row], text: str) -> list[Row]:
    """Return the rows whose words have this text. Raises ValueError if none has."""
    asked = [row for row in among if text in row.words]
    if not asked:
        raise ValueError(f"--match: no configuration has {text!r}")
    return asked


def rows(desk: Environment, options: argparse.Namespace) -> Iterator[Section]:
    """Yield the sections of predicted against real peaks."""
    asked = matching(configs.ROWS, options.match)
    found = measured(desk, "compare", asked, options.limit)
    for section, group in groupby(found, lambda pair: pair[0].section):
        yield tables.comparison(section, list(group))


def launches(desk: Environment, options: argparse.Namespace) -> Iterator[Section]:
    """Yield the section of counts."""
    asked = matching(configs.COUNTED, options.match)
    yield tables.counts(measured(desk, "count", asked, options.limit))


def allocator(desk: Environment, options: argparse.Namespace) -> Iterator[Section]:
    """Yield the section of the allocator's settings."""
    torch = Torch(desk.torch, stubs.include_folders(desk.headers), desk.place / "replay")
    lines = []
    for settings in SETTINGS:
        _, is_left_out = replayed([(0, 1)], settings)
        try:
            wrong = differing(torch, settings, range(options.streams))
            cells = [f"{len(wrong)} of {options.streams}", *wrong[:1]]
        except UnknownSetting:
            wrong = []
            cells = ["this torch refuses it"]
        except ValueError as error:
            wrong = [str(error)]
            cells = ["failed", *wrong]
        cells = [settings or "default", "left out, and said" if is_left_out else "modelled", *cells, ""][:4]
        lines.append(Line(cells, not wrong or is_left_out))
    about = "Peaks of allocated and reserved bytes, of random requests: the replay's against torch's own allocator's."
    yield Section("The allocator's settings", about, ("PYTORCH_ALLOC_CONF", "replay", "streams that differ", ""), lines)


def runs(desk: Environment, options: argparse.Namespace) -> Iterator[Section]:
    """Yield the section of whole runs."""
    lines = []
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory(dir=desk.place, prefix="run-") as folder:
            try:
                expected, found, is_right = run(Place(desk, Path(folder)))
            except Exception as error:  # whatever it is, the other runs go on
                expected, found, is_right = "an end", f"{type(error).__name__}: {error}"[:300], False
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        lines.append(Line((name, expected, found), is_right))
    about = "train.py in processes of its own, on the desk's device."
    yield Section("Runs", about, ("run", "should", "did"), lines)


PARTS: dict[str, Callable[[Environment, argparse.Namespace], Iterable[Section]]] = {
    "rows": rows,
    "allocator": allocator,
    "launches": launches,
    "runs": runs,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = Path(tempfile.gettempdir(), "unet3d-cuda-desk")
    parser.add_argument("--place", type=Path, default=place, help=f"folder of the environment ({place})")
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="to install (2.13.0)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="parts to run (all)")
    parser.add_argument("--match", default="", metavar="TEXT", help="take only configurations with this text")
    parser.add_argument("--streams", type=int, default=20, help="of requests, for each setting of the allocator")
    parser.add_argument("--limit", type=int, default=300, help="seconds, for one configuration")
    parser.add_argument("--out", type=Path, help="Markdown file (stdout)")
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = set(options.only) - set(PARTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: no such part; there are {', '.join(PARTS)}")
    return options


def main() -> int:
    options = parsed()
    desk = Environment(options.place)
    try:
        desk.make(options.torch)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"no environment in {options.place}: {error}", file=sys.stderr)
        return 1
    title = f"# torch {desk.version}, CUDA build, without a GPU: kernels compute nothing\n"
    sections: list[Section] = []
    for name in options.only:
        try:
            sections += PARTS[name](desk, options)
        except Exception as error:  # a part that cannot be run is a row, and the others go on
            sections.append(tables.failed(name, error))
        if options.out is not None:
            save(options.out, "\n".join([title, *(section.markdown() for section in sections)]))
    if options.out is None:
        print("\n".join([title, *(section.markdown() for section in sections)]))
    wrong = sum(section.wrong for section in sections)
    print(f"{wrong} of {sum(len(section.lines) for section in sections)} rows are not right", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
