"""The HTTP face of a coordinator: fit and predict from any program."""

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from support.served import Served, error_of
from xain_workloads.tables.data import load

IRIS = load("iris")
COLUMNS = list(IRIS.feature_names)


def iris_rows() -> list[list[float]]:
    return [list(map(float, row)) for row in IRIS.features]


def accuracy(answer: httpx.Response) -> float:
    assert answer.status_code == 200, answer.text
    return float(np.mean(np.array(answer.json()["predictions"]) == IRIS.target))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two participants that stay; the first session is completed."""
    with Served(tmp_path_factory.mktemp("served") / "http") as served:
        served.start()
        assert error_of(served.predict(COLUMNS, iris_rows())) == (409, "NOT_FITTED")
        assert served.status()["state"] == "waiting"
        served.join("north", "south")
        answer = served.fit(wait=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["state"] == "finished"
        yield served
        assert served.is_running("north")
        assert served.is_running("south")


def test_fit_predict_and_fit_again_with_other_rules(served):
    """Predictions come from the last completed session while the next one trains."""
    first = served.status()
    assert accuracy(served.predict(COLUMNS, iris_rows())) > 0.8
    answer = served.fit(rounds=100_000)
    assert answer.status_code == 202, answer.text
    second = answer.json()["session"]
    assert second != first["session"]
    assert error_of(served.fit()) == (409, "ALREADY_FITTING")
    served.until(lambda: served.status()["round"] > 2)
    during = served.predict(COLUMNS, iris_rows())
    assert served.status()["state"] == "fitting", "it is to be in the middle of the fit"
    assert during.json()["session"] == first["session"]
    assert served.client.post("/v1/fit/cancel").status_code == 200
    third = served.fit(rounds=120, wait=True).json()["session"]
    after = served.predict(COLUMNS, iris_rows())
    assert (after.json()["session"], after.json()["round"]) == (third, 120)
    assert accuracy(after) > 0.9
    assert served.status()["rounds"] == 120
    counted = served.client.get("/v1/rounds").json()["rounds"]
    assert {record["num_contributors"] for record in counted[:-1]} == {2}


def test_columns_are_matched_without_case_and_blanks_in_any_order(served):
    names = [f" {name.upper()}  " for name in reversed(COLUMNS)]
    rows = [row[::-1] for row in iris_rows()]
    expected = served.predict(COLUMNS, iris_rows()).json()
    assert served.predict(names, rows).json() == expected
    with_texts = [[str(value) for value in row] for row in rows]
    assert served.predict(names, with_texts).json() == expected


def test_probabilities_belong_to_the_predictions(served):
    answer = served.predict(COLUMNS, iris_rows(), probabilities=True).json()
    assert answer["classes"] == sorted(set(IRIS.target.tolist()))
    probabilities = np.array(answer["probabilities"])
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    most_likely = np.array(answer["classes"])[probabilities.argmax(axis=1)]
    assert most_likely.tolist() == answer["predictions"]


def test_models_are_described_and_downloaded(served, tmp_path):
    status = served.status()
    model = served.client.get("/v1/models/last").json()
    assert model["session"] == status["session"]
    assert model["round"] == status["rounds"]
    assert model["columns"] == [{"name": name, "type": "number"} for name in COLUMNS]
    listed = served.client.get("/v1/models").json()["models"]
    assert [one["round"] for one in listed] == list(range(status["rounds"] + 1))
    vector = served.client.get("/v1/models/0/download")
    assert np.load(io.BytesIO(vector.content), allow_pickle=False).ndim == 1
    exported = served.client.get("/v1/models/last/download", params={"format": "npz"})
    with np.load(io.BytesIO(exported.content), allow_pickle=False) as arrays:
        assert json.loads(str(arrays["xain"]))["session"] == status["session"]
    assert error_of(served.client.get("/v1/models/99999")) == (404, "NO_MODEL")
    assert error_of(served.client.get("/v1/models/first")) == (422, "INVALID_REQUEST")


def test_errors_of_paths_and_sizes_have_the_same_envelope(served):
    client = served.client
    assert error_of(client.get("/v1/nothing")) == (404, "NO_SUCH_PATH")
    assert error_of(client.get("/v1/fit")) == (405, "NO_SUCH_METHOD")
    assert error_of(client.post("/v1/fit", content=b"{")) == (422, "INVALID_REQUEST")
    untyped = client.post("/v1/predict", content=b'{"columns": ["a"], "rows": [[1]]}')
    assert error_of(untyped) == (422, "INVALID_REQUEST")
    assert "content-type: application/json" in untyped.json()["error"]["message"]
    json_type = {"content-type": "application/json"}
    for content in (b"\xff", b"[" * 100_000, b'{"rounds": 1' + b"0" * 5000 + b"}"):
        answer = client.post("/v1/fit", content=content, headers=json_type)
        assert error_of(answer) == (422, "INVALID_REQUEST")
    large = b" " * (4 << 20) + b"{}"
    assert error_of(client.post("/v1/fit", content=large)) == (413, "TOO_LARGE")

    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * (1 << 20)

    assert error_of(client.post("/v1/fit", content=chunks())) == (413, "TOO_LARGE")


def read_events(served: Served, number: int, after: str = "") -> list[tuple[str, dict]]:
    """(id, data) of the first events of a stream."""
    headers = {"last-event-id": after} if after else {}
    events = []
    with served.client.stream("GET", "/v1/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            if line.startswith("data: "):
                events.append((name, json.loads(line.removeprefix("data: "))))
                if len(events) == number:
                    return events
    raise AssertionError("the stream has ended")


def test_events_resume_after_the_last_event_id(served):
    """Ids are places in the journal; a reader goes on into the next session."""
    session = served.status()["session"]
    events = read_events(served, 12)
    assert [name for name, _ in events] == [f"{session}/{i}" for i in range(12)]
    assert events[0][1]["type"] == "SessionOpened"
    again = read_events(served, 7, after=events[4][0])
    assert again == events[5:]
    assert not any("profile" in data or "statistics" in data for _, data in events)
    whole = read_events(served, len(served_journal(session, served)))
    last, data = whole[-1]
    assert data["type"] == "SessionFinished"
    answer = served.client.post("/v1/fit")  # without a body, as configured
    assert answer.status_code == 202, answer.text
    following = read_events(served, 2, after=last)
    assert [name for name, _ in following] == [f"{answer.json()['session']}/{i}" for i in (0, 1)]
    served.until(lambda: served.status()["state"] == "finished")
    bad = served.client.get("/v1/events", headers={"last-event-id": "x"})
    assert error_of(bad) == (422, "INVALID_REQUEST")


def test_reader_of_events_that_goes_away_fills_no_log(served):
    for _ in range(5):
        read_events(served, 1)
    assert served.status()["state"] == "finished"
    assert "socket.send() raised exception" not in served.log()


def served_journal(session: str, served: Served) -> list[str]:
    """Ids of a finished session's events, read from its stream up to the end."""
    names = []
    with served.client.stream("GET", "/v1/events") as answer:
        for line in answer.iter_lines():
            if line.startswith(f"id: {session}/"):
                names.append(line)
            if line == "event: SessionFinished":
                return names
    raise AssertionError("the stream has ended")


