"""Masked uploads:

their sum is the sum of the uploads, and nothing less than all of it tells anything.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from feddkd.flower import client_masking, opened_sums, shamir, shares
from feddkd.flower.client_masking import NodeKeys
from feddkd.flower.deployment.credentials import make_node
from feddkd.flower.masking import (
    Words,
    decode,
    encode,
    from_groups,
    mask,
    pairwise,
    stream,
    total,
    weights,
)
from feddkd.flower.messages import ExchangeRequest, FederationFacts, MaskingOrder, PublicKeys
from feddkd.flower.opened_sums import save_sums, with_sums
from feddkd.flower.wire import NodeMemory, WireError, unpack
from feddkd.method import Collect
from feddkd.tensors import Groups, stack, weighted_mean

RULES = {"params": Collect.MEAN_BY_EXAMPLES, "control": Collect.MEAN_BY_CLIENTS}
FACTS = FederationFacts((), 10, 1.0)
NAMES = ["0-1", "1-1", "1-2"]  # a round of local training and two steps of DKD


def upload(k: int, round: int = 1) -> Groups:
    draw = torch.Generator().manual_seed(k + 10_000 * round)
    return {
        "params": {"w": torch.randn(40, 25, generator=draw, dtype=torch.float64)},
        "control": {"c": torch.randn(3, generator=draw)},
    }


# --- numbers


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 500)), min_size=3, max_size=8))
def test_a_decoded_sum_is_the_weighted_mean_up_to_half_a_unit_of_2_to_the_minus_32_each(
    told: list[tuple[float, int]],
) -> None:
    groups = [{"params": {"w": torch.tensor([x], dtype=torch.float64)}} for x, _ in told]
    counts, rule = [n for _, n in told], {"params": Collect.MEAN_BY_EXAMPLES}
    words = [
        encode(own, weights(rule, n), len(told)) for own, n in zip(groups, counts, strict=True)
    ]
    found = decode(total(words, []), weights(rule, sum(counts), len(told)), groups[0])["params"][
        "w"
    ]
    mean = weighted_mean(stack([own["params"] for own in groups]), counts)["w"]
    assert float((found - mean).abs()) <= len(told) * 2.0**-33 / sum(counts) + 1e-12


def test_counters_become_rounded_means_and_types_and_shapes_stay() -> None:
    like: Groups = {
        "params": {"w": torch.zeros(2, 3)},
        "control": {"seen": torch.tensor(0), "c": torch.zeros(())},
    }
    own: list[Groups] = [
        {
            "params": {"w": torch.full((2, 3), k / 2)},
            "control": {"seen": torch.tensor(k), "c": torch.tensor(1.5)},
        }
        for k in (3, 4, 8)
    ]
    found = decode(
        total([encode(one, weights(RULES, 2), 3) for one in own], []), weights(RULES, 6, 3), like
    )
    assert found["control"]["seen"] == 5
    assert found["control"]["seen"].dtype == torch.int64
    assert torch.equal(found["params"]["w"], torch.full((2, 3), 2.5))
    assert found["control"]["c"] == 1.5


@pytest.mark.parametrize("value", [2.0**31 / 5, -1e300, torch.inf, torch.nan])
def test_what_a_sum_could_not_hold_is_refused_and_not_cut_off(value: float) -> None:
    with pytest.raises(WireError, match=r"exceeds|NaN"):
        encode(
            {"params": {"w": torch.tensor([0.0, value], dtype=torch.float64)}},
            {"params": 1},
            members=5,
        )


def test_what_the_server_wants_one_by_one_is_not_masked() -> None:
    with pytest.raises(WireError, match="not summed"):
        weights({"params": Collect.EVERY}, 10)


def test_pairwise_masks_cancel_in_the_sum_of_all_and_of_no_fewer() -> None:
    seeds = {frozenset({k, j}): shares.new_seed() for k in range(4) for j in range(k)}
    pairs = [
        pairwise(k, {j: seeds[frozenset({k, j})] for j in range(4) if j != k}, 50) for k in range(4)
    ]
    assert not total(pairs, []).any()
    assert all(total(pairs[:n], []).all() for n in (1, 2, 3))


def test_masks_look_uniform() -> None:
    words = mask(0, shares.new_seed(), {1: shares.new_seed()}, 100_000)
    ones = [float(((words >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    assert max(abs(share - 0.5) for share in ones) < 0.01  # six deviations


# --- secrets


def test_fewer_shares_than_the_threshold_do_not_give_the_secret() -> None:
    seed = shares.new_seed()
    cut = shamir.split(seed, 3, 5)
    assert shamir.join([cut[4], cut[0], cut[2]]) == seed
    assert [shamir.number(share) for share in cut] == [1, 2, 3, 4, 5]
    with suppress(WireError):  # what comes out seldom looks like a secret at all
        assert shamir.join(cut[:2]) != seed


def test_sealed_shares_open_for_one_receiver_from_one_sender_and_whole() -> None:
    a, b = shares.new_key(), shares.new_key()
    channel, own = shares.agree(a, shares.public(b)), [b"s" * shamir.SHARE]
    assert channel == shares.agree(b, shares.public(a))
    sealed = shares.seal(channel, 0, 1, own, own)
    assert shares.unseal(channel, 0, 1, sealed, 1) == (own, own)
    for wrong in (
        (channel, 1, 0, sealed, 1),
        (channel, 0, 1, sealed, 2),
        (shares.new_seed(), 0, 1, sealed, 1),
        (channel, 0, 1, b"", 1),
    ):
        with pytest.raises(WireError, match="shares of client"):
            shares.unseal(*wrong)


# --- a client


@dataclass
class Cohort:
    """Five clients of a round, of which four make a threshold, and all that a server would see of
    them.
    """

    clients: Sequence[int] = (2, 3, 5, 7, 8)
    session: str = "s"
    round: int = 1
    kept: dict[int, NodeMemory] = field(default_factory=dict)
    public: dict[int, PublicKeys] = field(default_factory=dict)
    sealed: dict[int, Mapping[int, str]] = field(default_factory=dict)
    digest: str = "digest"  # of the experiment
    scale: float = 1.0  # of the uploads
    shift: float = 0.0  # of each of their numbers

    def upload(self, k: int, name: str) -> Groups:
        return {
            group: {name: tensor * self.scale + self.shift for name, tensor in tensors.items()}
            for group, tensors in upload(
                k + 1000 * int(name[-1]) + int(name[0]), self.round
            ).items()
        }

    def __post_init__(self) -> None:
        for k in self.clients:
            self.public[k], self.kept[k] = client_masking.begin(
                k, self.session, self.digest, self.round, NAMES, self.kept.get(k, {})
            )
        for k in self.clients:
            reply, self.kept[k] = client_masking.deal(k, self.session, 4, self.public, self.kept[k])
            self.sealed[k] = reply.sealed

    def order(self, k: int, name: str = "0-1") -> MaskingOrder:
        sealed = {j: shares[k] for j, shares in self.sealed.items() if j != k}
        return MaskingOrder(self.session, sealed if name == NAMES[0] else None)

    def masked(
        self, k: int, name: str = "0-1", order: MaskingOrder | None = None, round: int | None = None
    ) -> Words:
        index, step = map(int, name.split("-"))
        key = (3, round or self.round, index, step)
        request = ExchangeRequest({}, FACTS, k, key, "local", "", "", None)
        order, computed = order or self.order(k, name), self.upload(k, name)
        content, self.kept[k] = client_masking.masked(
            request, order, self.digest, RULES, 10 * k, computed, {}, self.kept[k]
        )
        return from_groups(unpack(content))

    def told(self, k: int, survivors: Sequence[int], name: str = "0-1") -> Mapping[int, str]:
        reply, self.kept[k] = client_masking.reveal(k, self.session, name, survivors, self.kept[k])
        return reply.shares

    def secret(self, member: int, survivors: Sequence[int], name: str) -> bytes:
        """Return the secret that the server joins from the survivors' shares."""
        return shamir.join(
            [bytes.fromhex(self.told(k, survivors, name)[member]) for k in survivors[:4]]
        )


