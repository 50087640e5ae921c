"""How much memory loading takes beside the weights that stay, and how large MXFP4 weights are in memory.

Writes a random BF16 release and its MXFP4 build into a temporary directory and loads each in every mode in a process of
its own. `weights` are the bytes of all tensors that stay; `peak` is the largest resident set of the load and of one
look at every weight, above what the process had before (VmHWM of /proc, reset before the load), pages of mapped files
included. It must stay within 1.15 times the weights, and packed linears within 0.33 of BF16's. Linux only.

Run: .venv/bin/python benchmarks/load_memory.py [--gigabytes 1.0] [--directory DIR]
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))

from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.quantize_memory import SMALL, configuration, write_release  # noqa: E402
from benchmarks.whole_model import write_head  # noqa: E402
from clef_core.model import load_release  # noqa: E402
from clef_core.mxfp4_linear import MXFP4Linear  # noqa: E402
from clef_core.quantize import quantize  # noqa: E402
from clef_core.recipe import Recipe  # noqa: E402

WAYS = {"BF16": ("bf16", None), "packed": ("mxfp4", "packed"), "expanded": ("mxfp4", "expanded")}


def resident_bytes(field: str) -> int:
    """VmRSS, VmHWM or RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def storage_bytes(modules: list[torch.nn.Module]) -> int:
    """Bytes of the distinct tensors of modules."""
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def measure(path: str, mode: str | None) -> dict[str, float]:
    """Load a release in this process."""
    load_release(SMALL)  # imports, processor classes, the timed products
    gc.collect()
    before, own_before = resident_bytes("VmRSS"), resident_bytes("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    release = load_release(path, linear_mode=mode)
    seconds = time.perf_counter() - started
    for tensor in [*release.backbone.state_dict().values(), *release.head.state_dict().values()]:
        tensor.reshape(-1).view(
            torch.uint8
        ).amax()  # on a CPU a tensor is a mapped part of its file, read when it is first used
    peak = resident_bytes("VmHWM") - before
    weights = storage_bytes([release.backbone, release.head])
    layers = release.backbone.model.language_model.layers
    linears = [module for module in layers.modules() if isinstance(module, MXFP4Linear | torch.nn.Linear)]
    own = resident_bytes("RssAnon") - own_before
    return {"weights": weights, "linears": storage_bytes(linears), "peak": peak, "own": own, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the BF16 release")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, mode = arguments.child
        print(json.dumps(measure(path, None if mode == "None" else mode)))
        return
    print(conditions(), "\n")
    print("| | weights | of these linears | peak | not of files | peak / weights | linears / BF16's | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="clef-load-") as folder:
        write_release(Path(folder) / "bf16", arguments.gigabytes * 1e9)
        write_head(Path(folder) / "bf16", configuration(1)["text_config"]["hidden_size"])
        quantize(Path(folder) / "bf16", Path(folder) / "mxfp4", Recipe(algorithm="none"))
        of_bf16 = 0.0
        for name, (kind, mode) in WAYS.items():
            command = [sys.executable, "-W", "ignore", __file__, "--child", f"{folder}/{kind}", str(mode)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(output.splitlines()[-1])
            of_bf16 = of_bf16 or found["linears"]
            sizes = " | ".join(f"{found[key] / 1e6:.0f} MB" for key in ("weights", "linears", "peak", "own"))
            ratios = f"{found['peak'] / found['weights']:.2f} | {found['linears'] / of_bf16:.3f}"
            print(f"| {name} | {sizes} | {ratios} | {found['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
