"""Loading: both kinds, what is refused, and that no code of a release runs."""

import base64
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from paths import GOLDEN, PROJECT
from PIL import Image
from safetensors.torch import load_file, save_file

from clef_core import load_release_model, systemone
from clef_core.errors import ReleaseError, RequestError
from clef_core.model import load_release
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.release import CHECKSUMS, INDEX

CARD_EXAMPLE = json.loads((PROJECT / "examples" / "card_example.json").read_text())


@pytest.fixture
def release(tmp_path) -> Path:
    """The small MXFP4 release without checksums and index, to be broken."""
    path = Path(shutil.copytree(PROJECT / "checkpoints" / "random-mxfp4", tmp_path / "release"))
    (path / CHECKSUMS).unlink()
    (path / INDEX).unlink()
    return path


def change_tensors(path: Path, **changes) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_the_snippet_of_the_model_card_works():
    model, processor = load_release_model(PROJECT / "checkpoints" / "random-mxfp4", device="cpu")
    answers = systemone(model, processor, CARD_EXAMPLE)["answers"]
    assert set(answers) == {"department", "urgency", "outage"}
    assert answers["department"]["choice"] in ("billing", "technical")


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_every_language_model_linear_has_the_releases_format(kind):
    backbone = load_release(PROJECT / "checkpoints" / f"random-{kind}").backbone
    layers = backbone.model.language_model.layers
    linears = [m for m in layers.modules() if isinstance(m, torch.nn.Linear | MXFP4Linear)]
    assert len(linears) == 31
    assert all(isinstance(linear, MXFP4Linear) == (kind == "mxfp4") for linear in linears)
    assert not any(isinstance(module, MXFP4Linear) for module in backbone.model.visual.modules())
    assert isinstance(backbone.lm_head, torch.nn.Linear)


def test_packed_weights_stay_packed_and_expanded_ones_are_decoded():
    path = PROJECT / "checkpoints" / "random-mxfp4"
    packed, expanded = (load_release(path, linear_mode=mode) for mode in ("packed", "expanded"))
    name = "model.language_model.layers.0.mlp.up_proj"
    assert packed.backbone.get_submodule(name).weight.dtype == torch.uint8
    assert expanded.backbone.get_submodule(name).weight.dtype == torch.bfloat16
    assert (packed.linear_mode, expanded.linear_mode) == ("packed", "expanded")


def addresses(module: torch.nn.Module) -> set[int]:
    return {tensor.data_ptr() for tensor in module.state_dict().values()}


def test_a_release_beside_another_holds_what_is_identical_once():
    first = load_release(PROJECT / "checkpoints" / "random-bf16")
    second = load_release(PROJECT / "checkpoints" / "random-mxfp4", beside=first)
    model, other = first.backbone.model, second.backbone.model
    assert second.head is first.head
    assert addresses(other.visual) == addresses(model.visual)
    assert other.language_model.embed_tokens.weight is not model.language_model.embed_tokens.weight
    assert addresses(other.language_model.embed_tokens) == addresses(model.language_model.embed_tokens)
    assert addresses(second.backbone.lm_head) == addresses(first.backbone.lm_head)
    mlp, other_mlp = model.language_model.layers[0].mlp, other.language_model.layers[0].mlp
    assert not addresses(mlp) & addresses(other_mlp)


def test_what_differs_from_the_release_beside_is_its_own(release):
    tensors = load_file(release / "model.safetensors")
    name = "model.language_model.norm.weight"
    change_tensors(release, **{name: tensors[name] + 1})
    first = load_release(PROJECT / "checkpoints" / "random-mxfp4")
    second = load_release(release, beside=first)
    norm, other = first.backbone.model.language_model.norm, second.backbone.model.language_model.norm
    assert torch.equal(other.weight, norm.weight + 1)
    alone = load_release(release)
    assert torch.equal(alone.backbone.model.language_model.norm.weight, other.weight)


def test_a_missing_tensor_is_named(release):
    change_tensors(release, **{"model.language_model.norm.weight": None})
    with pytest.raises(ReleaseError, match=r"language_model\.norm\.weight"):
        load_release(release)


