"""Metadata as nobody should send it, as far as a gRPC client lets it through."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.calls import Metadata

_PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=60)
_VALUES = (
    st.sampled_from(("", "0", "-1", "x" * 300, "x" * 5000, "Bearer ", "Bearer x", "Basic eDp5", "%00%ff")) | _PRINTABLE
)
_TRACES = st.sampled_from(
    (
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "00",
    )
)
_PAIRS = (
    st.tuples(st.just("traceparent"), _TRACES | _VALUES)
    | st.tuples(st.sampled_from(("tracestate", "baggage", "x-request-id", "authorization", "user-agent", "x")), _VALUES)
    | st.tuples(st.sampled_from(("grpc-trace-bin", "grpc-tags-bin", "x-bin")), st.binary(max_size=60))
)

headers: st.SearchStrategy[Metadata] = st.just(()) | st.lists(_PAIRS, max_size=4).map(tuple)
"""Often none; at times one name more than once."""
