"""The schema of a session: which data are refused at the rendezvous, and how that is told."""

from dataclasses import replace

import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.errors import ProfileMismatch
from xain_coordinator.core.vocabulary.values import DataProfile, Schema
from xain_workloads.tables.profile import MAX_CLASSES, MAX_FEATURES, sort_classes
from xain_workloads.tables.schema import MAX_COLUMNS, MAX_NAME, OPEN_SCHEMA, Column
from xain_workloads.tables.statistics import MAX_STATISTICS_BYTES

AGE, SEX, WEIGHT = Column("age", unit="years"), Column("sex", "category"), Column("weight")
PROFILE = DataProfile(
    10, 3, ("alive", "dead"), (AGE, SEX, WEIGHT), target="status", task="classification"
)


def profile_of(*columns: Column, **changes: object) -> DataProfile:
    return replace(PROFILE, num_features=len(columns), columns=columns, **changes)


def names_of(number: int, prefix: str = "") -> tuple[str, ...]:
    """Names of classes in their order."""
    return sort_classes(f"{prefix}{i}" for i in range(number))


def waiting(schema: Schema = Schema(), **rules: object) -> Bench:  # noqa: B008  # immutable
    return Bench(make_rules(min_participants=9, schema=schema, **rules), answers=False)


def refusal(bench: Bench, profile: DataProfile) -> str:
    return str(bench.refuses(c.Rendezvous("late", profile), ProfileMismatch))


