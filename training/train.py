"""Train clef-nano.

    python -m training.train --data ../shared/data --work DIR [--wordnet DIR] [--seed 0] [--steps 3400]

In three stages: texts and some pictures; the tower anew, on printed letters; all together, mostly receipts. Seeded and
resumable: DIR holds the stages' states (written every few minutes; that of the letters at their end) and `log.jsonl`,
and the same command goes on where it stopped; with other `--steps` the first stage is longer or shorter. A CPU is
enough. At the end the temperature is set on held-out records and the release is written to `DIR/nano-bf16`;
`python -m worker quantize` makes the MXFP4 one.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from clef_core.encoding import Encoder
from clef_core.joint_head import HeadInputs
from clef_core.room import keep_freed_memory
from clef_core.tasks import humanise
from clef_core.tokens import ImageLimits, PromptTokenizer
from training.architecture import HIDDEN, MERGE, PATCH, make_model, make_processor, write_release
from training.batches import Batches, PictureBatches, Stream, TrainingBatch, option_ids
from training.calibration import best_temperature, fold_temperature
from training.delta_rule import trainable_layers
from training.embeddings import SentenceEncoder
from training.generator import Generator
from training.intents import IntentData, read_banking77, read_clinc150
from training.losses import question_loss
from training.phrases import all_texts
from training.pictures import Pictures
from training.reading import (
    AMOUNTS,
    Amounts,
    learn_facts,
    learn_letters,
    linear_patches,
    muon,
    rate_share,
    scale_tokens,
)
from training.trainee import WEIGHT_DECAY, StepResult, Trainee, adamw, learning_rate, text_optimizer
from training.vocabulary import MAX_OPTIONS, train_tokenizer
from training.wordnet import FOLDER, WordNet, read_wordnet
from training.words import common_words

DEFAULT_STEPS = 3_400
READING_RATES = {"matrices": 1e-2, "tower": 1e-4, "others": 1e-3}
"""Of the last stage: of the matrices outside the tower, which Muon changes, and of what AdamW changes."""

MAX_TOKENS = 4_096
SAVE_EVERY_STEPS = 150
LOG_EVERY_STEPS = 50
EVALUATE_EVERY_STEPS = 700
NUM_HELD_OUT = 64


@dataclass(frozen=True)
class ReadingSteps:
    """Of each lesson of reading."""

    letters: int = 6_000
    facts: int = 1_600
    bare_facts: int = 600
    pictures: int = 600


@dataclass(frozen=True)
class Start:
    """The tokenizer, its tokens' first embeddings (vocabulary, HIDDEN), and what texts mean (texts, HIDDEN)."""

    tokenizer: Tokenizer
    embeddings: Tensor
    meanings: Callable[[Sequence[str]], Tensor]


@dataclass(frozen=True)
class Laboratory:
    """What a training run works with."""

    trainee: Trainee
    batches: Stream
    tokenizer: Tokenizer
    processor: Qwen3VLProcessor
    pools: Mapping[str, Mapping[str, tuple[int, ...]]]
    held_out: Mapping[str, Sequence[TrainingBatch]]


def prepare(data: Path, wordnet_folder: Path, tokenizer_file: Path, seed: int) -> Laboratory:
    """Read the data, train the tokenizer where the file is missing, and build a model with fresh weights."""
    wordnet = read_wordnet(wordnet_folder)
    intent_data = [read_banking77(data, seed), read_clinc150(data, seed)]
    if not tokenizer_file.is_file():
        make_tokenizer(intent_data, [*glosses(wordnet), *common_words()]).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    sentences = SentenceEncoder(tokenizer, HIDDEN)
    start = Start(tokenizer, sentences.token_embeddings(seed), sentences.meanings)
    return build(intent_data, wordnet, start, seed, NUM_HELD_OUT)


def glosses(wordnet: WordNet) -> list[str]:
    return [text for sense in wordnet.senses for text in (sense.gloss, *sense.words)]


def build(
    intent_data: Sequence[IntentData], wordnet: WordNet, start: Start, seed: int, num_held_out: int
) -> Laboratory:
    """A laboratory whose streams and weights `seed` decides."""
    tokenizer = start.tokenizer
    processor = make_processor(tokenizer)
    size = processor.image_processor.size
    limits = ImageLimits(PATCH, MERGE, size["shortest_edge"], size["longest_edge"])
    prompts = PromptTokenizer(tokenizer.to_str(), limits)
    backbone, head = make_model(tokenizer, start.embeddings, seed)
    encoder = Encoder(prompts, processor, MAX_TOKENS)
    pools = label_pools(intent_data, prompts)
    batches = Batches(Generator(intent_data, wordnet, seed), Pictures(seed), encoder, pools, start.meanings)
    held_out = held_out_batches(batches, intent_data, num_held_out)
    optimizer = text_optimizer([*backbone.named_parameters(), *head.named_parameters()])
    return Laboratory(Trainee(backbone, head, [optimizer]), batches, tokenizer, processor, pools, held_out)


