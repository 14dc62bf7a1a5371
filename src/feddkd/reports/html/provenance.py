"""What was run, by which command, with which versions, on what: enough to run it again."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from feddkd.reports.tables import families, labels
from feddkd.runs.record import Record

COLUMNS = (
    "run",
    "seed",
    "rounds",
    "seconds",
    "engine",
    "experiment",
    "data",
    "partition",
    "started",
)


@dataclass(frozen=True)
class Facts:
    """Texts: keys that all runs share, methods in full, a line a run, and what they ran with."""

    task: dict[str, str]
    methods: list[tuple[str, str]]
    runs: list[list[str]]
    commands: list[str]
    versions: list[str]
    machines: list[str]
    columns: tuple[str, ...] = COLUMNS


def facts(records: Sequence[Record]) -> Facts:
    manifests, groups = [record.manifest for record in records], families(records)
    return Facts(
        task=_shared([manifest["canonical"] for manifest in manifests]),
        methods=[
            (label, group[0].manifest["experiment"]["method"])
            for label, group in zip(labels(groups), groups, strict=True)
        ],
        runs=[_run(record) for record in records],
        commands=_distinct(
            _command(turn)
            for manifest in manifests
            for turn in [manifest, *manifest.get("resumed", [])]
        ),
        versions=_distinct(_listed(manifest.get("versions", {})) for manifest in manifests),
        machines=_distinct(_listed(manifest.get("hardware", {})) for manifest in manifests),
    )


def _run(record: Record) -> list[str]:
    manifest, engine = record.manifest, record.manifest.get("engine", "")
    hashes = (
        manifest["digest"],
        manifest.get("data", {}).get("digest", ""),
        manifest.get("partition", {}).get("digest", ""),
    )
    rounds = f"{len(record.history)} of {manifest['canonical']['rounds']}" + (
        ", ended" if "ended" in manifest else ""
    )
    name = engine.get("name", "") if isinstance(engine, dict) else str(engine)
    seed, seconds, started = (
        str(manifest["canonical"]["seed"]),
        f"{record.seconds:.1f}",
        str(manifest.get("started", "")),
    )
    return [record.folder.name, seed, rounds, seconds, name, *(one[:12] for one in hashes), started]


def _command(turn: dict[str, Any]) -> str:
    """As it was typed, whatever the program's path was."""
    command = turn.get("command", [])
    return shlex.join(["feddkd", *map(str, command[1:])]) if command else ""


def _shared(tables: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in tables[0].items()
        if all(table.get(key) == value for table in tables)
    }


def _listed(table: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in table.items())


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
