"""Common English words, so that the tokenizer knows more of them than the training texts hold.

They are the whole words of all-MiniLM-L6-v2's vocabulary (Apache-2.0), commonest first.
"""

from training.embeddings import minilm_folder

NUM_WORDS = 10_000
REPEATS = 3
"""How often each counts beside the training texts: a word must be met as often as its pieces to become a token."""


def common_words() -> list[str]:
    vocabulary = (minilm_folder() / "vocab.txt").read_text(encoding="utf-8").split()
    words = [word for word in vocabulary if len(word) > 2 and word.isascii() and word.isalpha()][:NUM_WORDS]
    return [f" {word}" for word in words] * REPEATS
