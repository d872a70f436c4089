import json
import re
import tomllib
from datetime import date
from fractions import Fraction
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.unit.core.bench import Bench

from support.configured import config, error_of
from support.examples import keys_in, keys_of
from xain_coordinator.cli.check_config import length
from xain_coordinator.config.coordinator import ENV_PREFIX, CoordinatorConfig
from xain_coordinator.config.sections.workload import WorkloadSettings
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import attempt_key, incoming_key, model_key, update_key
from xain_coordinator.core.vocabulary.values import Phase, Rules, Schema, Step
from xain_coordinator.ports import StoreError
from xain_coordinator.stores.prefixed import PrefixedAccess
from xain_coordinator.stores.s3.s3 import S3Store
from xain_coordinator.stores.s3.s3_bucket import connect
from xain_coordinator.stores.secret_files import read_secret
from xain_foundation import names
from xain_foundation.settings.fields import WrongSetting
from xain_foundation.settings.settings import ConfigError, load
from xain_workloads.tables.schema import Column

CONFIGS = Path(__file__).parents[3] / "configs"


def given_as(written: str) -> dict[str, object]:
    """Settings from "key=value key=value"; the values are JSON or text."""
    settings: dict[str, object] = {}
    for word in written.split():
        key, _, value = word.partition("=")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def assert_told(parts: str, message: str) -> None:
    """The message begins with the first part, a key, and has all others."""
    key, *others = parts.split(" | ")
    assert message.startswith(key), message
    assert all(part in message for part in others), message
    assert "hunter2" not in message


def test_defaults_run_a_coordinator():
    """Without a file there is one participant, embedded stores and XAIN's port."""
    rules = CoordinatorConfig().rules()
    assert (rules.num_required, rules.start_participants, rules.max_participants) == (1, 1, 1000)
    assert rules.initial == "first"
    assert rules.lease_s == 15.0
    assert CoordinatorConfig().server.address == "127.0.0.1:50051"


@pytest.mark.parametrize("written", [0, 1.1, -0.5, "1/0", "half", "", True, float("nan")])
def test_invalid_fractions(written):
    """Every mistake gets the same line; none a traceback."""
    assert error_of(rounds__fraction_participants=written).endswith(
        'it must be a number above 0 and at most 1, or a fraction as text such as "1/3"'
    )


def test_rules_follow_from_the_settings():
    """N from fraction and minimum, who starts from N; min_participants is no maximum."""
    rules = config(
        rounds__min_participants=4,
        rounds__fraction_participants="5/6",
        rounds__start_participants=6,
        workload__name="sgd",
        server__heartbeat_time_s=1,
    ).rules()
    assert (rules.num_required, rules.start_participants, rules.max_participants) == (4, 6, 1000)
    assert rules.initial == "workload"
    assert (rules.controller, rules.aggregation) == ("random", "weighted_average")
    assert rules.lease_s == 6.0


def test_initial_weights_come_from_one_participant_unless_another_way_is_chosen():
    """Sessions of XAIN's participants keep the average, which is all that those know."""
    assert config().rules().initial == "first"
    assert config(rounds__initial_weights="average").rules().initial == "empty"
    pickle = {"storage__kind": "s3", "storage__bucket": "xain-fl", "storage__format": "xain-pickle"}
    assert config(**pickle).rules().initial == "empty"
    assert config(**pickle, rounds__initial_weights="first").rules().initial == "first"
    told = error_of(workload__name="sgd", rounds__initial_weights="first")
    assert re.search("initial_weights .*with a workload", told)


def test_rules_carry_all_of_the_pacing():
    """Values are those of the file; the lists of a quorum become tuples, which cannot change."""
    rules = config(
        rounds__fraction_participants="1/2",
        rounds__max_participants=10,
        rounds__over_selection=0.3,
        rounds__deadline_s=600,
        rounds__idle_timeout_s=3600.5,
        rounds__quorum=["*:update:60%", ["hospital-a:update:1", "AND"], "||"],
    ).rules()
    assert rules.over_selection == Fraction(3, 10)
    assert (rules.deadline_s, rules.idle_timeout_s) == (600.0, 3600.5)
    assert rules.quorum == ("*:update:60%", ("hospital-a:update:1", "AND"), "||")
    assert (rules.consistency, rules.staleness) == ("bsp", 0)


def test_without_a_word_rounds_are_synchronous_and_every_wait_has_an_end():
    """A day for a round, a week for what does not come."""
    rules = CoordinatorConfig().rules()
    assert (rules.deadline_s, rules.idle_timeout_s) == (86400.0, 604800.0)
    assert (rules.consistency, rules.quorum, rules.over_selection) == ("bsp", "", 0)


@pytest.mark.parametrize(
    ("written", "limit", "buffer_size"),
    [
        ({"consistency": "asp", "min_participants": 2}, None, 2),
        ({"consistency": "asp", "min_participants": 2, "buffer_size": 2}, None, 2),
        ({"consistency": "ssp", "staleness": 4}, 4, 1),
        ({"consistency": "ssp", "staleness": 1, "buffer_size": 3, "max_participants": 3}, 1, 3),
    ],
)
def test_rules_carry_the_consistency(written, limit, buffer_size):
    """buffer_size is min_participants if it is left out; no staleness is any."""
    rules = config(**{f"rounds__{key}": value for key, value in written.items()}).rules()
    assert rules.consistency == written["consistency"]
    assert (rules.staleness, rules.buffer_size) == (limit, buffer_size)


# --- no configuration waits for ever ---

