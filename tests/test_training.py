"""The recipe of clef-nano: its data, its losses, and that a stopped training goes on as if nothing had been."""

import copy
import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from paths import PROJECT
from small_wordnet import FIELD_WORDS, NOUNS, PAIRS, write_wordnet
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5

from clef_core.encoding import Record
from clef_core.engine import Engine
from clef_core.joint_head import HeadInputs, option_log_probs
from clef_core.model import load_release
from clef_core.release import read_release
from clef_core.schema import Request, options, parse_request
from clef_core.tokens import SUFFIX, SYSTEM
from training.architecture import HIDDEN
from training.batches import max_options
from training.calibration import best_temperature, fold_temperature
from training.delta_rule import causal_convolution, delta_rule, trainable_layers
from training.examples import Example
from training.generator import Generator
from training.intents import IntentData, read_banking77, read_clinc150
from training.losses import BRIER_WEIGHT, SMOOTHING, question_loss
from training.object_records import object_record
from training.phrases import fill, load
from training.pictures import Pictures, drawn_receipt
from training.reading import Amounts
from training.train import Laboratory, ReadingSteps, Start, build, finish, learn_to_read, make_tokenizer, train
from training.trainee import learning_rate
from training.vocabulary import fixed_pieces
from training.word_records import WordRecords
from training.wordnet import WordNet, read_wordnet

LABELS = ("card_arrival", "lost_card", "exchange_rate", "close_account", "top_up", "pin_blocked")
ROWS = tuple((f"{text} {label.replace('_', ' ')}", label) for label in LABELS for text in ("about", "help me with my"))
DATA = IntentData("banking77", LABELS, ROWS, ROWS[:4])


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory: pytest.TempPathFactory) -> WordNet:
    return read_wordnet(write_wordnet(tmp_path_factory.mktemp("wordnet") / "dict"))


def drawn(wordnet: WordNet, num: int = 300) -> list[Example]:
    generator = Generator([DATA], wordnet, 3)
    return [generator.draw(6, 0.7) for _ in range(num)]


