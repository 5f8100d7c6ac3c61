"""What every engine must do, run over each of them.

The tests drive an engine through the real `Scheduler`, without gRPC, and through the six methods of `Engine`. They know
an engine only as an `EngineCase` (cases.py): a name, a way to make a fresh one, and by name what it cannot do.

To add an engine (MLX, say):

1. Write a function in cases.py that returns its `EngineCase`. It gets a folder for temporary files, loads its model
   once, and calls `pytest.skip` or `pytest.importorskip` where it cannot run. `make` returns an engine with an empty
   cache for the given `EngineOptions`; beside the `Engine` methods it needs `check_integrity()`, which raises
   AssertionError unless its books add up.
2. Enter the function in `CASES`. Every test runs over it from then on.
3. What it cannot do goes into `lacks`, never into a test: the tests that ask for it are skipped and say so.
   `Lack.EXACTNESS` is for what computes with rounded activations, or in an order that depends on who else is there: the
   prompts are such that a real model is sure of its greedy answers (by 1 or more between the two best logits, where the
   answer is compared), but a random draw is not.
4. A way to run that changes what is in the cache (its types, flash attention) goes into `TIERED` in test_host_tier.py.

cases.py      the engines; what may be lacking
bench.py      the scheduler and one engine: submit, tick until something holds, collect the answers
prompts.py    prompts of any length as token ids, and prompts with a secret
tiny_models.py  GGUF models with random weights, for architectures that the packaged model is not
conftest.py   fixtures: `case`, `bench`, and `alone`, the answer of a fresh engine to one request
"""
