import base64
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from service_kit import errors
from service_kit.faults import EngineFailed, Fault, InvalidRequest, Overloaded, StartupFailed, Unavailable, UnknownName

ANY_TEXT = st.text(alphabet=st.characters(), max_size=4000)  # lone surrogates included


def details_of(status: status_pb2.Status) -> dict[str, object]:
    found = {}
    for detail in status.details:
        message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(message)
        found[message.DESCRIPTOR.name] = message
    return found


def rpc_error(code: grpc.StatusCode, message: str, trailer: bytes | None = None) -> grpc.aio.AioRpcError:
    trailers = [("grpc-status-details-bin", trailer)] if trailer is not None else []
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)


def rpc_error_of(status: status_pb2.Status) -> grpc.aio.AioRpcError:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return rpc_error(code, status.message, status.SerializeToString())


def trailer_bytes(status: status_pb2.Status) -> int:
    return len(quote(status.message.encode(), safe="")) + len(base64.b64encode(status.SerializeToString()))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (InvalidRequest("sampling.top_p", "is 2; choose less"), "INVALID_ARGUMENT"),
        (UnknownName("no such backend"), "NOT_FOUND"),
        (Overloaded("queue full", 1.5), "RESOURCE_EXHAUSTED"),
        (Unavailable("nobody there"), "UNAVAILABLE"),
        (EngineFailed("broke"), "INTERNAL"),
        (StartupFailed("cannot happen in a call"), "INTERNAL"),
        (Fault("unspecific"), "INTERNAL"),
    ],
)
def test_each_fault_has_its_code_and_reason(fault: Fault, code: str) -> None:
    status = errors.to_status(fault)
    assert errors.code_name(status) == code
    assert status.message == str(fault)
    info = details_of(status)["ErrorInfo"]
    assert (info.reason, info.domain) == (fault.reason, "phaseroute")


def test_a_subclass_keeps_its_parents_code() -> None:
    class QueueFull(Overloaded):
        reason = "QUEUE_FULL"

    status = errors.to_status(QueueFull("full", 0.25))
    assert errors.code_name(status) == "RESOURCE_EXHAUSTED"
    assert details_of(status)["ErrorInfo"].reason == "QUEUE_FULL"
    assert details_of(status)["RetryInfo"].retry_delay.ToMilliseconds() == 250


def test_an_invalid_request_names_the_field() -> None:
    [violation] = details_of(errors.to_status(InvalidRequest("stop[1]", "is empty")))["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("stop[1]", "is empty")


@pytest.mark.parametrize(("retry_after_s", "sent_s"), [(-1.0, 0.0), (1e12, errors.MAX_RETRY_AFTER_S)])
def test_a_retry_delay_is_kept_within_reason(retry_after_s: float, sent_s: float) -> None:
    retry = details_of(errors.to_status(Overloaded("full", retry_after_s)))["RetryInfo"]
    assert retry.retry_delay.ToMilliseconds() == 1000 * sent_s


@given(field=ANY_TEXT, problem=ANY_TEXT)
def test_trailers_stay_well_under_8_kib_whatever_the_text(field: str, problem: str) -> None:
    assert trailer_bytes(errors.to_status(InvalidRequest(field, problem))) < 6000
    assert trailer_bytes(errors.to_status(Overloaded(problem, 1.0))) < 6000


@given(text=st.text(min_size=600, max_size=2000))
def test_a_cut_message_is_a_prefix_and_says_that_it_is_cut(text: str) -> None:
    message = errors.to_status(Unavailable(text)).message
    assert message == text or (message.endswith("…") and text.startswith(message[:-1]))
    assert len(message.encode()) <= errors.MAX_MESSAGE_BYTES


@given(
    fault=st.one_of(
        st.builds(InvalidRequest, st.text(), st.text()),
        st.builds(UnknownName, st.text()),
        st.builds(Overloaded, st.text(), st.floats(0, 100)),
        st.builds(Unavailable, st.text()),
        st.builds(EngineFailed, st.text()),
    )
)
def test_a_fault_survives_the_way_through_a_router(fault: Fault) -> None:
    sent = errors.to_status(fault)
    upstream = errors.from_rpc_error(rpc_error_of(sent))
    relayed = errors.to_status(upstream)
    assert relayed.code == sent.code
    assert list(relayed.details) == list(sent.details)
    assert upstream.code.value[0] == sent.code
    assert upstream.reason == fault.reason
    if sent.message:
        assert relayed.message == sent.message == str(upstream)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_backends_cancelled_never_reaches_the_client(code: grpc.StatusCode) -> None:
    upstream = errors.from_rpc_error(rpc_error(code, "message"))
    if code is grpc.StatusCode.CANCELLED:
        assert upstream.code is grpc.StatusCode.UNAVAILABLE
    else:
        assert (upstream.code, str(upstream)) == (code, "message")
        assert upstream.reason == "UPSTREAM_FAILED"


@pytest.mark.parametrize(
    "trailer",
    [
        b"\xff\xff\xff",
        status_pb2.Status(code=3, message="another code").SerializeToString(),
        status_pb2.Status(code=5, message="another message").SerializeToString(),
    ],
)
def test_details_that_contradict_the_call_are_dropped(trailer: bytes) -> None:
    relayed = errors.to_status(errors.from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, "gone", trailer)))
    assert (errors.code_name(relayed), relayed.message, len(relayed.details)) == ("NOT_FOUND", "gone", 0)


def test_a_backends_oversized_details_are_dropped_and_its_message_cut() -> None:
    huge = status_pb2.Status(code=13, message="é" * 5000)
    huge.details.add().Pack(error_details_pb2.DebugInfo(detail="x" * 5000))
    relayed = errors.to_status(errors.from_rpc_error(rpc_error_of(huge)))
    assert errors.code_name(relayed) == "INTERNAL"
    assert len(relayed.details) == 0
    assert trailer_bytes(relayed) < 6000


def test_a_foreign_error_reason_is_not_taken_for_ours() -> None:
    status = status_pb2.Status(code=14, message="down")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="example.com"))
    assert errors.from_rpc_error(rpc_error_of(status)).reason == "UPSTREAM_FAILED"
