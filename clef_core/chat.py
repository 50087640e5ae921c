"""Greedy chat with a release's backbone, through Transformers' `generate`, to see that a build still speaks.

A check by eye, not a measurement: four prompts, greedy, the same for every variant. The joint head takes no part.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from clef_core.errors import ReleaseError
from clef_core.model import Release

MAX_NEW_TOKENS = 64
PROMPTS = (
    "A train leaves at 09:40 and arrives at 11:15. How long is the journey?",
    "Write one polite sentence that declines a meeting on Friday.",
    "Name three things that can make a web page load slowly.",
    "Übersetze ins Englische: Der Zähler steht seit gestern still.",
)


@dataclass(frozen=True)
class Reply:
    """What a backbone said to a prompt. is_cut: it had not finished after `max_new_tokens`."""

    prompt: str
    text: str
    num_tokens: int
    is_cut: bool


@torch.inference_mode()
def chat(
    release: Release,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Reply]:
    """Answer each prompt alone, greedily.

    Args:
        progress: hears how many prompts are done.

    Raises:
        ReleaseError: the release has no chat template.
    """
    tokenizer = release.processor.tokenizer
    if not tokenizer.chat_template:
        raise ReleaseError(f"{release.files.path}: there is no chat template")
    ends = _end_ids(release)
    replies = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        input_ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)], device=release.device)
        output = release.backbone.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=release.pad_id,
            eos_token_id=ends or None,
        )
        new = output[0, input_ids.shape[1] :].tolist()
        said = tokenizer.decode(new, skip_special_tokens=True)
        replies.append(Reply(prompt, said, len(new), is_cut=new[-1] not in ends))
        progress(len(replies))
    return replies


def _end_ids(release: Release) -> list[int]:
    """The tokens that end a reply: those of `generation_config.json` where the release has one."""
    file = release.files.path / "generation_config.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    if found is None:
        found = release.backbone.config.text_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
