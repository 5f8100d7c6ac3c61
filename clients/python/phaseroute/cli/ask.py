"""Commands that ask a running router or backend: generate, route, backends."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from phaseroute import results
from phaseroute.cli import tables
from phaseroute.cli.connect import Target, TlsCa, TlsCert, TlsKey, TokenFile, UseTls, security
from phaseroute.client import Client, Stream
from phaseroute.requests import GenerateOptions, PriorityName, PromptLike
from phaseroute.results import Completion, Delta, Finished
from phaseroute.v1 import router_pb2

Prompt = Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.", show_default=False)]
AsChat = Annotated[bool, typer.Option("--chat", help="Send it as a user's message, in the model's chat template.")]
NewTokens = Annotated[int | None, typer.Option(help="How many tokens at most; the server's default is 256.")]
Policy = Annotated[str | None, typer.Option(help="Route by this policy instead of the router's own.")]
Backend = Annotated[str | None, typer.Option(help="Send it to this backend and nowhere else.")]
Precision = Annotated[
    str | None, typer.Option(help="Only backends that hold their weights so; `phaseroute backends` shows how.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
FirstToken = Annotated[
    float | None,
    typer.Option("--ttft-slo", metavar="SECONDS", help="Refuse it if its first token is forecast to come later."),
]
TimeLimit = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="Give up after this long.")]

DECISION_WAIT_S = 2.0
"""How long a decision may lag behind the answer that it led to."""


def generate(
    prompt: Prompt,
    target: Target = "localhost:50051",
    chat: AsChat = False,
    max_new_tokens: NewTokens = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy, the default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Above 0: repeat less, by count.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0: repeat less, once seen.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on when the model would end.")] = False,
    priority: Annotated[
        PriorityName | None, typer.Option(help="batch lets interactive requests, the default, go first.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Label for requests with answers of similar length.")] = None,
    policy: Policy = None,
    backend: Backend = None,
    precision: Precision = None,
    ttft_slo_s: FirstToken = None,
    timeout_s: TimeLimit = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Then show the candidates, the decision and how its forecast turned out.")
    ] = False,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Stream the model's answer to PROMPT."""
    options = _given(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
        stop=stop or None, ignore_eos=ignore_eos or None, priority=priority, workload=workload, policy=policy,
        backend=backend, precision=precision, ttft_slo_s=ttft_slo_s,
    )  # fmt: skip
    with Client(target, **security(tls, tls_ca, tls_cert, tls_key, token_file)) as client:
        decisions = client.watch_decisions() if explain else None
        if decisions:
            decisions.wait_started()
        with client.generate(_prompt(prompt, chat), timeout_s=timeout_s, **options) as stream:
            answer = results.completion(list(stream if as_json else _echo(stream)))
        decision = _decision_of(answer, decisions) if decisions else None
    if as_json:
        extra = {"decision": _as_dict(decision) if decision else None} if explain else {}
        _print_json(asdict(answer) | extra)
    elif explain:
        _print_explanation(answer, decision, target)


def route(
    prompt: Prompt,
    target: Target = "localhost:50051",
    chat: AsChat = False,
    max_new_tokens: NewTokens = None,
    policy: Policy = None,
    backend: Backend = None,
    precision: Precision = None,
    ttft_slo_s: FirstToken = None,
    timeout_s: TimeLimit = None,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show where the router would send PROMPT, and why. Sends nothing."""
    options = _given(
        max_new_tokens=max_new_tokens, policy=policy, backend=backend, precision=precision, ttft_slo_s=ttft_slo_s
    )
    with Client(target, **security(tls, tls_ca, tls_cert, tls_key, token_file)) as client:
        decision = client.route(_prompt(prompt, chat), timeout_s=timeout_s, **options)
    if as_json:
        _print_json(_as_dict(decision))
    else:
        console = Console(highlight=False, emoji=False)
        console.print(tables.decision_table(decision))
        console.print(tables.decision_text(decision), markup=False)


def backends(
    target: Target = "localhost:50051",
    timeout_s: TimeLimit = 10.0,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List the router's backends: state, engine, queue, KV cache, speeds."""
    with Client(target, **security(tls, tls_ca, tls_cert, tls_key, token_file)) as client:
        entries = client.backends(timeout_s=timeout_s)
    if as_json:
        _print_json([_as_dict(entry) for entry in entries])
    else:
        console = Console(highlight=False, emoji=False)
        console.print(tables.backend_table(entries))
        if notes := tables.backend_text(entries):
            console.print(notes, markup=False)


def _given(**options: Any) -> GenerateOptions:
    return cast(GenerateOptions, {name: value for name, value in options.items() if value is not None})


def _prompt(text: str, chat: bool) -> PromptLike:
    content = sys.stdin.read() if text == "-" else text
    return [{"role": "user", "content": content}] if chat else content


def _echo(stream: Stream[Delta | Finished]) -> Iterable[Delta | Finished]:
    """Print text as it comes, and pass the events on."""
    started = False
    try:
        for event in stream:
            if isinstance(event, Delta):
                started = True
                print(event.text, end="", flush=True)
            yield event
    finally:
        if started:
            print(flush=True)


def _decision_of(
    answer: Completion, decisions: Stream[router_pb2.Decision | router_pb2.Outcome]
) -> router_pb2.Decision | None:
    """The decision behind an answer, None where nobody decided or the news of it got lost."""
    if answer.routing is None:
        decisions.close()
        return None
    timer = threading.Timer(DECISION_WAIT_S, decisions.close)
    timer.start()
    try:
        for event in decisions:
            if isinstance(event, router_pb2.Decision) and event.id == answer.routing.decision_id:
                return event
        return None
    finally:
        timer.cancel()
        decisions.close()


def _print_explanation(answer: Completion, decision: router_pb2.Decision | None, target: str) -> None:
    console = Console(highlight=False, emoji=False)
    if decision:
        console.print(tables.decision_table(decision))
        console.print(tables.decision_text(decision), markup=False)
    elif answer.routing:
        console.print(f"The router did not report decision {answer.routing.decision_id} in time.", markup=False)
    else:
        console.print(f"{target} is a backend, not a router: there was nothing to decide.", markup=False)
    if answer.routing:
        console.print(tables.outcome_table(answer.routing))
    usage, timings = answer.usage, answer.timings
    console.print(
        f"{usage.generated_tokens} tokens ({answer.finish_reason}); prompt {usage.prompt_tokens}, "
        f"{usage.cached_tokens} of them reused; queue {timings.queue_s:.3f} s, prefill {timings.prefill_s:.3f} s, "
        f"decode {timings.decode_s:.3f} s",
        markup=False,
    )


def _as_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
