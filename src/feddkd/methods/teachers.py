"""Other teachers for DKD than a client's own model: controls that ask what the teachers add.

    "labels"     g_k = grad_w 1/B sum_x CE(y, f(w; x)): the label in the teacher's place
    "shuffled"   client k is taught by w_s(k), the local model of another client of the cohort
    "average"    client k is taught by wbar, the shared model before the first step

"labels" keeps the exchanges and takes the distillation out of them. "shuffled" keeps distillation
and takes away that a teacher was trained on the examples it sees: s is one cycle through the
clients that answer, drawn in every round. "average" is the null control: student and teacher are
one model at the first step, so no step moves it, except by rounding and by what `student` changes.

The last two send models, and this is counted. "shuffled" has two more exchanges in a round: all
local models go up, and each comes down to another client, with its private tensors. "average" has
one more, in which the shared model goes down. Mini-batches are other draws than those of the
client's own teacher, since a draw depends on the number of the exchange.
"""

from collections.abc import Callable
from typing import Literal

import torch

from feddkd.method import (
    Batch,
    Collect,
    Finish,
    Fold,
    Part,
    Phase,
    World,
    own_model,
)
from feddkd.models.functional import Mode, Model
from feddkd.randomness import fold, generator
from feddkd.spec.schedules import Repeat
from feddkd.tensors import Groups, Tensors, without

Teacher = Literal["eval", "batch", "train", "labels", "shuffled", "average"]
# the groups that only the phases below use: a client's teacher, the server's table of teachers
TEACHER, TABLE, DRAWS = "teacher", "dkd_teachers", "dkd_shuffle"


def teacher_group(teacher: Teacher) -> str | None:
    """Return the memo group that holds a client's teacher, or None for labels."""
    if teacher == "labels":
        return None
    return TEACHER if teacher in ("shuffled", "average") else "model"


def teacher_mode(teacher: Teacher) -> Mode:
    """Return the mode in which the teacher computes."""
    return teacher if teacher in ("batch", "train") else "eval"


def bring_teachers(teacher: Teacher, warmup: int) -> tuple[Phase, ...]:
    """Return the phases that give each client its teacher, if it is not the client's own model."""
    if teacher == "average":
        return (_send_average(warmup),)
    if teacher == "shuffled":
        return (_collect_teachers(warmup), _hand_out(warmup))
    return ()


def _holding(hold: Callable[[Model, Groups, Groups], Tensors], finish: Finish) -> Fold:
    """Return a client that reads no examples and holds a teacher in its carry."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {TEACHER: hold(model, sent, memo)}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        return carry

    return Fold(start, step, finish)


def _keep(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {}, {**memo, TEACHER: carry[TEACHER]}


def _same(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    return state


# --- the shared model as teacher


def _send_average(warmup: int) -> Phase:
    """Return the exchange that sends the shared model; a client adds its private tensors."""

    def hold(model: Model, sent: Groups, memo: Groups) -> Tensors:
        params, buffers = own_model(model, sent, memo)
        return {**params, **buffers}

    return Phase(
        name="send average",
        client=_holding(hold, _keep),
        server=_same,
        repeat=Repeat(1, warmup),
        leaves=frozenset({TEACHER}),
    )


# --- local models of other clients as teachers


def _collect_teachers(warmup: int) -> Phase:
    """Return the exchange in which clients upload their local models."""

    def upload(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {TEACHER: carry[TEACHER]}, memo

    return Phase(
        name="collect teachers",
        client=_holding(lambda model, sent, memo: memo["model"], upload),
        server=_shuffle,
        collect={TEACHER: Collect.EVERY},
        sends=(),
        repeat=Repeat(1, warmup),
        needs=frozenset({"model"}),
        opens=_open,
    )


def _hand_out(warmup: int) -> Phase:
    """Return the exchange that sends each client the local model of another."""
    return Phase(
        name="hand out teachers",
        client=_holding(lambda model, sent, memo: sent[TEACHER], _keep),
        server=lambda model, state, collected, rates: _without_table(state),
        sends=(),
        parts=_parts,
        repeat=Repeat(1, warmup),
        leaves=frozenset({TEACHER}),
    )


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return a key and the number of cycles drawn so far."""
    drawn = {"key": torch.tensor(fold(("teachers", *world.key))), "count": torch.tensor(0)}
    return {DRAWS: drawn}


def _shuffle(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Keep the models in a table, and draw the row in it of each client's teacher."""
    ledger, clients = state[DRAWS], rates["clients"]
    random = generator(("teachers", int(ledger["key"]), int(ledger["count"])))
    cycle = random.permutation(len(clients))
    rows = torch.empty(len(clients), dtype=torch.int64)
    rows[torch.from_numpy(cycle)] = torch.from_numpy(cycle).roll(-1)
    return {
        **state,
        TABLE: collected[TEACHER],
        DRAWS: {**ledger, "count": ledger["count"] + 1, "pupils": clients, "rows": rows},
    }


def _parts(state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """Send each client the model in its teacher's row."""
    pupils, rows = state[DRAWS]["pupils"].tolist(), state[DRAWS]["rows"].tolist()
    return [
        Part((client,), {TEACHER: {name: table[row] for name, table in state[TABLE].items()}})
        for client, row in zip(pupils, rows, strict=True)
        if client in cohort
    ]


def _without_table(state: Groups) -> Groups:
    """Return the state without the models of this round's clients."""
    kept = {group: tensors for group, tensors in state.items() if group != TABLE}
    return {**kept, DRAWS: without(state[DRAWS], ("pupils", "rows"))}
