"""Mistakes in the data of one site are named with site and column; honest data have none."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer

from support.learning import table_of
from xain_workloads.tables.checks.checking import MAX_FINDINGS, check
from xain_workloads.tables.checks.findings import Finding
from xain_workloads.tables.checks.summaries import summarise
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.table import Table

Values = dict[str, NDArray[Any]]
NAMES = ("north", "south", "east", "west", "mid")


def patients(num_rows: int, seed: int) -> tuple[Values, NDArray[Any]]:
    """A column of each kind, which go with the outcome as in life."""
    chance = np.random.RandomState(seed)
    age = np.clip(chance.normal(61, 12, num_rows), 18, 99).round()
    sex = np.where(chance.rand(num_rows) < 0.45, "female", "male").astype(object)
    values: Values = {
        "age": age,
        "weight": chance.normal(79, 14, num_rows).round(1),
        "lactate": np.exp(chance.normal(0.6, 0.6, num_rows)).round(2),
        "sex": sex,
        "ward": chance.choice(np.array(["A", "B", "C"], dtype=object), num_rows),
    }
    risk = (age - 61) / 12 + 1.2 * np.log(values["lactate"]) - 0.7 + (sex == "male") * 0.5
    outcome = np.where(chance.rand(num_rows) < 1 / (1 + np.exp(-1.5 * risk)), "dead", "alive")
    return values, outcome


def sites(number: int = 3, rows: int = 160) -> dict[str, tuple[Values, NDArray[Any]]]:
    return {name: patients(rows, seed) for seed, name in enumerate(NAMES[:number])}


def found(given: Mapping[str, tuple[Mapping[str, Any], Any]], **levels: Any) -> tuple[Finding, ...]:
    profiles = [(name, table_of(*one, "outcome").profile()) for name, one in given.items()]
    return check(profiles, levels)


def times(column: str, ratio: float) -> Callable[[Values, NDArray[Any]], NDArray[Any]]:
    def spoil(values: Values, outcome: NDArray[Any]) -> NDArray[Any]:
        values[column] = values[column] * ratio
        return outcome

    return spoil


def cells(column: str, value: Any, number: int = 1) -> Callable[..., NDArray[Any]]:
    def spoil(values: Values, outcome: NDArray[Any]) -> NDArray[Any]:
        values[column] = values[column].copy()
        values[column][:number] = value
        return outcome

    return spoil


def names(column: str, **new: str) -> Callable[..., NDArray[Any]]:
    def spoil(values: Values, outcome: NDArray[Any]) -> NDArray[Any]:
        values[column] = np.array([new.get(name, name) for name in values[column]], dtype=object)
        return outcome

    return spoil


def outcomes(**new: str) -> Callable[..., NDArray[Any]]:
    def spoil(values: Values, outcome: NDArray[Any]) -> NDArray[Any]:
        return np.array([new.get(name, name) for name in outcome])

    return spoil


def first_outcomes(value: str, number: int = 1) -> Callable[..., NDArray[Any]]:
    def spoil(values: Values, outcome: NDArray[Any]) -> NDArray[Any]:
        return np.array([value] * number + outcome[number:].tolist())

    return spoil


AT_ONE = [
    ("units", "age", times("age", 365.25)),
    ("units", "age", times("age", 12)),
    ("units", "weight", times("weight", 2.2046)),
    ("units", "weight", times("weight", 0.001)),
    ("units", "lactate", times("lactate", 100)),
    ("offset", "weight", lambda v, y: (v.update(weight=v["weight"] + 60), y)[1]),
    ("outlier", "lactate", cells("lactate", 1e9)),
    ("outlier", "weight", cells("weight", 790.0)),
    ("sentinel", "age", cells("age", -999.0)),
    ("sentinel", "weight", cells("weight", -9.0, 20)),
    ("sentinel", "lactate", cells("lactate", 9999.0, 30)),
    ("spelling", "ward", names("ward", A="a ")),
    ("spelling", "outcome", outcomes(dead="Dead")),
    ("unshared", "sex", names("sex", male="M", female="F")),
    ("empty", "lactate", lambda v, y: (v.update(lactate=v["lactate"] * np.nan), y)[1]),
    ("constant", "ward", names("ward", B="A", C="A")),
    ("constant", "weight", lambda v, y: (v.update(weight=0 * v["weight"] + 80), y)[1]),
    ("lone_class", "outcome", first_outcomes("unknown", 30)),
    ("odd_class", "outcome", first_outcomes("Total")),
    ("odd_class", "outcome", first_outcomes("7")),
    ("reversed_labels", "outcome", outcomes(dead="alive", alive="dead")),
]
AT_ALL = [
    ("identifier", "nr", lambda n, y: np.arange(n) + 1),
    ("identifier", "case", lambda n, y: np.random.RandomState(n).permutation(90000)[:n]),
    ("identifier", "name", lambda n, y: np.array([f"p{i}" for i in range(n)], object)),
    ("constant", "one", lambda n, y: np.ones(n)),
    ("leak", "score", lambda n, y: (y == "dead") + np.linspace(0, 0.5, n)),
    ("leak", "death", lambda n, y: np.where(y == "dead", "J12", "-").astype(object)),
    ("follow_up", "followup", lambda n, y: np.arange(n) % 97 + 60.0 * (y == "alive")),
    ("looks_numeric", "cost", lambda n, y: np.array([f"${i % 9},200" for i in range(n)], object)),
]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_honest_sites_have_no_findings(number):
    assert found(sites(number)) == ()


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize(
    ("name", "where", "spoil"), AT_ONE, ids=[f"{one[0]}-{i}" for i, one in enumerate(AT_ONE)]
)
def test_mistake_at_one_site_is_named_with_site_and_column(name, where, spoil, number):
    """The finding says what to do; at most one of two sites beside it is blamed, since nobody
    knows which of the two is right."""
    given = sites(number)
    values, outcome = given["south"]
    given["south"] = values, spoil(values, outcome)
    findings = [one for one in found(given) if one.check == name]
    assert ("south", where) in [(one.site, one.column) for one in findings], findings
    assert all(map(tells_what_to_do, findings)), findings
    if number > 2:
        assert {one.site for one in findings} == {"south"}


@pytest.mark.parametrize(
    ("name", "where", "make"), AT_ALL, ids=[f"{one[0]}-{i}" for i, one in enumerate(AT_ALL)]
)
def test_mistake_at_all_sites_is_named_with_the_column(name, where, make):
    given = sites()
    for values, outcome in given.values():
        values[where] = make(len(outcome), outcome)
    findings = [one for one in found(given) if one.level != "note"]
    assert [(one.check, one.column) for one in findings] == [(name, where)]
    assert all(map(tells_what_to_do, findings)), findings


def tells_what_to_do(finding: Finding) -> bool:
    """Whether a person is told what to type, or to look at the file; a question is answered."""
    text = str(finding)
    if "?" in text and not re.search(r"\? If so, set \S", text):
        return False
    return finding.level == "note" or bool(finding.fix) or "correct" in text or "look" in text


@pytest.mark.parametrize("number", [2, 4])
def test_categories_in_another_language_are_replaced_all_at_once(number):
    """The setting has all pairs, guessed where only one category begins with the same letter."""
    given = sites(number)
    values, outcome = given["south"]
    given["south"] = values, names("sex", male="Mann", female="Frau")(values, outcome)
    names("ward", A="x", B="y", C="z")(values, outcome)
    told = {
        one.column: one for one in found(given) if (one.site, one.check) == ("south", "unshared")
    }
    pairs = 'set data.replace."sex" = {"Frau" = "female", "Mann" = "male"}'
    assert told["sex"].fix.startswith(pairs)
    assert 'data.replace."ward" = {"x" = "NAME", "y" = "NAME", "z" = "NAME"}' in told["ward"].fix
    assert "others have 'female', 'male'" in told["sex"].text


def case_mixes() -> Iterator[tuple[str, dict[str, tuple[Values, NDArray[Any]]]]]:
    """Sites that differ because of their patients."""
    data = load_breast_cancer()
    radius = data.data[:, 0]
    of_clinic = radius > np.quantile(radius, 0.7)
    parts = {"clinic": np.flatnonzero(of_clinic), "practice": np.flatnonzero(~of_clinic)}
    given = {}
    for site, rows in parts.items():
        values = dict(zip(data.feature_names, data.data[rows].T, strict=True))
        given[site] = values, data.target[rows].astype(str)
    yield "large tumours at one site", given
    for number in (2, 3):
        given = sites(number)
        chance = np.random.RandomState(7)
        for values, _ in given.values():
            values["height"] = chance.normal(172, 9, 160)
            values["creatinine"] = np.exp(chance.normal(0, 0.3, 160))
        age = chance.uniform(0, 17, 160)
        given["south"][0].update(
            age=age.round(1),
            weight=8 + 3 * age + chance.normal(0, 4, 160),
            height=60 + 6.5 * age + chance.normal(0, 5, 160),
            creatinine=0.25 + 0.03 * age + chance.normal(0, 0.05, 160),
        )
        yield f"a hospital for children, of {number}", given
    for number in (2, 4):
        given = sites(number)
        for at, (values, _) in enumerate(given.values()):
            debt = np.zeros(160)
            debt[: 40 if at else 11] = chance.uniform(500, 3000, 40 if at else 11).round()
            values["debt"] = debt
        yield f"few debts at one site, of {number}", given
    for number in (2, 4):
        given = sites(number)
        for at, (values, _) in enumerate(given.values()):
            values["treated"] = (np.arange(160) % 20 > 0) == bool(at)
            values["treated"] = values["treated"].astype(float)
        yield f"few are treated at one site, of {number}", given


@pytest.mark.parametrize(("name", "given"), [pytest.param(*one, id=one[0]) for one in case_mixes()])
def test_sites_with_other_patients_have_no_findings(name, given):
    """A site of other patients differs in many columns, and zeros tell nothing of the unit."""
    assert [str(one) for one in found(given) if one.check != "unlike_classes"] == []


@pytest.mark.parametrize("rows", [22, 30, 49])
def test_measurements_in_whole_numbers_at_small_sites_are_no_identifiers(rows):
    """All incomes of 30 people differ, as ids do; row numbers and named ids are still told of."""
    given = {name: patients(rows, seed) for seed, name in enumerate(NAMES)}
    for seed, (values, outcome) in enumerate(given.values()):
        values["income"] = np.random.RandomState(seed).normal(52000, 9000, rows).round()
        values["nr"] = np.arange(1, rows + 1)
        values["case_id"] = np.random.RandomState(seed).permutation(90000)[:rows]
        del outcome
    told = [one.column for one in found(given) if one.check == "identifier"]
    assert told == ["nr", "case_id"]


def test_site_of_few_rows_makes_no_identifier_of_a_column_of_others():
    """A street that each patient of a small site has alone is shared by hundreds elsewhere."""
    given = {name: patients(rows, 3) for name, rows in (("north", 400), ("south", 24))}
    for values, outcome in given.values():
        streets = np.arange(len(outcome)) % 40
        values["street"] = np.array([f"street {one}" for one in streets], dtype=object)
    assert [one for one in found(given) if one.check == "identifier"] == []


def visits(num_patients: int, seed: int, id_name: str, number: int = 3) -> tuple[Values, Any]:
    """Patients who come several times, in no order; weight and outcome are of the visit."""
    values, _ = patients(num_patients, seed)
    chance = np.random.RandomState(seed)
    order = chance.permutation(np.repeat(np.arange(num_patients), number))
    again = {name: of[order] for name, of in values.items()}
    again["weight"] = again["weight"] + chance.normal(0, 2, len(order)).round(1)
    outcome = np.where(chance.rand(len(order)) < 0.4, "dead", "alive")
    return {id_name: chance.permutation(9999)[:num_patients][order], **again}, outcome


@pytest.mark.parametrize("name", ["patient_id", "Subject", "PatNr", "badge"])
def test_id_that_repeats_is_told_with_the_line_to_set(name):
    """The name tells it, or age, sex and ward, in which the rows of a patient agree."""
    (one,) = [one for one in found({"north": visits(60, 0, name)}) if one.check == "groups"]
    assert (one.level, one.site, one.column) == ("warn", "north", name)
    assert str(one).endswith(f'Is it such an id? If so, set data.group = "{name}"')
    both = {"north": visits(60, 0, name), "south": visits(50, 1, name)}
    assert [one.site for one in found(both) if one.check == "groups"] == [""]


def test_measurements_and_codes_that_repeat_are_no_ids():
    """Ages, their groups, wards and their districts, and codes with few values in many rows."""
    values, outcome = patients(600, 0)
    values["age_group"] = values["age"] // 10
    values["street"] = np.random.RandomState(1).randint(0, 40, 600)
    values["district"] = values["street"] // 10
    values["admission_source_id"] = np.arange(600) % 5
    values["weight"] = values["weight"].round()
    assert [str(one) for one in found({"north": (values, outcome)}) if one.check == "groups"] == []


def test_site_without_groups_beside_others_is_told_once():
    profiles = {}
    for name, one in sites().items():
        table = table_of(*one, "outcome")
        groups = np.arange(table.num_samples, dtype=np.uint64) // 4
        grouped = replace(table, groups=groups, group="patient")
        profiles[name] = (table if name == "south" else grouped).profile()
    (one,) = [one for one in check(profiles.items()) if one.check == "groups"]
    assert one.site == "south"
    assert "those of other sites are kept together by 'patient'" in one.text
    table = replace(
        table_of(*visits(60, 0, "id"), "outcome"), groups=np.arange(180, dtype=np.uint64)
    )
    declared = replace(table, group="visit").profile()
    assert [one for one in check([("north", declared)]) if one.check == "groups"] == []


@pytest.mark.parametrize("number", [2, 4])
def test_instrument_that_is_off_is_named_where_a_column_has_two_peaks(number):
    """The middle half of such a column is wider than that of a bell curve."""
    given = sites(number)
    for seed, (values, outcome) in enumerate(given.values()):
        chance = np.random.RandomState(seed)
        values["length"] = chance.normal(39 + 9 * (np.arange(len(outcome)) % 2), 2.5)
    given["south"][0]["length"] += 3 * given["south"][0]["length"].std()
    told = {(one.check, one.site, one.column) for one in found(given)}
    assert ("offset", "south", "length") in told


def test_target_in_cents_and_its_single_cells_are_named():
    def prices(seed):
        values, _ = patients(150, seed)
        chance = np.random.RandomState(seed + 100)
        return values, 2000 + 30 * values["age"] + chance.normal(0, 400, 150)

    given = {name: prices(seed) for seed, name in enumerate(NAMES)}
    assert found(given) == ()
    given["west"] = given["west"][0], given["west"][1] * 100
    (finding,) = found(given)
    assert (finding.check, finding.site, finding.column) == ("units", "west", "outcome")
    assert "100 times those of the other sites" in finding.text
    assert finding.fix.startswith('set data.factors."outcome" = 0.01')
    given["west"] = prices(3)
    given["west"][1][7] = 1e9
    assert [(one.check, one.site) for one in found(given)] == [("outlier", "west")]


def test_finding_tells_no_figure_of_another_site():
    """The owner of the data hears its own figures, and of others a direction and a ratio."""
    given = sites()
    values, outcome = given["south"]
    values["age"] = values["age"] * 365.25
    (finding,) = found({**given, "south": (values, outcome)})
    others = [float(np.median(given[name][0]["age"])) for name in ("north", "east")]
    assert f"{np.median(values['age']):,.0f}"[:2] in finding.text
    assert not any(f"{one:g}" in finding.text.replace("365", "") for one in others)


def test_sites_of_four_rows_are_refused_together_unless_they_tell_more():
    """Nothing would be scaled. Refused by name, with the two ways out."""
    given = {f"clinic-{i}": table_of(*patients(4, i), "outcome") for i in range(30)}
    told = [(name, table.profile()) for name, table in given.items()]
    (finding,) = check(told)
    assert (finding.level, finding.check) == ("refuse", "untold")
    assert "clinic-0 4" in finding.text
    assert "25 more sites" in finding.text
    assert "join sites" in finding.text
    assert finding.fix.startswith("set data.min_known = 1")
    told = [(name, table.profile(min_known=1)) for name, table in given.items()]
    assert not any(one.level == "refuse" for one in check(told))


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("rows", [9, 22])
def test_one_cell_at_a_site_of_few_rows_is_no_other_unit(rows, number):
    """The cell moves all quantiles of so few rows; a factor would spoil the other ones."""
    given = sites(number)
    given["south"] = patients(rows, 7)
    given["south"][0]["age"][3] = 1e9
    of_age = [one for one in found(given) if one.column == "age"]
    assert [(one.check, one.site) for one in of_age] == [("outlier", "south")]


@pytest.mark.parametrize("rows", [9, 22])
def test_unit_of_a_site_of_few_rows_is_mended_by_the_exact_factor(rows):
    """Their spread is too uncertain to tell the ratio, and no offset mends it."""
    given = sites(2)
    given["south"] = patients(rows, 7)
    given["south"][0]["weight"] = given["south"][0]["weight"] * 1000
    findings = [one for one in found(given) if one.column == "weight"]
    assert "offset" not in {one.check for one in findings}
    (fix,) = (one.fix for one in findings if (one.check, one.site) == ("units", "south"))
    assert 'data.factors."weight" = 0.001' in fix


def test_values_below_a_limit_of_detection_are_mended_by_its_setting():
    """The column is one of numbers, and half of the limit is taken."""
    given = sites(2)
    for values, outcome in given.values():
        values["troponin"] = np.array(["<5", "<10"], dtype=object)[np.arange(len(outcome)) % 2]
    (fix,) = (one.fix for one in found(given) if one.check == "looks_numeric")
    assert fix.startswith('set data.types."troponin" = "number"')
    assert fix.endswith('set data.below_limit = "half"')


def test_numbers_taken_for_classes_are_refused():
    labels = (np.arange(120) % 60).astype(str)
    given = {name: (values, labels) for name, (values, _) in sites(2, 120).items()}
    finding = found(given)[0]
    assert (finding.level, finding.check) == ("refuse", "many_classes")
    assert "regression" in finding.fix


def test_class_of_few_rows_at_all_sites_is_named():
    given = sites()
    given["north"] = given["north"][0], np.where(np.arange(160) < 6, "gone", given["north"][1])
    checks = {one.check for one in found(given)}
    assert "few_events" in checks


@pytest.mark.parametrize(("num_columns", "is_told"), [(2000, True), (2001, False)])
def test_wide_table_notes_the_checks_that_it_skips(num_columns, is_told):
    """Two thousand columns of ten classes are 20,000 pairs. The first column is the target."""
    outcome = np.repeat([f"c{i}" for i in range(10)], 20)
    columns = {f"{i}": (np.arange(200) * (i + 3) // 7) % 9.0 for i in range(num_columns - 1)}
    told = table_of({"leak": outcome.astype(object), **columns}, outcome, "outcome").profile()
    findings = [one for one in check([("north", told)]) if one.check == "leak"]
    assert [(one.level, one.column) for one in findings] == [
        ("warn", "leak") if is_told else ("note", "")
    ]
    assert is_told or "20,010 pairs of a column and a class" in findings[0].text


def test_levels_change_findings_or_leave_them_out():
    given = sites()
    given["south"][0]["age"] = given["south"][0]["age"] * 365.25
    assert [one.level for one in found(given, units="refuse")] == ["refuse"]
    assert [one.level for one in found(given, units="note")] == ["note"]
    assert found(given, units="off") == ()


def test_findings_are_bounded_and_the_worst_come_first():
    given = {}
    for i in range(MAX_FINDINGS + 20):
        values, outcome = patients(18, i)
        given[f"s{i}"] = values, np.array([str(i)] * 18)
        del outcome
    findings = found(given)
    assert len(findings) == MAX_FINDINGS
    order = ["refuse", "warn", "note"]
    assert sorted(findings, key=lambda one: order.index(one.level)) == list(findings)


def test_profiles_of_earlier_versions_are_checked_as_far_as_they_tell():
    told = [
        (name, replace(table_of(*one, "outcome").profile(), statistics=""))
        for name, one in sites(2).items()
    ]
    assert {one.check for one in check(told)} == {"no_statistics"}
    assert check([("empty", DataProfile(0, 3))]) == ()


def test_sites_with_unlike_classes_are_told_the_remedy():
    """Once, and not where a site differs by chance."""
    given = sites(3)
    values, outcome = given["south"]
    kept = np.flatnonzero((outcome == "dead") | (np.arange(len(outcome)) % 8 == 0))
    given["south"] = {name: column[kept] for name, column in values.items()}, outcome[kept]
    (one,) = [one for one in found(given) if one.check == "unlike_classes"]
    assert (one.level, one.site, one.column) == ("note", "", "outcome")
    assert 'workload.remedy = "scaffold"' in one.text


def test_pairs_of_column_and_class_above_the_bound_take_no_memory():
    """A site of 6,000 columns can name 10,000 classes in its statistics."""
    names = [f"c{i}" for i in range(300)]
    profile = table_of({name: [1.0, 2.0] for name in names}, np.array(["a", "b"])).profile()
    told = json.loads(profile.statistics) | {"class_counts": {str(i): 0 for i in range(100)}}
    told["columns"][0]["association"] = [0.5] * 100
    found = summarise([("north", replace(profile, statistics=json.dumps(told)))])
    assert found.associations == [None]


@pytest.mark.parametrize(("num_classes", "words"), [(6, ()), (7, ("opposite",)), (21, ("alone",))])
def test_checks_that_are_for_fewer_classes_are_noted(num_classes, words):
    """A protection does not go off without a word."""
    labels = np.tile([f"class {number:02}" for number in range(num_classes)], 20)
    features = np.random.default_rng(0).normal(size=(len(labels), 2))
    profile = Table.from_dataset(Dataset(features, labels)).profile()
    found = check([("north", profile), ("south", profile)])
    noted = [one.text for one in found if one.check == "reversed_labels"]
    assert len(noted) == (num_classes > 6)
    assert all(word in noted[0] for word in words)
