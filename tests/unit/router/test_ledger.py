from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router_service.ledger import Ledger, Pending

NOTHING = Pending(0, 0, 0)


def book(ledger: Ledger, backend: str = "gpu", incarnation: str = "first", **changes):
    values = {"prompt_tokens": 100, "reusable_tokens": 60, "max_new_tokens": 10, **changes}
    return ledger.book(backend, incarnation, **values)


def test_booking_counts_what_the_prefix_leaves():
    ledger = Ledger()
    book(ledger)
    book(ledger, reusable_tokens=0)

    assert ledger.pending("gpu") == Pending(2, 140, 20)
    assert ledger.pending("cpu") == NOTHING


def test_every_lease_has_its_own_attempt_id():
    ledger = Ledger()

    assert len({book(ledger).attempt_id for _ in range(100)}) == 100


def test_status_takes_a_lease_over_for_good():
    ledger = Ledger()
    lease = book(ledger)

    ledger.on_status("gpu", "first", {lease.attempt_id, "someone else's"})
    assert ledger.pending("gpu") == NOTHING

    ledger.on_status("gpu", "first", set())
    assert ledger.pending("gpu") == NOTHING
    assert len(ledger) == 1


def test_status_of_another_backend_takes_nothing_over():
    ledger = Ledger()
    lease = book(ledger)

    ledger.on_status("cpu", "first", {lease.attempt_id})

    assert ledger.pending("gpu").requests == 1


def test_release_is_idempotent():
    ledger = Ledger()
    lease, other = book(ledger), book(ledger)

    ledger.release(lease)
    ledger.release(lease)

    assert ledger.pending("gpu").requests == 1
    assert len(ledger) == 1
    ledger.release(other)
    assert len(ledger) == 0


def test_restart_voids_what_was_booked_on_the_old_process():
    ledger = Ledger()
    old = book(ledger, incarnation="first")
    new = book(ledger, incarnation="second")

    ledger.on_status("gpu", "second", set())

    assert list(ledger.unseen("gpu")) == [new]
    ledger.release(old)
    ledger.release(new)
    assert len(ledger) == 0


def test_turns_follow_the_bookings():
    ledger = Ledger()
    book(ledger, "gpu")
    book(ledger, "cpu")
    book(ledger, "cpu")

    assert ledger.last_turn("cpu") > ledger.last_turn("gpu") > ledger.last_turn("new") == 0


def test_origin_names_the_sender_as_long_as_the_lease_is_held():
    ledger = Ledger()
    lease = book(ledger, origin="outer")

    ledger.on_status("gpu", "first", {lease.attempt_id})
    assert ledger.origin(lease.attempt_id) == "outer"

    ledger.release(lease)
    assert ledger.origin(lease.attempt_id) is None


def test_the_first_finish_ahead_is_told_of_all_and_of_each_client():
    ledger = Ledger()
    assert ledger.finish_s(None, 0.0) is None
    for client, finish_s in (("a", 5.0), ("a", 3.0), ("b", 1.0), ("c", None)):
        book(ledger, client=client, finish_s=finish_s)
    assert (ledger.finish_s(None, 0.0), ledger.finish_s("a", 0.0), ledger.finish_s("c", 0.0)) == (1.0, 3.0, None)
    assert (ledger.finish_s(None, 1.0), ledger.finish_s("a", 4.0), ledger.finish_s("b", 2.0)) == (3.0, 5.0, None)


def test_a_lease_handed_over_to_a_status_still_tells_when_it_will_be_done():
    ledger = Ledger()
    lease = book(ledger, finish_s=3.0)
    ledger.on_status("gpu", "first", {lease.attempt_id})
    assert ledger.finish_s(None, 0.0) == 3.0
    ledger.release(lease)
    assert ledger.finish_s(None, 0.0) is None


class LedgerMachine(RuleBasedStateMachine):
    """Against a model: a set of leases that no Status has shown and nobody has released."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.incarnation = {"a": 0, "b": 0}
        self.unseen = {}
        self.held = {}

    @rule(
        target=leases,
        backend=st.sampled_from("ab"),
        prompt=st.integers(0, 500),
        reusable=st.integers(0, 600),
        decode=st.integers(1, 300),
        client=st.sampled_from(["", "a", "b"]),
        finish=st.none() | st.integers(0, 9),
    )
    def book(self, backend, prompt, reusable, decode, client, finish):
        lease = self.ledger.book(
            backend,
            str(self.incarnation[backend]),
            prompt_tokens=prompt,
            reusable_tokens=reusable,
            max_new_tokens=decode,
            client=client,
            finish_s=finish,
        )
        self.unseen[lease.attempt_id] = lease
        self.held[lease.attempt_id] = lease
        return lease

    @rule(backend=st.sampled_from("ab"), shown=st.lists(leases))
    def status(self, backend, shown):
        """May show ended, foreign and unknown attempts alike."""
        ids = {lease.attempt_id for lease in shown} | {"unknown"}
        self.ledger.on_status(backend, str(self.incarnation[backend]), ids)
        for lease in shown:
            if lease.backend == backend:
                self.unseen.pop(lease.attempt_id, None)

    @rule(backend=st.sampled_from("ab"))
    def restart(self, backend):
        self.incarnation[backend] += 1
        self.ledger.on_status(backend, str(self.incarnation[backend]), set())
        self.unseen = {id_: lease for id_, lease in self.unseen.items() if lease.backend != backend}

    @rule(lease=consumes(leases))
    def release(self, lease):
        self.ledger.release(lease)
        self.unseen.pop(lease.attempt_id, None)
        self.held.pop(lease.attempt_id, None)

    @rule(lease=leases)
    def release_but_remember(self, lease):
        self.release(lease)

    @invariant()
    def pending_is_the_models_sum(self):
        for backend in "ab":
            unseen = [lease for lease in self.unseen.values() if lease.backend == backend]
            pending = self.ledger.pending(backend)
            assert pending.requests == len(unseen)
            assert pending.prefill_tokens == sum(lease.prefill_tokens for lease in unseen) >= 0
            assert pending.decode_tokens == sum(lease.max_new_tokens for lease in unseen)
        assert len(self.ledger) == len(self.held)

    @invariant()
    def finishes_are_the_models(self):
        for client in (None, "", "a", "b"):
            ahead = [
                lease.finish_s
                for lease in self.held.values()
                if lease.finish_s is not None and lease.finish_s > 4 and client in (None, lease.client)
            ]
            assert self.ledger.finish_s(client, 4) == min(ahead, default=None)


TestLedgerMachine = LedgerMachine.TestCase
