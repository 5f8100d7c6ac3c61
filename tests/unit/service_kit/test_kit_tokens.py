"""Token files: what they say, and what is wrong with them."""

from pathlib import Path

import pytest

from service_kit.access import Access
from service_kit.addresses import stays_here
from service_kit.faults import Forbidden, StartupFailed, Unauthenticated
from service_kit.identity import ANYONE, Caller, Scope
from service_kit.tokens import Tokens, bearer_of, load_tokens, new_token, read_token
from tests.tokens import bearer, write_tokens

GENERATE = "/phaseroute.v1.InferenceService/Generate"
DIGEST = "a" * 64
SECRET = "phr_looks-like-a-token"


def loaded(path: Path, text: str) -> dict[str, Caller]:
    path.write_text(text)
    return {known.caller.name: known.caller for known in load_tokens(path)}


def entry(name: str, digest: str = DIGEST, more: str = "") -> str:
    return f'[clients."{name}"]\nsha256 = "{digest}"\nscopes = ["generate"]\n{more}\n'


def test_defaults_of_a_client(tmp_path: Path) -> None:
    caller = loaded(tmp_path / "t", entry("alice"))["alice"]
    assert (caller.scopes, caller.weight) == ({Scope.GENERATE}, 1.0)
    assert (caller.max_in_flight, caller.tokens_per_minute) == (None, None)


def test_salts_differ_by_client_and_secret_and_are_the_same_wherever_the_file_is(tmp_path: Path) -> None:
    text = entry("alice", "a" * 64) + entry("bob", "b" * 64)
    first, again = loaded(tmp_path / "1", text), loaded(tmp_path / "2", text)
    secret = loaded(tmp_path / "3", f'salt_secret = "s"\n{text}')
    assert first["alice"].cache_salt == again["alice"].cache_salt
    assert len({each.cache_salt for found in (first, secret) for each in found.values()}) == 4


def test_salts_may_be_chosen(tmp_path: Path) -> None:
    text = "".join(
        entry(name, str(number) * 64, more)
        for number, (name, more) in enumerate(
            [("a", 'cache_salt = "team"'), ("b", 'cache_salt = "team"'), ("c", "share_cache = true")]
        )
    )
    found = loaded(tmp_path / "t", text)
    assert [found[name].cache_salt for name in "abc"] == ["team", "team", ""]


def test_two_tokens_of_one_client_while_one_replaces_the_other(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f'[clients.alice]\nsha256 = ["{"a" * 64}", "{"b" * 64}"]\nscopes = []\n')
    one, other = load_tokens(path)
    assert one.caller == other.caller
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "clients: Field required"),
        ("[clients.alice", "no valid TOML"),
        ("clients = 3", "clients: Input should be a valid dictionary"),
        (f'[clients.alice]\nsha256 = "{SECRET}"\nscopes = []', "clients.alice.sha256: a SHA-256 in 64 hex digits"),
        (f'[clients.alice]\nsha256 = ["{SECRET}"]\nscopes = []', "clients.alice.sha256"),
        (f'[clients.alice]\ntoken = "{SECRET}"\nsha256 = "{DIGEST}"\nscopes = []', "clients.alice.token"),
        (f'[clients.alice]\nsha256 = "{DIGEST}"\nscopes = ["all"]', 'no scope "all"; there are generate'),
        (entry("alice", more="weight = 0"), "clients.alice.weight"),
        (entry("alice", more="weight = inf"), "clients.alice.weight"),
        (entry("alice", more="max_in_flight = 0"), "clients.alice.max_in_flight"),
        (entry("alice", more='share_cache = true\ncache_salt = "x"'), "exclude each other"),
        (entry("al ice"), "a name has up to 64 letters"),
        (entry("alice") + entry("bob"), "one sha256 twice"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_without_what_stands_there(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StartupFailed) as caught:
        loaded(tmp_path / "t", text)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path / "t") in message
    assert SECRET not in message


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="No such file"):
        Tokens(tmp_path / "missing")


def test_a_file_replaced_by_an_older_one_counts(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t", {"alice": [Scope.GENERATE]})
    older = write_tokens(tmp_path / "older", {"bob": [Scope.GENERATE]})
    tokens = Tokens(path)
    older.rename(path)
    assert tokens.caller(bearer("bob")).name == "bob"
    with pytest.raises(Unauthenticated):
        tokens.caller(bearer("alice"))


def test_a_file_that_vanishes_leaves_things_as_they_were(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t", {"alice": [Scope.GENERATE]})
    tokens = Tokens(path)
    path.unlink()
    assert tokens.caller(bearer("alice")).name == "alice"


@pytest.mark.parametrize("value", ["Bearer", "Bearer ", "token", "Basic x"])
def test_what_is_no_bearer_token_is_refused_without_being_repeated(value: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        bearer_of([("authorization", value)])
    assert caught.value.reason == "UNAUTHENTICATED"


def test_access_without_tokens_is_for_anyone() -> None:
    assert Access().caller(GENERATE, ()) is ANYONE
    assert Access().caller("/phaseroute.v1.RouterService/DrainBackend", ()) is ANYONE


def test_admin_calls_can_be_switched_off() -> None:
    with pytest.raises(Forbidden, match="DrainBackend is switched off here; start this server without --no-admin"):
        Access(admin=False).caller("/phaseroute.v1.RouterService/DrainBackend", ())
    assert Access(admin=False).caller(GENERATE, ()) is ANYONE


def test_what_is_new_needs_admin_until_it_is_in_the_table(tmp_path: Path) -> None:
    access = Access(Tokens(write_tokens(tmp_path / "t", {"a": [Scope.GENERATE, Scope.STATUS, Scope.ROUTE]})))
    with pytest.raises(Forbidden, match='New needs the scope "admin"'):
        access.caller("/phaseroute.v2.RouterService/New", bearer("a"))


def test_a_token_file_for_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{new_token()}\n")
    assert read_token(path).startswith("phr_")
    for text in ("", "\n", "two words", "two\nlines", "ü"):
        path.write_text(text)
        with pytest.raises(StartupFailed, match="holds no token"):
            read_token(path)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", True),
        ("127.3.2.1:1", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("unix:/run/a.sock", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("10.0.0.5:50061", False),
        ("gpu.local:50061", False),
        ("dns:///gpu:50061", False),
    ],
)
def test_addresses_that_stay_on_this_machine(address: str, expected: bool) -> None:
    assert stays_here(address) is expected