def plain(k: int, name: str = "0-1") -> Words:
    return encode(upload(k + 1000 * int(name[-1]) + int(name[0])), weights(RULES, 10 * k), 5)


def test_a_masked_upload_has_no_word_of_the_plain_one_nor_of_another_time() -> None:
    one, other = Cohort().masked(2), Cohort().masked(2)
    assert not set(one.tolist()) & set(other.tolist())
    assert not set(one.tolist()) & set(plain(2).tolist())


def test_of_each_member_one_secret_is_told_its_seed_if_it_survived_or_else_its_key() -> None:
    cohort = Cohort()
    for k in cohort.clients:
        cohort.masked(k)
    there = [2, 3, 7, 8]
    for k in there:
        assert (
            cohort.secret(k, there, "0-1").hex()
            == json.loads(cohort.kept[k]["secrets:" + str(k)])["seeds"]["0-1"]
        )
    assert shares.public(cohort.secret(5, there, "0-1")).hex() == cohort.public[5].keys["0-1"]


def test_the_key_of_a_client_that_fell_silent_opens_none_of_its_earlier_uploads() -> None:
    """The server learns the seed of one exchange and the key of another.

    With one key for the whole round it would learn both of one exchange.
    """
    cohort = Cohort()
    first = {k: cohort.masked(k) for k in cohort.clients}
    rest = [k for k in cohort.clients if k != 5]
    for k in rest:
        cohort.masked(k, "1-1")
    own, key = cohort.secret(5, cohort.clients, "0-1"), cohort.secret(5, rest, "1-1")
    bare = first[5] - stream(shares.derive(own, "mask"), len(first[5]))
    for name in NAMES:
        pairs = {k: shares.agree(key, bytes.fromhex(cohort.public[k].keys[name])) for k in rest}
        assert not set((bare - pairwise(5, pairs, len(bare))).tolist()) & set(plain(5).tolist())