def test_only_the_training_splits_are_read(tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "banking77/categories.json").write_text(json.dumps(LABELS))
    with (tmp_path / "banking77/train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "category"), *ROWS])
    splits = {
        "train": ROWS,
        "oos_train": [("what is love", "oos")],
        "test": [("secret", "a")],
        "oos_test": [("x", "oos")],
    }
    (tmp_path / "clinc150/data_oos_plus.json").write_text(json.dumps(splits))
    banking, clinc = read_banking77(tmp_path, 0), read_clinc150(tmp_path, 0)
    assert sorted((*banking.train, *banking.held_out)) == sorted(ROWS)
    assert sorted((*clinc.train, *clinc.held_out)) == sorted((*ROWS, ("what is love", "oos")))
    assert clinc.labels == (*LABELS, "oos")


def test_a_seed_decides_the_stream_of_records(wordnet: WordNet) -> None:
    first, second = ([(example.record.request, example.labels) for example in drawn(wordnet, 100)] for _ in range(2))
    assert first == second


def test_every_label_is_an_option_of_its_question(wordnet: WordNet) -> None:
    for example in drawn(wordnet):
        request = example.record.request
        assert example.labels.keys() == request.questions.keys()
        for id, question in request.questions.items():
            assert example.labels[id] in [option.id for option in options(question)]


def test_the_stream_has_all_types_and_states_of_all_shapes(wordnet: WordNet) -> None:
    requests = [example.record.request for example in drawn(wordnet)]
    assert {question.type for request in requests for question in request.questions.values()} == {
        "choice",
        "score",
        "noul",
    }
    assert {type(request.state) for request in requests} == {str, dict, list}
    assert max(len(request.questions) for request in requests) > 2


def test_a_benchmark_record_asks_the_benchmarks_own_question(wordnet: WordNet) -> None:
    example = Generator([DATA], wordnet, 0).intent_among(DATA, ROWS[0], len(LABELS))
    question = example.record.request.questions["intent"].to_json()
    criteria = {label: label.replace("_", " ") for label in LABELS}
    assert question == {
        "type": "choice", "instructions": "Which intent does the message express?", "criteria": criteria,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_a_flag_of_an_object_is_answered_by_its_value(seed: int) -> None:
    example = object_record(random.Random(seed))
    state = example.record.request.state
    assert isinstance(state, dict)
    for id, label in example.labels.items():
        if isinstance(state.get(id), bool):
            assert label == str(state[id]).lower()


def test_the_outage_question_has_both_answers_about_equally_often(wordnet: WordNet) -> None:
    generator = Generator([DATA], wordnet, 1)
    asked = [generator.support(6).labels for _ in range(600)]
    answers = [labels[id] for labels in asked for id in ("outage", "down", "q6") if id in labels]
    assert 0.4 < sum(answer == "true" for answer in answers) / len(answers) < 0.6


def test_wordnets_relations_are_read(wordnet: WordNet) -> None:
    assert {sense.words[0] for sense in wordnet.senses} == {*NOUNS, *(word for pair in PAIRS for word in pair)}
    (oak,) = (sense for sense in wordnet.senses if sense.words == ("oak",))
    assert (oak.gloss, oak.examples, oak.kinds) == ("a plant named oak", ("the oak grows slowly",), ("plant",))
    assert {sense.words[0] for sense in wordnet.fields["tennis"]} == set(FIELD_WORDS)
    assert set(PAIRS) <= set(wordnet.opposites)


def test_without_wordnet_the_error_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="wordnet-base"):
        read_wordnet(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_stated_properties_are_true_and_their_opposites_false(wordnet: WordNet, seed: int) -> None:
    example = WordRecords(wordnet, random.Random(seed)).stated(2)
    text = str(example.record.request.to_json()["state"])
    opposite = {word: other for pair in PAIRS for word, other in (pair, reversed(pair))}
    for id, question in example.record.request.questions.items():
        words = str(question.to_json()["instructions"]).rstrip(".?").split()
        noun = next((word for word in words if word in NOUNS), None)
        asked = next((word for word in words if word in opposite), None)
        if noun is None or asked is None:  # a number is asked about
            continue
        sentence = next(part for part in text.split(".") if noun in part.split())
        is_denied = any(word in sentence for word in (" not ", "no longer", "Nobody", "isn't"))
        is_stated = asked in sentence.split() and not is_denied
        assert example.labels[id] == str(is_stated).lower()


def test_the_words_of_one_record_agree() -> None:
    words: dict[str, str] = {}
    rng = random.Random(0)
    assert fill("{thing}", rng, words) == fill("{thing}", rng, words) == words["thing"]


def test_no_phrase_is_in_the_set_outside_the_training_domains() -> None:
    outside = (PROJECT / "tests/data/nano_outside.jsonl").read_text(encoding="utf-8").lower()
    sentences = [s for topic in load("topics").values() for s in topic["sentences"]]
    sentences += [s for mood in load("moods").values() for s in mood] + load("emergencies")
    sentences += [s for fact in load("facts") for part in ("yes", "no") for s in fact[part]]
    sentences += [s for teams in load("organisations").values() for team in teams.values() for s in team[1]]
    sentences += [s for mood, one in load("feelings").items() if mood != "subjects" for s in one["remarks"]]
    assert [s for s in sentences if s.lower() in outside] == []


def test_receipts_ask_for_the_band_of_their_total() -> None:
    pictures = Pictures(0)
    examples = [pictures.receipt() for _ in range(12)]
    assert all(len(example.record.images) == 1 for example in examples)
    bands = {example.labels["total_band"] for example in examples if "total_band" in example.labels}
    assert len(bands) > 1


def test_no_fixed_piece_holds_a_control_token() -> None:
    assert [piece for piece in fixed_pieces() if "<" in piece] == []
    assert any(piece in SYSTEM for piece in fixed_pieces())
    assert any(piece in SUFFIX for piece in fixed_pieces())


def test_options_grow_and_the_rate_falls() -> None:
    assert [max_options(share) for share in (0.0, 0.1, 0.2, 0.4, 0.9)] == [3, 5, 10, 20, 30]
    rates = [learning_rate(step, 500) for step in range(60, 500, 40)]
    assert all(before > after for before, after in pairwise(rates))


@pytest.mark.parametrize("length", [1, 31, 32, 70])
def test_the_fast_delta_rule_is_transformers_own(length: int) -> None:
    torch.manual_seed(length)
    query, key = torch.randn(2, 2, length, 2, 16)
    value, decay, beta = torch.randn(2, length, 4, 16), -torch.rand(2, length, 4), torch.rand(2, length, 4)
    expected, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(delta_rule(query, key, value, decay, beta)[0], expected, rtol=1e-4, atol=1e-5)


def test_shifted_products_are_the_causal_convolution() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 11), torch.randn(6, 4)
    padded = torch.nn.functional.pad(x, (3, 0))
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=6))
    torch.testing.assert_close(causal_convolution(x, weight, None, "silu"), expected)