WAITS = st.sampled_from([0.5, 7.0, 30.0, 100.0])
UNITS = st.builds(
    "{}:{}:{}".format,
    st.sampled_from(["participant", "*", "p0", "unregistered"]),
    st.sampled_from(["update", "*"]),
    st.sampled_from(["1", "2", "4", "10%", "80%", "100%"]),
)
QUORUMS = st.recursive(
    UNITS,
    lambda parts: st.builds(
        lambda some, operator: [*some, operator],
        st.lists(parts, min_size=1, max_size=3),
        st.sampled_from(["AND", "OR"]),
    ),
    max_leaves=4,
)
ANY_ROUNDS = st.fixed_dictionaries(
    {
        "rounds": st.integers(1, 3),
        "min_participants": st.integers(1, 3),
        "max_participants": st.integers(3, 8),
        "deadline_s": WAITS,
        "idle_timeout_s": WAITS,
        "start_timeout_s": st.just(0.0) | WAITS,
        "consistency": st.sampled_from(["bsp", "ssp", "asp"]),
    },
    optional={
        "fraction_participants": st.sampled_from([0.3, 0.5, "2/3", 0.9]),
        "start_participants": st.integers(1, 8),
        "controller": st.sampled_from(["all", "ordered", "random"]),
        "over_selection": st.sampled_from([0.2, 0.5, 3]),
        "quorum": QUORUMS,
        "staleness": st.integers(1, 3),
        "buffer_size": st.integers(1, 4),
    },
)


@st.composite
def valid_rules(draw: st.DrawFn) -> Rules:
    """The rules of a session under a valid [rounds]."""
    written = draw(ANY_ROUNDS)
    # Leave out what could never go together, so that most of the rest is taken.
    buffered = written["consistency"] != "bsp"
    for key in ("over_selection", "quorum") if buffered else ("staleness", "buffer_size"):
        written.pop(key, None)
    if written["consistency"] == "ssp":
        written.setdefault("staleness", 1)
    else:
        written.pop("staleness", None)
    try:
        loaded = config(
            workload__name=draw(st.sampled_from(["", "sgd"])),
            **{f"rounds__{key}": value for key, value in written.items()},
        )
    except ConfigError:
        assume(False)
    return loaded.rules()


any_rules = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def bound_s(rules: Rules) -> float:
    """How long a session can take that no participant joins after the beginning."""
    start = min(rules.start_timeout_s, rules.idle_timeout_s)
    # Each round to its deadline; then the one thing that does not come: participants, an update or
    # a model.
    return start + rules.lease_s + rules.num_rounds * rules.deadline_s + 2 * rules.idle_timeout_s


@any_rules
@given(
    rules=valid_rules(),
    num_come=st.integers(0, 8),
    num_silent=st.sampled_from([0, 0, 1, 3, 8]),
    num_idle=st.integers(0, 8),
    answers=st.booleans(),
)
def test_no_configuration_waits_for_ever(rules, num_come, num_silent, num_idle, answers):
    """The session ends within a bound that the configuration gives, whether participants fall
    silent, do nothing or hand in at once, and whether models are made or not."""
    bench = Bench(rules, answers=answers)
    names = [f"p{i}" for i in range(min(num_come, rules.max_participants))]
    for name in names:
        bench.join(name)
    silent = names[:num_silent]
    limit = bound_s(rules)
    while bench.phase is not Phase.FINISHED:
        if bench.phase is Phase.COLLECTING:
            brings = [name for name in bench.outstanding if name in names[num_idle:]]
            for name in brings:
                if name in bench.outstanding and bench.phase is Phase.COLLECTING:
                    bench.end(name, f"{name}@{bench.session.round}")
        bench.pass_time(5.0, *silent)
        assert bench.now <= limit + 5.0, f"waits for ever in {bench.session}"
    if len(names) >= rules.num_required and not silent:
        assert "waited for participants" not in bench.session.cause, "they were all there"


@any_rules
@given(rules=valid_rules(), slow=st.sampled_from(["", "p0", "p1"]))
def test_every_configuration_leads_to_the_last_model(rules, slow):
    """If as many as may come do come and hand in, whether or not one of them is slower than the
    others."""
    bench = Bench(rules)
    bench.join(*(f"p{i}" for i in range(rules.max_participants)))
    for _ in range(200):
        names = [name for name in bench.outstanding if name != slow] or bench.outstanding
        if names:
            bench.end(names[0], f"{names[0]}@{bench.session.round}")
    assert bench.session.cause == "completed"
    assert len(bench.happened(e.ModelPublished)) == rules.num_rounds


@pytest.mark.parametrize(
    "written",
    [
        *("ca_file=/ca.crt", "insecure=true"),
        *("endpoint=http://s3:9000", "public_endpoint=http://s3:9000", "region=eu-central-1"),
        *("bucket=b", "prefix=trials/7", "create_bucket=true", "presigned=false"),
        *("access_key_id=hunter2", "access_key_id_file=/run/secrets/hunter2"),
        *("secret_access_key=hunter2", "secret_access_key_file=/run/secrets/hunter2"),
        *("session_token=hunter2", "session_token_file=/run/secrets/hunter2"),
        *("timeout_s=3.0", "url_lifetime_s=60"),
    ],
)
def test_keys_that_only_s3_reads_are_refused_elsewhere(written):
    """An operator would otherwise believe that the weights lie in S3."""
    said = error_of(storage__kind="files", **given_as(f"storage.{written}"))
    key = written.partition("=")[0]
    assert_told(f"storage.{key} is | nothing would read it without storage.kind =", said)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("http://user:hunter2@h", "********"),
        ("http://user:hun/ter2@h:9000", "********"),
        ("user:hunter2@h", "********"),
        ("hunter2", "********"),
        ("http://h:hunter2", "********"),
        ("ftp://h/hunter2", '"ftp://h/..."'),
        ("https://h:9000/b?X-Amz-Signature=hunter2", '"https://h:9000/..."'),
        ("http://h#hunter2", '"http://h/..."'),
        ("http://h\nhunter2", "********"),
    ],
)
def test_a_refused_url_is_shown_without_user_path_and_query(written, shown):
    """Scheme, host and port tell which URL is meant; a password may stand in all other parts."""
    s3 = {"storage__kind": "s3", "storage__bucket": "b"}
    for key, others in (
        ("storage.endpoint", s3),
        ("storage.public_endpoint", s3),
        ("metrics.url", {"metrics__kind": "influxdb"}),
    ):
        said = error_of(**others, **{key.replace(".", "__"): written})
        assert said.startswith(f"{key} is {shown}; it must be a URL")