def test_for_an_exchange_there_is_one_set_of_survivors_for_ever() -> None:
    cohort = Cohort()
    for k in cohort.clients:
        cohort.masked(k)
    assert cohort.told(2, [2, 3, 5, 7]) == cohort.told(2, [7, 5, 3, 2])
    with pytest.raises(WireError, match="already revealed"):
        cohort.told(2, [2, 3, 5, 8])
    again = Cohort(session="again", kept=cohort.kept)  # a server that plays the round once more
    again.masked(2)
    with pytest.raises(WireError, match="nearly the same upload"):
        again.told(2, [2, 3, 5, 7, 8])
    assert again.told(2, [2, 3, 5, 7])
    later = Cohort(session="later", round=2, kept=again.kept)
    later.masked(2)
    assert later.told(2, [2, 3, 5, 7, 8])
    back = Cohort(session="back", kept=later.kept)
    back.masked(2)
    with pytest.raises(WireError, match="nearly the same upload"):
        back.told(2, [2, 3, 5, 7, 8])


@pytest.mark.parametrize(
    "changes",
    [{}, {"digest": "of another experiment"}, {"scale": 1.5}, {"scale": 3.0, "shift": 1e-5}],
    ids=["the same", "another key", "another learning rate", "and a little noise"],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_nearly_the_same_upload_is_in_sums_for_one_set_of_survivors(
    changes: dict[str, Any], restarted: bool, tmp_path: Path
) -> None:
    first = Cohort()
    for k in first.clients:
        first.masked(k)
    first.told(2, [2, 3, 5, 7])
    kept = first.kept
    if restarted:
        save_sums(tmp_path, {}, kept[2])
        kept = {2: with_sums(tmp_path, {})}
    second = Cohort(session="second", kept=kept, **changes)
    for k in second.clients:
        second.masked(k)
    with pytest.raises(WireError, match="nearly the same upload"):
        second.told(2, [2, 3, 5, 7, 8])
    assert second.told(2, [2, 3, 5, 7])


def test_uploads_that_differ_are_in_any_sums() -> None:
    first = Cohort()
    first.masked(2)
    first.told(2, [2, 3, 5, 7])
    for round in range(2, 6):
        later = Cohort(session=str(round), round=round, kept=first.kept)
        later.masked(2)
        assert later.told(2, [2, 3, 5, 8] if round % 2 else later.clients)


def test_the_memory_of_sums_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_sums, "MOST", 5)
    memory, record = opened_sums.new_memory(), opened_sums.RECORD.itemsize
    for k in range(20):
        found = opened_sums.sketches(memory, upload(k), {})
        memory = opened_sums.remember(memory, found, [1, 2, 3])
    assert len(memory) == opened_sums.SALT + 5 * record


