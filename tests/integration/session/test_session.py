"""The server's loop of a script, with a real coordinator in the process and real sites."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import xain
from integration.session.conftest import MODEL, Share, opened, run_all, settings_of
from support.waiting import beside
from xain_coordinator.journal.restore import restore_session
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.process.embedding import Coordinator
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl.access_pb2_grpc import ControlStub
from xain_workloads.exported import formats


def finished(folder: Path) -> list[str]:
    """Causes of the ends of the sessions in a folder, the oldest first; "" for one that goes on."""
    with closing(SqliteJournal(folder / "journal.sqlite")) as journal:
        found = (journal.records_of(one) for one in journal.session_ids())
        return [restore_session(records).session.cause for records in found if records is not None]


def until_connected(session: xain.Session, number: int) -> None:
    """Wait until so many sites are connected."""
    while len(session.participants) < number:
        time.sleep(0.02)  # a poll, not a race: it ends when all are there


def test_loop_configures_runs_and_evaluates_each_round(tmp_path, address, sites, capsys):
    told = []
    with opened(tmp_path, address, metric="r2", progress=True) as session:
        sites()
        for round_ in session:
            round_.configure(lr=0.5, by_site={"west": {"lr": 0.25, "epochs": 2}})
            record = round_.run()
            assert {name: site.counted for name, site in record.sites.items()} == {
                "east": True,
                "west": True,
            }
            assert record.samples == 3
            assert record.metrics == {"loss": 0.5}
            told.append(record.weights["w"][0])
            record.evaluate(r2=0.5 - 0.1 * round_.number, samples=7)
            assert record.metrics == {"loss": 0.5, "r2": 0.5 - 0.1 * round_.number}
    step = (1 * 0.5 + 2 * 2 * 0.25 * 2) / 3
    np.testing.assert_allclose(told, [step, 2 * step])
    result = session.result
    assert (result.model, result.cause) == (2, "completed")
    assert result.metrics == {"loss": 0.5, "r2": 0.4}
    np.testing.assert_allclose(result.weights["w"], 2 * step)
    assert (result.best.model, result.best.value) == (1, 0.5)
    np.testing.assert_allclose(result.best.weights["w"], step)
    assert [one["num_updates"] for one in result.history] == [2, 2]
    assert [one["evaluation"] for one in result.history] == [{}, {}], "no site evaluates"
    assert "round 2/2: 2 updates in" in capsys.readouterr().err
    session.export(tmp_path / "best.npz", "best")
    exported = formats.read(tmp_path / "best.npz").model
    np.testing.assert_allclose(exported.vector, step)


def test_personal_tensors_of_the_first_model_stay_at_home(tmp_path, address):
    """The script's model has them, and those of a session that goes on from it as well."""
    model = {"body": np.zeros(2), "head": np.zeros(1)}
    heads = {"east": [], "west": []}

    def train(name: str) -> None:
        for round_ in xain.rounds(model, id=name, coordinator=address):
            heads[name].append(float(round_.weights["head"][0]))
            own = {"body": round_.weights["body"] + 1, "head": np.ones(1)}
            round_.submit(own, samples=1)

    def train_all(first: Any) -> xain.Session:
        session = xain.session(
            first,
            rounds=2,
            min_participants=2,
            settings={"model.personal": ["head"]},
            data_dir=tmp_path,
            address=address,
            linger_s=0.0,
            progress=False,
        )
        with session:
            threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in heads]
            for thread in threads:
                thread.start()
            run_all(session)
        for thread in threads:
            thread.join(60)
        return session

    session = train_all(model)
    np.testing.assert_array_equal(session.result.weights["body"], 2)
    np.testing.assert_array_equal(session.result.weights["head"], 0)  # the script's own
    session.export(tmp_path / "last.npz")
    session = train_all(tmp_path / "last.npz")
    np.testing.assert_array_equal(session.result.weights["body"], 4)
    assert heads == {"east": [0, 1, 0, 1], "west": [0, 1, 0, 1]}


def test_pattern_of_no_tensor_of_the_first_model_is_named(tmp_path, address):
    session = opened(tmp_path, address, settings={"model.personal": ["tail.*"]})
    with pytest.raises(xain.SessionError, match=r"'tail\.\*', which is no tensor"):
        session.__enter__()


