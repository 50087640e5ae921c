"""Load a release into memory: backbone, joint head, tokenizer, processor.

The backbone is Transformers' `Qwen3_5ForConditionalGeneration`, built without weights; each linear whose tensors are
MXFP4 becomes an `MXFP4Linear`, and every tensor is read from its file straight to the device. Quark is not needed, and
no code of the release is run. Whether a release is BF16 or MXFP4 is seen from its tensors alone.

What surprises: rotary tables are not stored in a release, so they are computed after the empty build; and Qwen3.5
checkpoints may carry `mtp.*` tensors (multi-token prediction) that a decision never uses.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoProcessor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextRotaryEmbedding,
    Qwen3_5VisionRotaryEmbedding,
)

from clef_core import delta_rule, gpu
from clef_core.encoding import Batch
from clef_core.errors import ReleaseError
from clef_core.joint_head import JointHead, load_joint_head
from clef_core.linear_modes import choose_mode, measure_products, prepare_linears, use_float32_products
from clef_core.mxfp4 import BLOCK
from clef_core.mxfp4_linear import LinearMode, MXFP4Linear, Steps
from clef_core.prefix import num_shared_tokens, run_after_prefix
from clef_core.release import ReleaseFiles, read_release, verify_checksums
from clef_core.tokens import PromptTokenizer

logger = logging.getLogger(__name__)

IGNORED_PREFIX = "mtp."


@dataclass(frozen=True)
class Release:
    """A release in memory. `dtype` is the backbone's compute dtype, `checksum` names the exact files.

    linear_mode: how MXFP4 linears compute; None in a BF16 release.
    has_float32_products: whether BF16 linears multiply in float32, as is faster on this CPU.
    has_reference_delta_rule: whether DeltaNet layers run Transformers' own function, bit for bit.
    steps: what the MXFP4 linears share.
    """

    files: ReleaseFiles
    checksum: str
    backbone: Qwen3_5ForConditionalGeneration
    head: JointHead
    tokenizer: PromptTokenizer
    processor: Any
    device: torch.device
    dtype: torch.dtype
    linear_mode: LinearMode | None
    has_float32_products: bool = False
    has_reference_delta_rule: bool = False
    steps: Steps | None = None

    @property
    def linears(self) -> str:
        """How the linears compute, in a word or two: what a run's row records."""
        return self.linear_mode or ("bf16 in float32" if self.has_float32_products else "bf16")

    @property
    def pad_id(self) -> int:
        return int(self.backbone.config.text_config.pad_token_id or 0)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Run the backbone over a micro-batch, without lm_head logits; what all texts begin with is computed once.

        Returns:
            (B, T, D) in `dtype`: the final hidden state, after the last norm, of every token.
        """
        input_ids = batch.input_ids.to(self.device)
        is_padded = bool((batch.attention_mask == 0).any())
        attention_mask = batch.attention_mask.to(self.device) if is_padded else None
        with self._delta_rule():
            if batch.mm_token_type_ids is not None:
                pixels = {name: values.to(self.device) for name, values in batch.pixels.items()}
                token_types = batch.mm_token_type_ids.to(self.device)
                hidden = self._run(
                    self.backbone.model, input_ids, attention_mask, mm_token_type_ids=token_types, **pixels
                )
            elif num_shared := num_shared_tokens(batch.input_ids, batch.attention_mask):
                hidden = run_after_prefix(self.backbone.model.language_model, input_ids, attention_mask, num_shared)
            else:
                hidden = self._run(self.backbone.model.language_model, input_ids, attention_mask)
        if self.steps is not None:
            self.steps.forget()
        return hidden

    @staticmethod
    def _run(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, **media: Tensor) -> Tensor:
        output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **media)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _delta_rule(self) -> AbstractContextManager[None]:
        """Ours on a CPU; Transformers' where a GPU's kernels stand behind it, or where last bits are compared."""
        is_ours = self.device.type == "cpu" and not self.has_reference_delta_rule
        return delta_rule.installed() if is_ours else nullcontext()

    def output_embeddings(self, batch: Batch) -> Tensor:
        """(B, T, D): the row of lm_head's weight for each input token."""
        matrix: Tensor = self.backbone.lm_head.weight
        return matrix[batch.input_ids.to(self.device)]