def test_killed_coordinator_goes_on_with_an_acknowledged_fit(tmp_path):
    """kill -9 in the middle of the second fit; before it ends the first session's model is served,
    after a restart too."""
    with Served(tmp_path / "http") as served:
        served.start()
        served.join("north", "south")
        first = served.fit(wait=True).json()["session"]
        second = served.fit(rounds=100_000, seed=3).json()["session"]
        served.until(lambda: served.status()["round"] > 3)
        served.kill()
        served.start()
        assert served.predict(COLUMNS, iris_rows()).json()["session"] == first
        status = served.status()
        assert (status["session"], status["rounds"]) == (second, 100_000), "under its own rules"
        reached = status["round"]
        served.until(lambda: served.status()["round"] > reached)
        assert served.stop() == 0


def test_stopped_and_cancelled_fits_have_no_result(tmp_path):
    """SIGTERM ends the wait for a fit, which goes on after the restart and can be cancelled; the
    participants stay for the next one."""
    with Served(tmp_path / "http") as served, ThreadPoolExecutor() as threads:
        served.start()
        assert error_of(served.client.post("/v1/fit/cancel")) == (409, "NOT_FITTING")
        served.join("north", "south")
        waiting = threads.submit(served.fit, rounds=100_000, wait=True)
        served.until(lambda: served.status()["round"] > 2)
        assert served.stop() == 0
        assert error_of(waiting.result()) == (503, "UNAVAILABLE")
        served.start()
        assert served.status()["state"] == "fitting"
        assert error_of(served.predict(COLUMNS, iris_rows())) == (409, "NOT_FITTED")
        waiting = threads.submit(served.client.post, "/v1/chimera/parameter-server/fit")
        assert waiting.result().json()["details"]["errorMessage"] == "AlreadyFitting"
        cancelled = served.client.post("/v1/fit/cancel").json()
        assert (cancelled["state"], cancelled["cause"]) == ("failed", "cancelled by a request")
        assert error_of(served.predict(COLUMNS, iris_rows())) == (409, "NOT_FITTED")
        assert served.fit(rounds=1, wait=True).status_code == 200
        assert served.predict(COLUMNS, iris_rows()).status_code == 200
        assert served.is_running("north")
        assert served.is_running("south")
