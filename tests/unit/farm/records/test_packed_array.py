"""The binary layout of arrays: a round trip preserves them, and garbage is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from farm.records.packed_array import pack, unpack

sizes = st.integers(0, 200)
finite = {"allow_nan": False}


@given(
    st.one_of(hnp.arrays(np.int32, sizes), hnp.arrays(np.uint8, sizes), hnp.arrays(np.float32, sizes, elements=finite))
)
def test_round_trip_preserves_dtype_and_values(array: NDArray[Any]) -> None:
    back = unpack(pack(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_bytes_are_as_documented() -> None:
    data = pack(np.array([1, -2], np.int32))
    assert struct.unpack_from("<BcI", data) == (1, b"i", 2)
    assert zstandard.ZstdDecompressor().decompress(data[6:]) == struct.pack("<ii", 1, -2)


@pytest.mark.parametrize("array", [np.zeros(3, np.float64), np.zeros((2, 2), np.int32), np.zeros(3, np.int64)])
def test_unsupported_arrays_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="cannot pack"):
        pack(array)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01i",
        b"\x02" + pack(np.zeros(2, np.int32))[1:],
        b"\x01z" + pack(np.zeros(2, np.int32))[2:],
        pack(np.zeros(2, np.int32))[:-3],
        struct.pack("<BcI", 1, b"i", 5) + pack(np.zeros(2, np.int32))[6:],
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"packed array|layout version"):
        unpack(data)
