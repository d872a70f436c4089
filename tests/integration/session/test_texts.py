"""Errors and warnings of a session speak of what a script gives, and of no flag of a program."""

import re
from pathlib import Path

import pytest

import xain
from integration.session.conftest import Share, opened, run_all, settings_of
from xain_coordinator.process.embedding import Coordinator


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"rule": Share(0.25)}, "with the code and values of now"),
        ({"rounds": 3}, "with the settings that it was begun with"),
        (
            {"rule": Share(0.25), "rounds": 3},
            "with the settings that it was begun with and with the code and values of now",
        ),
    ],
)
def test_changed_script_is_told_which_settings_and_code_go_on(changed, what, tmp_path, address):
    with opened(tmp_path, address, rule=Share(0.5)) as session:
        session.pause()
    with pytest.raises(xain.SessionError) as caught:
        opened(tmp_path, address, **{"rule": Share(0.5), **changed}).__enter__()
    assert str(caught.value).endswith(f'with resume="changed" the session goes on {what}')


def test_session_that_goes_on_after_a_change_warns_of_it(tmp_path, address, capfd):
    with opened(tmp_path, address, rule=Share(0.5)) as session:
        session.pause()
    capfd.readouterr()
    with opened(tmp_path, address, rule=Share(0.25), rounds=3, resume="changed") as session:
        session.pause()
    told = capfd.readouterr().err
    assert "settings_kept kept=['rounds.rounds = 2 (configured: 3)'] hint=" in told
    assert re.search(r"code_replaced replaced=\['the rule \S*Share as its code was then", told)
    for text in (told, (tmp_path / "coordinator.log").read_text(encoding="utf-8")):
        assert "--new-session" not in text
        assert "rules_differ" not in text


def test_rule_that_raises_is_told_with_the_log_of_the_coordinator(tmp_path, address, sites):
    log = re.escape(str(tmp_path / "coordinator.log"))
    text = rf"the coordinator has stopped: .*ZeroDivisionError.*no share.*; its log, {log}, says"
    with opened(tmp_path, address, rule=Share(0.0)) as session:
        sites()
        round_ = next(session)
        with pytest.raises(xain.SessionError, match=text):
            round_.run()
        session.pause()
    with opened(tmp_path, address, rule=Share(0.5), resume="changed") as session:  # for the sites
        run_all(session)


def test_folder_that_is_in_use_is_told_with_the_argument(tmp_path, address):
    with opened(tmp_path, address) as session:
        with pytest.raises(xain.SessionError) as caught:
            opened(tmp_path, "127.0.0.1:0").__enter__()
        session.pause()
    assert "in use by another process; stop that one, or give another data_dir=" in str(
        caught.value
    )
    assert "journal.path" not in str(caught.value)


def test_simulation_is_told_with_its_own_argument(tmp_path, address):
    with opened(tmp_path, address) as session:
        with pytest.raises(xain.SessionError, match="stop that one, or give another folder="):
            xain.simulate(print, 1, folder=tmp_path, progress=False)
        session.pause()


def test_model_that_is_not_there_is_told_with_those_that_are(tmp_path, address, sites):
    with opened(tmp_path, address) as session:
        sites()
        run_all(session)
        known = session.id
    text = rf"{known}/7 is no model of it; its models are 0, 1, 2$"
    with pytest.raises(xain.SessionError, match=text):
        xain.session(f"{known}/7", data_dir=tmp_path, address=address).__enter__()


def test_export_without_a_session_is_told_with_the_argument(tmp_path, address):
    with pytest.raises(xain.SessionError, match=r"no journal at .*; give its data_dir=FOLDER"):
        opened(tmp_path, address).export(tmp_path / "model.npz")


def test_address_without_certificates_is_told_with_the_arguments(tmp_path):
    text = r"certificates first, .* give settings=\{\"server\.insecure\": True\}"
    with pytest.raises(xain.SessionError, match=text):
        opened(tmp_path, "0.0.0.0:50051").__enter__()


def test_other_values_of_resume_are_refused(tmp_path, address):
    with pytest.raises(xain.SessionError, match="resume is 'yes'; it must be \"same\" or"):
        opened(tmp_path, address, resume="yes")


# --- elsewhere ---


@pytest.fixture
def running(tmp_path: Path, address: str) -> Coordinator:
    return Coordinator(settings_of(tmp_path, address) | {"rounds.scripted": True})


def test_loopback_without_certificates_is_told_of_the_socket(running, address):
    text = "give as the address the path of its socket, journal.sock beside the journal"
    with (
        running,
        pytest.raises(xain.SessionError, match=text),
        xain.connect(address, progress=False) as session,
    ):
        next(session)


def test_other_machine_without_certificates_is_told_of_tls():
    text = r"nohost\.example:50051 is another machine, .*: give tls=FOLDER, the folder of an"
    with pytest.raises(xain.SessionError, match=text):
        xain.connect("nohost.example:50051").__enter__()


def test_address_without_a_port_is_refused():
    with pytest.raises(xain.SessionError, match=r"'ward\.example' has no port; give HOST:PORT"):
        xain.connect("ward.example")


@pytest.mark.parametrize("path", ["journal.sock", "unix:journal.sock", "./journal.sock"])
def test_address_without_a_port_is_the_path_of_a_socket(path, running, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running, xain.connect(path, progress=False) as session:
        assert session.id
        session.pause()