# --- keys that hospitals have exchanged by hand


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Return a folder with the keys of three hospitals; the public ones are in keys/."""
    (tmp_path / "keys").mkdir()
    for k in (2, 3, 5):
        make_node(tmp_path / f"{k}")
        (tmp_path / f"{k}.pub").rename(tmp_path / "keys" / f"{k}.pub")
    return tmp_path


Signed = tuple[dict[int, PublicKeys], dict[int, NodeMemory]]


def announced(folder: Path, signers: Mapping[int, str], session: str = "s") -> Signed:
    """Return what each client announces, and what it keeps; `signers` have signed."""
    made = {
        k: client_masking.begin(
            k, session, "digest", 1, NAMES, {}, NodeKeys(folder / signer if signer else None)
        )
        for k, signer in signers.items()
    }
    return {k: keys for k, (keys, _) in made.items()}, {k: kept for k, (_, kept) in made.items()}


def test_keys_that_each_hospital_has_signed_are_taken(hospitals: Path) -> None:
    public, kept = announced(hospitals, {2: "2", 3: "3", 5: "5"})
    node = NodeKeys(hospitals / "2", hospitals / "keys")
    assert client_masking.deal(2, "s", 3, public, kept[2], node)


@pytest.mark.parametrize(
    ("signers", "why"),
    [
        ({3: ""}, "not signed by a known"),
        ({3: "5"}, "signed by 5"),
        ({3: "stranger"}, "not signed by a known"),
    ],
)
def test_keys_that_a_server_has_swapped_are_refused(
    signers: dict[int, str], why: str, hospitals: Path
) -> None:
    make_node(hospitals / "stranger")
    public, kept = announced(hospitals, {2: "2", 3: "3", 5: "5", **signers})
    node = NodeKeys(hospitals / "2", hospitals / "keys")
    with pytest.raises(WireError, match=why):
        client_masking.deal(2, "s", 3, public, kept[2], node)


def test_a_signature_is_for_one_client_one_session_and_these_keys(hospitals: Path) -> None:
    node = NodeKeys(hospitals / "2", hospitals / "keys")
    earlier, _ = announced(hospitals, {2: "2", 3: "3", 5: "5"}, "earlier")
    public, kept = announced(hospitals, {2: "2", 3: "3", 5: "5"})
    swapped = replace(public[3], channel=public[5].channel)
    for wrong in (earlier[3], swapped, replace(public[3], signature="00")):
        with pytest.raises(WireError, match="signature under the keys of client 3"):
            client_masking.deal(2, "s", 3, {**public, 3: wrong}, kept[2], node)
    (hospitals / "keys" / "5.pub").rename(hospitals / "keys" / "five.pub")
    twice = {**public, 7: public[5]}
    with pytest.raises(WireError, match="clients 5 and 7 are both signed by five"):
        client_masking.deal(2, "s", 3, twice, kept[2], node)


def test_a_hospital_insists_on_its_least_threshold() -> None:
    cohort = Cohort(session="other")
    public, kept = client_masking.begin(2, "s", "digest", 1, NAMES, {})
    with pytest.raises(WireError, match="at least 5"):
        client_masking.deal(2, "s", 4, {**cohort.public, 2: public}, kept, least=5)
    assert client_masking.deal(2, "s", 5, {**cohort.public, 2: public}, kept, least=5)


@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        ([2, 3, 5], "threshold of 4"),
        ([3, 5, 7, 8], "no upload in"),
        ([2, 3, 5, 9], "not all among the members"),
        ([2, 2, 2, 2], "1 survivors"),
    ],
)
def test_survivors_must_be_enough_and_members_and_have_the_asked_among_them(
    survivors: list[int], why: str
) -> None:
    cohort = Cohort()
    cohort.masked(2)
    with pytest.raises(WireError, match=why):
        cohort.told(2, survivors)


def test_nothing_is_told_of_an_exchange_without_an_upload() -> None:
    cohort = Cohort()
    cohort.masked(2)
    with pytest.raises(WireError, match="no upload in"):
        cohort.told(2, cohort.clients, "1-1")


def test_a_mask_is_used_once_and_in_its_round() -> None:
    cohort = Cohort()
    with pytest.raises(WireError, match="have not arrived"):
        cohort.masked(2, "1-1")
    cohort.masked(2)
    for name, round in (("0-1", 1), ("1-3", 1), ("1-1", 2)):
        with pytest.raises(WireError, match="no unused mask"):
            cohort.masked(2, name, round=round)
    with pytest.raises(WireError, match="once a round"):
        cohort.masked(2, "1-1", cohort.order(2))
    cohort.masked(2, "1-1")


def test_shares_that_cannot_be_opened_or_are_too_few_are_refused() -> None:
    cohort = Cohort()
    parcels = cohort.order(2).sealed
    assert parcels is not None
    for sealed in (
        {**parcels, 3: parcels[5]},
        {**parcels, 3: parcels[3][:-4] + "AAA="},
        {**parcels, 3: ""},
    ):
        with pytest.raises(WireError, match="shares of client 3 cannot be decrypted"):
            cohort.masked(2, order=MaskingOrder("s", sealed))
    with pytest.raises(WireError, match="shares of 3 clients"):
        cohort.masked(2, order=MaskingOrder("s", {3: parcels[3], 5: parcels[5]}))


def test_shares_are_dealt_once_with_a_threshold_that_means_something_and_under_ones_own_keys() -> (
    None
):
    cohort = Cohort()
    with pytest.raises(WireError, match="already sent"):
        client_masking.deal(2, "s", 4, cohort.public, cohort.kept[2])
    told, kept = client_masking.begin(2, "s", "digest", 1, NAMES, {})
    fresh = {**cohort.public, 2: told}
    two = {k: fresh[k] for k in (2, 3)}
    others = {**fresh, 3: replace(fresh[3], keys={"0-1": fresh[3].keys["0-1"]})}
    nonsense = {**fresh, 3: replace(fresh[3], channel="00")}
    for threshold, public, why in (
        (2, two, "at least 3"),
        (6, fresh, "threshold is 6"),
        (3, {**fresh, 9: fresh[8]}, "more than half"),
        (4, cohort.public, "not those that it has sent"),
        (4, others, "other exchanges"),
        (4, nonsense, "not a public key"),
    ):
        with pytest.raises(WireError, match=why):
            client_masking.deal(2, "s", threshold, public, kept)
    with pytest.raises(WireError, match="no secrets of this round"):
        client_masking.deal(2, "another", 4, fresh, kept)
    assert client_masking.deal(2, "s", 4, fresh, kept)
