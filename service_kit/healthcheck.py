"""Asks a server for its health, for containers without a gRPC tool: `python -m service_kit.healthcheck --help`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Never

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.certificates import ClientTls
from service_kit.channels import channel_options
from service_kit.faults import StartupFailed

SERVING = 0
NOT_SERVING = 1
UNREACHABLE = 2


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        self.exit(UNREACHABLE, f"error: {message}; see --help\n")


def main(argv: Sequence[str]) -> int:
    """Print one line; 0 SERVING, 1 not serving, 2 unreachable or wrong usage."""
    parser = _OneLineParser(prog="python -m service_kit.healthcheck", description=__doc__, allow_abbrev=False)
    parser.add_argument("--addr", default="127.0.0.1:50051", help="gRPC target (default: %(default)s)")
    parser.add_argument("--service", default="", help="full service name (default: the server as a whole)")
    parser.add_argument("--timeout", type=_seconds, default=3.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--tls-ca", type=Path, metavar="PEM", help="ask over TLS; the CA that vouches for the server")
    parser.add_argument(
        "--tls-cert", type=Path, metavar="PEM", help="certificate to show to a server that asks for one"
    )
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="key of --tls-cert")
    arguments = parser.parse_args(argv)
    tls = ClientTls(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    try:
        credentials = tls.load() if tls != ClientTls() else None
    except StartupFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return UNREACHABLE
    code, line = check(arguments.addr, arguments.service, arguments.timeout, credentials)
    print(line, file=sys.stderr if code else sys.stdout)
    return code


def check(
    target: str, service: str, timeout_s: float, credentials: grpc.ChannelCredentials | None = None
) -> tuple[int, str]:
    """Exit code and sentence for the health of a service ("" for the whole server) at a gRPC target."""
    subject = f"{service or 'the server'} at {target}"
    options = channel_options(target)
    with (
        grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)
    ) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.NOT_FOUND:
                return NOT_SERVING, f"{subject} is unknown; ask for one of the names that reflection lists"
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return UNREACHABLE, f"{subject} did not answer within {timeout_s:g} s; is it running?"
            return UNREACHABLE, f"{subject} cannot be asked: {code.name}: {error.details()}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return SERVING if status == "SERVING" else NOT_SERVING, f"{subject} is {status}"


def _seconds(text: str) -> float:
    value = float(text)
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
