"""Which call needs which scope, and who may make it."""

from __future__ import annotations

from collections.abc import Iterable

from service_kit.faults import Forbidden
from service_kit.identity import ANYONE, Caller, Scope
from service_kit.tokens import Tokens

OWN = "/phaseroute."
REFLECTION = "/grpc.reflection."

_INFERENCE = f"{OWN}v1.InferenceService/"
_ROUTER = f"{OWN}v1.RouterService/"

SCOPES = {
    f"{_INFERENCE}Generate": Scope.GENERATE,
    f"{_INFERENCE}CacheProbe": Scope.GENERATE,
    f"{_INFERENCE}Status": Scope.STATUS,
    f"{_INFERENCE}WatchStatus": Scope.STATUS,
    f"{_ROUTER}Route": Scope.GENERATE,
    f"{_ROUTER}ListBackends": Scope.STATUS,
    f"{_ROUTER}WatchDecisions": Scope.STATUS,
    f"{_ROUTER}DrainBackend": Scope.ADMIN,
}


def scope_of(method: str) -> Scope | None:
    """What a call of `/package.Service/Method` needs; None: nothing, as for health. Of our own services, what is not
    in the table needs admin."""
    if method.startswith(OWN):
        return SCOPES.get(method, Scope.ADMIN)
    return Scope.STATUS if method.startswith(REFLECTION) else None


def is_observer(method: str) -> bool:
    """Whether a method only looks on: no trace is made of it, and it goes on during a drain without prolonging it."""
    return SCOPES.get(method) is Scope.STATUS


class Access:
    """Lets calls in, or not."""

    def __init__(self, tokens: Tokens | None = None, *, admin: bool = True) -> None:
        """No `tokens`: everybody may do everything. `admin`: whether calls that need that scope are served at all."""
        self._tokens = tokens
        self._admin = admin

    def caller(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Who makes a call. Raises `Unauthenticated` and `Forbidden`."""
        scope = scope_of(method)
        if scope is None:
            return ANYONE
        caller = self._tokens.caller(metadata) if self._tokens else ANYONE
        name = method.rpartition("/")[2]
        if scope is Scope.ADMIN and not self._admin:
            raise Forbidden(f"{name} is switched off here; start this server without --no-admin to use it.")
        if scope not in caller.scopes:
            raise Forbidden(
                f'{name} needs the scope "{scope}", which the token of {caller.name} does not have; ask whoever runs '
                "this server for it."
            )
        return caller
