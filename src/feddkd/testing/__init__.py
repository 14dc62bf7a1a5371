"""Checks a method of your own: `check_method` tests the laws that all methods here obey.

    from feddkd.testing import check_method

    def test_my_method_obeys_the_laws() -> None:
        check_method("mymethod(epochs=1, batch_size=8)")

It takes seconds if the method's options are small. If a law is broken, LawError (an AssertionError)
says which one and how. Otherwise it returns a report of the laws that were checked, and of those
that were not, with the reason. It does not need pytest.
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
    """The laws that were checked for a method, and those that were skipped, with the reason."""

    method: str
    networks: tuple[str, ...]
    checked: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name, networks = self.method or "the method", " and ".join(self.networks)
        lines = [f"{name}, on networks {networks}: {', '.join(self.checked)}"]
        lines += [f"not checked: {law}: {why}" for law, why in self.skipped.items()]
        return "\n".join(lines)


def check_method(method: Method | str) -> Report:
    """Check a method, or its text, against every law of LAWS, or raise LawError.

    Each law is checked on a small network without batch norm and on one with it.
    """
    chosen = parse(method) if isinstance(method, str) else method
    chosen.check_order()
    skipped, networks = _playable(chosen)
    laws = dict(LAWS)
    if not chosen.calls:
        del laws["reads back from its text"]
        skipped["reads back from its text"] = "it has no text; METHODS.register gives it one"
    for law, holds in laws.items():
        for network in networks:
            holds(Trial(chosen, network, law))
    return Report(str(chosen), tuple(networks), tuple(laws), skipped)


def _playable(method: Method) -> tuple[dict[str, str], list[Network]]:
    """Return the reasons for which networks are refused, and the networks that work."""
    refused: dict[str, str] = {}
    for network in NETWORKS:
        try:
            rehearse(method, network=network, rounds=1)
        except InputError as error:
            refused[f"network {network!r}"] = str(error)
        except Exception as error:
            repeat = Trial(method, network, "runs").again({"rounds": 1})
            raise LawError("runs", f"a run fails: {error}{repeat}") from error
    if len(refused) == len(NETWORKS):
        raise LawError("runs", f"the method refuses all networks: {'; '.join(refused.values())}")
    return refused, [network for network in NETWORKS if f"network {network!r}" not in refused]
