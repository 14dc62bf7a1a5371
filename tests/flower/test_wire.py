"""Tests of the wire format: a receiver gets the tensors that were sent, or an error."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddkd.flower.wire import WireError, check, pack, unpack
from feddkd.tensors import Groups

GROUPS: Groups = {
    "params": {"fc.weight": torch.randn(3, 2, dtype=torch.float64), "a/b": torch.ones(2)},
    "buffers": {},
    "rates": {"lr": torch.tensor(0.1, dtype=torch.float64)},
    "counts": {"seen": torch.tensor(7), "mask": torch.tensor([True, False])},
}


def test_types_shapes_numbers_and_empty_groups_come_through() -> None:
    found = unpack(pack(GROUPS))
    check(found, GROUPS)
    assert all(
        torch.equal(found[g][n], tensor) for g, own in GROUPS.items() for n, tensor in own.items()
    )


def test_tensors_that_share_memory_or_lie_crosswise_come_through() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    groups = {
        "a": {"part": whole[1], "whole": whole, "turned": whole.T, "none": whole[:0]},
        "b": {"row": whole[0], "wide": whole[:1].expand(4, 3), "none": torch.zeros(0)},
    }
    found = unpack(pack(groups))
    assert all(
        torch.equal(found[g][n], tensor) for g, own in groups.items() for n, tensor in own.items()
    )


@given(st.binary(max_size=200))
def test_whatever_bytes_come_they_are_groups_or_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        unpack(content)


@given(st.integers(0, len(pack(GROUPS)) - 1), st.integers(0, 255))
def test_a_damaged_message_is_read_or_refused_and_nothing_else(at: int, byte: int) -> None:
    content = bytearray(pack(GROUPS))
    content[at] = byte
    with suppress(WireError):
        check(unpack(bytes(content)), GROUPS)


def test_what_is_too_large_is_not_read() -> None:
    with pytest.raises(WireError, match="at most 100"):
        unpack(pack(GROUPS), most=100)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"b": {}}, "groups are"),
        ({"a": {"w": torch.ones(2), "v": torch.ones(2)}}, "tensors in 'a' are"),
        ({"a": {"w": torch.ones(3)}}, r"a/w is \(3,\) torch.float32; it should be \(2,\)"),
        ({"a": {"w": torch.ones(2).double()}}, "torch.float64; it should be"),
        ({"a": {"w": torch.tensor([1, torch.nan])}}, "NaN or infinite"),
    ],
)
def test_what_does_not_fit_is_named(found: Groups, why: str) -> None:
    with pytest.raises(WireError, match=why):
        check(found, {"a": {"w": torch.zeros(2)}})
