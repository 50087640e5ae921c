"""How much memory and time `quantize --algorithm none` and `verify --against` take on a release of several gigabytes.

Writes a random BF16 release in several files into a temporary directory, runs both commands as processes of their own,
samples their anonymous memory (RssAnon of /proc, 50 times a second; pages of files do not count, the system can drop
them) and deletes everything. Linux only. Numbers go to standard output as JSON, with the conditions they hold under.

Run: .venv/bin/python benchmarks/quantize_memory.py [--gigabytes 4.0] [--directory DIR]
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from clef_core.linears import read_backbone  # noqa: E402
from clef_core.quantize_files import as_bytes  # noqa: E402
from clef_core.release import INDEX  # noqa: E402
from clef_core.weight_files import Entry, ShardWriter, index_text, plan_shards  # noqa: E402

SMALL = PROJECT / "checkpoints" / "random-bf16"
PIECE = 1 << 22
FILES = 4
SAMPLE_S = 0.02


def configuration(num_layers: int) -> dict[str, Any]:
    """A backbone whose largest tensors (embeddings, lm_head) are large beside its layers, as in the 27B."""
    config = json.loads((SMALL / "config.json").read_text())
    config["text_config"] |= {
        "vocab_size": 131_072, "hidden_size": 2_048, "intermediate_size": 8_192, "num_hidden_layers": num_layers,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)],
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    }  # fmt: skip
    config["vision_config"]["out_hidden_size"] = 2_048
    return config


def write_release(folder: Path, num_bytes: float) -> int:
    """Write the smallest such release of at least `num_bytes` and return its size in bytes."""
    num_layers = 4
    while True:
        config = configuration(num_layers)
        shapes = read_backbone(config, folder).shapes
        entries = [Entry(name, "BF16", shape) for name, shape in shapes.items()]
        total = sum(entry.num_bytes for entry in entries)
        if total >= num_bytes:
            break
        num_layers += 1
    folder.mkdir()
    for file in SMALL.iterdir():
        if file.name not in ("config.json", INDEX, "SHA256SUMS") and file.name != "model.safetensors":
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config))
    plan = plan_shards(entries, FILES, 1)
    generator = torch.Generator().manual_seed(0)
    for name, shard in plan.items():
        with ShardWriter(folder / name, shard) as writer:
            for entry in shard:
                left = entry.num_bytes // 2
                while left:
                    piece = torch.randn(min(left, PIECE), generator=generator).mul_(0.02).bfloat16()
                    writer.append(entry.name, as_bytes(piece))
                    left -= piece.numel()
    (folder / INDEX).write_text(index_text(plan))
    return total


def measure(*command: str) -> dict[str, float]:
    """Run a command of the worker to its end and sample its memory."""
    started = time.perf_counter()
    peak = 0
    with subprocess.Popen(
        [sys.executable, "-m", "worker", *command], cwd=PROJECT, stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"{command[0]} left with {process.returncode}")
    return {"peak_anonymous_mb": round(peak / 1e6, 1), "elapsed_s": round(time.perf_counter() - started, 1)}


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="clef-quantize-") as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        source_bytes = write_release(source, arguments.gigabytes * 1e9)
        print(f"source: {source_bytes / 1e9:.2f} GB in {FILES} files", file=sys.stderr)
        result = {
            "source_gb": round(source_bytes / 1e9, 2),
            "quantize": measure("quantize", str(source), str(target), "--algorithm", "none"),
            "verify": measure("verify", str(target), "--against", str(source)),
            "target_gb": round(sum(file.stat().st_size for file in target.glob("model-*.safetensors")) / 1e9, 2),
            "target_files": len(list(target.glob("model-*.safetensors"))),
        }
    for step in ("quantize", "verify"):
        result[step]["mb_per_s"] = round(source_bytes / 1e6 / result[step]["elapsed_s"], 1)
    conditions = {
        "threads": torch.get_num_threads(), "cores": os.cpu_count(), "machine": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "load_average": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(result | {"conditions": conditions}, indent=2))


if __name__ == "__main__":
    main()