def two_options() -> HeadInputs:
    one = torch.ones(1, 1, dtype=torch.int64)
    return HeadInputs(
        lengths=one[0] * 9, question_spans=torch.tensor([[[1, 2]]]), question_types=one,
        question_mask=one.bool(), option_spans=torch.tensor([[[3, 4], [5, 6]]]),
        option_question=torch.zeros(1, 2, dtype=torch.int64), option_mask=torch.ones(1, 2, dtype=torch.bool),
    )  # fmt: skip


def test_the_loss_is_smoothed_cross_entropy_plus_brier() -> None:
    loss, accuracy = question_loss(torch.tensor([[math.log(3.0), 0.0]]), two_options(), torch.tensor([[0]]))
    cross_entropy = -(1 - SMOOTHING) * math.log(0.75) - SMOOTHING * (math.log(0.75) + math.log(0.25)) / 2
    assert loss.item() == pytest.approx(cross_entropy + BRIER_WEIGHT * (0.25**2 + 0.25**2))
    assert accuracy.item() == 1.0


def test_the_temperature_of_overconfident_answers_is_high() -> None:
    logits = torch.tensor([[4.0, 0.0]])
    right, wrong = torch.tensor([[0]]), torch.tensor([[1]])
    scored = [(logits, two_options(), label) for label in (right, right, right, wrong)]
    assert best_temperature(scored) == pytest.approx(1.05**16)  # the grid's end: 4 / ln 3 would be 3.6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer([DATA], [])


