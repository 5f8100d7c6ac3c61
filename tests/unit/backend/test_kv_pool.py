"""What the pool promises to engines, example by example; test_kv_pool_model.py has it under random use."""

from __future__ import annotations

from threading import Thread

import pytest

from backend_service import retention
from backend_service.host_tier import BLOCK_TOKENS, MIN_RESTORE_TOKENS, blocks_of
from backend_service.kv_pool import Eviction, KvPool, PoolLimits

LIMITS = PoolLimits(capacity_tokens=64, max_live=3, max_retained=4, retained_tokens=24)
REST = BLOCK_TOKENS // 2
"""Tokens that fill no block."""


def with_host(blocks):
    """Nothing is retained on the device: all goes to the host at once."""
    return PoolLimits(
        20 * BLOCK_TOKENS, max_live=3, max_retained=4, retained_tokens=0, host_tokens=blocks * BLOCK_TOKENS
    )


WITH_HOST = with_host(blocks=20)


def grown(pool, tokens, max_new_tokens=4):
    placement = pool.place(tokens, max_new_tokens)
    pool.grow(placement.handle, tokens[placement.reused_tokens :])
    return placement


def generated(pool, tokens, output):
    """A sequence with its output, still live."""
    handle = grown(pool, tokens, len(output)).handle
    pool.grow(handle, output)
    return handle


def stash(pool, evictions, payload=None):
    for eviction in evictions:
        for block in eviction.save:
            pool.stash(block, payload)