def load_release(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    linear_mode: LinearMode | None = None,
    head_dtype: torch.dtype = torch.float32,
    *,
    has_reference_delta_rule: bool = False,
    beside: Release | None = None,
) -> Release:
    """Load a BF16 or MXFP4 release.

    Args:
        path: a release directory.
        device: where the weights live and the products run.
        dtype: compute dtype of the backbone, bfloat16 or float32.
        linear_mode: how MXFP4 linears compute; None chooses by device, free memory and a measurement.
        head_dtype: compute dtype of the joint head; float32 by default, bfloat16 is what the reference does.
        has_reference_delta_rule: run Transformers' own delta rule on a CPU, to compare last bits with it.
        beside: a release in memory; what is identical (of BF16 and MXFP4: the vision tower, embeddings, lm_head, norms,
            the head) is held once for both.

    Raises:
        ReleaseError: the directory is not a release, a file is missing or damaged, or a tensor has a wrong shape.
        SettingsError: the device is not there, or cannot run the linear mode.
    """
    started = time.perf_counter()
    device = torch.device(device)
    gpu.report(device)
    files = read_release(path)
    checksum = verify_checksums(files)
    backbone = load_backbone(files, device, dtype, beside.backbone.state_dict() if beside else None)
    mode, steps = None, None
    if files.kind == "mxfp4":
        mode = linear_mode or choose_mode(_num_quantised(files), device, dtype)
        steps = prepare_linears(backbone, mode, device, dtype, is_mapped=device.type == "cpu")
    has_float32_products = device.type == "cpu" and dtype == torch.bfloat16 and measure_products().is_float32_faster
    if has_float32_products:
        use_float32_products(backbone.model)  # not lm_head: no decision uses it, and its copy would be gigabytes
    head = load_joint_head(files.path, device, head_dtype)
    if beside is not None and head.config == beside.head.config and _are_equal(head, beside.head):
        head = beside.head
    if head.config.hidden_size != backbone.config.text_config.hidden_size:
        raise ReleaseError(
            f"{files.path}: the joint head expects hidden size {head.config.hidden_size}, "
            f"the backbone has {backbone.config.text_config.hidden_size}"
        )
    tokenizer = PromptTokenizer.from_release(files.path)
    release = Release(
        files, checksum, backbone, head, tokenizer, _processor(files.path), device, dtype,
        mode, has_float32_products, has_reference_delta_rule, steps,
    )  # fmt: skip
    logger.info(
        "loaded %s (%s, %s, linears %s) on %s in %.1f s",
        files.path, files.kind, dtype, release.linears, device, time.perf_counter() - started,
    )  # fmt: skip
    return release


def load_release_model(path: Path | str, device: str = "cpu") -> tuple[Release, Any]:
    """Load a release as the model card does: `model, processor = load_release_model(path, device="cpu")`."""
    release = load_release(path, device)
    return release, release.processor


def load_backbone(
    files: ReleaseFiles, device: torch.device, dtype: torch.dtype, known: Mapping[str, Tensor] | None = None
) -> Qwen3_5ForConditionalGeneration:
    """Read the backbone alone, every linear in the format that the release has.

    Args:
        known: tensors in memory by name; where one equals what the file holds, it is taken instead.

    Raises:
        ReleaseError: a tensor is missing, one too many, or of a wrong shape.
    """
    settings = {key: value for key, value in files.config.items() if key != "quantization_config"}
    try:
        config = Qwen3_5Config(**settings)
        with torch.device("meta"):
            model = Qwen3_5ForConditionalGeneration._from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ReleaseError(f"{files.path / 'config.json'}: no backbone can be built from it: {error}") from error
    _place_mxfp4_linears(model, files)
    _compute_rotary_tables(model, device)
    expected = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, tensor in _read_tensors(files, device):
        if name not in expected:
            raise ReleaseError(f"{files.path}: tensor {name} belongs to no part of the backbone")
        slot = expected.pop(name)
        if slot.shape != tensor.shape:
            raise ReleaseError(
                f"{files.path}: tensor {name} has shape {tuple(tensor.shape)}, "
                f"the configuration needs {tuple(slot.shape)}"
            )
        if tensor.is_floating_point() != slot.is_floating_point():
            raise ReleaseError(f"{files.path}: tensor {name} is {tensor.dtype}, the configuration needs {slot.dtype}")
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        other = known.get(name) if known else None
        _assign(model, name, tensor if other is None or not _is_equal(other, tensor) else other)
    if "lm_head.weight" in expected and config.tie_word_embeddings:
        del expected["lm_head.weight"]
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    if expected:
        first = sorted(expected)[0]
        raise ReleaseError(f"{files.path}: {len(expected)} tensors missing, first {first}")
    return model.eval().requires_grad_(False)


def _place_mxfp4_linears(model: nn.Module, files: ReleaseFiles) -> None:
    """Replace each linear that the release stores as codes and scales."""
    for name, info in files.tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        path = name.removesuffix(".weight_scale")
        try:
            linear = model.get_submodule(path)
        except AttributeError as error:
            raise ReleaseError(f"{files.path}: tensor {name} belongs to no part of the backbone") from error
        if not isinstance(linear, nn.Linear) or linear.bias is not None or linear.in_features % BLOCK:
            raise ReleaseError(f"{files.path}: {path} cannot be MXFP4 (scales of shape {info.shape})")
        parent, _, leaf = path.rpartition(".")
        replacement = MXFP4Linear(linear.in_features, linear.out_features, device="meta")
        setattr(model.get_submodule(parent), leaf, replacement)


def _compute_rotary_tables(model: nn.Module, device: torch.device) -> None:
    rotary = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Qwen3_5TextRotaryEmbedding | Qwen3_5VisionRotaryEmbedding)
    ]
    for name, module in rotary:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, type(module)(module.config).to(device))


def _read_tensors(files: ReleaseFiles, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for file in files.weight_files:
        try:
            with safe_open(files.path / file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118  safe_open is no mapping
                    if not name.startswith(IGNORED_PREFIX):
                        yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ReleaseError(f"{files.path / file}: cannot be read: {error}") from error


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[leaf] = tensor


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device) and torch.equal(one, other)


def _are_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold the same tensors under the same names."""
    tensors, others = one.state_dict(), other.state_dict()
    return tensors.keys() == others.keys() and all(_is_equal(tensors[name], others[name]) for name in tensors)


def _num_quantised(files: ReleaseFiles) -> int:
    """Weights that are stored as codes."""
    scales = (info.shape for name, info in files.tensors.items() if name.endswith(".weight_scale"))
    return sum(BLOCK * shape[0] * shape[1] for shape in scales)


def _processor(path: Path) -> Any:
    try:
        return AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseError(f"{path}: the processor cannot be loaded: {error}") from error
