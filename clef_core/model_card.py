"""The model card of a build: README.md with the hub's front matter, and numbers that were measured while building.

It claims no accuracy: that is what a comparison is for. Licence and language are taken from the
source's own card where it has one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from clef_core.build_plan import BuildPlan
from clef_core.errors import ReleaseError
from clef_core.recipe import ORIGINAL_CONFIG, RECIPE_FILE, Recipe
from clef_core.room import gigabytes

INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
MAX_LISTED = 12


def front_matter_of(card: Path) -> dict[str, Any]:
    """The YAML between the first two `---` lines of a card; empty where there is no card or no front matter.

    Raises:
        ReleaseError: it is not YAML.
    """
    if not card.is_file():
        return {}
    lines = card.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in [line.strip() for line in lines[1:]]:
        return {}
    end = [line.strip() for line in lines].index("---", 1)
    try:
        found = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError as error:
        raise ReleaseError(f"{card}: its front matter is not YAML: {error}") from error
    return found if isinstance(found, dict) else {}


def model_card(plan: BuildPlan, inherited: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Write the card.

    Args:
        inherited: the source's front matter.
        measured: `num_linears`, `source_bytes`, `weight_bytes`, `calibration` (facts or None), `versions`.
    """
    recipe, base_model, kept = plan.recipe, plan.base_model, plan.kept
    tags = ["mxfp4", "quark", "4-bit", "qwen3_5", *(["awq"] if recipe.algorithm == "awq" else [])]
    front = {key: inherited[key] for key in INHERITED if key in inherited}
    front |= {"base_model": base_model, "base_model_relation": "quantized", "tags": tags}
    name = base_model.rpartition("/")[2]
    ratio = measured["weight_bytes"] / measured["source_bytes"]
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {name}, MXFP4",
        "",
        f"The linears of `{base_model}`'s language model in MXFP4 (OCP Microscaling v1.0: E2M1 elements, one E8M0",
        "scale per 32 input values, `even` scale rounding), weights and activations alike; everything else in BF16.",
        "",
        "| | |",
        "|---|---|",
        f"| algorithm | {_algorithm(recipe)} |",
        f"| linears in MXFP4 | {measured['num_linears']:,}, at 4.25 bits per weight |",
        f"| weights on disk | {gigabytes(measured['weight_bytes'])}, {ratio:.1%} of the source's "
        f"{gigabytes(measured['source_bytes'])} |",
    ]
    if calibration := measured["calibration"]:
        lines.append(
            f"| calibration | `{calibration['source']}`, {calibration['num_blocks']} × {calibration['block_tokens']} "
            f"tokens of {calibration['num_documents']} documents, seed {recipe.seed} |"
        )
    versions = ", ".join(f"{key} {value}" for key, value in measured["versions"].items() if value)
    lines += [f"| made with | {versions} |", ""]
    if kept:
        listed = ", ".join(f"`{one}`" for one in kept[:MAX_LISTED])
        more = f" and {len(kept) - MAX_LISTED} more" if len(kept) > MAX_LISTED else ""
        lines += [f"Kept in BF16 on request ({', '.join(recipe.keep_bf16)}): {listed}{more}.", ""]
    if plan.source.is_random:
        lines += ["The weights of the source are random numbers: the answers of this release mean nothing.", ""]
    lines += [
        f"`{RECIPE_FILE}` has the whole recipe, `SHA256SUMS` the checksum of every file."
        + (f" `{ORIGINAL_CONFIG}` is the config as Quark exported it." if recipe.algorithm == "awq" else ""),
        "",
        "These numbers were measured while this build was made. No accuracy was measured.",
        "",
    ]
    return "\n".join(lines)


def _algorithm(recipe: Recipe) -> str:
    if recipe.algorithm == "none":
        return "round to nearest"
    return f"AWQ (AMD Quark, template `{recipe.template}`: scales in the MLP, clipping in every linear)"
