"""Reads an offline wandb run back from its .wandb file, for the tests: wandb itself has no reader.

The file is a LevelDB log: 7 bytes of header, then blocks of 32 KiB; in them chunks of crc, length, type and bytes. A
record (protobuf) is one full chunk (type 1) or a first, any middle and a last one (types 2, 3, 4).
"""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768
CHUNK = struct.Struct("<IHB")
FULL, FIRST, LAST = 1, 2, 4


def read_run(folder: Path) -> SimpleNamespace:
    """Return the one wandb run below a run folder."""
    (path,) = folder.glob("wandb/*run-*/*.wandb")
    return read_file(path)


def read_file(path: Path) -> SimpleNamespace:
    """Return what a .wandb file holds; nested keys are dotted.

    `summaries` are its changes, each after so many records of the history; `unsummarised` the metrics that it leaves
    out; `run` has the run's name, group, project and so on, as wandb's message.
    """
    records = list(_records(path.read_bytes()))
    runs = [record.run for record in records if record.HasField("run")]
    summaries, logged = [], 0
    for record in records:
        logged += record.HasField("history")
        if record.HasField("summary"):
            summaries.append((logged, _values(record.summary.update)))
    metrics = [record.metric for record in records if record.HasField("metric")]
    return SimpleNamespace(
        kinds={record.WhichOneof("record_type") for record in records},
        config=_values(item for run in runs for item in run.config.update),
        history=[_values(record.history.item) for record in records if record.HasField("history")],
        summary=_values(item for record in records for item in record.summary.update),
        summaries=summaries,
        files={file.path for record in records for file in record.files.files},
        step_metrics={metric.name or metric.glob_name: metric.step_metric for metric in metrics},
        unsummarised={metric.name or metric.glob_name for metric in metrics if metric.summary.none},
        artifacts=[record.artifact for record in records if record.HasField("artifact")]
        + [record.request.log_artifact.artifact for record in records if record.HasField("request")],
        run=runs[0],
        exit_code=next((record.exit.exit_code for record in records if record.HasField("exit")), None),
    )


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    assert data[:4] == b":W&B"
    at, parts = CHUNK.size, b""
    while at + CHUNK.size <= len(data):
        room = BLOCK - at % BLOCK
        if room < CHUNK.size:
            at += room
            continue
        _, length, kind = CHUNK.unpack_from(data, at)
        chunk = data[at + CHUNK.size : at + CHUNK.size + length]
        at += CHUNK.size + length
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
