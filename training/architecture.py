"""clef-nano's size: the real classes, small. Build it with fresh weights, and write it as a release."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from clef_core.joint_head import JointHead, JointHeadConfig
from clef_core.release import CHECKSUMS, INDEX, JOINT_HEAD

HIDDEN = 256
PATCH, MERGE = 16, 2  # pixels per patch, patches per image token, along each side
HEAD = JointHeadConfig(hidden_size=HIDDEN, width=256, routing_layers=2, layers=2, heads=4, feedforward=512)
LAYER_TYPES = ("linear_attention", "full_attention", "linear_attention", "full_attention")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CARD = Path(__file__).parent / "card"
"""README.md and LICENSE of the release."""


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
    patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    image = Qwen2VLImageProcessor(**patches, **mean_std, size={"shortest_edge": 16_384, "longest_edge": 131_072})
    video = Qwen3VLVideoProcessor(**patches, **mean_std, size={"shortest_edge": 4_096, "longest_edge": 65_536})
    return Qwen3VLProcessor(image, fast, video, chat_template=CHAT_TEMPLATE)


def make_backbone(tokenizer: Tokenizer) -> Qwen3_5ForConditionalGeneration:
    """A backbone with Transformers' initial weights, float32; seed torch before."""
    ids = {token: tokenizer.token_to_id(f"<|{token}|>") for token in (
        "endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end"
    )}  # fmt: skip
    config = Qwen3_5Config(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(), "hidden_size": HIDDEN, "intermediate_size": 512,
            "num_hidden_layers": len(LAYER_TYPES),
            "layer_types": list(LAYER_TYPES), "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "max_position_embeddings": 65_536, "pad_token_id": ids["endoftext"],
            "eos_token_id": ids["im_end"], "bos_token_id": None, "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": HIDDEN,
            "num_position_embeddings": 256, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3_5ForConditionalGeneration(config).float()


def make_model(
    tokenizer: Tokenizer, embeddings: Tensor, seed: int
) -> tuple[Qwen3_5ForConditionalGeneration, JointHead]:
    """Backbone and head with fresh weights; input and output embeddings start as `embeddings` (vocabulary, hidden)."""
    torch.manual_seed(seed)
    backbone = make_backbone(tokenizer)
    head = JointHead(HEAD)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                parameter.normal_(0.0, 0.5 * parameter[0].numel() ** -0.5)
        backbone.model.language_model.embed_tokens.weight.copy_(embeddings)
        backbone.lm_head.weight.copy_(embeddings)
        head.prior_logit_scale.fill_(2.7)
        head.joint_logit_scale.fill_(1.5)
    return backbone, head


def write_release(
    path: Path,
    backbone: Qwen3_5ForConditionalGeneration,
    head: JointHead,
    tokenizer: Tokenizer,
) -> None:
    """Write a BF16 release into a new directory, with its model card and licence."""
    path.mkdir(parents=True)
    make_processor(tokenizer).save_pretrained(path)
    _copy_as_bf16(backbone, make_backbone(tokenizer)).save_pretrained(path, max_shard_size="1GB")
    save_file(
        {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()},
        path / JOINT_HEAD,
    )
    (path / "joint_head_config.json").write_text(json.dumps(asdict(head.config), indent=2) + "\n")
    for file in CARD.iterdir():
        shutil.copy(file, path / file.name)
    write_index_and_checksums(path)


def _copy_as_bf16(source: nn.Module, target: Qwen3_5ForConditionalGeneration) -> Qwen3_5ForConditionalGeneration:
    target.load_state_dict(source.state_dict())
    return target.to(torch.bfloat16)


def write_index_and_checksums(path: Path) -> None:
    """Write the index of `model.safetensors` and the checksum of every other file."""
    tensors = load_file(path / "model.safetensors")
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    files = sorted(file for file in path.iterdir() if file.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (path / CHECKSUMS).write_text("".join(lines))