MISTAKES = {
    "missing": (profile_of(AGE, SEX), "column 'weight' of the session's schema is not in the data"),
    "extra": (
        profile_of(AGE, SEX, WEIGHT, Column("name", "category")),
        "column 'name' of the data is not in the session's schema; leave it out, set data.drop = ",
    ),
    "renamed": (
        profile_of(AGE, SEX, Column("Weight")),
        "column 'weight' of the session's schema is not in the data, and column 'Weight' of the"
        " data is not in the schema; if two of them are the same, rename it, set data.rename",
    ),
    "type": (
        profile_of(AGE, SEX, replace(WEIGHT, type="category")),
        "column 'weight' is of type 'category', in the session's schema of type 'number'",
    ),
    "unit": (
        profile_of(replace(AGE, unit="months"), SEX, WEIGHT),
        "column 'age' is in the unit 'months', in the session's schema in 'years'",
    ),
    "target": (
        replace(PROFILE, target="outcome"),
        "the target is called 'outcome', in the session 'status'; set data.target = \"status\", or"
        ' if it is the same, rename it, set data.rename."outcome" = "status"',
    ),
    "task": (
        replace(PROFILE, task="regression", classes=()),
        "the data are for regression, the session for classification; set data.task ="
        " \"classification\", if the target 'status' is right for it; if the session is to be for"
        ' regression, the coordinator needs it: set workload.options.task = "regression"',
    ),
    "other labels": (
        replace(PROFILE, classes=("0", "1")),
        "labels '0', '1' of the target 'status' are unknown to the session, whose classes are"
        " 'alive', 'dead'",
    ),
    "stray label": (
        replace(PROFILE, classes=("alive", "dead", "unknown")),
        "label 'unknown' of the target 'status' is unknown to the session, whose classes are"
        " 'alive', 'dead'; correct these rows or leave them out. If it is another word for one of"
        ' these, set data.replace."status"."unknown" = "NAME"',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("from_configuration", [True, False])
def test_data_that_do_not_fit_the_schema_are_refused(mistake, from_configuration):
    """Whether the configuration or the first participant gives the schema, the message names the
    participant, the column or label, and what to do."""
    profile, complaint = MISTAKES[mistake]
    schema = Schema(PROFILE.columns, "status", "classification", ("alive", "dead"))
    bench = waiting(schema if from_configuration else Schema())
    if not from_configuration:
        bench.join("first", profile=PROFILE)
    message = refusal(bench, profile)
    assert complaint in message
    assert message.startswith("participant 'late': ")
    assert ("as in the data of 'first'" in message) is not from_configuration
    bench.join("late", profile=PROFILE)


@pytest.fixture
def bench() -> Bench:
    return waiting()


def test_an_empty_column_is_of_no_type(bench):
    """A column without any value at the first site does not refuse those of others; the first site
    with values decides its type."""
    bench.join("first", profile=profile_of(AGE, replace(SEX, type="empty"), WEIGHT))
    bench.join("second", profile=PROFILE)
    bench.join("third", profile=profile_of(AGE, SEX, replace(WEIGHT, type="empty")))
    assert "column 'sex' is of type 'number', in the session's schema of type 'category'" in (
        refusal(bench, profile_of(AGE, Column("sex"), WEIGHT))
    )


@pytest.mark.parametrize(("label", "is_number"), [("-1.25", True), ("57", True), ("v1.2", False)])
def test_labels_that_are_numbers_may_be_meant_for_regression(label, is_number, bench):
    bench.join("first", profile=PROFILE)
    message = refusal(bench, replace(PROFILE, classes=(label,)))
    assert ("the task is regression" in message) is is_number


@pytest.mark.parametrize(
    "profile",
    [
        profile_of(WEIGHT, AGE, SEX),
        replace(PROFILE, classes=("dead",)),
        profile_of(replace(AGE, unit=""), SEX, replace(WEIGHT, unit="kg")),
        DataProfile(10, 3, ("alive",)),
    ],
    ids=["other order", "fewer classes", "units not declared", "earlier version"],
)
def test_data_that_differ_in_what_may_differ_are_taken(profile, bench):
    """Order, absent labels and undeclared units refuse no participant."""
    bench.join("first", profile=PROFILE)
    bench.join("second", profile=profile)


def test_earlier_versions_are_compared_by_their_number_of_features(bench):
    """A profile without columns needs as many features as the schema has columns."""
    bench.join("first", profile=PROFILE)
    assert "4 features, those of the session 3" in refusal(bench, DataProfile(10, 4, ("alive",)))


def test_schema_is_that_of_the_members(bench):
    """A first participant with the wrong file does not refuse all others for ever."""
    bench.join("wrong", profile=profile_of(AGE))
    refusal(bench, PROFILE)
    bench.leave("wrong")
    bench.join("right", profile=PROFILE)


def test_schema_of_the_model_outlives_its_participants():
    """Once the initial model is asked for, its columns and classes are those of the session."""
    bench = Bench(make_rules(schema=Schema(allow_new_classes=True)), answers=False)
    bench.join("first", profile=PROFILE)
    bench.leave("first")
    assert "column 'sex'" in refusal(bench, profile_of(AGE, WEIGHT))
    assert "label 'unknown'" in refusal(bench, replace(PROFILE, classes=("dead", "unknown")))


def test_allowed_differences_are_taken():
    """[schema] allows extra and missing columns, and labels that others do not have."""
    bench = waiting(Schema(allow_extra=True, allow_missing=True, allow_new_classes=True))
    bench.join("first", profile=PROFILE)
    bench.join("second", profile=profile_of(AGE, SEX, Column("bmi")))
    bench.join("third", profile=replace(PROFILE, classes=("unknown",)))
    assert "no column of the data" in refusal(bench, profile_of(Column("bmi")))


def test_one_label_alone_is_no_list_of_classes(bench):
    """A first part of a data set that has only one label may be followed by one with all of them,
    but not by one with others."""
    bench.join("first", profile=replace(PROFILE, classes=("alive",)))
    assert "label" in refusal(bench, replace(PROFILE, classes=("0", "1")))
    bench.join("second", profile=PROFILE)
    assert "label 'unknown'" in refusal(bench, replace(PROFILE, classes=("alive", "unknown")))


def test_initial_model_is_made_for_the_schema():
    """All profiles have the columns of the schema, in its order, and all of its classes."""
    schema = Schema(
        (SEX, AGE, Column("bmi")), classes=("alive", "dead", "unknown"), allow_missing=True
    )
    rules = make_rules(min_participants=2, schema=replace(schema, allow_extra=True))
    bench = Bench(rules, answers=False)
    bench.join("first", profile=PROFILE)
    bench.join("old", profile=DataProfile(5, 3, ("alive",)))
    expected = replace(
        PROFILE, columns=schema.columns, classes=("alive", "dead", "unknown"), num_samples=10
    )
    profiles = (expected, DataProfile(5, 3, ("alive",)))
    assert bench.owed == [InitialiseModel("workload", profiles, names=("first", "old"))]


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        (replace(PROFILE, num_features=4), "3 columns are named, and there are 4"),
        (profile_of(AGE, AGE), "more than one column is called 'age'"),
        (profile_of(Column(" ")), "column 1 has no name"),
        (profile_of(Column("x" * (MAX_NAME + 1))), "at most 200 printable characters"),
        (profile_of(Column("bell\a")), "at most 200 printable characters"),
        (profile_of(Column("x", unit="\n")), "at most 200 printable characters"),
        (profile_of(Column("x", "text")), "is of type 'text'"),  # type: ignore[arg-type]  # on purpose
        (profile_of(*(Column(f"x{i}") for i in range(MAX_COLUMNS + 1))), "10001 columns"),
        (profile_of(*(Column(f"{'x' * 150}{i}") for i in range(5_000))), "names of all columns"),
        (replace(PROFILE, target="x" * (MAX_NAME + 1)), "at most 200 printable characters"),
        (replace(PROFILE, task="clustering"), "the task is 'clustering'"),
        (replace(PROFILE, num_samples=-1), "must not be negative"),
        (DataProfile(10, MAX_FEATURES + 1, ("a", "b")), "1000001 features"),
        (replace(PROFILE, classes=names_of(MAX_CLASSES + 1)), "10001 classes"),
        (replace(PROFILE, classes=names_of(2_000, "x" * 140)), "names of all classes"),
        (replace(PROFILE, classes=("alive", "dead\a")), "cannot be printed"),
        (replace(PROFILE, statistics=" " * (MAX_STATISTICS_BYTES + 1)), "524288 bytes"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_profile_above_a_bound_is_refused(profile, told, bench):
    """Profiles come from the network: each bound of docs/data.md is met from above."""
    refused = refusal(bench, profile)
    assert told in refused
    assert len(refused) < 500
    assert bench.connected == ()


def test_profile_at_the_bounds_is_taken(bench):
    columns = (Column(f"{i:052}") for i in range(MAX_COLUMNS))
    bench.join("first", profile=profile_of(*columns))
    bench = waiting()
    bench.join("first", profile=replace(PROFILE, classes=names_of(MAX_CLASSES)))
    bench = waiting()
    bench.join("first", profile=profile_of(Column("x" * MAX_NAME)))


def test_equal_columns_of_members_are_kept_once(bench):
    """There may be many members with many columns."""
    bench.join("first", profile=PROFILE)
    bench.join("second", profile=replace(PROFILE, columns=(*PROFILE.columns[:2], WEIGHT)))
    first, second = (member.profile for member in bench.session.members.values())
    assert first.columns is second.columns


# --- enrolled participants ---


class Enrolled:
    """Enrolled participants that come to a session. num_needed: before its model is made."""

    def __init__(self, schema: Schema = OPEN_SCHEMA, num_needed: int = 3) -> None:
        rules = make_rules(min_participants=num_needed, schema=schema)
        self.bench = Bench(rules, answers=False)

    def come(self, name: str, profile: DataProfile, at: float | None = None) -> r.Reply:
        command = c.Rendezvous(name, profile, is_enrolled=True)
        return self.bench.send(command, at=at).reply


NONSENSE = replace(profile_of(Column("price"), Column("rooms")), target="sold")


@pytest.fixture
def site() -> Enrolled:
    return Enrolled()


def test_nonsense_that_comes_first_leaves_alone(site):
    """Two others who agree take its place; it is told what differs, and its way back is closed."""
    site.come("first", NONSENSE)
    waits = site.come("a", PROFILE)
    assert isinstance(waits, r.Later)
    assert "'price', 'rooms'" in waits.why
    assert "'first'" in waits.why
    assert site.bench.connected == ("first",)
    assert isinstance(site.come("b", PROFILE), r.Accepted)
    assert site.bench.connected == ("b",)
    assert site.bench.happened(e.ParticipantLeft) == [e.ParticipantLeft("first", "outvoted")]
    told = site.bench.session.members.not_admitted["first"]
    assert told.startswith("2 participants have other data than this one: columns 'age', 'sex', 'w")
    assert isinstance(site.come("a", PROFILE), r.Accepted)
    assert isinstance(site.come("first", NONSENSE), r.Later)
    site.come("c", PROFILE)
    assert site.bench.session.requested_of == ("a", "b", "c")
    assert [one.profiles[0].columns for one in site.bench.owed] == [PROFILE.columns]
    site.bench.answer()
    site.bench.refuses(c.Rendezvous("first", NONSENSE, is_enrolled=True), ProfileMismatch)


def test_one_against_one_waits_for_an_operator(site):
    """Asking again gives no second vote, and a participant that asks no more has none."""
    site.come("first", NONSENSE)
    lease_s = site.bench.session.rules.lease_s
    for at in (0.0, 1.0, 2.0):
        assert isinstance(site.come("a", PROFILE, at=at), r.Later)
    site.bench.heartbeat("first", at=2.0 + lease_s)
    late = site.come("b", PROFILE, at=2.0 + lease_s)
    assert isinstance(late, r.Later)
    assert "participants remove NAME" in late.why
    site.bench.send(c.RemoveParticipant("first"))
    assert isinstance(site.come("a", PROFILE), r.Accepted)


def test_removed_participant_has_no_vote(site):
    site.come("first", PROFILE)
    site.come("nonsense", NONSENSE)
    site.bench.send(c.RemoveParticipant("nonsense"))
    assert isinstance(site.come("more nonsense", NONSENSE), r.Later)
    assert site.bench.connected == ("first",)


def test_members_that_fit_stay_when_others_are_more(site):
    """A site without rows of a class is no stranger to those that have some."""
    few = replace(PROFILE, classes=("alive", "dead"))
    all_of_them = replace(PROFILE, classes=("alive", "dead", "lost"))
    site.come("first", few)
    assert isinstance(site.come("a", all_of_them), r.Later)
    assert isinstance(site.come("b", all_of_them), r.Accepted)
    assert site.bench.connected == ("first", "b")


def test_configured_schema_is_not_voted_on():
    """Data that are unlike [schema] are refused, however many have them."""
    site = Enrolled(Schema(target="status"))
    site.come("a", PROFILE)
    for name in ("x", "y", "z"):
        site.bench.refuses(c.Rendezvous(name, NONSENSE, is_enrolled=True), ProfileMismatch)
    assert site.bench.connected == ("a",)


def test_vote_is_over_once_a_model_is_asked_for(site):
    """While it is made, others wait: if it cannot be made, they may be right."""
    for name in ("a", "b", "c"):
        site.come(name, PROFILE)
    assert site.bench.session.requested_of
    for name in ("w", "x", "y", "z"):
        assert isinstance(site.come(name, NONSENSE), r.Later)
    assert site.bench.connected == ("a", "b", "c")
    site.bench.send(c.InitialisationFailed("the target is constant"))
    assert isinstance(site.come("z", NONSENSE), r.Accepted)
    assert site.bench.connected == ("z",)


def test_model_of_nonsense_alone_ends_no_other_participant():
    """Where one participant is enough to begin, those that are unlike it wait for an operator."""
    site = Enrolled(num_needed=1)
    site.come("first", NONSENSE)
    site.bench.answer()
    assert site.bench.session.model is not None
    for name in ("a", "b", "c"):
        waits = site.come(name, PROFILE)
        assert isinstance(waits, r.Later)
        assert "xain-coordinator session finish" in waits.why
    assert site.bench.connected == ("first",)
