"""In which portions weights are packed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from localrun.models import weights

matrices = st.lists(st.builds(SimpleNamespace, rows=st.integers(1, 400), row_bytes=st.integers(1, 300)), min_size=1, max_size=8)


@given(matrices=matrices, size=st.integers(1, 60_000))
def test_portions_hold_every_row_once_and_whole_groups(matrices: list[Any], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "PORTION", size)
        portions = list(weights._portions(cast("list[weights.Weight]", matrices)))
    assert all(portions)
    for portion in portions:
        whole = sum(weight.row_bytes * n for weight, _, n in portion)
        assert whole < size + max(weight.row_bytes * 16 for weight, _, _ in portion)
    parts = [part for portion in portions for part in portion]
    for matrix in matrices:
        mine = [(first, n) for weight, first, n in parts if weight is matrix]
        assert [first for first, _ in mine] == [sum(n for _, n in mine[:i]) for i in range(len(mine))]
        assert sum(n for _, n in mine) == matrix.rows
        assert all(n % 16 == 0 for _, n in mine[:-1])
