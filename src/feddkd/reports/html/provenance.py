"""The origin of the results: experiments, commands, versions and machines, to run them again."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from feddkd.reports.families import families, labels
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
    """Texts about the origin of the records."""

    task: dict[str, str]  # the keys that are the same in all runs
    methods: list[tuple[str, str]]  # label and full text
    runs: list[list[str]]  # one line for each run
    commands: list[str]
    versions: list[str]
    machines: list[str]
    columns: tuple[str, ...] = COLUMNS  # the headings of `runs`


def facts(records: Sequence[Record]) -> Facts:
    """Return the facts about some records."""
    manifests, groups = [record.manifest for record in records], families(records)
    parts = [part for manifest in manifests for part in [manifest, *manifest.get("resumed", [])]]
    texts = [group[0].manifest["experiment"]["method"] for group in groups]
    return Facts(
        task=_shared([manifest["canonical"] for manifest in manifests]),
        methods=list(zip(labels(groups), texts, strict=True)),
        runs=[_run(record) for record in records],
        commands=_distinct(map(_command, parts)),
        versions=_distinct(_listed(manifest.get("versions", {})) for manifest in manifests),
        machines=_distinct(_listed(manifest.get("hardware", {})) for manifest in manifests),
    )


def _run(record: Record) -> list[str]:
    """Return the cells of a run's line."""
    manifest, engine = record.manifest, record.manifest.get("engine", "")
    hashes = (
        manifest["digest"],
        manifest.get("data", {}).get("digest", ""),
        manifest.get("partition", {}).get("digest", ""),
    )
    return [
        record.folder.name,
        str(manifest["canonical"]["seed"]),
        f"{len(record.history)} of {manifest['canonical']['rounds']}"
        + (", ended" if "ended" in manifest else ""),
        f"{record.seconds:.1f}",
        # a name while the run goes on, facts of the engine when it is finished
        engine.get("name", "") if isinstance(engine, dict) else str(engine),
        *(text[:12] for text in hashes),
        str(manifest.get("started", "")),
    ]


def _command(part: dict[str, Any]) -> str:
    """Return the command that was typed, with `feddkd` in place of the program's path."""
    command = part.get("command", [])
    return shlex.join(["feddkd", *map(str, command[1:])]) if command else ""


def _shared(tables: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the keys that have the same value in all tables."""
    first = tables[0].items()
    return {
        key: str(value) for key, value in first if all(table.get(key) == value for table in tables)
    }


def _listed(table: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in table.items())


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
