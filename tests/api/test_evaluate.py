"""How a text is cut into windows, and what is said of them: every position once, in order, with enough before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.api.evaluate import EvaluateBody, Window, common_prefix, line, requests, windows
from localrun.errors import BadRequest
from localrun.messages import Evaluated


def test_a_text_that_fits_is_one_window() -> None:
    assert windows(100, 0, 0, 1) == [Window(0, 100, 0, 100)]
    assert windows(100, 100, 10, 1) == [Window(0, 100, 0, 100)]


def test_windows_by_hand() -> None:
    # 10 tokens, 6 at a time, moving on by 3: the last row of a window is reported by the next, which sees the token that follows it
    assert windows(10, 6, 3, 0) == [Window(0, 6, 0, 5), Window(3, 9, 5, 8), Window(6, 10, 8, 10)]
    # with BOS in front of each, a window holds one token of the text less
    assert windows(10, 6, 3, 1) == [Window(0, 6, 0, 5), Window(4, 9, 5, 8), Window(7, 10, 8, 10)]


@given(st.integers(1, 300), st.integers(2, 40), st.integers(0, 40), st.integers(0, 2))
def test_every_position_is_reported_once_with_what_comes_before_it(n: int, window: int, stride: int, n_prefix: int) -> None:
    try:
        found = windows(n, window, stride, n_prefix)
    except BadRequest:
        assert (stride or window // 2) > window - n_prefix - 1
        return
    assert [at for one in found for at in range(one.first, one.last)] == list(range(n))
    for one in found:
        assert one.start <= one.first < one.last <= one.end <= n
        front = n_prefix if one.start else 0
        assert one.end - one.start + front <= max(window, 1)
        # the token after each reported position is in the window too, but for the text's last
        assert one.last < one.end or one.end == n
    least = window - (stride or window // 2) - 1
    for one in found[1:]:
        assert one.first - one.start + n_prefix >= least or one.start <= n_prefix


@pytest.mark.parametrize(("window", "stride", "message"), [(4, 4, "by 3 at most, not by 4"), (2, 1, "too small")])
def test_windows_in_which_nothing_moves_are_refused(window: int, stride: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        windows(100, window, stride, 1 if window == 2 else 0)


def test_what_stands_in_front_of_a_text_is_found_in_it() -> None:
    assert common_prefix([1, 7, 8, 2], [1, 2]) == [1]
    assert common_prefix([7, 8], [1]) == []
    assert common_prefix([7, 8], []) == []


def test_requests_put_the_prefix_in_front_and_shift_the_ids() -> None:
    tokens = [1, *range(10, 19)]
    body = EvaluateBody(model="m", tokens=tokens, window=6, stride=3, ids=[[i] for i in range(10)])
    made = requests(body, tokens, [1], "r")
    assert [(request.request_id, request.tokens, front) for request, _, front in made] == [
        ("r-0", [1, 10, 11, 12, 13, 14], 0),
        ("r-1", [1, 13, 14, 15, 16, 17], 1),
        ("r-2", [1, 16, 17, 18], 1),
    ]
    assert made[1][0].ids == [[], [4], [5], [6], [7], [8]]


def test_ids_of_another_text_are_refused() -> None:
    with pytest.raises(BadRequest, match="ids has 2 rows for 3 tokens"):
        requests(EvaluateBody(model="m", tokens=[1, 2, 3], ids=[[1], [2]]), [1, 2, 3], [], "r")


def test_only_new_positions_are_said() -> None:
    window, front = Window(4, 9, 5, 8), 1
    event = Evaluated(
        request_id="r",
        first=0,
        tokens=[1, 4, 5, 6, 7, 8],
        nll=[0.0, 0.4, 0.5, 0.6, 0.7],
        top_ids=[[0], [4], [5], [6], [7], [8]],
        top_logprobs=[[-0.0], [-4.0], [-5.0], [-6.0], [-7.0], [-8.0]],
    )
    assert line("m", event, window, front) == {
        "model": "m",
        "first": 5,
        "tokens": [5, 6, 7],
        "nll": [0.5, 0.6, 0.7],
        "top_ids": [[5], [6], [7]],
        "top_logprobs": [[-5.0], [-6.0], [-7.0]],
    }
    early = Evaluated(request_id="r", first=0, tokens=[1, 4], nll=[0.0, 0.4], top_ids=[], top_logprobs=[])
    assert line("m", early, window, front) is None