@pytest.mark.parametrize("key", ["data__source", "server__host", "rounds__quorum", "journal__path"])
def test_a_url_with_a_password_is_masked_for_every_key(key):
    """A secret that was given for another key is no less secret."""
    assert "hunter2" not in error_of(**{key: "http://user:hunter2@h"})
    assert "hunter2" not in error_of(**{f"{key}.storage:hunter2=": "x"})


def test_a_file_of_a_secret_that_is_missing_is_not_named():
    """The secret itself may have been put where its file's name belongs."""
    s3 = {"storage__kind": "s3", "storage__bucket": "b", "storage__access_key_id": "AKIA1"}
    storage = config(**s3, storage__secret_access_key_file="hunter2/hunter2").storage
    with pytest.raises(StoreError) as caught:
        read_secret("storage", storage, "secret_access_key")
    assert "storage.secret_access_key_file (not shown)" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_blank_credentials_are_none():
    """A variable may hold an empty file: half of a pair is still refused, and none is none."""
    s3 = {"storage__kind": "s3", "storage__bucket": "b", "storage__secret_access_key": "\n"}
    config(**s3, storage__access_key_id=" ")
    config(**s3, storage__access_key_id_file="/id", storage__secret_access_key_file="/key")
    assert error_of(**s3, storage__access_key_id="AKIA1").startswith("storage.secret_access_key")


# The longest names that a participant may have, by what S3's names make of them.
LONGEST = [
    "x" * 128,
    "%" * 128,
    *("x" * number + "%" * (128 - number) for number in range(1, 4)),
    ".x" * 64,
    "x." * 32 + "%" * 63 + "x",
]


@pytest.mark.parametrize("prefix", ["p" * 70 + "/" + "p" * 69, "%" * 140, "/".join("p" * 70) + "p"])
@pytest.mark.parametrize("name", LONGEST)
def test_every_key_has_room_behind_the_longest_prefix(tmp_path, prefix, name):
    """A long name of one participant would otherwise end the whole round."""
    assert names.why_not(name) is None
    s3 = {"storage__kind": "s3", "storage__bucket": "b"}
    credentials = {"storage__access_key_id": "a", "storage__secret_access_key": "b"}
    storage = config(**s3, **credentials, storage__prefix=prefix).storage
    store = S3Store(connect(storage), storage.prefix, tmp_path)
    part = PrefixedAccess(store, "f" * 12)
    round_ = 2**31 - 1  # the largest on the wire
    for key in (
        attempt_key(update_key(round_, name), "f" * 32),
        incoming_key(round_, name),
        model_key(round_),
    ):
        part.upload_url(key)
    store.close()
    told = error_of(**s3, storage__prefix=prefix + "p" * 10)
    assert told.endswith("of at most 140 bytes and without a slash at its ends")


TREES = "workload.name=xgboost aggregation.rule=trees"
CYCLIC = (
    f"{TREES} aggregation.options.mode=cyclic rounds.controller=round_robin "
    "rounds.fraction_participants=1/3"
)
HELD = "workload.name=bagging aggregation.rule=ensemble"
BAGGING = f'{HELD} workload.options={{"publish":true,"estimator":"Ridge"}}'
SLICES = "aggregation.rule=assemble"
STAGES = f'{SLICES} workload.name=neural workload.options={{"mode":"pipeline","cuts":[2]}}'
SGD = "workload.name=sgd"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("workload.name=xgboost", "100 passes at 1 site: 300 rounds, 3 for each boosting"),
        (
            'workload.name=xgboost workload.options={"max_depth":3} rounds.passes=7',
            "7 passes at 1 site: 21 rounds, 3 for each boosting iteration",
        ),
        ('workload.name=xgboost aggregation.options={"mode":"bagging"}', "100 passes at 1 site:"),
        ("workload.name=xgboost rounds.rounds=7", "7 rounds, 3 for each boosting iteration at 1"),
        ("workload.name=sgd", "50 passes at 1 site: 50 rounds of 1 epoch"),
        ("workload.name=sgd rounds.epochs=4", "50 passes at 1 site: 13 rounds of 4 epochs"),
        ("workload.name=mlp rounds.rounds=7", "7 rounds of 1 epoch at 1 site"),
        ("workload.name=mlp", "200 passes at 1 site: 200 rounds of a step each"),
        (
            "workload.name=sgd rounds.min_participants=2 rounds.fraction_participants=0.1",
            "50 passes at 11 sites, 2 of them a round: 275 rounds of 1 epoch",
        ),
        (
            "workload.name=sgd rounds.start_participants=6 rounds.consistency=asp "
            "rounds.buffer_size=2 rounds.min_participants=2",
            "50 passes at 6 sites, 2 of them a round: 150 rounds of 1 epoch",
        ),
        ("workload.name=sgd workload.options.mode=gradient", "200 passes at 1 site: 200 rounds"),
        (
            "workload.name=sgd workload.options.mode=gradient workload.options.batch_size=32",
            "50 passes over all rows, in steps of 32 rows of each site, one a round",
        ),
        ("workload.name=bagging", "6 rounds at 1 site"),
        ("workload.name=describe", "It describes the data, and trains nothing."),
        ("", "10 rounds of 1 epoch at 1 site"),
        ("rounds.passes=3", "3 passes at 1 site: 3 rounds of 1 epoch"),
    ],
)
def test_length_of_a_training_is_told_before_it(written, told):
    """Passes over all rows are the default of the workloads that are trained on tables. What is not
    known before the sites have joined is not told."""
    assert told in length(config(**given_as(written)))


