"""What the pool promises to engines, example by example; test_kv_pool_model.py has it under random use."""

from __future__ import annotations

from threading import Thread

import pytest

from backend_service.host_tier import BLOCK_TOKENS, MIN_RESTORE_TOKENS, blocks_of
from backend_service.kv_pool import Eviction, KvPool, PoolLimits

LIMITS = PoolLimits(capacity_tokens=64, max_live=3, max_retained=4, retained_tokens=24)
WITH_HOST = PoolLimits(capacity_tokens=1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=1000)
"""Nothing is retained on the device: all goes to the host at once."""


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


def saved(evictions):
    return [(block.start, block.end) for eviction in evictions for block in eviction.save]


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
    handle = grown(pool, list(range(100))).handle
    assert pool.probe(list(range(100))) == 0
    assert pool.release(handle, retain=True) == (Eviction(handle, 0, ()),)
    assert (pool.use().used_tokens, pool.use().host_capacity_tokens) == (0, 0)


def test_evicted_blocks_are_found_again_in_host_memory():
    pool = KvPool(WITH_HOST)
    tokens = list(range(150))
    evictions = pool.release(grown(pool, tokens).handle, retain=True)
    assert saved(evictions) == [(64, 128), (0, 64)]
    stash(pool, evictions, "copy")
    assert (pool.use().used_tokens, pool.use().host_tokens) == (0, 128)
    assert pool.probe([*tokens, 1]) == 128
    assert pool.probe(tokens[:128]) == 127
    placement = pool.place(tokens[:128], 4)
    assert placement.reused_tokens == 0
    assert [(stored.block, stored.payload) for stored in placement.restorable] == [
        (block, "copy") for block in blocks_of(tokens)
    ]
    pool.grow(placement.handle, tokens[:64])
    pool.grow(placement.handle, tokens[64:127])
    assert pool.release(placement.handle, retain=False) == (Eviction(placement.handle, 0, ()),)
    pool.clear()
    assert pool.probe(tokens) == 128
    pool.clear_host()
    assert (pool.probe(tokens), pool.use().host_tokens) == (0, 0)


def test_host_memory_continues_what_the_device_holds():
    pool = KvPool(WITH_HOST)
    tokens = list(range(200))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    grown(pool, tokens[:100])
    assert pool.probe(tokens) == 192
    placement = pool.place(tokens, 4)
    assert placement.reused_tokens == 100
    assert [stored.block.start for stored in placement.restorable] == [64, 128]


def test_a_few_tokens_are_not_restored():
    pool = KvPool(WITH_HOST)
    tokens = list(range(128))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    grown(pool, tokens[: 127 - MIN_RESTORE_TOKENS])
    assert pool.probe(tokens) == 127
    placement = pool.place(tokens, 4)
    assert len(placement.restorable) == 1
    pool.release(placement.handle, retain=False)
    grown(pool, [*tokens[: 128 - MIN_RESTORE_TOKENS], 999])
    assert pool.probe(tokens) == 128 - MIN_RESTORE_TOKENS
    assert pool.place(tokens, 4).restorable == ()


def served(pool, tokens, output=(), payload=None):
    """A request from its placement to its release; what it restored."""
    placement = pool.place(tokens, len(output))
    stash(pool, placement.evicted, payload)
    pool.grow(placement.handle, [*tokens[placement.reused_tokens :], *output])
    stash(pool, pool.release(placement.handle, retain=True), payload)
    return [stored.block.start for stored in placement.restorable]


def test_host_memory_keeps_what_was_used_last_and_the_beginnings_longest():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=4 * BLOCK_TOKENS))
    old, young, new = [0] * 129, [1] * 129, [2] * 65
    served(pool, old)
    served(pool, young)
    assert served(pool, old) == [0, 64]
    served(pool, new)
    assert [pool.probe([*tokens, 9]) for tokens in (old, young, new)] == [128, 64, 64]
    served(pool, [3] * 65)
    assert [pool.probe([*tokens, 9]) for tokens in (old, young, new)] == [128, 0, 64]
    served(pool, [4] * 129)
    assert [pool.probe([*tokens, 9]) for tokens in (old, young, new)] == [0, 0, 64]


def test_restoring_is_a_use():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=2 * BLOCK_TOKENS))
    served(pool, [0] * 65)
    served(pool, [1] * 65)
    pool.place([0] * 66, 1)
    served(pool, [2] * 65)
    pool.clear()
    assert [pool.probe([token] * 70) for token in (0, 1, 2)] == [64, 0, 64]


def test_a_chain_that_was_partly_in_host_memory_keeps_its_beginning_longest():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=3 * BLOCK_TOKENS))
    served(pool, [0] * 65)
    served(pool, [0] * 129)
    served(pool, [0] * 193)
    served(pool, [1] * 65)
    served(pool, [2] * 65)
    assert pool.probe([0] * 200) == 64