def laboratory(tokenizer: Tokenizer, wordnet: WordNet) -> Laboratory:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(tokenizer.get_vocab_size(), HIDDEN, generator=generator) / HIDDEN**0.5

    def meanings(texts: Sequence[str]) -> torch.Tensor:
        return torch.stack([embeddings[tokenizer.encode(text).ids].mean(0) for text in texts])

    return build([DATA], wordnet, Start(tokenizer, embeddings, meanings), seed=0, num_held_out=4)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches of a few records, so that steps take a fraction of a second."""
    for name, value in {
        "DRAWN_TOGETHER": 6,
        "SUMMARIES_TOGETHER": 4,
        "SUMMARY_BATCHES": 1,
        "WORD_SUMMARY_BATCHES": 1,
        "WORDS_BESIDE": 6,
        "PICTURE_BATCHES": 1,
        "PICTURES_TOGETHER": 1,
        "PICTURES_ALONE": 1,
    }.items():
        monkeypatch.setattr(f"training.batches.{name}", value)
    monkeypatch.setattr("training.train.NUM_HELD_OUT", 8)
    monkeypatch.setattr("training.train.SAVE_EVERY_STEPS", 1)
    with trainable_layers():
        yield


@pytest.mark.usefixtures("small_groups")
def test_a_stopped_training_goes_on_as_if_nothing_had_been(
    tmp_path: Path, tokenizer: Tokenizer, wordnet: WordNet
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    through = laboratory(tokenizer, wordnet)
    group = len(list(through.batches.next_batches(0.0)))
    through = laboratory(tokenizer, wordnet)
    train(through, whole / "state.pt", 2 * group)

    class StoppedError(Exception):
        pass

    stopped = laboratory(tokenizer, wordnet)
    save = stopped.trainee.save

    def save_and_stop(*arguments: object) -> None:
        save(*arguments)  # type: ignore[arg-type]
        raise StoppedError

    stopped.trainee.save = save_and_stop  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        train(stopped, parts / "state.pt", 2 * group)
    resumed = laboratory(tokenizer, wordnet)
    train(resumed, parts / "state.pt", 2 * group)
    for one, other in zip(through.trainee.parameters(), resumed.trainee.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


FEW = Amounts(papers=2, receipts=2, together=2, held_out=2, whitened=6)


@pytest.mark.usefixtures("small_groups")
def test_reading_is_learnt_last_and_goes_on_where_it_stopped(
    tmp_path: Path, tokenizer: Tokenizer, wordnet: WordNet
) -> None:
    lab = laboratory(tokenizer, wordnet)
    train(lab, tmp_path / "state.pt", 2)
    embeddings = lab.trainee.backbone.lm_head.weight.clone()
    reading = learn_to_read(lab, tmp_path, 0, ReadingSteps(2, 2, 2, 2), FEW)
    assert torch.equal(reading.trainee.backbone.lm_head.weight, embeddings), "words keep their meaning"
    weights = {name: one.clone() for name, one in reading.trainee.backbone.named_parameters()}
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"letter_loss", "fact_loss"} <= {key for line in log for key in line}
    assert "receipts" in log[-1]["mean_held_out"]

    again = laboratory(tokenizer, wordnet)
    train(again, tmp_path / "state.pt", 2)
    resumed = learn_to_read(again, tmp_path, 0, ReadingSteps(2, 2, 2, 2), FEW)
    for name, one in resumed.trainee.backbone.named_parameters():
        assert torch.equal(one, weights[name]), name
    assert (tmp_path / "log.jsonl").read_text().count("letter_loss") == 1


@pytest.mark.parametrize("seed", range(3))
def test_what_is_asked_of_a_receipt_is_printed_on_it(seed: int) -> None:
    pictures = Pictures(seed)
    for _ in range(20):
        drawn = copy.deepcopy(pictures.rng)
        example = pictures.read_receipt()
        receipt = drawn_receipt(drawn)
        questions = {id: question.to_json() for id, question in example.record.request.questions.items()}
        if "threshold" in questions:
            words = str(questions["threshold"]["instructions"]).split()
            threshold = next(int(word.strip("?")) for word in words if word.strip("?").isdigit())
            is_true = receipt.total > threshold if {"above", "more"} & set(words) else receipt.total < threshold
            assert example.labels["threshold"] == str(is_true).lower()
        if "payment" in questions:
            criteria = questions["payment"]["criteria"]
            said = json.dumps(criteria[example.labels["payment"]]) + example.labels["payment"]
            assert ("card" in said) == receipt.paid_by.startswith("CARD")


@pytest.mark.usefixtures("small_groups")
def test_what_is_trained_is_what_the_engine_runs(tmp_path: Path, tokenizer: Tokenizer, wordnet: WordNet) -> None:
    lab = laboratory(tokenizer, wordnet)
    train(lab, tmp_path / "state.pt", 2)
    path = finish(lab, tmp_path)
    assert read_release(path).kind == "bf16"
    release = load_release(path, dtype=torch.float32)
    request = drawn(wordnet, 1)[0].record.request
    batch = lab.batches.cut([Example(Record(request), {id: options(q)[0].id for id, q in request.questions.items()})])[
        0
    ]
    with torch.no_grad():
        _, logits, inputs = lab.trainee.logits(batch)
    decision = Engine(release).decide([Record(Request.model_validate(request.to_json()))])[0]
    assert not isinstance(decision, Exception)
    trained = option_log_probs(logits, inputs)[0].exp()
    answered = [math.exp(p) for id in decision.log_probs for p in sorted(decision.log_probs[id].values())]
    assert sorted(trained.tolist()) == pytest.approx(sorted(answered), abs=0.03)  # training multiplies in bfloat16


def test_a_temperature_divides_every_logit(tokenizer: Tokenizer, wordnet: WordNet) -> None:
    lab = laboratory(tokenizer, wordnet)
    request = parse_request({"model": "clef", "state": "about card arrival", "questions": {
        "intent": {"type": "choice", "criteria": dict.fromkeys(LABELS)}
    }}).request  # fmt: skip
    batch = lab.batches.cut([Example(Record(request), {"intent": LABELS[0]})])[0]
    with torch.no_grad(), trainable_layers():
        before = lab.trainee.logits(batch)[1]
        fold_temperature(lab.trainee.head, 2.0)
        after = lab.trainee.logits(batch)[1]
    torch.testing.assert_close(after, before / 2, rtol=0.02, atol=0.02)  # bfloat16 products inside the residual