@pytest.mark.parametrize("options", [{"learning_rate_init": 0.1}, {"mode": "federated"}])
def test_searched_option_of_local_training_is_taken_as_if_it_were_set(options):
    """The mode that is chosen where nothing asks for local training does not stay."""
    settings = config(**given_as("workload.name=mlp"))
    searched = {f"workload.options.{key}": json.dumps(value) for key, value in options.items()}
    assert settings.rules().aggregation == "gradient"
    rules = settings.rules(Step("x", "train", "", options=searched))
    assert (rules.aggregation, rules.optimizer) == ("weighted_average", "")
    assert json.loads(rules.workload_options) == options


def test_searched_step_of_gradient_descent_is_taken_as_if_it_were_set():
    """The optimiser that is chosen where no step is set does not stay when one is searched."""
    settings = config(**given_as("workload.name=sgd workload.options.mode=gradient"))
    step = Step("x", "train", "", options={"aggregation.options.eta0": "0.5"})
    assert settings.rules().optimizer == "fedadam"
    assert settings.rules(step).optimizer == ""


@pytest.mark.parametrize("name", ["sgd", "mlp", "neural"])
def test_remedy_is_an_option_of_the_workload(name):
    """The remedy stands among the options in the metadata of the model, for the participants."""
    written = f"workload.name={name} workload.remedy=proximal workload.proximal_mu=0.3"
    options = json.loads(config(**given_as(written)).rules().workload_options)
    assert options == {"remedy": "proximal", "proximal_mu": 0.3}


@pytest.mark.parametrize(
    ("name", "stays"), [("sgd", "intercept"), ("mlp", "output.*"), ("neural", "2.*")]
)
def test_personal_remedy_names_the_tensors(name, stays):
    """Rules of a session name them too: there the remedy is among the options, as in a search."""
    given = config(**given_as(f"workload.name={name} workload.remedy=personal"))
    options = json.loads(given.rules().workload_options)
    of_session = WorkloadSettings(name=name, options=options)
    assert given.workload.personal == of_session.personal == (stays,)


XGBOOST = "workload.name=xgboost"
NEURAL = "workload.name=neural"
MLP = "workload.name=mlp"
GRADIENT = f"{SGD} workload.options.mode=gradient"
BALANCED = "workload.options.class_weight=balanced"
RULE, OPTIMIZER = "aggregation.rule", "aggregation.optimizer"

FOLLOWS = [
    # The only rule that fits needs no word, set or not.
    ("", RULE, "weighted_average"),
    (SGD, RULE, "weighted_average"),
    (GRADIENT, RULE, "gradient"),
    (XGBOOST, RULE, "trees"),
    ("workload.name=bagging", RULE, "ensemble"),
    (STAGES, RULE, "assemble"),
    (f"{XGBOOST} aggregation.rule=", RULE, "trees"),
    (
        f"{XGBOOST} aggregation.options.mode=bagging",
        "rules.aggregation_options",
        {"mode": "bagging"},
    ),
    (TREES, "rules.aggregation_options", {"mode": "histogram"}),
    (f"{CYCLIC} rounds.max_participants=3", "rules.aggregation_options", {"mode": "cyclic"}),
    (STAGES, "rules.aggregation_options", {"stages": 2}),
    (BAGGING, "workload.task", "regression"),
    # No model is evaluated where estimators stay at the participants.
    (BAGGING, "rules.evaluate_every", 1),
    (HELD, "rules.evaluate_every", 0),
    # Gradient descent without a step of its own has an optimiser.
    (GRADIENT, OPTIMIZER, "fedadam"),
    (f"{GRADIENT} aggregation.options.eta0=0.5", OPTIMIZER, ""),
    (f"{GRADIENT} aggregation.optimizer=", OPTIMIZER, ""),
    (f"{MLP} workload.options.mode=gradient", OPTIMIZER, "fedadam"),
    (f"{NEURAL} workload.options.mode=gradient", OPTIMIZER, "fedadam"),
    (f"{NEURAL} workload.options.mode=gradient aggregation.options.eta0=0.5", OPTIMIZER, ""),
    (SGD, OPTIMIZER, ""),
    ("aggregation.rule=gradient", OPTIMIZER, ""),
    # Networks send gradients, unless settings ask for what those cannot do.
    (MLP, RULE, "gradient"),
    (f"{NEURAL} rounds.passes=80 {BALANCED}", RULE, "gradient"),
    (f"{MLP} rounds.consistency=bsp rounds.fraction_participants=1", RULE, "gradient"),
    (f"{NEURAL} workload.options.mode=federated", RULE, "weighted_average"),
    (f"{MLP} workload.options.batch_size=8", RULE, "weighted_average"),
    (f"{NEURAL} rounds.rounds=20", RULE, "weighted_average"),
    (f"{MLP} rounds.epochs=2", RULE, "weighted_average"),
    (f"{NEURAL} rounds.epochs=0", RULE, "weighted_average"),
    (f"{MLP} rounds.min_participants=2 rounds.fraction_participants=0.5", RULE, "weighted_average"),
    (f"{NEURAL} rounds.consistency=asp", RULE, "weighted_average"),
    (f"{MLP} workload.remedy=proximal", RULE, "weighted_average"),
    (f"{NEURAL} aggregation.optimizer=", RULE, "weighted_average"),
    (f"{MLP} aggregation.rule=median rounds.min_participants=3", RULE, "median"),
    ('workload.name=neural workload.options.layers=[{"type":"linear"}]', RULE, "weighted_average"),
    # Class weights change probabilities, and with them the log loss, for the worse.
    (f"{SGD} {BALANCED}", "rules.evaluate_metric", "auc"),
    (f"{SGD} {BALANCED} workload.options.loss=hinge", "rules.evaluate_metric", "balanced_accuracy"),
    (f"{SGD} {BALANCED} evaluate.metric=f1", "rules.evaluate_metric", "f1"),
    (SGD, "rules.evaluate_metric", ""),
    # Rounds that are set are trained, and figures of other rows each round are not compared.
    (SGD, "rules.evaluate_patience", 10),
    (f"{SGD} evaluate.patience=0", "rules.evaluate_patience", 0),
    (f"{SGD} evaluate.patience=3", "rules.evaluate_patience", 3),
    (f"{SGD} rounds.rounds=20", "rules.evaluate_patience", 0),
    (f"{SGD} evaluate.every=0", "rules.evaluate_patience", 0),
    (f"{SGD} rounds.fraction_participants=0.5", "rules.evaluate_patience", 0),
    (f"{SGD} rounds.fraction_participants=0.5 evaluate.data=digits", "rules.evaluate_patience", 10),
    ("", "rules.evaluate_patience", 0),
    ("evaluate.patience=3 evaluate.metric=loss", "rules.evaluate_patience", 3),
    (SGD, "rules.evaluate_patience_rows", 100),
    (f"{SGD} evaluate.patience=3", "rules.evaluate_patience_rows", 0),
    # XAIN refused "[::]", its own example, and bound "::1" to a malformed address.
    ("server.host=::", "server.address", "[::]:50051"),
    ("server.host=[::]", "server.address", "[::]:50051"),
    ("server.host=::1", "server.address", "[::1]:50051"),
    ("server.host=0.0.0.0", "server.address", "0.0.0.0:50051"),
    ("server.host=localhost", "server.address", "localhost:50051"),
    # Sessions wait for a request with the HTTP face only.
    ("", "rules.start", "participants"),
    ("", "http.is_on", False),
    ("http.port=8080", "rules.start", "request"),
    ("http.port=8080 rounds.start=participants", "rules.start", "participants"),
    # The parameter server is off without a port, and its checkpoints are below its path.
    ("", "parameters.is_on", False),
    ("parameters.port=0", "parameters.is_on", True),
    ("parameters.path=/data/tables", "parameters.checkpoints_url", "/data/tables/checkpoints"),
    (
        "parameters.checkpoints=s3://models/parameters",
        "parameters.checkpoints_url",
        "s3://models/parameters",
    ),
    # Refused participants are left out unless that is switched off.
    ("", "rules.refused_limit", 3),
    ("", "rules.refused_rounds", 3),
    ("rounds.refused_limit=0", "rules.refused_limit", 0),
    # A flag and the environment have text only.
    ("model.personal=head.*,output.*", "model.personal", ("head.*", "output.*")),
]


