"""Each scheme, extra, example and profile that a user is told of has a test that uses it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

# A name without a test is the mistake to be found here.
TESTS = {
    "s3://": "contract/test_sources.py",
    "hdfs://": "contract/test_sources.py",
    "redis://": "contract/discovery/test_members.py",
    "xain-coordinator[docker]": "e2e/test_launch_containers.py",
    "xain-coordinator[export]": "unit/coordinator/test_export_formats.py",
    "xain-coordinator[http]": "e2e/test_http.py",
    "xain-coordinator[mlflow]": "unit/coordinator/test_export_formats.py",
    "xain-coordinator[parameters]": "integration/coordinator/test_parameter_group.py",
    "xain-coordinator[ray]": "e2e/test_launch_on_ray.py",
    "xain-coordinator[tensorboard]": "integration/session/test_trackers.py",
    "xain-coordinator[wandb]": "integration/session/test_trackers.py",
    "xain-foundation[ray]": "e2e/test_simulation_on_ray.py",
    "xain-messaging[redis]": "contract/discovery/test_members.py",
    "xain-messaging[zmq]": "contract/drivers/test_zeromq.py",
    "xain-parameters[parquet]": "integration/parameters/test_server.py",
    "xain-parameters[s3]": "integration/parameters/test_s3_checkpoints.py",
    "xain-participant[bagging]": "e2e/test_bagging.py",
    "xain-participant[export]": "unit/coordinator/test_export_formats.py",
    "xain-participant[excel]": "unit/workloads/test_reading.py",
    "xain-participant[hdfs]": "contract/test_sources.py",
    "xain-participant[http]": "contract/test_sources.py",
    "xain-participant[readstat]": "unit/workloads/test_reading.py",
    "xain-participant[s3]": "contract/test_sources.py",
    "xain-participant[sparse]": "integration/parameters/test_sparse_worker.py",
    "xain-participant[tables]": "unit/workloads/test_data.py",
    "xain-participant[torch]": "e2e/test_pages.py",
    "xain-participant[xgboost]": "integration/coordinator/test_trees.py",
    "xain-session[ray]": "e2e/test_simulation_on_ray.py",
    "xain-workloads[bagging]": "unit/workloads/test_bagging.py",
    "xain-workloads[export]": "unit/coordinator/test_export_formats.py",
    "xain-workloads[excel]": "unit/workloads/test_reading.py",
    "xain-workloads[hdfs]": "contract/test_sources.py",
    "xain-workloads[http]": "contract/test_sources.py",
    "xain-workloads[readstat]": "unit/workloads/test_reading.py",
    "xain-workloads[s3]": "contract/test_sources.py",
    "xain-workloads[sparse]": "unit/workloads/sparse/test_rows.py",
    "xain-workloads[torch]": "unit/workloads/test_neural.py",
    "xain-workloads[train]": "unit/workloads/test_sgd.py",
    "xain-workloads[xgboost]": "integration/coordinator/test_trees.py",
    "examples/fedprox.py": "e2e/test_examples.py",
    "examples/lora.py": "e2e/test_examples.py",
    "examples/parameter_jobs.py": "e2e/test_examples.py",
    "examples/scaffold.py": "e2e/test_examples.py",
    "examples/simulate.py": "e2e/test_examples.py",
    "examples/torch_federated.py": "e2e/test_examples.py",
    "examples/torch_gradients.py": "e2e/test_examples.py",
    "examples/torch_local.py": "e2e/test_examples.py",
    "messaging/examples/actor_learner.py": "integration/messaging/test_examples.py",
    "messaging/examples/parameter_averaging.py": "integration/messaging/test_examples.py",
    "messaging/examples/sum_by_scatter.py": "integration/messaging/test_examples.py",
    "--profile bagging": "e2e/test_compose.py",
    "--profile dashboard": "e2e/test_compose.py",
    "--profile gradient": "e2e/test_compose.py",
    "--profile neural": "e2e/test_compose.py",
    "--profile sparse": "e2e/test_compose.py",
}
# What a test says of an extra that it uses, where that is not the extra's name.
WORDS = {
    "export": "skops",
    "http": "http",
    "tables": "load_table",
    "train": "sklearn",
    "zmq": "zeromq",
}
OTHER_SCHEMES = {"http://", "https://"}  # no plug-ins


def schemes() -> Iterator[str]:
    """Schemes of URLs in all that users read: pages, configurations, --help."""
    texts = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").glob("*"),
        *(ROOT / "deploy").rglob("*.toml"),
        ROOT / "docker-compose.yml",
        *ROOT.glob("*/src/**/*cli*.py"),
        *ROOT.glob("*/src/**/config/*.py"),
    ]
    for text in texts:
        yield from re.findall(r"\b[a-z][a-z0-9+.-]*://", text.read_text(encoding="utf-8"))


def named() -> set[str]:
    found = set(schemes()) - OTHER_SCHEMES
    for file in ROOT.glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        found |= {f"{project['name']}[{extra}]" for extra in extras}
    for file in (*ROOT.glob("examples/*.py"), *ROOT.glob("messaging/examples/*.py")):
        found.add(str(file.relative_to(ROOT)))
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for service in compose["services"].values():
        found |= {f"--profile {profile}" for profile in service.get("profiles", ())}
    return found


def test_each_scheme_extra_and_example_that_is_named_has_a_test():
    assert named() == set(TESTS)


@pytest.mark.parametrize("name", TESTS)
def test_named_test_is_about_what_it_is_named_for(name):
    text = (ROOT / "tests" / TESTS[name]).read_text(encoding="utf-8").lower()
    word = Path(name.partition("[")[2].rstrip("]") or name.split()[-1]).stem.partition(":")[0]
    assert WORDS.get(word, word) in text
