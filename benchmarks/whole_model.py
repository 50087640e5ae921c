"""How long the backbone of a 130M release takes per forward: BF16, every MXFP4 mode, and Transformers with AMD Quark.

Writes a random release of that size (8 layers, hidden 1,024) and its MXFP4 build into a temporary
directory, and times every way in turn on the same tokens. The table goes to standard output as Markdown. `--profile`
adds where the time of one way goes.

Run: OMP_WAIT_POLICY=PASSIVE .venv/bin/python benchmarks/whole_model.py [--tokens 512 1346] [--profile int8]
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions, time_in_turn  # noqa: E402
from clef_core.encoding import Batch  # noqa: E402
from clef_core.joint_head import JointHead, JointHeadConfig  # noqa: E402
from clef_core.model import Release, load_release  # noqa: E402
from clef_core.mxfp4_linear import LinearMode  # noqa: E402
from clef_core.quantize import quantize  # noqa: E402
from clef_core.recipe import Recipe  # noqa: E402
from clef_core.release import CHECKSUMS, INDEX  # noqa: E402
from clef_core.room import keep_freed_memory  # noqa: E402

SMALL = PROJECT / "checkpoints" / "random-bf16"
NUM_LAYERS, HIDDEN = 8, 1_024
NUM_ROUNDS = 3
MODES: tuple[LinearMode, ...] = ("expanded", "packed", "int8")


def write_release(path: Path) -> int:
    """A random BF16 release that differs from the shipped one in its backbone; returns its parameters."""
    ignored = shutil.ignore_patterns("model.safetensors", INDEX, CHECKSUMS, "joint_head*")
    shutil.copytree(SMALL, path, ignore=ignored)
    settings = json.loads((SMALL / "config.json").read_text())
    settings["text_config"] |= {
        "hidden_size": HIDDEN, "intermediate_size": 3_584, "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(NUM_LAYERS)],
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    }  # fmt: skip
    settings["vision_config"]["out_hidden_size"] = HIDDEN
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**settings)).to(torch.bfloat16)
    model.save_pretrained(path)
    tensors = model.state_dict()
    (path / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")})
    )
    write_head(path, HIDDEN)
    return sum(parameter.numel() for parameter in model.parameters())


def write_head(path: Path, hidden_size: int) -> None:
    """A small random head for a backbone of that hidden size."""
    config = JointHeadConfig(hidden_size=hidden_size, width=64, routing_layers=2, layers=4, heads=4, feedforward=128)
    (path / "joint_head_config.json").write_text(json.dumps(vars(config)))
    head = JointHead(config).to(torch.bfloat16).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in head.items()}, path / "joint_head.safetensors")


def forward(release: Release, batch: Batch) -> Callable[[], object]:
    return lambda: release.hidden_states(batch)


def main(tokens: list[int], *, has_quark: bool, profiled: str | None) -> None:
    keep_freed_memory()  # as a worker does
    print(conditions(), "\n")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder)
        num_parameters = write_release(path / "bf16")
        quantize(path / "bf16", path / "mxfp4", Recipe(algorithm="none"))
        releases = {"BF16": load_release(path / "bf16")}
        releases |= {mode: load_release(path / "mxfp4", linear_mode=mode) for mode in MODES}
        print(f"{num_parameters / 1e6:.0f}M parameters, BF16 linears: {releases['BF16'].linears}\n")
        quarks = None
        if has_quark:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                quarks = Qwen3_5ForConditionalGeneration.from_pretrained(path / "mxfp4", dtype=torch.bfloat16)
        print("| tokens |", " | ".join([*releases, *(["Quark"] if quarks else [])]), "|")
        print("|---" * (len(releases) + 1 + bool(quarks)) + "|")
        for num_tokens in tokens:
            ids = torch.randint(0, 2_000, (1, num_tokens), generator=torch.Generator().manual_seed(1))
            batch = Batch(ids, torch.ones_like(ids), None, {}, torch.tensor([num_tokens]))
            ways = {name: forward(release, batch) for name, release in releases.items()}
            if quarks is not None:
                ways["Quark"] = lambda: quarks.model.language_model(input_ids=ids, use_cache=False)  # noqa: B023
            print(
                f"| {num_tokens} |",
                " | ".join(f"{value:.2f} s" for value in time_in_turn(ways, NUM_ROUNDS).values()),
                "|",
            )
            if profiled is not None:
                with profile(activities=[ProfilerActivity.CPU]) as measured:
                    ways[profiled]()
                print(measured.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1_346, 4_096])
    parser.add_argument("--no-quark", action="store_true", help="do not load it beside ours")
    parser.add_argument("--profile", metavar="WAY", help="BF16, expanded, packed, int8 or Quark")
    arguments = parser.parse_args()
    main(arguments.tokens, has_quark=not arguments.no_quark, profiled=arguments.profile)