@pytest.mark.parametrize(("written", "key", "value"), FOLLOWS)
def test_missing_setting_follows_from_those_given(written, key, value):
    """A key of the configuration, or of the rules of its session."""
    found = config(**given_as(written))
    of_rules = key.removeprefix("rules.")
    found = found if of_rules == key else found.rules()
    assert attrgetter(of_rules)(found) == value


S3 = "storage.kind=s3 storage.bucket=b"
INFLUX = "metrics.kind=influxdb metrics.org=o"
SCAFFOLD = f"{SGD} workload.remedy=scaffold"
ASP = "rounds.consistency=asp"
SSP = "rounds.consistency=ssp rounds.staleness=1"
TWO = "rounds.min_participants=2"
THREE = "rounds.max_participants=3"
THIRD = "rounds.fraction_participants=1/3"
MORE = "rounds.over_selection=0.3"
PAIR = "storage.access_key_id=AKIA1 storage.secret_access_key=hunter2"
PIPELINE = "workload.name=neural workload.options.mode=pipeline rounds.rounds=2"
HALF = "rounds.fraction_participants=0.5 rounds.max_participants=8"
SCRIPTED = "rounds.scripted=true"

# Settings that are refused: what is written, and the key, and words, with which the line begins.
REFUSED = [
    (f"{TWO} rounds.max_participants=1", "rounds.max_participants | it must not be less than the"),
    (f"{TWO} {THIRD} rounds.start_participants=3", "rounds.start_participants | 4 connected"),
    (f"{THREE} rounds.start_participants=4", "rounds.start_participants | more than max_part"),
    ("storage.kind=s3", 'storage.bucket: it must be given with storage.kind = "s3"'),
    (f"{S3} storage.endpoint=host:9000", "storage.endpoint | it must be a URL such as"),
    (f"{S3} storage.prefix=/a", "storage.prefix | it must be the beginning of a key, such as"),
    (f"{S3} storage.access_key_id=AKIA1", "storage.secret_access_key | one half of the"),
    (f"{S3} {PAIR} storage.secret_access_key_file=/s", "storage.secret_access_key_file | keep one"),
    (f"{S3} storage.session_token=hunter2", "storage.session_token | it goes with"),
    (f"{S3} storage.session_token_file=/t", "storage.session_token_file | it goes with"),
    ("storage.format=xain-pickle", "storage.format | XAIN's participants look for weights in"),
    (f"{S3} storage.format=xain-pickle storage.prefix=a", "storage.prefix | XAIN's participants"),
    (f"{INFLUX} metrics.url=https://h:8086", "metrics.bucket | it must be given with metrics.kind"),
    (f"{INFLUX} metrics.url=http://h:1 metrics.bucket=b", "metrics.url | others could read"),
    (f"{S3} storage.endpoint=http://10.0.0.1:8333", "storage.endpoint | others could read the"),
    (f"{S3} storage.public_endpoint=http://h", "storage.public_endpoint | others could read the"),
    ("metrics.ca_file=/ca.crt", "metrics.ca_file | nothing would read it without metrics.kind"),
    ("metrics.kind=none metrics.path=3", "metrics.path | it must be a path, not empty and no"),
    ("rounds.deadline_s=Infinity", "rounds.deadline_s is inf; it must be finite"),
    ("rounds.idle_timeout_s=NaN", "rounds.idle_timeout_s is nan; it must be finite"),
    ("rounds.start_timeout_s=Infinity", "rounds.start_timeout_s is inf; it must be finite"),
    ("rounds.over_selection=-0.1", "rounds.over_selection | it must be a number, not negative,"),
    ("rounds.over_selection=0.3", "rounds.over_selection | everybody is selected without it; it"),
    (f"{MORE} {HALF} rounds.controller=all", "rounds.over_selection | everybody is selected"),
    ("rounds.quorum=participant:update:0", "rounds.quorum | conditional event"),
    ("rounds.quorum=3", "rounds.quorum | it must be a conditional event such as"),
    ('rounds.quorum=["participant:update:1"]', "rounds.quorum | conditional event a list of 1: it"),
    ("rounds.quorum=participant:model:1", "rounds.quorum | never happens: a round gets one"),
    ("rounds.quorum=a/b:update:1", "rounds.quorum | never happens: a round gets one"),
    (f"rounds.quorum=participant:update:5 {HALF}", 'rounds.quorum | "participant:update:5" never'),
    ('rounds.quorum=["*:*:1","a:update:2","OR"]', 'rounds.quorum | "a:update:2" never happens'),
    ("rounds.staleness=2", 'rounds.staleness is 2; nothing would read it with consistency = "bsp"'),
    (f"{ASP} rounds.quorum=participant:update:1", 'rounds.quorum | with consistency = "asp" a'),
    (f"{SSP} rounds.over_selection=0.3 {HALF}", 'rounds.over_selection | with consistency = "ssp"'),
    ("rounds.consistency=ssp", 'rounds.staleness: it must be given with consistency = "ssp"'),
    ("rounds.consistency=ssp rounds.staleness=0", "rounds.staleness | it must be a whole number,"),
    (f"{ASP} rounds.staleness=1", 'rounds.staleness | there is no limit with consistency = "asp";'),
    (f"{ASP} {TWO} rounds.buffer_size=1", "rounds.buffer_size | it must be from min_participants,"),
    (f"{ASP} rounds.buffer_size=5 {HALF}", "rounds.buffer_size | trains at a time, 4"),
    ("rounds.rounds=3 rounds.epochs=1073741824", "rounds.epochs | with rounds.rounds = 3 that"),
    ("rounds.min_participants=1000000000", "rounds.min_participants | it must be a whole number,"),
    (f"{TWO} rounds.fraction_participants=1/1000000", "rounds.fraction_participants | 1000001"),
    ('server.grpc_options={"grpc.x":2147483648}', "server.grpc_options. | it must be text, or a"),
    ("rounds.refused_limit=-1", "rounds.refused_limit | at least 0"),
    ("rounds.start=request", "rounds.start | without http.port nothing could request a fit"),
    ("aggregation.rule=average", 'aggregation.rule is "average"; | one of: | weighted_average'),
    (f"{ASP} aggregation.rule=sum", 'aggregation.rule is "sum"; rounds.consistency = "asp" mixes'),
    ("logging.status_file=x logging.latency_file=x", "logging.latency_file is | is the same"),
    ("server.health_port=50051", "server.health_port is 50051; | server.port"),
    ("server.heartbeat_time_s=1e12", "server.heartbeat_time_s is | 86400"),
    ("server.heartbeat_timeout_s=1e12", "server.heartbeat_timeout_s is | 86400"),
    ("server.drain_s=1e12", "server.drain_s is | 86400"),
    ("storage.timeout_s=1e12", "storage.timeout_s is | 86400"),
    ("metrics.timeout_s=5", "metrics.timeout_s is gone"),
    ("parameters.num_ranges=4", "parameters.num_ranges is gone"),
    ("parameters.tls=x", "parameters.tls is called tls.folder now"),
    ("parameters.insecure=x", "parameters.insecure is called server.insecure now"),
    ("parameters.port=1 parameters.host=0.0.0.0", "parameters.advertised: it must be given with"),
    ("rounds.seed=9223372036854775808", "rounds.seed | a whole number must have at most 64"),
    ("rounds.passes=3 rounds.rounds=3", "rounds.passes is 3; rounds.rounds = 3 is given too"),
    ("rounds.passes=3 rounds.epochs=0", "rounds.epochs is 0; | set it to 1 or more"),
    ("workload.name=bagging rounds.passes=3", "rounds.passes is 3; a round of bagging fits"),
    (f"{ASP} {SCRIPTED}", 'rounds.consistency is "asp"; sites go on with a round while'),
    (f"rounds.passes=3 {SCRIPTED}", "rounds.passes is 3; the script says how many epochs a round"),
    (f"{SGD} {SCRIPTED}", "rounds.passes | set rounds.rounds"),
    (f"study.folds=3 rounds.rounds=2 {SGD} {SCRIPTED}", "study.folds is 3; each of its sessions"),
    (f"{PIPELINE} {SCRIPTED}", "settings: aggregation.rule: all stages of the model"),
    ("workload.name=xgboost workload.remedy=proximal", "workload.remedy | for the workloads sgd"),
    ("workload.remedy=proximal", "workload.remedy | it is for the workloads sgd"),
    (f"{SGD} workload.remedy=prox", "workload.remedy is | it must be"),
    (f"{SGD} workload.proximal_mu=1", "workload.proximal_mu | only remedy"),
    (f"{GRADIENT} workload.remedy=proximal", "workload.remedy | corrects local training"),
    (f'{MLP} workload.remedy=personal model.personal=["hidden0.*"]', "model.personal | set one of"),
    (f"{MLP} workload.remedy=personal aggregation.rule=sum", "workload.remedy | leave it out with"),
    (f"{MLP} workload.remedy=scaffold workload.options.solver=adam", "workload.remedy | those of"),
    (f"{SCAFFOLD} aggregation.rule=median", 'aggregation.rule is | workload.remedy = "scaffold"'),
    (f"{SCAFFOLD} {ASP}", "rounds.consistency is | an update counts in the round that it was"),
    (f"{SCAFFOLD} server.update_encoding=float16", "server.update_encoding is | leave it out with"),
    (f"{SCAFFOLD} server.max_update_norm=1", "server.max_update_norm is | leave it out with"),
    (f'{SCAFFOLD} model.personal=["intercept"]', "model.personal is | leave it out with"),
    (f"{MLP} workload.options.remedy=scaffold", "workload.options.remedy | set workload.remedy ="),
    ("workload.name=gpt", 'workload.name is "gpt"; it must be one of: '),
    ("workload.options.eta0=1", "workload.options | without workload.name nothing would"),
    (f"{SGD} workload.options.eta0=-1", "workload.options.eta0 is -1; it must be at least 0"),
    (f"{SGD} workload.options.eta0=fast", "workload.options.eta0 | it must be of type float"),
    (f"{SGD} workload.options.eta=1", "workload.options | unknown option 'eta' | known: alpha,"),
    ("workload.name=xgboost aggregation.rule=mean", 'aggregation.rule is "mean"; workload.name ='),
    ("aggregation.rule=trees", 'aggregation.rule | it needs workload.name = "xgboost"'),
    (f"{TREES} aggregation.options.mode=both", "aggregation.options.mode | 'bagging' or 'cyclic'"),
    (f"{TREES} rounds.epochs=3", "rounds.epochs is 3; | it must be 1"),
    (f"{TREES} rounds.epochs=0", "rounds.epochs is 0; it counts the boosting iterations"),
    (f"{TREES} workload.options.mode=bagging", "workload.options.mode | aggregation.options.mode"),
    (f"{TREES} server.max_update_norm=3", "server.max_update_norm is 3; leave it out with"),
    (f"{TREES} aggregation.optimizer=fedadam", "aggregation.optimizer | leave it out with"),
    (f"{CYCLIC} rounds.max_participants=6", "rounds.fraction_participants | 2 participants would"),
    (f"{TREES} rounds.consistency=asp", "aggregation.rule | mixes updates"),
    (f"{BAGGING} aggregation.rule=mean", 'aggregation.rule | workload.name = "bagging" needs'),
    ("aggregation.rule=ensemble", 'aggregation.rule | it needs workload.name = "bagging"'),
    (f"{BAGGING} rounds.epochs=2", "rounds.epochs is 2; it must be 1: workload.options"),
    (f"{BAGGING} aggregation.optimizer=fedadam", "aggregation.optimizer | leave it out with"),
    (f"{HELD} evaluate.metric=accuracy", "evaluate.metric | publish = false nobody has the"),
    (f"{SGD} evaluate.metric=r2", "evaluate.metric | accuracy, balanced"),
    (f"{HELD} evaluate.data=wine", "evaluate.data | publish = false nobody has the"),
    (f"{BAGGING} workload.preprocessing.scaling=site", 'workload.preprocessing.scaling is "site";'),
    (f"{TREES} workload.preprocessing.scaling=site", 'workload.preprocessing.scaling is "site";'),
    (f"{SLICES} aggregation.optimizer=fedadam", "aggregation.optimizer is "),
    (f"{SLICES} server.update_encoding=float16", "server.update_encoding is "),
    (f"{SLICES} server.max_update_norm=3.0", "server.max_update_norm is "),
    (f'{SLICES} model.personal=["head.*"]', "model.personal is "),
    (f"{SLICES} rounds.quorum=participant:update:1", "rounds.quorum is "),
    (f"{SLICES} rounds.epochs=0", "rounds.epochs is 0; it must be at least 1"),
    (f"{SLICES} rounds.initial_weights=average", "rounds.initial_weights is "),
    (f"{SLICES} workload.name=sgd", 'aggregation.rule is "assemble"; it needs workload'),
    (f'{STAGES} aggregation.options={{"stages":2}}', "aggregation.options.stages is 2;"),
    (f"{STAGES} rounds.min_participants=3", "rounds.min_participants is 3; | number of stages, 2"),
]


