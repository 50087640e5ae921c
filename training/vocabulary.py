"""The tokenizer of clef-nano: 15,360 tokens, learned from the texts of training, with the prompt's fixed pieces added.

The fixed pieces halve the sequences. They are ordinary vocabulary; only tokens of the form `<…>` are control tokens,
and none of the pieces contains one, so a user's text cannot stand for a turn of its own.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC

from clef_core.schema import NOUL_DESCRIPTIONS
from clef_core.tokens import ALLOWED, END_FIELD, SCHEMA, SYSTEM

VOCABULARY = 15_360
MAX_OPTIONS = 255
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
ORDINARY_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but not marked special
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fixed_pieces() -> list[str]:
    """What every prompt repeats: the system turn, the heads of fields, the frame of an option."""
    types = ("choice", "score", "noul")
    return [
        SYSTEM.split("<|im_start|>")[1].split("<|im_end|>")[0],
        SYSTEM.rsplit("<|im_start|>", 1)[1],
        SCHEMA, ALLOWED, END_FIELD, "\n\nJOINT SCHEMA DECISIONS:", "assistant\n",
        "\nFIELD ", "\nFIELD 1\nID: ", "\nID: ", *(f"\nTYPE: {type}\nINSTRUCTION: " for type in types),
        '{"description":"', '","option_id":"', '{"option_id":"', '"}', '{"description":{"', '"},"option_id":"',
        *(f'{{"description":"{text}","option_id":"{id}"}}' for id, text in NOUL_DESCRIPTIONS.items()),
        *(f"OPTION {number}: " for number in range(1, MAX_OPTIONS + 1)),
    ]  # fmt: skip


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE over `texts` with the fixed pieces as added tokens; the same texts give the same tokenizer."""
    pieces = fixed_pieces()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL_TOKENS) - len(ORDINARY_TOKENS) - len(pieces),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*ORDINARY_TOKENS, *pieces)])
    return tokenizer
