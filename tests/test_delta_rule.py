"""Our gated delta rule against Transformers' and against the recurrence written out token by token."""

import pytest
import torch
from paths import GOLDEN
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from clef_core.delta_rule import CHUNK, chunk_gated_delta_rule
from clef_core.encoding import Batch
from clef_core.model import load_release

CLOSE = {"rtol": 0.0, "atol": 2e-5}
"""Values reach 10; float32 sums over 64 tokens and 64 features err by less than 2**-19 of that."""


def inputs(num_rows: int, num_tokens: int, key_heads: int, value_heads: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_rows, num_tokens, *shape, generator=generator)

    return {
        "query": random(key_heads, 64),
        "key": random(key_heads, 64),
        "value": random(value_heads, 32) * 3,
        "g": -random(value_heads).abs(),
        "beta": random(value_heads).sigmoid(),
    }


def token_by_token(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64."""
    group = value.shape[2] // key.shape[2]
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1).repeat_interleave(group, 2) for x in (query, key))
    state = value.new_zeros(len(value), value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.float64)
    outs = []
    for t in range(value.shape[1]):
        state = state * g[:, t].double().exp()[..., None, None]
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        new = (value[:, t].double() - held) * beta[:, t].double().unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("num_tokens", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 6)])
def test_it_equals_the_recurrence(num_tokens, key_heads, value_heads):
    given = inputs(2, num_tokens, key_heads, value_heads)
    out, state = chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True, output_final_state=True)
    expected, expected_state = token_by_token(**given)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    torch.testing.assert_close(state.double(), expected_state, **CLOSE)


def test_it_equals_transformers_with_a_state_to_begin_with():
    given = inputs(2, 2 * CHUNK + 3, 2, 4)
    first = torch.randn(2, 4, 64, 32, generator=torch.Generator().manual_seed(1))
    results = [
        rule(**given, initial_state=first, use_qk_l2norm_in_kernel=True, output_final_state=True)
        for rule in (chunk_gated_delta_rule, torch_chunk_gated_delta_rule)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_keys_that_are_all_alike_do_not_blow_up():
    given = inputs(1, 4 * CHUNK, 1, 1)
    given["key"] = torch.ones_like(given["key"])
    given["beta"] = torch.full_like(given["beta"], 0.999)
    given["g"] = torch.zeros_like(given["g"])
    out, _ = chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out.double(), token_by_token(**given)[0], **CLOSE)


def test_strong_decay_stays_finite():
    given = inputs(1, 2 * CHUNK, 1, 1)
    given["g"] = torch.full_like(given["g"], -60.0)
    out, _ = chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out.double(), token_by_token(**given)[0], **CLOSE)


def test_a_release_runs_it_and_leaves_transformers_as_it_was():
    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    ids = torch.randint(0, 500, (1, 100), generator=torch.Generator().manual_seed(2))
    batch = Batch(ids, torch.ones_like(ids), None, {}, torch.tensor([100]))
    with torch.inference_mode():
        ours, reference = (
            load_release(GOLDEN / "release-bf16", dtype=torch.float32, has_reference_delta_rule=is_reference)
            .hidden_states(batch)
            for is_reference in (False, True)
        )  # fmt: skip
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is theirs
    assert not torch.equal(ours, reference)
    torch.testing.assert_close(ours, reference, rtol=0.0, atol=1e-4)
