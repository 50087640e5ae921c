"""The beginning that all records of a micro-batch share: found, computed once, and no answer changed."""

from collections.abc import Iterator

import pytest
import torch
from paths import PROJECT
from torch import Tensor

from clef_core.delta_rule import CHUNK
from clef_core.encoding import Batch, Record
from clef_core.engine import Decision, Engine
from clef_core.model import Release, load_release
from clef_core.prefix import MIN_SAVED, num_shared_tokens
from clef_core.schema import parse_request

QUESTIONS = ("Is the writer angry?", "Does the writer ask for money?", "Is it about a parcel that never arrived?")
STATE = "My parcel was due on Monday and still has not come. Please send my 30 euros back. " * 6


@pytest.fixture(scope="module", params=["bf16", "mxfp4"])
def release(request: pytest.FixtureRequest) -> Release:
    return load_release(PROJECT / "checkpoints" / f"random-{request.param}", dtype=torch.float32)


class Counter:
    """Counts the tokens that go through a module."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, _: object, inputs: tuple[Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()


@pytest.fixture
def counted(release: Release) -> Iterator[Counter]:
    counter = Counter()
    handle = release.backbone.model.language_model.embed_tokens.register_forward_pre_hook(counter)
    yield counter
    handle.remove()


def batch_of(num_rows: int, num_shared: int, num_own: int, lengths: list[int] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(1, 2_000, (1, num_shared), generator=generator).expand(num_rows, -1)
    own = torch.randint(1, 2_000, (num_rows, num_own), generator=generator)
    own[:, 0] = torch.arange(num_rows)  # no token more in common than asked for
    ids = torch.cat([shared, own], 1)
    of_rows = torch.tensor(lengths or [ids.shape[1]] * num_rows)
    return Batch(ids, (torch.arange(ids.shape[1]) < of_rows.unsqueeze(1)).long(), None, {}, of_rows)


@pytest.mark.parametrize(
    ("batch", "num_shared"),
    [
        (batch_of(4, 2 * CHUNK + 5, 40), 2 * CHUNK),
        (batch_of(4, CHUNK - 1, 40), 0),  # too short for a chunk
        (batch_of(1, 2 * CHUNK, 40), 0),  # alone
        (batch_of(4, CHUNK, 5 * CHUNK), 0),  # would save less than it costs
        (batch_of(4, 2 * CHUNK, 16, [2 * CHUNK, 144, 144, 144]), CHUNK),  # the shortest keeps a token of its own
    ],
)
def test_the_beginning_ends_with_a_chunk_and_is_worth_it(batch: Batch, num_shared: int) -> None:
    assert num_shared_tokens(batch.input_ids, batch.attention_mask) == num_shared
    total = batch.input_ids.numel()
    assert num_shared == 0 or (len(batch.input_ids) - 1) * num_shared >= MIN_SAVED * total


@pytest.mark.parametrize("lengths", [None, [190, 171, 168]])
def test_every_row_gets_the_states_it_gets_alone(release: Release, counted: Counter, lengths: list[int] | None) -> None:
    batch = batch_of(3, 2 * CHUNK + 9, 53, lengths)
    with torch.inference_mode():
        together = release.hidden_states(batch)
        assert counted.tokens == 2 * CHUNK + 3 * (9 + 53)
        for row, length in enumerate(batch.lengths.tolist()):
            ids = batch.input_ids[row : row + 1, :length]
            alone = release.hidden_states(Batch(ids, torch.ones_like(ids), None, {}, torch.tensor([length])))
            assert torch.allclose(together[row, :length], alone[0], atol=2e-4), row


def test_requests_about_one_state_read_it_once(release: Release, counted: Counter) -> None:
    bodies = [
        {"model": "clef", "state": STATE, "questions": {"answer": {"type": "noul", "instructions": text}}}
        for text in QUESTIONS
    ]
    engine = Engine(release)
    records = [Record(parse_request(body).request) for body in bodies]
    together = engine.decide(records)
    num_together, counted.tokens = counted.tokens, 0
    alone = engine.decide(records, "single")
    assert num_together < 0.7 * counted.tokens
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, Decision)
        assert isinstance(other, Decision)
        for option, value in other.log_probs["answer"].items():
            assert one.log_probs["answer"][option] == pytest.approx(value, abs=1e-3)
