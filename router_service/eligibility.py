"""Which backends may take a request, and why the others may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router_service.backend import Backend, State
from router_service.decision import Candidate, Exclusion, RoutingRequest
from router_service.likeness import tokenizer_in_use, why_left_out
from router_service.snapshot import Snapshot
from service_kit.faults import InvalidRequest, UnknownName


@dataclass(frozen=True, slots=True)
class Eligible:
    """The fleet, split in two."""

    snapshots: Mapping[str, Snapshot]
    """Latest Status of each backend that may take the request."""
    exclusions: Sequence[Exclusion]
    context_tokens: int
    """The largest of any backend that could take the request at another time; 0 while none is known."""


def eligible(
    fleet: Mapping[str, Backend], request: RoutingRequest, failed: Mapping[str, str], *, now_s: float
) -> Eligible:
    """Split the fleet for one request; `failed` says why earlier attempts ended, by backend.

    Of the model's backends only those that tokenize alike are left, unless the request is pinned to one. One whose
    breaker is open is out as long as another serves that could take the request: errors that all of them have are more
    likely the requests' fault than theirs, and to refuse everything would make an outage of it. Raises `UnknownName`
    for a model, precision or pinned backend that is not here, and `InvalidRequest` when the request names no model and
    several are served. Nobody being left is no error here.
    """
    model = _model(fleet, request)
    _check_precision(fleet, request, model)
    pinned = bool(request.hints.backend)
    tokenizer = None if pinned or model is None else tokenizer_in_use(fleet.values(), model)
    snapshots: dict[str, Snapshot] = {}
    exclusions: list[Exclusion] = []
    context_tokens = 0
    untripped = False
    """Some backend serves that could take the request, and its breaker lets requests through."""
    tripped: list[tuple[Backend, Snapshot, str]] = []
    for backend in fleet.values():
        snapshot = backend.snapshot
        why = _never(backend, request, model, tokenizer)
        if not why:
            context_tokens = max(context_tokens, snapshot.context_tokens if snapshot else 0)
            refusal = backend.breaker.refusal(now_s)
            untripped = untripped or (not refusal and backend.state is State.SERVING)
            why = _not_now(backend, failed)
            if refusal and not why and snapshot is not None:
                tripped.append((backend, snapshot, refusal))
                continue
        if why:
            exclusions.append(Exclusion(backend.name, why))
        elif snapshot is not None:
            snapshots[backend.name] = snapshot
    for backend, snapshot, refusal in tripped:
        if untripped:
            exclusions.append(Exclusion(backend.name, refusal))
        else:
            snapshots[backend.name] = snapshot
    return Eligible(snapshots, exclusions, context_tokens)


def _model(fleet: Mapping[str, Backend], request: RoutingRequest) -> str | None:
    """The model that the request will run on; None while no Status says what is served."""
    pinned = request.hints.backend
    if pinned and pinned not in fleet:
        raise UnknownName(f"No backend is called {pinned!r}; there are {', '.join(sorted(fleet))}.")
    known = {backend.snapshot.model for backend in fleet.values() if backend.snapshot is not None}
    if request.model:
        if known and request.model not in known:
            raise UnknownName(f"Model {request.model!r} is not served here; there are {', '.join(sorted(known))}.")
        return request.model
    if pinned:
        snapshot = fleet[pinned].snapshot
        return None if snapshot is None else snapshot.model
    serving = {b.snapshot.model for b in fleet.values() if b.snapshot is not None and b.state is State.SERVING}
    if len(serving) > 1:
        raise InvalidRequest("model", f"is missing and several are served; name one of {', '.join(sorted(serving))}")
    return next(iter(serving), None)


def _check_precision(fleet: Mapping[str, Backend], request: RoutingRequest, model: str | None) -> None:
    """Raises `UnknownName` for a precision that no backend of the model has, of those that were ever heard of: while
    there are none, nobody can know."""
    wanted = request.hints.precision
    known = {
        backend.snapshot.precision
        for backend in fleet.values()
        if backend.snapshot is not None and model in (None, backend.snapshot.model)
    }
    if wanted and known and wanted not in known:
        told = ", ".join(sorted(known - {""})) or "none that backends tell of"
        what = "The model" if model is None else f"Model {model!r}"
        raise UnknownName(f"{what} is not held in precision {wanted!r} here; there are {told}.")


def _never(backend: Backend, request: RoutingRequest, model: str | None, tokenizer: str | None) -> str:
    """Why this request may not go there, whatever the backend's state; empty when it may. `tokenizer` is the one that
    it must have, None for any."""
    pinned = request.hints.backend
    if pinned and backend.name != pinned:
        return f"the request is pinned to {pinned}"
    if backend.name in request.hints.excluded:
        return "the request excludes it"
    snapshot = backend.snapshot
    if snapshot is None:
        return ""
    if model is not None and snapshot.model != model:
        return f"serves model {snapshot.model}"
    if request.hints.precision and snapshot.precision != request.hints.precision:
        return f"holds its weights in precision {snapshot.precision or 'unknown'}, not {request.hints.precision}"
    return why_left_out(snapshot, tokenizer)


def _not_now(backend: Backend, failed: Mapping[str, str]) -> str:
    """Why nothing goes there at the moment; empty when it may."""
    if backend.name in failed:
        return f"failed this request: {failed[backend.name]}"
    if backend.state is not State.SERVING:
        return f"{backend.state.value} ({backend.detail})"
    return ""


def within_context(
    candidates: Sequence[Candidate], request: RoutingRequest, *, prompt_tokens: int, context_tokens: int
) -> tuple[list[Candidate], list[Exclusion]]:
    """Split candidates by whether prompt and answer fit. `prompt_tokens` is a sure count or a lower bound; a
    candidate's own count goes first. Raises `InvalidRequest` when they fit none of them, nor the `context_tokens` that
    the fleet has at best."""
    fitting: list[Candidate] = []
    exclusions: list[Exclusion] = []
    shortest: int | None = None
    for candidate in candidates:
        prompt = prompt_tokens if candidate.prompt_tokens_estimated else candidate.prompt_tokens
        shortest = prompt if shortest is None else min(shortest, prompt)
        if prompt + request.max_new_tokens <= candidate.context_tokens:
            fitting.append(candidate)
        else:
            exclusions.append(
                Exclusion(
                    candidate.name,
                    f"prompt of {prompt} + max_new_tokens of {request.max_new_tokens} "
                    f"is over its context of {candidate.context_tokens} tokens",
                )
            )
    if shortest is not None and not fitting and shortest + request.max_new_tokens > context_tokens:
        raise InvalidRequest(
            "max_new_tokens",
            f"prompt of {shortest} + max_new_tokens of {request.max_new_tokens} = {shortest + request.max_new_tokens} "
            f"tokens is over the context of {context_tokens}; shorten the prompt or ask for fewer tokens",
        )
    return fitting, exclusions
