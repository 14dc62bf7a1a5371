"""For those who write a method: `check_method` holds it to the laws that every method of this
package obeys.

    from feddkd.testing import check_method

    def test_my_method_obeys_the_laws() -> None:
        check_method("mymethod(epochs=1, batch_size=8)")

It takes seconds, if the method's options are small. Where a law is broken, LawError (an
AssertionError) says which and how; the report that comes back otherwise says what was checked, and
what was left out and why. pytest is not needed.
"""

from dataclasses import dataclass, field

from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.testing.laws import LAWS, LawError, Trial
from feddkd.testing.probes import FallsSilent as FallsSilent
from feddkd.testing.rehearsal import NETWORKS, Network
from feddkd.testing.rehearsal import rehearse as rehearse

__all__ = ["LAWS", "FallsSilent", "LawError", "Report", "check_method", "rehearse"]


@dataclass(frozen=True)
class Report:
    """What was checked of a method, and what was left out and why."""

    method: str
    networks: tuple[str, ...]
    checked: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.method or 'the method'}, on networks {' and '.join(self.networks)}:"
            f" {', '.join(self.checked)}"
        ]
        return "\n".join(
            [*lines, *(f"not checked: {what}: {why}" for what, why in self.skipped.items())]
        )


def check_method(method: Method | str) -> Report:
    """Hold a method, or its text, to every law of LAWS, on a small network without batch norm and
    on one with it.
    """
    chosen = parse(method) if isinstance(method, str) else method
    chosen.check_order()
    skipped, networks = _playable(chosen)
    laws = dict(LAWS)
    if not chosen.calls:
        del laws["reads back from its text"]
        skipped["reads back from its text"] = "it has none; METHODS.register gives it one"
    for law, holds in laws.items():
        for network in networks:
            holds(Trial(chosen, network, law))
    return Report(str(chosen), tuple(networks), tuple(laws), skipped)


def _playable(method: Method) -> tuple[dict[str, str], list[Network]]:
    """The networks that the method takes; of the others, what it says of them."""
    refused: dict[str, str] = {}
    for network in NETWORKS:
        try:
            rehearse(method, network=network, rounds=1)
        except InputError as error:
            refused[f"network {network!r}"] = str(error)
        except Exception as error:
            raise LawError(
                "runs", f"a run fails: {error}{Trial(method, network, 'runs').again({'rounds': 1})}"
            ) from error
    if len(refused) == len(NETWORKS):
        raise LawError("runs", f"it takes none of the networks: {'; '.join(refused.values())}")
    return refused, [network for network in NETWORKS if f"network {network!r}" not in refused]