@pytest.mark.parametrize(("written", "told"), REFUSED)
def test_setting_that_cannot_be_is_refused_in_one_line_by_its_key(written, told):
    """Settings with which a session waits for ever, or fails in a later round, are told."""
    message = error_of(**given_as(written))
    assert_told(told, message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[ai]\nrounds = 3\nepochs = 1", "ai.rounds is called rounds.rounds now\n"),
        ("[ai]\nfraction_participants = 1", "ai.fraction_participants is called rounds.fraction"),
        ("[ai]", "ai is called [rounds] now"),
        ("[server]\nheartbeat_time = 3", "server.heartbeat_time is called server.heartbeat_time_s"),
        ("[server]\nthread_pool_workers = 3", "server.thread_pool_workers is gone: "),
        ("[storage]\nendpoint = 'http://x'", 'storage.endpoint is "http://x"; nothing would read'),
        ("[http]\ninsecure = true", "http.insecure is called server.insecure now, which is for"),
        ("[metrics]\nenable = true", "metrics.enable is called metrics.kind now: "),
        ("[metrics]\npassword = 'hunter2'", 'metrics.password is gone: metrics.kind = "influxdb"'),
    ],
)
def test_xains_keys_are_told_their_new_names(tmp_path, text, message):
    """A coordinator that is started with XAIN's file names each key's successor."""
    file = tmp_path / "xain-fl.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(CoordinatorConfig, file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "values"),
    [("north", ("north",)), (["north", "west"], ("north", "west")), ('["n", "w"]', ("n", "w"))],
)
def test_tags_that_are_asked_for(written, values):
    """One value or several; as a list also in the environment and in flags."""
    rules = config(rounds__tags__site=written).rules()
    assert rules.tags == {"site": values}