def test_a_surplus_tensor_is_named_but_mtp_layers_are_ignored(release):
    change_tensors(release, **{"mtp.layers.0.weight": torch.zeros(2)})
    load_release(release)
    change_tensors(release, **{"model.surplus": torch.zeros(2)})
    with pytest.raises(ReleaseError, match=r"model\.surplus"):
        load_release(release)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lm_head.weight", torch.zeros(7, 128, dtype=torch.bfloat16)),
        ("model.language_model.layers.0.mlp.up_proj.weight", torch.zeros(256, 63, dtype=torch.uint8)),
        ("model.language_model.layers.0.mlp.up_proj.weight_scale", torch.zeros(256, 5, dtype=torch.uint8)),
        ("model.language_model.layers.0.mlp.up_proj.weight", torch.zeros(256, 64, dtype=torch.bfloat16)),
        ("model.language_model.layers.9.mlp.up_proj.weight_scale", torch.zeros(256, 4, dtype=torch.uint8)),
        ("model.language_model.norm.weight_scale", torch.zeros(1, 1, dtype=torch.uint8)),
    ],
)
def test_a_wrong_tensor_is_named(release, name, tensor):
    change_tensors(release, **{name: tensor})
    with pytest.raises(ReleaseError, match=name.removesuffix("_scale").removesuffix(".weight")):
        load_release(release)


def test_a_head_for_another_backbone_is_refused(release):
    config = json.loads((release / "config.json").read_text())
    for name in ("joint_head.safetensors", "joint_head_config.json"):
        shutil.copy(GOLDEN / "release-bf16" / name, release / name)
    head = json.loads((release / "joint_head_config.json").read_text())
    tensors = load_file(release / "joint_head.safetensors")
    narrowed = {
        n: t[..., :96].contiguous() if t.shape[-1:] == (128,) and "feed" not in n and "linear" not in n else t
        for n, t in tensors.items()
    }
    save_file(narrowed, release / "joint_head.safetensors")
    (release / "joint_head_config.json").write_text(json.dumps(head | {"hidden_size": 96}))
    with pytest.raises(
        ReleaseError, match=f"expects hidden size 96, the backbone has {config['text_config']['hidden_size']}"
    ):
        load_release(release)


def test_an_impossible_config_is_one_clear_error(release):
    config = json.loads((release / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = "many"
    (release / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReleaseError, match=r"config\.json"):
        load_release(release)


def test_code_in_a_release_is_never_run(release, tmp_path):
    witness = tmp_path / "ran"
    (release / "joint_schema_model.py").write_text(f"open({str(witness)!r}, 'w')\n")
    config = json.loads((release / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "joint_schema_model.Model", "AutoProcessor": "joint_schema_model.Processor"}
    (release / "config.json").write_text(json.dumps(config))
    load_release(release)
    assert not witness.exists()


def test_a_damaged_release_fails_before_it_is_loaded(tmp_path):
    path = Path(shutil.copytree(PROJECT / "checkpoints" / "random-bf16", tmp_path / "release"))
    data = bytearray((path / "joint_head.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "joint_head.safetensors").write_bytes(data)
    with pytest.raises(ReleaseError, match=r"joint_head\.safetensors is not the file that SHA256SUMS lists"):
        load_release(path)


def test_systemone_raises_what_the_request_breaks():
    model, processor = load_release_model(PROJECT / "checkpoints" / "random-bf16")
    with pytest.raises(RequestError, match="questions"):
        systemone(model, processor, {"model": "clef", "state": "s", "questions": {}})


@pytest.mark.filterwarnings("ignore")
def test_systemone_takes_pillow_images_and_videos():
    model, processor = load_release_model(PROJECT / "checkpoints" / "random-bf16")
    image = Image.new("RGB", (64, 64), "red")
    request = {"model": "clef", "state": ["look"], "questions": {"q": {"type": "noul"}}}
    plain = systemone(model, processor, request)
    shown = systemone(model, processor, {**request, "images": [image]})
    moving = systemone(model, processor, {**request, "videos": [[image] * 4]})
    tokens = [answer["usage"]["input_tokens"] for answer in (plain, shown, moving)]
    assert tokens[0] < min(tokens[1:])
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded_png(image)}}
    with pytest.raises(RequestError, match="Pillow"):
        systemone(model, processor, {**request, "state": [part], "images": [image]})


def encoded_png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
