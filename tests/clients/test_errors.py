"""What the clients make of statuses that no service of ours sent."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from phaseroute.errors import from_rpc_error


def test_a_call_that_a_stopping_server_dropped_was_not_cancelled():
    error = from_rpc_error(AioRpcError(grpc.StatusCode.CANCELLED, Metadata(), Metadata(), "CANCELLED"), "here:1")
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "here:1" in str(error)


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_other_statuses_keep_their_code(code):
    details = "Locally cancelled by application!"
    assert from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details), "here:1").code is code