def test_section_train_takes_any_key_and_is_kept_with_the_rules():
    """The rules keep it as JSON with sorted keys; a session without the section has none."""
    given = load(CoordinatorConfig, overrides={"train.lr": "0.5", "train.layers": [3, 4]})
    assert given.rules().train_config == '{"layers": [3, 4], "lr": 0.5}'
    assert CoordinatorConfig().rules().train_config == ""


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("coordinator-*.toml")), ids=lambda f: f.stem)
def test_examples_load(file, monkeypatch):
    """Variables of the test's own environment do not count."""
    for variable in ("ROUNDS__ROUNDS", "SERVER__HOST"):
        monkeypatch.delenv(ENV_PREFIX + variable, raising=False)
    assert load(CoordinatorConfig, file).rules().rounds > 0


def test_every_key_occurs_in_an_example():
    """The examples are the reference; a new key is explained there or nowhere."""
    assert keys_of(CoordinatorConfig) <= keys_in(CONFIGS.glob("coordinator-*.toml"))


def test_defaults_that_the_example_tells_are_true():
    """A commented key shows its default, so that uncommenting it changes nothing."""
    lines = (CONFIGS / "coordinator-laptop.toml").read_text().splitlines()
    told = {}
    section = ""
    for line in lines:
        if line.startswith("["):
            section = line.strip("[]")
        assignment = None
        if line.startswith("# ") and line[2:].split(" = ")[0].isidentifier() and " = " in line:
            assignment = line[2:]
        elif "# default: " in line:
            assignment = f"{line.split(' = ')[0]} = {line.split('# default: ')[1]}"
        if assignment is not None:
            ((key, value),) = tomllib.loads(assignment).items()
            told[f"{section}.{key}"] = value
    # These depend on others, or on where the process runs.
    for key in (
        "rounds.start_participants",
        "rounds.initial_weights",
        "rounds.passes",
        "rounds.rounds",
        "rounds.epochs",
        "evaluate.patience",
        "rounds.start",
        "http.port",
        "parameters.port",
        "parameters.advertised",
        "launch.workers",
        "logging.console",
    ):
        del told[key]
    assert len(told) > 20
    assert load(CoordinatorConfig, overrides=told) == CoordinatorConfig()


