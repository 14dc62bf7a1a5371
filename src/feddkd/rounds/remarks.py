"""Remarks on settings that are possible, but perhaps not meant."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from feddkd.method import Method
from feddkd.rounds.loop import cohort_size

log = logging.getLogger(__name__)
Setting = tuple[Method, int | float, int]  # (method, cohort, number of clients)


def remark(settings: Iterable[Setting]) -> None:
    """Log a warning for each odd setting, the same one only once."""
    for text in dict.fromkeys(text for setting in settings for text in remarks(*setting)):
        log.warning("%s", text)


def remarks(method: Method, cohort: int | float, clients: int) -> Iterator[str]:
    """Yield a line for each odd setting."""
    if isinstance(cohort, int) and cohort == 1 < clients:
        yield f"cohort = 1 means one of {clients} clients in each round; for all clients write 1.0"
    elif cohort * clients < 1 and cohort_size(cohort, clients) == 1:
        yield f"cohort = {cohort:g} of {clients} clients is less than one client; one is taken"
    for name, count in Counter(call.name for call in method.calls).items():
        if count > 1:
            yield f"{name} is named {count} times in {method}: each round plays it {count} times"
    for call in method.calls:
        options = dict(call.complete)
        if options.get("nesterov") and options.get("momentum") == 0:
            yield f"{call}: nesterov changes nothing without momentum"
        if (decay := options.get("lr_decay")) and float(decay) > 1:
            yield f"{call}: lr_decay is above 1, so the learning rate grows from round to round"


def remark_on_batches(method: Method, sizes: Sequence[int]) -> None:
    """Log a line for each phase whose batches are larger than any client: each is one batch."""
    for phase in method.phases:
        reads, largest = phase.reads, max(sizes)
        trains = phase.asks_clients and reads.random and reads.source == "train"
        if trains and reads.batch_size > largest:
            text = "%s: batch_size = %d, and the largest client has %d examples: one batch each"
            log.info(text, phase.name, reads.batch_size, largest)
