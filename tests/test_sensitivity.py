"""Sensitivity against releases that really are quantised in one part, its plot, and its place in the database."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from paths import PROJECT, RANDOM_ENVIRONMENT
from typer.testing import CliRunner

from clef_core.engine import Engine, Record
from clef_core.errors import ReleaseError, RequestError
from clef_core.linears import read_backbone
from clef_core.model import Release, load_release
from clef_core.mxfp4_linear import MXFP4Linear
from clef_core.progress import Progress
from clef_core.quantize import quantize
from clef_core.recipe import Recipe
from clef_core.release import read_release
from clef_core.schema import parse_request
from clef_core.sensitivity import Sensitivity, group_linears, measure_sensitivity, quantised
from clef_core.sensitivity_plot import sensitivity_svg
from db.session import Database
from db.store_sensitivity import (
    NewSensitivityRun,
    get_sensitivity_run,
    list_sensitivity_runs,
    store_sensitivity_run,
)
from worker.__main__ import app

BF16 = PROJECT / "checkpoints" / "random-bf16"
QUESTIONS = {
    "down": {"type": "noul"},
    "team": {"type": "choice", "criteria": {"billing": "Money", "technical": "Faults", "sales": None}},
}
STATES = ("The site is down since noon.", "Please send the invoice again.")


def request(state: str, **changes: object) -> dict:
    return {"model": "clef", "state": state, "questions": QUESTIONS} | changes


RECORDS = [Record(parse_request(request(state)).request) for state in STATES]


@pytest.fixture(scope="module")
def release() -> Release:
    return load_release(BF16)


@pytest.fixture(scope="module")
def found(release: Release) -> Sensitivity:
    return measure_sensitivity(release, RECORDS, "layer")


def linears() -> tuple[str, ...]:
    return read_backbone(read_release(BF16).config, BF16).linears


def test_linears_are_grouped_by_layer_kind_or_alone():
    assert {part: len(names) for part, names in group_linears(linears(), "layer").items()} == {
        "0": 8,
        "1": 8,
        "2": 8,
        "3": 7,
    }
    kinds = group_linears(linears(), "kind")
    assert {kind: len(names) for kind, names in kinds.items() if not kind.startswith("linear_attn")} == {
        "mlp.gate_proj": 4,
        "mlp.up_proj": 4,
        "mlp.down_proj": 4,
        **dict.fromkeys([f"self_attn.{name}_proj" for name in "qkvo"], 1),
    }
    alone = group_linears(linears(), "linear")
    assert len(alone) == 31
    assert alone["3.self_attn.q_proj"] == ["model.language_model.layers.3.self_attn.q_proj"]


def test_inside_the_part_is_mxfp4_and_afterwards_everything_is_as_before(release):
    before = {name: release.backbone.get_submodule(name) for name in linears()}
    part = group_linears(linears(), "layer")["1"]
    with quantised(release.backbone, part):
        for name, linear in before.items():
            inside = release.backbone.get_submodule(name)
            assert isinstance(inside, MXFP4Linear) if name in part else inside is linear
    with pytest.raises(ZeroDivisionError), quantised(release.backbone, part):
        raise ZeroDivisionError
    assert all(release.backbone.get_submodule(name) is linear for name, linear in before.items())


def test_every_part_has_its_effect_beside_everything_and_the_noise_floor(found):
    assert [effect.part for effect in found.effects] == ["0", "1", "2", "3"]
    assert [effect.num_linears for effect in found.effects] == [8, 8, 8, 7]
    assert found.everything.num_linears == 31
    assert found.everything.num_weights == sum(effect.num_weights for effect in found.effects)
    assert found.noise_floor.num_linears == 0
    assert {effect.agreement.n for effect in found.effects} == {4}  # two requests of two questions
    assert found.noise_floor.kl.value < found.everything.kl.value / 100


@pytest.mark.parametrize(("part", "kept"), [(None, ()), (0, ("layers.[123].*",)), (3, ("layers.[012].*",))])
def test_an_effect_is_that_of_a_release_that_is_quantised_in_this_part(release, found, tmp_path, part, kept):
    """The other way round: a release on disk, loaded and asked like any other, and KL from its definition."""
    quantize(BF16, tmp_path / "part", Recipe(algorithm="none", keep_bf16=kept))
    left = Engine(release).decide(RECORDS)
    right = Engine(load_release(tmp_path / "part", linear_mode="expanded")).decide(RECORDS)
    divergences, changes = [], []
    for ours, theirs in zip(left, right, strict=True):
        for question, options in ours.log_probs.items():
            p = np.array(list(options.values()))
            q = np.array([theirs.log_probs[question][option] for option in options])
            divergences.append(float((np.exp(p) * (p - q)).sum()))
            changes.append(float(np.abs(np.exp(p) - np.exp(q)).max()))
    effect = found.everything if part is None else found.effects[part]
    assert effect.kl.value == pytest.approx(np.mean(divergences), rel=1e-6)
    assert effect.max_abs_dp == pytest.approx(max(changes), rel=1e-6)


def test_a_request_that_is_refused_is_left_out_of_every_run(release, found):
    too_long = Record(parse_request(request("word " * 20_000)).request)
    seen: list[Progress] = []
    again = measure_sensitivity(release, [RECORDS[0], too_long, RECORDS[1]], "layer", listener=seen.append)
    assert (again.num_requests, again.num_refused) == (2, 1)
    assert again.effects == found.effects
    assert (seen[-1].done, seen[-1].total) == (21, 21)  # three records, seven runs


def test_nothing_to_ask_is_an_error(release):
    with pytest.raises(RequestError, match="none of the requests can be answered"):
        measure_sensitivity(release, [Record(parse_request(request("word " * 20_000)).request)])


def test_a_release_that_is_mxfp4_already_is_refused():
    with pytest.raises(ReleaseError, match="needs the BF16 release"):
        measure_sensitivity(load_release(PROJECT / "checkpoints" / "random-mxfp4"), RECORDS)


# The plot


def effect(part: str, kl: float, agreeing: int = 8) -> dict:
    share = agreeing / 10
    return {
        "part": part, "num_linears": 3, "num_weights": 96, "num_answers": 10, "num_agreeing": agreeing,
        "agreement": [share, share - 0.1, min(1.0, share + 0.05)], "kl": kl, "kl_standard_error": kl / 4,
        "max_abs_dp": 2 * kl,
    }  # fmt: skip


RESULTS = {
    "noise_floor": effect("noise floor", 0.0, 10),
    "everything": effect("everything", 0.04, 6),
    "effects": [effect("0", 0.02), effect("<i>&", 0.01), effect("2", 0.0, 10) | {"kl_standard_error": None}],
}
SVG = "{http://www.w3.org/2000/svg}"


def test_the_plot_has_a_row_per_part_and_bars_in_proportion():
    root = ElementTree.fromstring(sensitivity_svg(RESULTS, "layer", "mine <b>&"))
    rows = [group for group in root.findall(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    assert [group.find(f"{SVG}text").text for group in rows] == ["everything", "0", "<i>&", "2"]
    widths = [[float(bar.get("width")) for bar in group.findall(f"{SVG}rect")] for group in rows]
    assert [kl for kl, _ in widths] == pytest.approx([168.0, 84.0, 42.0, 0.0])  # of 210 for 0.05, the whisker's end
    assert [change for _, change in widths] == pytest.approx([210.0, 105.0, 52.5, 0.0])


def test_the_plot_escapes_texts_and_names_the_worst():
    svg = sensitivity_svg(RESULTS, "kind", "mine <b>&")
    assert "<b>" not in svg
    assert "<i>" not in svg
    label = ElementTree.fromstring(svg).get("aria-label")
    assert label == "mine <b>&. The largest divergence is that of 0."


def test_a_plot_of_nothing_but_agreement_can_be_drawn():
    same = {name: effect(name, 0.0, 10) for name in ("noise_floor", "everything")} | {"effects": [effect("0", 0.0, 10)]}
    ElementTree.fromstring(sensitivity_svg(same, "layer", "all equal"))


# The database


def test_a_stored_run_comes_back(database: Database):
    run = NewSensitivityRun("release", "c" * 64, "file.jsonl", "d" * 64, "layer", RESULTS, {"dtype": "bfloat16"})
    with database.write() as session:
        first, second = store_sensitivity_run(session, run), store_sensitivity_run(session, run)
    with database.read() as session:
        view = get_sensitivity_run(session, first)
        assert get_sensitivity_run(session, 99) is None
        assert [one.id for one in list_sensitivity_runs(session)] == [second, first]
    assert view is not None
    assert (view.release, view.parts, view.results, view.provenance) == (
        "release",
        "layer",
        RESULTS,
        {"dtype": "bfloat16"},
    )
    assert view.created_at.tzinfo is not None


# The command line


def run(data_dir: Path, *arguments: object) -> tuple[int, str, str]:
    environment = RANDOM_ENVIRONMENT | {"CLEF_DATA_DIR": str(data_dir), "COLUMNS": "160"}
    result = CliRunner().invoke(app, ["sensitivity", *map(str, arguments)], env=environment)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(request(state)) + "\n" for state in STATES))
    return file


def test_the_command_prints_a_table_draws_the_plot_and_stores_the_run(found, requests_file, tmp_path):
    plot = tmp_path / "plot.svg"
    code, stdout, stderr = run(tmp_path / "data", BF16, "--requests", requests_file, "--plot", plot)
    assert code == 0, stderr
    assert "noise floor" in stdout
    assert f"{found.everything.kl.value:.2e}" in stdout
    assert "stored as sensitivity run 1" in stderr
    database = Database(f"sqlite:///{tmp_path / 'data' / 'clef.sqlite3'}")
    with database.read() as session:
        view = get_sensitivity_run(session, 1)
    database.close()
    assert view is not None
    assert view.results["effects"] == [effect.to_json() for effect in found.effects]
    assert view.provenance["linear_mode"] in ("bf16", "bf16 in float32")
    title = f"{BF16}, 2 requests of requests.jsonl"
    assert plot.read_text() == sensitivity_svg(view.results, "layer", title)


def test_a_bad_row_is_named_and_left_out(requests_file, tmp_path):
    with requests_file.open("a") as file:
        file.write(json.dumps(request("")) + "\n")
    code, stdout, stderr = run(tmp_path / "data", BF16, "-r", requests_file, "--by", "kind", "--json", "--limit", 3)
    assert code == 1
    assert "row 3" in stderr
    results = json.loads(stdout)
    assert (results["num_requests"], results["num_bad_rows"], len(results["effects"])) == (2, 1, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "absent.jsonl"], "absent.jsonl"),
        (["--requests", PROJECT / "examples" / "messages.csv"], "questions are missing"),
        (["--requests", PROJECT / "examples" / "messages.csv", "--plot", "plot.png"], "must end in .svg"),
    ],
)
def test_bad_input_leaves_with_2(tmp_path, arguments, message):
    code, _, stderr = run(tmp_path / "data", BF16, *arguments)
    assert code == 2
    assert message in stderr