def test_saving_the_rest_of_a_chain_keeps_its_beginning():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=3 * BLOCK_TOKENS))
    slow = pool.place([0] * 193, 0).handle
    for token in (0, 1, 2):
        served(pool, [token] * 65)
    pool.grow(slow, [0] * 193)
    evictions = pool.release(slow, retain=True)
    assert saved(evictions) == [(128, 192), (64, 128)]
    stash(pool, evictions)
    assert pool.probe([0] * 200) == 192


def test_host_memory_keeps_prompts_before_outputs_until_they_are_part_of_one():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=3 * BLOCK_TOKENS))
    prompt, answer = [0] * 64, [7] * 65
    served(pool, [1] * 65)
    served(pool, prompt, answer)
    assert pool.probe([*prompt, *answer]) == 128
    served(pool, [2] * 65)
    assert pool.probe([*prompt, *answer]) == 64, "the answer went before an older prompt"
    assert pool.probe([1] * 66) == 64
    served(pool, prompt, answer)
    assert pool.probe([*prompt, *answer]) == 64, "nor is there room for it beside prompts"
    pool.clear_host()
    served(pool, prompt, answer)
    assert served(pool, [*prompt, *answer, 8]) == [0, 64]
    served(pool, [1] * 65)
    assert pool.probe([*prompt, *answer]) == 128


def test_blocks_are_saved_when_the_last_holder_goes():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=300, host_tokens=1000))
    first = grown(pool, [*range(100), *range(200, 300)], 0).handle
    second = grown(pool, [*range(100), *range(300, 400)], 0).handle
    pool.release(first, retain=True)
    pool.release(second, retain=True)
    other = grown(pool, list(range(500, 700)), 0).handle
    evictions = pool.release(other, retain=True)
    assert evictions == (Eviction(first, 0, evictions[0].save), Eviction(second, 100, evictions[1].save))
    assert [saved([eviction]) for eviction in evictions] == [[(128, 192), (64, 128)], [(128, 192), (64, 128)]]
    stash(pool, evictions)
    assert saved(pool.release(grown(pool, [999] * 200, 0).handle, retain=True)) == [(128, 192), (64, 128), (0, 64)]


def test_what_is_in_host_memory_is_not_copied_again():
    pool = KvPool(WITH_HOST)
    tokens = list(range(150))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    evictions = pool.release(generated(pool, tokens, [7] * 60), retain=True)
    assert saved(evictions) == [(128, 192)]


def test_stash_takes_what_was_asked_for_once():
    pool = KvPool(WITH_HOST)
    evictions = pool.release(grown(pool, list(range(150))).handle, retain=True)
    late, block = evictions[0].save
    pool.stash(block, None)
    with pytest.raises(ValueError, match=r"tokens 0\.\.64: not to be saved"):
        pool.stash(block, None)
    pool.place([1], 1)
    with pytest.raises(ValueError, match="not to be saved"):
        pool.stash(late, None)
    pool.clear()
    evictions = pool.release(grown(pool, list(range(200, 300))).handle, retain=True)
    pool.clear()
    with pytest.raises(ValueError, match="not to be saved"):
        pool.stash(evictions[0].save[0], None)


def test_restorable_blocks_outlive_their_place_in_the_tier():
    pool = KvPool(PoolLimits(300, max_live=3, max_retained=4, retained_tokens=300, host_tokens=128))
    tokens = list(range(129))
    stash(pool, pool.release(grown(pool, tokens, 0).handle, retain=True))
    stash(pool, pool.place(list(range(500, 700)), 100).evicted, "copy")
    pool.clear()
    retained = grown(pool, list(range(800, 1000)), 0).handle
    pool.release(retained, retain=True)
    placement = pool.place(tokens, 100)
    assert [eviction.handle for eviction in placement.evicted] == [retained]
    stash(pool, placement.evicted)
    assert [stored.payload for stored in placement.restorable] == ["copy", "copy"]
    assert pool.probe(tokens) == 0


def test_a_probe_beside_everything_else_finds_what_the_device_holds_and_no_more_than_there_is():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=8 * BLOCK_TOKENS))
    tokens = [0] * 200
    pool.place(tokens, 1)
    pool.grow(0, tokens[:100])
    seen = set()
    rounds = Thread(target=lambda: [seen.add(pool.probe(tokens)) for _ in range(500)])
    rounds.start()
    while rounds.is_alive():
        served(pool, tokens)
        served(pool, [1] * 300)
        pool.clear_host()
    rounds.join()
    assert seen <= {100, 128, 192, 199}
    pool.check_integrity()
