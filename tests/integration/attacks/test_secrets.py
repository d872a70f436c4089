"""Real programs from the authority to the report, with what goes wrong on the way: no key and no
token is in what they write or say, or on their command lines."""

import json
import ssl
from pathlib import Path

import httpx
import pytest

from integration.attacks.conftest import Said
from support.commands import called
from support.process import CoordinatorProcess, Process
from support.secret_search import Secrets, command_line
from xain_foundation.net.sockets import free_ports
from xain_foundation.security.join_token import JoinToken


class Site(Process):
    async def start(self, *flags: str) -> None:
        self._process = await self.run(["-m", "xain_participant", *flags])


async def said_by(said: Said, *command: str) -> tuple[int, str]:
    """Exit status and standard output of a command, which has ended."""
    status, output, errors = await called("-m", *command)
    said.messages.append(errors)
    return status, output


def token_of(text: str, secrets: Secrets, folder: Path, name: str) -> Path:
    secrets.add_text(text.strip(), f"the token of {name}")
    secrets.add_key(JoinToken.decode(text).key, f"the token of {name}")
    path = folder / f"{name}.token"
    path.write_text(text)
    path.chmod(0o600)
    return path


def found(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


@pytest.mark.timeout(600)
async def test_no_program_shows_a_key_or_a_token(keep, tmp_path, secrets, said):
    data = f"--data-dir={tmp_path}"
    passphrase = tmp_path / "authority.passphrase"
    passphrase.write_text("correct horse battery staple\n")
    passphrase.chmod(0o600)
    secrets.add_text(passphrase.read_text().strip(), "the passphrase")
    coordinator, http = "xain_coordinator", free_ports(1)[0]
    made = await said_by(
        said,
        coordinator,
        "certs",
        "init",
        "--host=localhost",
        f"--passphrase-file={passphrase}",
        data,
    )
    assert made[0] == 0, said.messages
    said.messages.append(made[1])
    secrets.add_key((tmp_path / "access/tls/tls.key").read_bytes(), "the coordinator")
    program = keep(
        CoordinatorProcess(
            tmp_path,
            {
                "workload.name": "sgd",
                "rounds.rounds": 2,
                "rounds.min_participants": 2,
                "http.port": http,
                "logging.level": "debug",
                "server.passphrase_file": passphrase,
            },
        )
    )
    sites = {name: keep(Site(tmp_path, name)) for name in ("north", "south")}
    await program.start()
    for name in sites:
        create = ("tokens", "create", f"--name={name}", f"--address=127.0.0.1:{program.port}")
        token = token_of(await program.told(*create), secrets, tmp_path, name)
        join = ("xain_participant", "join", str(token), "--state-dir")
        for state, status in ((name, 0), (f"{name}-thief", 1)):
            ended = await said_by(said, *join, str(tmp_path / state))
            assert ended[0] == status, said.messages
            said.messages.append(ended[1])
        for key in found(tmp_path, f"{name}*/certificates/*/tls.key"):
            secrets.add_key(key.read_bytes(), name)
    bearer = (
        await program.told("tokens", "create", "--bearer", "--name=eve", "--role=operator")
    ).strip()
    secrets.add_text(bearer, "a bearer token")
    authority = ssl.create_default_context(cafile=tmp_path / "access/ca.crt")
    async with httpx.AsyncClient(verify=authority, trust_env=False) as client:
        for token in (bearer, bearer[:-1] + "?"):
            answer = await client.get(
                f"https://localhost:{http}/v1/status", headers={"authorization": f"Bearer {token}"}
            )
            said.messages.append(answer.text)
    for index, (name, site) in enumerate(sites.items()):
        await site.start(
            f"--state-dir={tmp_path / name}",
            "--data=iris",
            "--task=classification",
            "--partition=iid",
            "--num-parts=2",
            f"--index={index}",
            "--set=logging.level=debug",
        )
    said.command_lines += [command_line(one.pid) for one in (program, *sites.values())]
    for words in (("status", "--json"), ("certs", "list", "--json"), ("audit", "show")):
        said.messages.append(await program.told(*words))
    assert json.loads(await program.told("status", "--json"))
    async with httpx.AsyncClient(verify=authority, trust_env=False) as client:
        answer = await client.post(
            f"https://localhost:{http}/v1/fit",
            headers={"authorization": f"Bearer {bearer}"},
            json={},
        )
        said.messages.append(answer.text)
        assert answer.status_code < 300, answer.text
    await program.until_logged("session_finished")
    for site in sites.values():
        if site.status is None:
            await site.stop()
    kept = json.loads(found(tmp_path, "**/.weights-port")[0].read_text())["secret"]
    secrets.add_text(kept, "the secret of the URLs")
    assert await program.stop() == 0
    await program.told("report", f"--html={tmp_path / 'report.html'}")
    said.messages.append(await program.told("audit", "verify"))
    assert len(secrets) > 50
    refused = "used at"  # of the token that came twice
    assert refused in "".join(said.messages)
