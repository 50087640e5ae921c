"""Greedy chat against a loop of our own without Transformers' `generate`."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from paths import PROJECT
from test_cli import Cli

from clef_core.chat import PROMPTS, chat
from clef_core.errors import ReleaseError
from clef_core.model import Release, load_release

SMALL = PROJECT / "checkpoints" / "random-bf16"


@pytest.fixture(scope="module")
def release() -> Release:
    return load_release(SMALL, dtype=torch.float32)


def greedy(release: Release, prompt: str, num_tokens: int) -> list[int]:
    """The likeliest token, again and again, each time from a forward over everything and no cache."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = release.processor.tokenizer.encode(text, add_special_tokens=False)
    start = len(ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            hidden = release.backbone.model.language_model(input_ids=torch.tensor([ids]), use_cache=False)
            ids.append(int(release.backbone.lm_head(hidden.last_hidden_state[0, -1]).argmax()))
    return ids[start:]


def test_a_reply_is_the_likeliest_token_again_and_again(release: Release) -> None:
    heard: list[int] = []
    replies = chat(release, PROMPTS[:2], 6, heard.append)
    for prompt, reply in zip(PROMPTS[:2], replies, strict=True):
        wanted = greedy(release, prompt, 6)
        assert reply.text == release.processor.tokenizer.decode(wanted, skip_special_tokens=True)
        assert (reply.prompt, reply.num_tokens, reply.is_cut) == (prompt, 6, True)
    assert heard == [1, 2]


def test_a_reply_ends_where_the_release_says(tmp_path: Path, release: Release) -> None:
    first = greedy(release, "hello", 1)[0]
    path = tmp_path / "release"
    copytree(SMALL, path)
    (path / "SHA256SUMS").unlink()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, first]}))
    (reply,) = chat(load_release(path, dtype=torch.float32), ["hello"], 6)
    assert (reply.num_tokens, reply.is_cut) == (1, False)


def test_a_release_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "release"
    copytree(SMALL, path)
    for name in ("SHA256SUMS", "chat_template.jinja"):
        (path / name).unlink()
    with pytest.raises(ReleaseError, match="no chat template"):
        chat(load_release(path, dtype=torch.float32))


def test_the_command_shows_variants_side_by_side(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "data", OMP_NUM_THREADS="1")
    outcome = cli("chat", "--max-new-tokens", "3", "--json", tmp_path / "replies.json")
    assert outcome.code == 0, outcome.stderr
    header, _, *rows = outcome.stdout.splitlines()
    assert header == "| prompt | bf16 | mxfp4 |"
    assert len(rows) == len(PROMPTS) == 4
    replies = json.loads((tmp_path / "replies.json").read_text(encoding="utf-8"))
    assert [reply["prompt"] for reply in replies["mxfp4"]] == list(PROMPTS)