def test_session_that_an_operator_has_ended_is_told_once(tmp_path, address, sites):
    def train() -> None:
        with opened(tmp_path, address, rounds=1) as session:
            stopping = threading.Thread(target=finish, args=(tmp_path,))
            stopping.start()
            run_all(session)  # no site comes

    with pytest.raises(xain.SessionError, match="has ended: finished by an operator: no sites"):
        train()
    with opened(tmp_path, address, rounds=1) as session:  # another session
        sites()
        run_all(session)
    assert session.result.model == 1


def finish(folder: Path) -> None:
    with grpc.insecure_channel(f"unix:{folder / 'journal.sock'}") as channel:
        ControlStub(channel).FinishSession(pb.FinishSessionRequest(reason="no sites"), timeout=30)


# --- rules, controllers and pacing of the script ---


class Last:
    """The last participants by name."""

    def select(self, candidates: Any, k: int, chance: Any) -> list[str]:
        return [one.participant_id for one in candidates][-k:]


def test_rule_and_controller_are_objects_of_the_script(tmp_path, address, sites):
    with opened(tmp_path, address, rule=Share(0.5), controller=Last(), fraction=0.5) as session:
        sites("east", "north", "west")
        for round_ in session:
            if round_.number == 0:
                until_connected(session, 3)
            record = round_.run()
            assert [*record.sites] == ["north", "west"]
    np.testing.assert_allclose(session.result.weights["w"], 0.5 * (0.5 * 2.5 + 2.5))


def test_changed_rule_does_not_go_on_with_a_session_unless_told(tmp_path, address, sites):
    with opened(tmp_path, address, rule=Share(0.5)) as session:
        sites()
        for round_ in session:
            round_.run()
            session.pause()
    text = r"begun with the rule \S*conftest\.Share as its code was then \(\w{12}, now \w{12}\)"
    with pytest.raises(xain.SessionError, match=text):
        opened(tmp_path, address, rule=Share(0.25)).__enter__()
    with opened(tmp_path, address, rule=Share(0.25), resume="changed") as session:
        run_all(session)
    np.testing.assert_allclose(session.result.weights["w"], 0.25 * (0.5 * 1.5 + 1.5))


def test_class_instead_of_an_object_is_refused(tmp_path, address):
    with pytest.raises(xain.SessionError, match=r"rule is the class Share.* rule=Share\(\)"):
        opened(tmp_path, address, rule=Share)


def test_two_sessions_of_a_process_have_a_rule_of_the_same_class_each(tmp_path, address, sites):
    first = opened(tmp_path / "first", address, rule=Share(0.5), rounds=1)
    opened(tmp_path / "second", address, rule=Share(0.25), rounds=1)
    with first as session:
        sites()
        run_all(session)
    np.testing.assert_allclose(session.result.weights["w"], 0.5 * 1.5)


# --- its end ---


def test_start_that_fails_leaves_the_folder_to_the_next_one(tmp_path, address, sites):
    with pytest.raises(xain.SessionError, match=r"missing\.npz"):
        xain.session(str(tmp_path / "missing.npz"), data_dir=tmp_path).__enter__()
    with opened(tmp_path, address, rounds=1) as session:
        sites()
        run_all(session)
    assert session.result.model == 1


def test_exception_in_the_body_ends_the_session_as_failed(tmp_path, address, sites):
    def divide() -> None:
        with opened(tmp_path, address) as session:
            sites()
            for round_ in session:
                round_.run()
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        divide()
    (cause,) = finished(tmp_path)
    assert cause.startswith("the script failed: round 0: ZeroDivisionError\nTraceback")
    assert "ZeroDivisionError: division by zero" in cause
    with opened(tmp_path, address) as session:  # another session
        sites("north", "south")  # one that has missed the failure comes as a third
        run_all(session)
    assert finished(tmp_path) == [cause, "completed"]


def corrected(name: str, target: float, address: str) -> None:
    """A site that is drawn to its own target, and corrects its steps by control variates."""
    for round_ in xain.rounds(MODEL, id=name, coordinator=address, scaffold=True):
        w = round_.weights["w"]
        for _ in range(5):
            w = w - 0.1 * (w - target + round_.correction["w"])
        round_.submit({"w": w}, samples=1, path=0.5)