def test_schema_of_the_configuration_is_that_of_the_session():
    """[schema] gives columns, target and classes; the workload gives the task."""
    config = load(
        CoordinatorConfig,
        overrides={
            "workload.name": "sgd",
            "schema.columns": {"ward": "category", "age": "number"},
            "schema.units.age": "years",
            "schema.classes": "10, 9.0",
        },
    )
    columns = (Column("ward", "category"), Column("age", "number", "years"))
    assert config.rules().schema == Schema(columns, "", "classification", ("9", "10"))
    assert load(CoordinatorConfig).rules().schema == Schema()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"rounds.tags": {"site": 7}}, "rounds.tags.site is 7; it must be printable text"),
        ({"rounds.tags": {"site": []}}, "rounds.tags.site is a list; it must be printable text"),
        ({"rounds.tags": {"site": ["n", 7]}}, "rounds.tags.site is a list; it must be printable"),
        ({"rounds.tags": {"site": "x" * 257}}, "it must be printable text of at most 256 bytes"),
        ({"rounds.tags": {"a b": "x"}}, 'tags."a b" is "x"; no participant can have such a tag'),
        ({"train.since": date(2026, 1, 1)}, "train.since is 2026-01-01; it must be a number, text"),
        ({"train": {"lr": float("inf")}}, "train.lr is inf; it must be a number, text, true"),
        ({"train": {"epochs": 3}}, "train.epochs is 3; set rounds.epochs = N"),
        ({"train": {"text": ["x" * 60_000] * 2}}, "section must have at most 65536 bytes as JSON"),
        ({"schema.columns.x": "text"}, 'schema.columns.x is "text"; it must be one of: number, ca'),
        ({"schema.columns": {"": "number"}}, "column 1 has no name"),
        ({"schema.units.x": "kg"}, 'schema.units.x is "kg"; schema.columns has no column of'),
        ({"schema.columns.x": "number", "schema.target": "x"}, "lists it as a column of features"),
        ({"schema.classes": "a"}, "classification needs two classes or more"),
        ({"schema.classes": "a,b", "schema.task": "regression"}, "schema.classes is"),
        ({"schema.task": "regression", "workload.name": "sgd"}, 'trains for "classification"'),
    ],
)
def test_table_that_no_session_can_have_is_refused(overrides, complaint):
    """Tags that no participant has, values that JSON cannot hold, and a schema of no data."""
    assert complaint in error_of(**overrides)


# --- the HTTP face ---


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "coordinator.example.org"])
def test_http_face_beyond_this_machine_needs_consent(host):
    with pytest.raises(WrongSetting, match=r"^http\.host: .*--insecure"):
        config(http__port=8080, http__host=host).require_certificates()
    config(http__port=8080, http__host=host, server__insecure=True).require_certificates()


# --- certificates ---


def test_own_certificates_are_found_beside_the_journal(tmp_path):
    settings = config(server__host="::", journal__path=str(tmp_path / "journal.sqlite"))
    with pytest.raises(WrongSetting, match="certs init"):
        settings.require_certificates()
    (tmp_path / "access" / "tls").mkdir(parents=True)
    settings.require_certificates()
    assert settings.certificates == tmp_path / "access" / "tls"


# --- the parameter server ---


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "coordinator.example.org"])
def test_parameter_server_beyond_this_machine_needs_consent(host):
    given = {"parameters__port": 50052, "parameters__host": host, "parameters__advertised": "n7"}
    with pytest.raises(WrongSetting, match="certs init") as refused:
        config(**given).require_certificates()
    assert refused.value.key == "parameters.host"
    assert "--insecure" in str(refused.value)
    config(**given, server__insecure=True).require_certificates()
    config(**given, tls__folder="certificates").require_certificates()


def test_closed_coordinator_does_not_open_itself(tmp_path):
    """A coordinator with an authority and no certificate does not start, even if `insecure`."""
    settings = config(journal__path=str(tmp_path / "journal.sqlite"), server__insecure=True)
    settings.require_certificates()
    (tmp_path / "access").mkdir()
    (tmp_path / "access" / "ca.crt").write_text("an authority")
    with pytest.raises(WrongSetting, match="certs renew"):
        settings.require_certificates()
