"""The checkpoint after which runs can be continued, with the undamaged rows before it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feddkd.runs import checkpoint
from feddkd.runs.damage import Flaw, check, check_contents, contents, raise_if_damaged
from feddkd.runs.record import finished_summary
from feddkd.runs.seal import LINES
from feddkd.simulation import Snapshot

log = logging.getLogger(__name__)


class Group(NamedTuple):
    """Runs that continue together, by their numbers, and their snapshots of one round."""

    members: list[int]
    snapshots: list[Snapshot]  # none if the runs start from the beginning


def finished(folder: Path, digest: str) -> dict[str, Any] | None:
    """Return the summary of the finished run with this digest; None if it is not in the folder.

    Raise a DamagedRunError if a file of a finished run is damaged, or if so much of an unfinished
    run is that it would begin again.
    """
    if (folder / "summary.json").exists():
        raise_if_damaged(folder, check(folder))
    else:
        rounds_to_continue(folder)
    return finished_summary(folder, digest)


def rounds_to_continue(folder: Path) -> list[int]:
    """Return the rounds after which a run can be continued: those that have a checkpoint and whole
    rows. Raise a DamagedRunError if rows are damaged and no checkpoint is left.
    """
    rounds = checkpoint.rounds(folder)
    if not rounds:
        return []
    checked = check_contents(folder, contents(folder, ("manifest.json", *LINES)))
    usable = [t for t in rounds if t <= checked.rounds or not checked.sealed]
    if any(flaw.file == "manifest.json" for flaw in checked.flaws):
        raise_if_damaged(folder, checked)
    if not usable:
        few = Flaw(LINES[0], f"has fewer lines than its checkpoint of round {rounds[0]} needs")
        raise_if_damaged(folder, checked._replace(flaws=checked.flaws or [few]))
    return usable


def abreast(
    folders: Sequence[Path], digests: Sequence[str], device: torch.device, fresh: bool
) -> list[Group]:
    """Return groups of runs that can continue in lock-step: all together if there is a round of
    which every run has a checkpoint.
    """
    if not folders:
        return []
    if fresh:
        return [Group(list(range(len(folders))), [])]
    saved = [_good(folder, digest, device) for folder, digest in zip(folders, digests, strict=True)]
    common = set.intersection(*map(set, saved))
    last = [max(common or snapshots, default=0) for snapshots in saved]
    groups = []
    for t in sorted(set(last)):
        members = [n for n in range(len(folders)) if last[n] == t]
        groups.append(Group(members, [saved[n][t] for n in members] if t else []))
    return groups


def _good(folder: Path, digest: str, device: torch.device) -> dict[int, Snapshot]:
    """Return the checkpoints of a run by round. Log damage, and leave out what it reaches."""
    snapshots = {}
    usable = rounds_to_continue(folder)
    if len(usable) < len(checkpoint.rounds(folder)):
        log.warning("rows in %s are damaged; the run goes back to round %d", folder, usable[-1])
    for round in usable:
        try:
            snapshots[round] = checkpoint.read(folder, digest, round, device)
        except checkpoint.DamagedError as error:
            log.warning("%s; it is ignored", error)
    return snapshots