def test_first_model_has_a_control_variate_where_the_script_says_so(tmp_path, address):
    """A file of the model has none, and a session that begins with it goes on with SCAFFOLD."""
    targets = {"east": 1.0, "west": 4.0}
    for name, options in (("first", {"scaffold": True}), ("second", {})):
        model = MODEL if name == "first" else tmp_path / "first.npz"
        with xain.session(
            model,
            rounds=3,
            min_participants=2,
            data_dir=tmp_path / name,
            address=address,
            linger_s=0.0,
            progress=False,
            **options,
        ) as session:
            threads = [
                threading.Thread(target=corrected, args=(*one, address), daemon=True)
                for one in targets.items()
            ]
            for thread in threads:
                thread.start()
            assert [round_.run().num_updates for round_ in session] == [2, 2, 2]
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert list(session.result.weights) == ["w"]
        session.export(tmp_path / f"{name}.npz")
    step = 1 - 0.9**5
    expected = 2.5 * (1 - (1 - step) ** 6)
    np.testing.assert_allclose(session.result.weights["w"], [expected] * 3, rtol=1e-6)


@pytest.mark.parametrize("model", [None, "model.npz", np.zeros(3)])
def test_control_variate_of_a_model_without_named_tensors_is_refused(model):
    with pytest.raises(xain.SessionError, match="scaffold=True needs a model with named tensors"):
        xain.session(model, scaffold=True)


def test_rule_that_takes_no_control_variates_is_named(tmp_path, address):
    session = opened(tmp_path, address, rule="median", scaffold=True)
    with pytest.raises(xain.SessionError, match=r'control variates, and .*"median"'):
        session.__enter__()


def test_paused_session_goes_on_in_the_round_that_was_configured_last(tmp_path, address, sites):
    with opened(tmp_path, address) as session:
        sites()
        for round_ in session:
            round_.configure(lr=0.5)
            first = round_.run()
            first.evaluate(r2=0.5)
            session.pause()
        known = session.id
    with opened(tmp_path, address) as session:
        assert session.id == known
        numbers = []
        for round_ in session:
            numbers.append(round_.number)
            if round_.is_configured:
                with pytest.raises(xain.SessionError, match=r"0\.5.*cannot become.*0\.25"):
                    changed(round_)
                continue
            round_.configure(lr=0.5)
            record = round_.run()
            assert record.evaluated is None
    assert numbers == [0, 1]
    assert finished(tmp_path) == ["completed"]


def changed(round_: Any) -> None:
    """Configure otherwise than before, and then as before."""
    try:
        round_.configure(lr=0.25)
        round_.run()
    finally:
        round_.configure(lr=0.5)
        record = round_.run()
        assert record.evaluated == {"r2": 0.5}


def test_stop_ends_the_session_with_the_models_that_are_there(tmp_path, address, sites):
    with opened(tmp_path, address, rounds=100) as session:
        sites()
        for round_ in session:
            round_.run()
            if round_.number == 1:
                round_.stop()
    assert (session.result.model, session.result.cause) == (2, "completed")


def test_ctrl_c_leaves_the_session_to_the_next_start(tmp_path, address, sites):
    main = threading.main_thread().ident
    assert main is not None

    def wait() -> None:
        with opened(tmp_path, address) as session:
            threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
            for round_ in session:  # waits for sites
                raise AssertionError(f"{round_} without a site")

    with pytest.raises(KeyboardInterrupt):
        wait()
    with opened(tmp_path, address) as session:
        sites()
        run_all(session)
    assert finished(tmp_path) == ["completed"]


# --- what cannot be done ---


def test_mistakes_of_a_body_are_told_in_a_sentence(tmp_path, address, sites):
    with opened(tmp_path, address, rounds=1) as session:
        sites()
        for round_ in session:
            with pytest.raises(
                TypeError, match=r"the setting 'opt' is <object .* JSON cannot hold"
            ):
                round_.configure(opt=object())
            with pytest.raises(TypeError, match="the setting 'lr' of west is nan"):
                round_.configure(by_site={"west": {"lr": float("nan")}})
            with pytest.raises(TypeError, match=r"by_site\['west'\] is 3; it must be a mapping"):
                round_.configure(by_site={"west": 3})
            with pytest.raises(ValueError, match=r"round 0: select\(\) was given no site"):
                round_.select([])
            round_.run()
            with pytest.raises(RuntimeError, match=r"round 0: configure\(\) comes before run\(\)"):
                round_.configure(lr=1)
            with pytest.raises(RuntimeError, match=r"round 0: select\(\) comes before run\(\)"):
                round_.select(["west"])