def make_tokenizer(intent_data: Sequence[IntentData], words: Sequence[str]) -> Tokenizer:
    """The tokenizer of the training texts, label names, phrases and `words`."""
    labels = [label for data in intent_data for label in data.labels]
    texts = [text for data in intent_data for text, _ in data.train]
    names = [*labels, *(humanise(label) for label in labels), *(f" {humanise(label)}" for label in labels)]
    return train_tokenizer([*texts, *names * 20, *list(all_texts()) * 20, *words])


def label_pools(data: Sequence[IntentData], tokenizer: PromptTokenizer) -> dict[str, dict[str, tuple[int, ...]]]:
    """Per data set its labels, each with the token ids of its option."""

    return {one.name: {label: option_ids(label, tokenizer) for label in one.labels} for one in data}


def held_out_batches(
    batches: Batches, intent_data: Sequence[IntentData], num: int
) -> dict[str, Sequence[TrainingBatch]]:
    """Held-out texts with 5 and with all labels, and records and pictures of ours from other seeds."""
    wordnet = batches.generator.words.wordnet
    generator, pictures = Generator(intent_data, wordnet, "held-out"), Pictures("held-out")
    result: dict[str, Sequence[TrainingBatch]] = {}
    for data in intent_data:
        for name, num_options in (("5", 5), ("all", len(data.labels))):
            rows = data.held_out[:num]
            examples = [generator.intent_among(data, row, num_options) for row in rows]
            result[f"{data.name}_{name}"] = batches.cut(examples)
    kinds = (
        generator.support,
        generator.organisation,
        generator.topic,
        generator.mood,
        generator.urgency,
        generator.fact,
        generator.object,
    )
    result["own"] = batches.cut([kind(8) for _ in range(num // 4) for kind in kinds])
    words = generator.words
    general = (words.word, words.kind, words.field, words.about, words.stated)
    result["words"] = batches.cut([kind(8) for _ in range(num // 4) for kind in general])
    result["pictures"] = [batches.batch([pictures.draw() for _ in range(8)]) for _ in range(max(1, num // 8))]
    return result


@torch.no_grad()
def evaluate(trainee: Trainee, held_out: Mapping[str, Sequence[TrainingBatch]]) -> dict[str, float]:
    """Share of questions answered right per held-out set."""
    result = {}
    for name, batches in held_out.items():
        rights = num_questions = 0.0
        for batch in batches:
            _, logits, inputs = trainee.logits(batch)
            count = float(inputs.question_mask.sum())
            rights += count * question_loss(logits, inputs, batch.targets)[1].item()
            num_questions += count
        result[name] = round(rights / num_questions, 4)
    return result


def train(lab: Laboratory, state: Path, steps: int, rate: Callable[[int, int], float] = learning_rate) -> None:
    """Go on from the file `state`, or from the start, until `steps` steps are done; the log lies beside that file."""
    work = state.parent
    step = lab.trainee.restore(state, lab.batches) if state.is_file() else 0
    saved = evaluated = step
    recent: list[StepResult] = []
    while step < steps:
        for batch in lab.batches.next_batches(step / steps):
            recent.append(lab.trainee.step(batch, rate(step, steps)))
            step += 1
        if len(recent) >= LOG_EVERY_STEPS:
            write_log(work, step, _means(recent))
            recent.clear()
        if step - evaluated >= EVALUATE_EVERY_STEPS or step >= steps:
            write_log(work, step, {"held_out": evaluate(lab.trainee, lab.held_out)})
            evaluated = step
        if step - saved >= SAVE_EVERY_STEPS or step >= steps:  # between groups, so that going on repeats nothing
            lab.trainee.save(state, lab.batches, step)
            saved = step


def learn_to_read(
    lab: Laboratory, work: Path, seed: int, steps: ReadingSteps, amounts: Amounts = AMOUNTS
) -> Laboratory:
    """The tower anew, on letters and facts, then all but the embeddings, on pictures most of all, then a mean.

    The mean is that of the weights before and after the last stage, but for the tower's.
    """
    tower, processor, log = lab.trainee.backbone.model.visual, lab.processor.image_processor, partial(write_log, work)
    lessons: dict[str, Callable[[], None]] = {
        "letters": lambda: learn_letters(tower, processor, seed, steps.letters, log, amounts),
        "facts": lambda: learn_facts(tower, processor, seed, steps.facts, log, amounts, letter_weight=1.0),
        "bare_facts": lambda: learn_facts(
            tower, processor, seed + 1, steps.bare_facts, log, amounts, letter_weight=0.0
        ),
    }
    for name, learn in lessons.items():
        file = work / f"{name}.pt"
        if not file.is_file():
            learn()
            torch.save(tower.state_dict(), file)
        tower.load_state_dict(torch.load(file, weights_only=True))
    scale_tokens(tower, processor, seed, amounts)
    reading = reading_laboratory(lab, seed)
    before = [one.detach().clone() for one in others_than_tower(lab.trainee)]
    with linear_patches(tower):
        train(reading, work / "pictures.pt", steps.pictures, rate_share)
    with torch.no_grad():  # what texts need comes back so, and reading stays
        for one, earlier in zip(others_than_tower(reading.trainee), before, strict=True):
            one.lerp_(earlier, 0.5)
    write_log(work, -1, {"mean_held_out": evaluate(reading.trainee, reading.held_out)})
    return reading


def others_than_tower(trainee: Trainee) -> list[nn.Parameter]:
    """What the last stage changes but for the tower."""
    named = [*trainee.backbone.named_parameters(), *trainee.head.named_parameters()]
    return [one for name, one in named if one.requires_grad and "visual" not in name]


def reading_laboratory(lab: Laboratory, seed: int) -> Laboratory:
    """The same model with the optimizers, the stream and the held-out receipts of the last stage."""
    assert isinstance(lab.batches, Batches)
    backbone, head = lab.trainee.backbone, lab.trainee.head
    for matrix in (backbone.model.language_model.embed_tokens, backbone.lm_head):
        matrix.requires_grad_(False)
    tower, others = list(backbone.model.visual.parameters()), others_than_tower(lab.trainee)
    rest = [one for one in others if one.dim() != 2]
    optimizers = [
        muon([one for one in others if one.dim() == 2], READING_RATES["matrices"]),
        adamw([(tower, READING_RATES["tower"], WEIGHT_DECAY), (rest, READING_RATES["others"], WEIGHT_DECAY)]),
    ]
    pictures = Pictures("held-out receipts")
    receipts = [lab.batches.batch([pictures.read_receipt() for _ in range(12)]) for _ in range(NUM_HELD_OUT // 8)]
    return replace(
        lab,
        trainee=Trainee(backbone, head, optimizers),
        batches=PictureBatches(lab.batches, Pictures(f"{seed} reading")),
        held_out={**lab.held_out, "receipts": receipts},
    )


def finish(lab: Laboratory, work: Path) -> Path:
    """Calibrate, give tokens that training never met a sensible row, and write the release."""
    level_option_numbers(lab)
    scored: list[tuple[Tensor, HeadInputs, Tensor]] = []
    with torch.no_grad():
        for batch in (batch for batches in lab.held_out.values() for batch in batches):
            _, logits, inputs = lab.trainee.logits(batch)
            scored.append((logits, inputs, batch.targets))
    temperature = best_temperature(scored)
    fold_temperature(lab.trainee.head, temperature)
    write_log(work, -1, {"temperature": temperature})
    release = work / "nano-bf16"
    write_release(release, lab.trainee.backbone, lab.trainee.head, lab.tokenizer)
    return release


@torch.no_grad()
def level_option_numbers(lab: Laboratory) -> None:
    """Option numbers above the largest label set were never met: they take the mean of those that were."""
    num_met = max(len(places) for places in lab.pools.values())
    ids = [lab.tokenizer.token_to_id(f"OPTION {number}: ") for number in range(1, MAX_OPTIONS + 1)]
    model = lab.trainee.backbone
    for matrix in (model.model.language_model.embed_tokens.weight, model.lm_head.weight):
        matrix[ids[num_met:]] = matrix[ids[20:num_met]].mean(0)


def write_log(work: Path, step: int, values: Mapping[str, Any]) -> None:
    line = {"step": step, "cpu_s": round(time.process_time()), **values}
    with (work / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    print(line, flush=True)


def _means(results: Sequence[StepResult]) -> dict[str, float]:
    whole = [one for one in results if not math.isnan(one.accuracy)]
    return {
        "loss": round(statistics.fmean(one.loss for one in whole), 4),
        "accuracy": round(statistics.fmean(one.accuracy for one in whole), 4),
        "summary_loss": round(statistics.fmean(one.summary_loss for one in results), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with banking77/ and clinc150/")
    parser.add_argument("--wordnet", type=Path, default=FOLDER, help="folder with WordNet's data.noun and so on")
    parser.add_argument("--work", type=Path, required=True, help="folder for state, log and release")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    keep_freed_memory(2**31 - 1)  # a step takes up to three times as long without
    lab = prepare(arguments.data, arguments.wordnet, work / "tokenizer.json", arguments.seed)
    with trainable_layers():
        train(lab, work / "state.pt", arguments.steps)
        print(finish(learn_to_read(lab, work, arguments.seed, ReadingSteps()), work))


if __name__ == "__main__":
    main()
