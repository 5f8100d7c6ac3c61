import pytest

from phaseroute.workloads import WORKLOADS, Sizes


class CountsWords:
    """Stands for a client whose server has one token a word."""

    async def probe(self, prompt):
        return type("Probe", (), {"prompt_tokens": len(text_of(prompt).split())})


def text_of(prompt) -> str:
    return prompt if isinstance(prompt, str) else " ".join(turn["content"] for turn in prompt)


async def workload(name: str, requests: int = 8, sizes: Sizes | None = None):
    return await WORKLOADS[name](CountsWords(), requests, sizes or Sizes())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(WORKLOADS))
async def test_each_burst_has_new_prompts_and_is_routed_as_told(name: str):
    made = await workload(name)
    bursts = [made.burst(policy) for policy in ("forced:a", "two_phase")]
    assert [burst.options["policy"] for burst in bursts] == ["forced:a", "two_phase"]
    assert "policy" not in made.options
    assert all(burst.options["ignore_eos"] and burst.gap_s == 0.05 for burst in bursts)
    texts = [text_of(prompt) for burst in bursts for prompt in burst.prompts]
    assert len(set(texts)) == 16


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "new_tokens", "warm"),
    [("warm", 516, 128, True), ("cold", 516, 8, False), ("long", 25, 128, False)],
)
async def test_sizes_are_those_described(name: str, prompt_tokens: int, new_tokens: int, warm: bool):
    made = await workload(name)
    burst = made.burst("two_phase")
    assert all(abs(len(text_of(prompt).split()) - prompt_tokens) <= 3 for prompt in burst.prompts)
    assert burst.options["max_new_tokens"] == new_tokens
    assert made.warm is warm
    assert f"{prompt_tokens}-token prompts" in made.description
    assert f"{new_tokens} new tokens" in made.description


async def test_only_warm_prompts_share_a_beginning():
    for name in WORKLOADS:
        prompts = [text_of(prompt) for prompt in (await workload(name)).burst("two_phase").prompts]
        first_words = {prompt.split()[0] for prompt in prompts}
        assert len(first_words) == (1 if name == "warm" else 8)


@pytest.mark.parametrize("name", list(WORKLOADS))
async def test_the_smallest_sizes_are_still_a_workload(name: str):
    burst = (await workload(name, 1, Sizes(prompt_tokens=1, new_tokens=1))).burst("two_phase")
    assert len(burst.prompts) == 1
    assert text_of(burst.prompts[0])
    assert burst.options["max_new_tokens"] == 1