def test_other_model_than_that_of_the_session_is_told(tmp_path, address, sites):
    with opened(tmp_path, address) as session:
        sites()
        next(session).run()
        session.pause()
    other = xain.session(
        {"w": np.zeros(5)}, rounds=2, min_participants=2, data_dir=tmp_path, address=address
    )
    told = r"begun with another model: tensor 'w' has shape \(5,\) in this script and \(3,\)"
    with pytest.raises(xain.SessionError, match=told), other as session:
        next(session)
    with opened(tmp_path, address) as session:  # the mended script goes on
        run_all(session)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda round_: round_.configure(by_site={7: {"lr": 1}}), "by_site has the key 7"),
        (lambda round_: round_.configure(table={1: "a"}), "'table' is .* the key 1 is no text"),
        (lambda round_: round_.select([7]), r"select\(\) was given 7; it takes names of sites"),
        (lambda round_: (round_.configure(epochs=2.5), round_.run()), "epochs is 2.5"),
        (lambda round_: round_.run().evaluate(r2="high"), "the metric 'r2' is 'high'"),
        (lambda round_: round_.run().evaluate(r2=float("nan")), "'r2' is nan, by which no models"),
        (lambda round_: (round_.run(), round_.configure(lr=1)), "comes before run"),
    ],
)
def test_wrong_call_leaves_the_session_to_the_mended_script(
    tmp_path, address, sites, mistake, told
):
    def make_mistake() -> None:
        with opened(tmp_path, address, rounds=2) as session:
            sites()
            mistake(next(session))

    with pytest.raises((TypeError, ValueError, RuntimeError), match=told):
        make_mistake()
    assert finished(tmp_path) == [""]
    with opened(tmp_path, address, rounds=2) as session:
        for round_ in session:
            round_.select(lambda sites: sites)
            round_.run()
    assert finished(tmp_path) == ["completed"]


def test_session_has_one_with(tmp_path, address, sites):
    session = opened(tmp_path, address, rounds=1)
    with session:
        session.pause()
    with pytest.raises(RuntimeError, match=r"has had its `with`; xain\.session\(\) gives another"):
        session.__enter__()


# --- elsewhere, and under asyncio ---


def test_session_of_a_coordinator_elsewhere_is_driven_through_its_socket(tmp_path, address, sites):
    rounds = {"rounds.scripted": True, "rounds.rounds": 2, "rounds.min_participants": 2}
    with Coordinator(settings_of(tmp_path, address) | rounds):
        sites()
        with xain.connect(str(tmp_path / "journal.sock"), MODEL, progress=False) as session:
            for round_ in session:
                round_.configure(lr=0.5)
                assert round_.run().metrics == {"loss": 0.5}
        session.export(tmp_path / "last.npz")
    assert (tmp_path / "last.npz").exists()
    assert session.result.model == 3  # the sites have made the first one in a round of their own


def test_connect_takes_no_rule():
    with pytest.raises(xain.SessionError, match=r"aggregation\.rule"):
        xain.connect("127.0.0.1:1", rule="median")


async def test_loop_runs_under_asyncio(tmp_path, address, sites):
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)  # whatever else is to run does

    ticking = asyncio.create_task(tick())
    async with opened(tmp_path, address) as session:
        sites()
        async for round_ in session:
            round_.configure(lr=0.5)
            before = ticks
            record = await round_.run()
            assert record.metrics == {"loss": 0.5}
            assert ticks > before
    ticking.cancel()
    assert session.result.model == 2


@pytest.fixture
def slow_sites(address: str) -> Iterator[threading.Event]:
    """Two sites that hand in their updates when the event is set."""
    go_on = threading.Event()

    def train(name: str) -> None:
        with suppress(xain.SessionError):  # the session was ended by its script
            for round_ in xain.rounds(MODEL, id=name, coordinator=address):
                go_on.wait()
                round_.submit(round_.weights, samples=1)

    with beside(*[partial(train, n) for n in ("east", "west")]):
        yield go_on
        go_on.set()


async def test_round_that_was_given_up_may_be_awaited_again(tmp_path, address, slow_sites):
    async with opened(tmp_path, address, rounds=1) as session:
        async for round_ in session:
            for _ in range(50):  # more than asyncio has threads
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(round_.run(), 0.001)
            slow_sites.set()
            assert (await round_.run()).num_updates == 2
    assert session.result.model == 1


async def test_body_may_end_while_a_round_is_waited_for(tmp_path, address, slow_sites):
    async def give_up() -> None:
        async with opened(tmp_path, address, rounds=1) as session:
            async for round_ in session:
                await asyncio.wait_for(round_.run(), 0.1)

    with pytest.raises(TimeoutError):
        await give_up()
    (cause,) = finished(tmp_path)
    assert cause.startswith("the script failed: round 0: TimeoutError")