def numbers(blocks):
    """Of blocks in their chains."""
    return [block.start // BLOCK_TOKENS for block in blocks]


def saved(evictions):
    return [number for eviction in evictions for number in numbers(eviction.save)]


def test_probe_says_what_place_shares_and_never_the_whole_prompt():
    pool = KvPool(LIMITS)
    tokens = list(range(10))
    assert pool.probe(tokens) == 0
    grown(pool, tokens)
    assert pool.probe(tokens) == 9
    assert pool.probe(tokens[:5]) == 4
    assert pool.probe([*tokens[:6], 99]) == 6
    placement = pool.place(tokens, 4)
    assert placement.reused_tokens == 9
    assert placement.source is not None


def test_full_batch_is_refused():
    pool = KvPool(LIMITS)
    for start in range(3):
        grown(pool, [start * 10])
    assert pool.place([99], 1) is None


def test_retained_prompts_give_way_to_live_sequences_oldest_first():
    pool = KvPool(PoolLimits(capacity_tokens=40, max_live=3, max_retained=4, retained_tokens=40))
    old = grown(pool, list(range(10))).handle
    pool.release(old, retain=True)
    young = grown(pool, list(range(100, 110))).handle
    pool.release(young, retain=True)
    placement = pool.place(list(range(200, 220)), 5)
    assert placement.evicted == (Eviction(old, 0, ()),)
    pool.check_integrity()


def test_outputs_give_way_before_older_prompts():
    pool = KvPool(PoolLimits(capacity_tokens=60, max_live=3, max_retained=4, retained_tokens=60))
    old = generated(pool, list(range(10)), [50] * 10)
    pool.release(old, retain=True)
    young = generated(pool, list(range(100, 110)), [51] * 10)
    pool.release(young, retain=True)
    placement = pool.place(list(range(200, 230)), 5)
    assert placement.evicted == (Eviction(old, 10, ()), Eviction(young, 10, ()))
    assert pool.probe([*range(10), 50]) == 10
    pool.check_integrity()


def test_only_one_of_those_that_share_a_prefix_keeps_it():
    pool = KvPool(PoolLimits(capacity_tokens=40, max_live=3, max_retained=4, retained_tokens=40))
    first = grown(pool, [*range(10), *range(20, 30)], 0).handle
    second = grown(pool, [*range(10), *range(30, 40)], 0).handle
    pool.release(first, retain=True)
    pool.release(second, retain=True)
    placement = pool.place(list(range(100, 120)), 5)
    assert placement.evicted == (Eviction(first, 0, ()), Eviction(second, 10, ()))
    assert pool.probe([*range(10), 99]) == 10
    pool.check_integrity()


def test_a_shared_retained_source_may_be_dropped_and_the_prefix_survives():
    pool = KvPool(PoolLimits(capacity_tokens=20, max_live=3, max_retained=4, retained_tokens=20))
    source = grown(pool, list(range(12)), max_new_tokens=0).handle
    pool.release(source, retain=True)
    placement = pool.place([*range(8), 90, 91], 10)
    assert placement.source == source
    assert placement.reused_tokens == 8
    assert placement.evicted == (Eviction(source, 0, ()),)
    assert pool.probe(list(range(12))) == 8
    pool.check_integrity()


def test_a_sequence_that_others_hold_is_the_first_to_lose_its_handle():
    pool = KvPool(PoolLimits(capacity_tokens=100, max_live=3, max_retained=2, retained_tokens=100))
    pool.release(grown(pool, [7] * 5).handle, retain=True)
    covered = grown(pool, list(range(10))).handle
    pool.release(covered, retain=True)
    follow_up = grown(pool, [*range(10), 50, 51]).handle
    assert pool.release(follow_up, retain=True) == (Eviction(covered, 0, ()),)
    assert pool.probe([7] * 5) == 4


def test_retained_cells_are_bounded():
    pool = KvPool(LIMITS)
    for start in range(0, 60, 10):
        handle = grown(pool, list(range(start * 10, start * 10 + 10))).handle
        pool.release(handle, retain=True)
        assert pool.use().retained_tokens <= LIMITS.retained_tokens
        pool.check_integrity()


def test_the_bound_holds_when_the_last_live_holder_is_not_retained():
    pool = KvPool(PoolLimits(capacity_tokens=100, max_live=3, max_retained=4, retained_tokens=24))
    source = grown(pool, list(range(20))).handle
    pool.release(source, retain=True)
    holder = grown(pool, list(range(21))).handle
    other = grown(pool, list(range(50, 70))).handle
    assert pool.release(other, retain=True) == ()
    assert pool.release(holder, retain=False) == (Eviction(holder, 0, ()), Eviction(other, 0, ()))
    pool.check_integrity()


def test_nothing_computed_is_nothing_to_retain():
    pool = KvPool(LIMITS)
    handle = pool.place([1, 2], 1).handle
    assert pool.release(handle, retain=True) == (Eviction(handle, 0, ()),)


def test_models_that_cannot_be_cut_share_nothing():
    pool = KvPool(WITH_HOST, share=False)
    tokens = list(range(3 * BLOCK_TOKENS))
    handle = grown(pool, tokens).handle
    assert pool.probe(tokens) == 0
    assert pool.release(handle, retain=True) == (Eviction(handle, 0, ()),)
    assert (pool.use().used_tokens, pool.use().host_capacity_tokens) == (0, 0)


def test_evicted_blocks_are_found_again_in_host_memory():
    pool = KvPool(WITH_HOST)
    end = 2 * BLOCK_TOKENS
    tokens = list(range(end + REST))
    evictions = pool.release(grown(pool, tokens).handle, retain=True)
    assert saved(evictions) == [1, 0]
    stash(pool, evictions, "copy")
    assert (pool.use().used_tokens, pool.use().host_tokens) == (0, end)
    assert pool.probe([*tokens, 1]) == end
    assert pool.probe(tokens[:end]) == end - 1
    placement = pool.place(tokens[:end], 4)
    assert placement.reused_tokens == 0
    assert [(stored.block, stored.payload) for stored in placement.restorable] == [
        (block, "copy") for block in blocks_of(tokens)
    ]
    pool.grow(placement.handle, tokens[:BLOCK_TOKENS])
    pool.grow(placement.handle, tokens[BLOCK_TOKENS : end - 1])
    assert pool.release(placement.handle, retain=False) == (Eviction(placement.handle, 0, ()),)
    pool.clear()
    assert pool.probe(tokens) == end
    pool.clear_host()
    assert (pool.probe(tokens), pool.use().host_tokens) == (0, 0)


def test_host_memory_continues_what_the_device_holds():
    pool = KvPool(WITH_HOST)
    tokens = list(range(3 * BLOCK_TOKENS + REST))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    grown(pool, tokens[: BLOCK_TOKENS + REST])
    assert pool.probe(tokens) == 3 * BLOCK_TOKENS
    placement = pool.place(tokens, 4)
    assert placement.reused_tokens == BLOCK_TOKENS + REST
    assert numbers(stored.block for stored in placement.restorable) == [1, 2]


def test_a_few_tokens_are_not_restored():
    pool = KvPool(WITH_HOST)
    end = 3 * BLOCK_TOKENS
    tokens = list(range(end))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    held = end - 1 - MIN_RESTORE_TOKENS
    grown(pool, tokens[:held])
    assert pool.probe(tokens) == end - 1
    placement = pool.place(tokens, 4)
    assert numbers(stored.block for stored in placement.restorable) == list(range(held // BLOCK_TOKENS, 3))
    pool.release(placement.handle, retain=False)
    grown(pool, [*tokens[: held + 1], 999])
    assert pool.probe(tokens) == held + 1
    assert pool.place(tokens, 4).restorable == ()


def served(pool, tokens, output=(), payload=None):
    """A request from its placement to its release; the blocks that it restored."""
    placement = pool.place(tokens, len(output))
    stash(pool, placement.evicted, payload)
    pool.grow(placement.handle, [*tokens[placement.reused_tokens :], *output])
    stash(pool, pool.release(placement.handle, retain=True), payload)
    return numbers(stored.block for stored in placement.restorable)


def blocks_and_one(token, blocks):
    """A prompt that is found again to the end of its last block."""
    return [token] * (blocks * BLOCK_TOKENS + 1)


def found(pool, token):
    """Blocks that a long prompt of this token finds."""
    blocks, rest = divmod(pool.probe([token] * (9 * BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not rest
    return blocks


def test_host_memory_keeps_what_was_used_last_and_the_beginnings_longest():
    pool = KvPool(with_host(blocks=4))
    old, young, new = blocks_and_one(0, 2), blocks_and_one(1, 2), blocks_and_one(2, 1)
    served(pool, old)
    served(pool, young)
    assert served(pool, old) == [0, 1]
    served(pool, new)
    assert [found(pool, token) for token in (0, 1, 2)] == [2, 1, 1]
    served(pool, blocks_and_one(3, 1))
    assert [found(pool, token) for token in (0, 1, 2)] == [2, 0, 1]
    served(pool, blocks_and_one(4, 2))
    assert [found(pool, token) for token in (0, 1, 2)] == [0, 0, 1]


def test_restoring_is_a_use():
    pool = KvPool(with_host(blocks=2))
    served(pool, blocks_and_one(0, 1))
    served(pool, blocks_and_one(1, 1))
    pool.place(blocks_and_one(0, 1), 1)
    served(pool, blocks_and_one(2, 1))
    pool.clear()
    assert [found(pool, token) for token in (0, 1, 2)] == [1, 0, 1]


def test_a_chain_that_was_partly_in_host_memory_keeps_its_beginning_longest():
    pool = KvPool(with_host(blocks=3))
    for blocks in (1, 2, 3):
        served(pool, blocks_and_one(0, blocks))
    served(pool, blocks_and_one(1, 1))
    served(pool, blocks_and_one(2, 1))
    assert found(pool, 0) == 1


def test_saving_the_rest_of_a_chain_keeps_its_beginning():
    pool = KvPool(with_host(blocks=3))
    slow = pool.place(blocks_and_one(0, 3), 0).handle
    for token in (0, 1, 2):
        served(pool, blocks_and_one(token, 1))
    pool.grow(slow, blocks_and_one(0, 3))
    evictions = pool.release(slow, retain=True)
    assert saved(evictions) == [2, 1]
    stash(pool, evictions)
    assert found(pool, 0) == 3


def test_a_chain_of_which_the_middle_was_in_host_memory_goes_from_its_end(monkeypatch):
    monkeypatch.setattr(retention, "SHARED_FOR_PLACEMENTS", 0)  # what was shared goes with the rest
    pool = KvPool(with_host(blocks=4))
    beginning = grown(pool, blocks_and_one(0, 1)).handle
    served(pool, blocks_and_one(0, 2))
    whole = grown(pool, blocks_and_one(0, 3)).handle
    pool.release(beginning, retain=False)
    evictions = pool.release(whole, retain=True)
    assert saved(evictions) == [2, 0]
    stash(pool, evictions)
    served(pool, blocks_and_one(1, 2))
    assert found(pool, 0) == 2


def test_of_two_chains_that_leave_together_one_is_whole():
    capacity = 8 * BLOCK_TOKENS
    pool = KvPool(PoolLimits(capacity, 3, max_retained=4, retained_tokens=capacity, host_tokens=3 * BLOCK_TOKENS))

    def make_room():
        placement = pool.place([9], capacity - 1)
        stash(pool, placement.evicted)
        pool.release(placement.handle, retain=False)
        return [saved([eviction]) for eviction in placement.evicted]

    served(pool, blocks_and_one(0, 2))
    make_room()
    served(pool, blocks_and_one(1, 1))
    make_room()
    assert [found(pool, token) for token in (0, 1)] == [2, 1]
    served(pool, blocks_and_one(0, 3))
    served(pool, blocks_and_one(1, 3))
    assert make_room() == [[2], [2, 1, 0]], "there was no room for the other's beginning beside the first"
    assert [found(pool, token) for token in (0, 1)] == [0, 3]


def test_host_memory_keeps_prompts_before_outputs_until_they_are_part_of_one():
    pool = KvPool(with_host(blocks=3))
    prompt, answer = [0] * BLOCK_TOKENS, blocks_and_one(7, 1)
    served(pool, blocks_and_one(1, 1))
    served(pool, prompt, answer)
    assert pool.probe([*prompt, *answer]) == 2 * BLOCK_TOKENS
    served(pool, blocks_and_one(2, 1))
    assert pool.probe([*prompt, *answer]) == BLOCK_TOKENS, "the answer went before an older prompt"
    assert found(pool, 1) == 1
    served(pool, prompt, answer)
    assert pool.probe([*prompt, *answer]) == BLOCK_TOKENS, "nor is there room for it beside prompts"
    pool.clear_host()
    served(pool, prompt, answer)
    assert served(pool, [*prompt, *answer, 8]) == [0, 1]
    served(pool, blocks_and_one(1, 1))
    assert pool.probe([*prompt, *answer]) == 2 * BLOCK_TOKENS


def test_blocks_are_saved_when_the_last_holder_goes():
    half = BLOCK_TOKENS + REST + 2  # of three blocks and a rest; it ends inside the second
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=3 * half, host_tokens=1000))
    first = grown(pool, [*range(half), *[200] * half], 0).handle
    second = grown(pool, [*range(half), *[300] * half], 0).handle
    pool.release(first, retain=True)
    assert pool.release(second, retain=True) == ()
    other = grown(pool, [500] * (2 * half), 0).handle
    evictions = pool.release(other, retain=True)
    assert evictions == (Eviction(first, 0, evictions[0].save), Eviction(second, half, evictions[1].save))
    assert [saved([eviction]) for eviction in evictions] == [[2, 1], [2, 1]]
    stash(pool, evictions)
    assert saved(pool.release(grown(pool, [999] * (2 * half), 0).handle, retain=True)) == [2, 1, 0]


def test_what_is_in_host_memory_is_not_copied_again():
    pool = KvPool(WITH_HOST)
    tokens = list(range(2 * BLOCK_TOKENS + REST))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    evictions = pool.release(generated(pool, tokens, [7] * BLOCK_TOKENS), retain=True)
    assert saved(evictions) == [2]


def test_stash_takes_what_was_asked_for_once():
    pool = KvPool(WITH_HOST)
    evictions = pool.release(grown(pool, list(range(2 * BLOCK_TOKENS))).handle, retain=True)
    late, block = evictions[0].save
    pool.stash(block, None)
    with pytest.raises(ValueError, match=rf"tokens 0\.\.{BLOCK_TOKENS}: not to be saved"):
        pool.stash(block, None)
    pool.place([1], 1)
    with pytest.raises(ValueError, match="not to be saved"):
        pool.stash(late, None)
    other = grown(pool, [1, 2]).handle
    evictions = pool.release(grown(pool, list(range(200, 200 + 2 * BLOCK_TOKENS))).handle, retain=True)
    pool.release(other, retain=True)
    with pytest.raises(ValueError, match="not to be saved"):
        pool.stash(evictions[0].save[0], None)
    pool.clear()
    evictions = pool.release(grown(pool, list(range(200, 200 + 2 * BLOCK_TOKENS))).handle, retain=True)
    pool.clear()
    with pytest.raises(ValueError, match="not to be saved"):
        pool.stash(evictions[0].save[0], None)


def test_restorable_blocks_outlive_their_place_in_the_tier():
    capacity = 5 * BLOCK_TOKENS
    pool = KvPool(PoolLimits(capacity, 3, max_retained=4, retained_tokens=capacity, host_tokens=2 * BLOCK_TOKENS))
    tokens = blocks_and_one(0, 2)
    stash(pool, pool.release(grown(pool, tokens, 0).handle, retain=True))
    stash(pool, pool.place(blocks_and_one(1, 3), capacity - 3 * BLOCK_TOKENS - 1).evicted, "copy")
    pool.clear()
    retained = grown(pool, blocks_and_one(2, 3), 0).handle
    pool.release(retained, retain=True)
    placement = pool.place(tokens, BLOCK_TOKENS)
    assert [eviction.handle for eviction in placement.evicted] == [retained]
    stash(pool, placement.evicted)
    assert [stored.payload for stored in placement.restorable] == ["copy", "copy"]
    assert pool.probe(tokens) == 0


def test_a_probe_beside_everything_else_finds_what_the_device_holds_and_no_more_than_there_is():
    pool = KvPool(with_host(blocks=8))
    tokens = [0] * (3 * BLOCK_TOKENS + REST)
    pool.place(tokens, 1)
    pool.grow(0, tokens[: BLOCK_TOKENS + REST])
    seen = set()
    rounds = Thread(target=lambda: [seen.add(pool.probe(tokens)) for _ in range(500)])
    rounds.start()
    while rounds.is_alive():
        served(pool, tokens)
        served(pool, blocks_and_one(1, 5))
        pool.clear_host()
    rounds.join()
    assert seen <= {BLOCK_TOKENS + REST, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, len(tokens) - 1}
    pool.check_integrity()


def test_of_equal_prefixes_the_live_one_is_shared():
    pool = KvPool(PoolLimits(capacity_tokens=44, max_live=3, max_retained=4, retained_tokens=44))
    tokens = list(range(10))
    retained, live = pool.place(tokens, 2), pool.place(tokens, 2)  # together, so each computes its own
    for placement in (retained, live):
        pool.grow(placement.handle, tokens)
    pool.release(retained.handle, retain=True)
    placement = pool.place([*tokens, 99], 25)  # fits only if it takes no further cells for its first ten tokens
    assert placement is not None
    assert placement.source == live.handle
    pool.check_integrity()


def copying(capacity_tokens, retained_tokens=100):
    return KvPool(PoolLimits(capacity_tokens, max_live=3, max_retained=4, retained_tokens=retained_tokens), copies=True)


def test_copies_are_admitted_by_the_rectangle_that_they_may_become():
    pool = copying(60)
    long = pool.place(list(range(10)), 20)
    assert pool.place([90, 91], 2) is not None, "two rows of 30 fit"
    assert pool.place([80, 81], 2) is None, "three rows of 30 do not"
    pool.release(long.handle, retain=False)
    assert pool.place([80, 81], 2) is not None, "two rows of 4 fit"
    pool.check_integrity()


def test_a_copy_whose_tokens_another_sequence_holds_is_not_retained_twice():
    pool = copying(200)
    tokens = list(range(10))
    pool.release(generated(pool, tokens, [50, 51]), retain=True)
    second = generated(pool, tokens, [50, 51, 52])
    assert pool.use().retained_tokens == 12
    evicted = pool.release(second, retain=True)
    assert [eviction.keep_tokens for eviction in evicted] == [0]
    assert pool.use().retained_tokens == 13
    assert pool.probe([*tokens, 50, 51, 52, 53]) == 13
    pool.check_integrity()


def test_of_equal_copies_one_stays():
    pool = copying(200)
    handles = [generated(pool, list(range(10)), [50, 51]) for _ in range(3)]
    for handle in handles:
        pool.release(handle, retain=True)
    assert pool.use().retained_tokens == 12
    assert pool.probe([*range(10), 50, 51, 53]) == 12
    pool.check_integrity()


def test_retained_copies_give_way_to_a_larger_rectangle():
    pool = copying(60)
    pool.release(grown(pool, list(range(30)), 0).handle, retain=True)
    placement = pool.place(list(range(100, 120)), 20)
    assert [eviction.keep_tokens for eviction in placement.evicted] == [0]
    assert pool.use().used_tokens + pool.use().reserved_tokens <= 60
    pool.check_integrity()
