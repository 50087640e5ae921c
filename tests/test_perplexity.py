"""Perplexity against Transformers' own loss and by hand."""

import math

import pytest
import torch
from paths import PROJECT
from transformers import Qwen3_5ForConditionalGeneration

from clef_core.errors import RequestError
from clef_core.model import load_release
from clef_core.perplexity import perplexity, token_log_probs
from clef_core.windows import perplexity_ratio, summarise_losses, windows_of

SMALL = PROJECT / "checkpoints" / "random-bf16"
TEXT = (PROJECT / "examples" / "messages.csv").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def release():
    return load_release(SMALL, dtype=torch.float32)


def test_the_loss_equals_transformers_own(release):
    model = Qwen3_5ForConditionalGeneration.from_pretrained(SMALL, dtype=torch.float32)
    (window,) = windows_of(release.tokenizer, TEXT, 1, 300)
    ids = torch.tensor([window])
    with torch.inference_mode():
        wanted = model(input_ids=ids, labels=ids).loss.item()
    assert -token_log_probs(release, window).mean().item() == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_knows_nothing_has_the_vocabularys_size(release):
    """Random weights predict about as well as chance, so the value lies near the number of words, 2,048."""
    found = perplexity(release, windows_of(release.tokenizer, TEXT, 2, 128))
    assert 1_000 < found.value < 6_000
    assert (found.num_windows, found.window_tokens) == (2, 128)


def test_value_and_error_by_hand():
    found = summarise_losses([1.0, 2.0, 3.0], 1_024)
    assert found.value == pytest.approx(math.e**2)
    assert found.standard_error == pytest.approx(math.e**2 / math.sqrt(3))


def test_the_ratio_is_taken_window_by_window():
    left, right = summarise_losses([1.0, 2.0, 3.0], 8), summarise_losses([1.1, 2.1, 3.1], 8)
    found = perplexity_ratio(left, right)
    assert found.value == pytest.approx(math.exp(0.1))
    assert found.standard_error == pytest.approx(0, abs=1e-12)  # every window moves by the same
    with pytest.raises(ValueError, match="shorter"):
        perplexity_ratio(left, summarise_losses([1.0], 8))


def test_windows_follow_each_other_and_progress_is_told(release):
    first, second = windows_of(release.tokenizer, TEXT, 2, 50)
    assert list(first + second) == list(release.tokenizer.encode_text(TEXT)[:100])
    heard: list[int] = []
    perplexity(release, [first, second], heard.append)
    assert heard == [1, 2]


def test_a_short_text_is_refused_with_the_numbers(release):
    with pytest.raises(RequestError, match="64 windows of 1,024"):
        windows_of(release.tokenizer, "short")
