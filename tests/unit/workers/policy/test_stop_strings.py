"""A stop string ends the shown text, complete or streamed alike."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from workers.policy.token_completion import StopStream, before_stop


@example(pieces=["bc", "b"], stops=["c", "bcb"])
@given(pieces=st.lists(st.text("abc", max_size=3), max_size=12), stops=st.lists(st.text("abc", max_size=3), max_size=2))
def test_stream_gives_the_same_text_as_the_whole(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    for reason in (None, 7, *stops):
        stream = StopStream(stops)
        given_out = [stream.feed(piece) for piece in pieces]
        assert "".join([*given_out, stream.end(reason)]) == before_stop(text, reason, [stop for stop in stops if stop])


def test_possible_beginning_of_a_stop_string_is_held_back() -> None:
    stream = StopStream(["\nObservation:", "###"])
    assert stream.feed("I look.\nObs") == "I look."
    assert stream.feed("tacles") == "\nObstacles"
    assert stream.feed("\nObservation: ") == ""
    assert stream.end("\nObservation:") == ""


def test_text_ends_before_the_stop_string_that_ended_it() -> None:
    assert before_stop("a ### b ### ", "###", ["###"]) == "a ### b "
    assert before_stop("a ### b", None, ["###"]) == "a ### b"
    assert before_stop("a </s>", "</s>", ["###"]) == "a </s>"
    assert before_stop("a 5", 5, ["5"]) == "a 5"
    assert before_stop("a", "###", ["###"]) == "a"
