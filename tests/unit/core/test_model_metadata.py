"""Layout and metadata of the global model, which thousands of models have in common."""

from dataclasses import replace

from tests.unit.core.bench import Bench, make_rules, model_from

from xain_coordinator.core.machine.evolve import begin, fold
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.journal.codec import decode, encode
from xain_workloads.model import TensorSpec

METADATA = {"workload": "sgd", "preprocessing": "0.125," * 40_000}
LAYOUT = (TensorSpec("weights", (3,), "float32"),)


def trained(num_rounds: int) -> Bench:
    """A session of one participant, whose model has large metadata."""
    bench = Bench(make_rules(rounds=num_rounds), answers=False)
    bench.join("a")
    first = replace(model_from(bench.owed.pop()), layout=LAYOUT, metadata=METADATA)
    bench.send(c.InitialisationDone(first))
    for number in range(num_rounds):
        bench.end("a", f"a@{number}")
        bench.send(c.AggregationDone(model_from(bench.owed.pop())))
    return bench


def replayed(journal: list[e.DurableEvent]) -> tuple[Session, History]:
    opened, *others = journal
    assert isinstance(opened, e.SessionOpened)
    history = History(rules=opened.rules)
    for event in others:
        history.apply(event)
    return fold(begin(opened), others), history


def test_metadata_are_journalled_once_for_all_models():
    """A session of weeks has thousands of models, and a preprocessing takes up to 1 MiB."""
    bench = trained(20)
    rows = [encode(event) for event in bench.journal]
    num_bytes = sum(len(body) for _, body in rows)
    assert num_bytes < 1.5 * len(METADATA["preprocessing"])
    session, history = replayed([decode(*row) for row in rows])
    assert session == bench.session
    assert session.model.metadata == METADATA
    assert session.model.layout == LAYOUT
    first, *others = history.models.values()
    assert len(others) == 20
    for model in (session.model, *others):
        assert model.metadata is first.metadata
        assert model.layout is first.layout


def test_metadata_that_differ_from_the_last_model_are_journalled():
    bench = trained(3)
    last = bench.session.model
    changed = replace(last, round=last.round + 1, metadata={"workload": "mlp"})
    event = e.ModelPublished.after(last, changed, 1.0)
    assert decode(*encode(event)) == event
    assert event.published(last) == changed
