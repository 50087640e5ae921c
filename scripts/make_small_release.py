"""Write the two small random releases that ship with the project: `checkpoints/random-bf16` and `random-mxfp4`.

Real classes at tiny size: a Qwen3.5 backbone with DeltaNet, full attention and a vision tower, a tokenizer trained
here, a processor and a joint schema head. The weights are random, so the answers mean nothing, and a file named
`RANDOM_WEIGHTS` says so. Head dims are 64, because vLLM's CPU build refuses 32. The MXFP4 release is the BF16 one as
`python -m worker quantize --algorithm none` makes it.

Run: .venv/bin/python scripts/make_small_release.py [--checkpoints DIR]
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from clef_core.joint_head import JointHead, JointHeadConfig  # noqa: E402
from clef_core.quantize import quantize  # noqa: E402
from clef_core.recipe import Recipe  # noqa: E402
from clef_core.release import CHECKSUMS, INDEX, RANDOM_MARKER  # noqa: E402
from clef_core.tokens import ALLOWED, END_FIELD, SCHEMA, SUFFIX, SYSTEM  # noqa: E402

SEED = 0
VOCABULARY = 2_048
HIDDEN = 128
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
ORDINARY_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but not marked special
FIXED_PIECES = (
    "OPTION ", '{"description":"', '","option_id":"', '{"option_id":"', '"}', END_FIELD, ALLOWED, SCHEMA, "\nFIELD ",
    "\nID: ", "\nTYPE: ", "\nINSTRUCTION: ",
)  # fmt: skip
"""Fixed words of the prompt as ordinary vocabulary: a request with 77 options is 2,500 tokens instead of 4,200."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LICENSE = (
    "The tensors in this directory are random numbers and the tokenizer was trained on this project's own example\n"
    "texts. No rights are claimed in them: use them for any purpose, without any warranty.\n"
)
MARKER = "The weights of this release are random numbers. Its answers mean nothing.\n"


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE trained on the project's examples and on the fixed words of the prompt."""
    texts = [
        SYSTEM,
        SCHEMA,
        ALLOWED,
        END_FIELD,
        SUFFIX,
        '{"description":"","option_id":""}\n',
        "OPTION 1: \nFIELD 1\nID: ",
    ]
    texts += [file.read_text(encoding="utf-8") for file in sorted((PROJECT / "examples").glob("*.csv"))]
    texts += [file.read_text(encoding="utf-8") for file in sorted((PROJECT / "examples").glob("*.json"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL_TOKENS) + len(ORDINARY_TOKENS) + len(FIXED_PIECES)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - added, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*ORDINARY_TOKENS, *FIXED_PIECES)])
    return tokenizer


def make_processor(tokenizer: Tokenizer) -> Qwen3VLProcessor:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        },
    )  # fmt: skip
    mean_std = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    image = Qwen2VLImageProcessor(**patches, **mean_std, size={"shortest_edge": 65_536, "longest_edge": 262_144})
    video = Qwen3VLVideoProcessor(**patches, **mean_std, size={"shortest_edge": 4_096, "longest_edge": 65_536})
    return Qwen3VLProcessor(image, fast, video, chat_template=CHAT_TEMPLATE)


def make_backbone(tokenizer: Tokenizer) -> Qwen3_5ForConditionalGeneration:
    def token_id(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None
        return int(found)

    config = Qwen3_5Config(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 65_536,
            "pad_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>"), "bos_token_id": None,
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": HIDDEN,
            "num_position_embeddings": 256, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=token_id("<|image_pad|>"), video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"), vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():  # the default 0.02 leaves the layers without a say at this size
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter[0].numel() ** -0.5)
    return model.to(torch.bfloat16)


def make_joint_head() -> tuple[JointHead, JointHeadConfig]:
    config = JointHeadConfig(hidden_size=HIDDEN, width=64, routing_layers=2, layers=4, heads=4, feedforward=128)
    torch.manual_seed(SEED + 1)
    head = JointHead(config)
    with torch.no_grad():
        head.prior_logit_scale.fill_(2.0)
        head.joint_logit_scale.fill_(3.0)
    return head.to(torch.bfloat16), config


def write_bf16(path: Path) -> None:
    tokenizer = train_tokenizer()
    path.mkdir(parents=True)
    make_processor(tokenizer).save_pretrained(path)
    make_backbone(tokenizer).save_pretrained(path, max_shard_size="1GB")
    head, config = make_joint_head()
    save_file(
        {name: tensor.contiguous() for name, tensor in head.state_dict().items()}, path / "joint_head.safetensors"
    )
    (path / "joint_head_config.json").write_text(json.dumps(vars(config), indent=2) + "\n")
    (path / "LICENSE").write_text(LICENSE)
    (path / RANDOM_MARKER).write_text(MARKER)
    finish(path)


def finish(path: Path) -> None:
    """Write the index and the checksums."""
    tensors = load_file(path / "model.safetensors")
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    files = sorted(file for file in path.iterdir() if file.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (path / CHECKSUMS).write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=PROJECT / "checkpoints")
    folder = parser.parse_args().checkpoints
    for name in ("random-bf16", "random-mxfp4"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_bf16(folder / "random-bf16")
    quantize(folder / "random-bf16", folder / "random-mxfp4", Recipe(algorithm="none"))
