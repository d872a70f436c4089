"""Regression without penalty: what sums of sites make of it, and what is told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.learning import by_target, table_of
from xain_workloads.errors import DataError, InvalidContent, NoModel
from xain_workloads.linear.glm.coefficients import SEPARATED, Coefficients, coefficients_of
from xain_workloads.linear.glm.families import null_deviance
from xain_workloads.linear.glm.newton import stepped
from xain_workloads.linear.glm.student import quantile, two_sided
from xain_workloads.linear.glm.workload import GlmWorkload
from xain_workloads.linear.newton import Fit, check_sums
from xain_workloads.model import ENDED, TOLD, Model
from xain_workloads.tables.preprocessing import PreprocessingOptions, prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, fit_centralised, from_metadata, initial_model


@dataclass(frozen=True)
class Reference:
    """Figures of statsmodels, in the order of the terms."""

    coef: tuple[float, ...]
    error: tuple[float, ...]
    p: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    deviance: float
    null: float
    aic: float


# Figures that statsmodels 0.15.0 gives for the rows of study(), with the design matrix
#   x = column_stack([ones, age, dose, sex == "m", ward == "A", ward == "C"])
# and, with the attributes params, bse, pvalues, conf_int(), deviance, null_deviance and aic:
#   logistic     GLM(ill == "ill", x, family=families.Binomial()).fit(tol=1e-14)
#   poisson      GLM(falls, x, family=families.Poisson()).fit(tol=1e-14)
#   linear       OLS(days, x).fit(), with ssr and centered_tss
#   multinomial  MNLogit(stage, x).fit(method="newton", tol=1e-14), with -2 llf and -2 llnull
REFERENCES = {
    "logistic": Reference(
        coef=(-1.74495634, 0.0333657393, 0.0052689233, 0.808806548, -0.17496186, -1.10423128),
        error=(0.736699295, 0.0117360103, 0.00288067907, 0.28973937, 0.384387985, 0.33109813),
        p=(0.0178548723, 0.00446879381, 0.0673912221, 0.00524648625, 0.648986977, 0.000852817877),
        low=(-3.18886042, 0.0103635819, -0.000377103942, 0.240927819, -0.928348466, -1.75317169),
        high=(-0.301052249, 0.0563678968, 0.0109149505, 1.37668528, 0.578424746, -0.455290865),
        deviance=286.245539179,
        null=320.455996965,
        aic=298.245539179,
    ),
    "poisson": Reference(
        coef=(-0.0475757342, 0.00304687073, 0.00186002253, 0.168799416, 0.0920402999, -0.152917452),
        error=(0.284453432, 0.0044266574, 0.000911787974, 0.11054404, 0.1371648, 0.129168223),
        p=(0.867170861, 0.491263535, 0.0413530502, 0.126764009, 0.502207901, 0.236467387),
        low=(
            -0.605094215,
            -0.00562921836,
            7.29509364e-05,
            -0.0478629207,
            -0.176797768,
            -0.406082517,
        ),
        high=(0.509942747, 0.0117229598, 0.00364709412, 0.385461753, 0.360878368, 0.100247614),
        deviance=271.129402453,
        null=282.814591858,
        aic=721.196756376,
    ),
    "linear": Reference(
        coef=(6.52739625, 0.239365518, 0.029832828, 2.58014648, -1.20858142, -5.7548898),
        error=(1.63360192, 0.0256955402, 0.00584899057, 0.647344782, 0.8431883, 0.73924674),
        p=(
            8.64465235e-05,
            9.2964976e-18,
            6.99741365e-07,
            8.99159311e-05,
            0.15309345,
            2.24327406e-13,
        ),
        low=(3.30894947, 0.188741356, 0.0183094179, 1.3047778, -2.86979193, -7.21131946),
        high=(9.74584302, 0.289989681, 0.0413562381, 3.85551516, 0.452629077, -4.29846015),
        deviance=5762.80090445,
        null=10860.9376733,
        aic=1455.94009121,
    ),
    "multinomial": Reference(
        coef=(
            *(-0.575555541, 0.00541530931, 0.000417748843, 0.262405428, 0.141055311, -0.250416611),
            *(1.27731082, -0.0238777331, -0.00302797648, -0.39532802, 0.292178862, 0.86522886),
        ),
        error=(
            *(0.84281346, 0.0130812304, 0.00276323862, 0.321101896, 0.400274202, 0.378173136),
            *(0.81189014, 0.012932858, 0.00310796939, 0.325059877, 0.436872311, 0.370182208),
        ),
        p=(
            *(0.494671362, 0.678892026, 0.879833033, 0.413812436, 0.724540771, 0.507859388),
            *(0.115659614, 0.064850932, 0.329926467, 0.223920228, 0.503625023, 0.019423312),
        ),
        low=(
            *(-2.22743957, -0.0202234311, -0.00499809933, -0.366942723, -0.643467709, -0.991622337),
            *(-0.313964613, -0.049225669, -0.00911948455, -1.03243367, -0.564075134, 0.139685064),
        ),
        high=(
            *(1.07632849, 0.0310540497, 0.00583359702, 0.891753579, 0.925578331, 0.490789115),
            *(2.86858625, 0.00147020285, 0.00306353159, 0.241777631, 1.14843286, 1.59077266),
        ),
        deviance=504.875186105,
        null=526.708491106,
        aic=528.875186105,
    ),
}
TARGETS = {"logistic": "ill", "multinomial": "stage", "linear": "days", "poisson": "falls"}


def study() -> dict[str, NDArray[Any]]:
    n, chance = 240, np.random.default_rng(20)
    age, dose = chance.normal(60, 12, n).round(1), chance.gamma(2, 40, n).round(1)
    sex, ward = chance.choice(["f", "m"], n), chance.choice(list("ABC"), n, p=[0.25, 0.45, 0.3])
    eta = 0.03 * (age - 60) + 0.004 * dose + 0.4 * (sex == "m") - 0.5 * (ward == "C")
    share, noise = chance.random(n), chance.normal(size=n)
    later = np.where(share < 0.6 + 0.1 * np.tanh(eta), "II", "III")
    return {
        "age": age,
        "dose": dose,
        "sex": sex.astype(object),
        "ward": ward.astype(object),
        "ill": np.where(share < 1 / (1 + np.exp(-eta)), "ill", "well"),
        "stage": np.where(share < 0.3, "I", later),
        "days": (20 + 8 * eta + 5 * noise).round(2),
        "falls": chance.poisson(np.exp(0.2 + 0.3 * eta)).astype(float),
    }


def study_of(name: str) -> Table:
    whole = study()
    return table_of(
        {key: whole[key] for key in ("age", "dose", "sex", "ward")}, whole[TARGETS[name]]
    )


def options_of(name: str) -> dict[str, Any]:
    family = {"family": name} if name in ("linear", "poisson") else {}
    reference = {"reference_class": "well"} if name == "logistic" else {}
    return {**family, **reference, "references": {"sex": "f", "ward": "B"}}


def fitted(
    options: dict[str, Any], sites: Sequence[Table], *, scaling: str = "", rounds: int = 25
) -> tuple[Model, int]:
    """The model without a coordinator, and its rounds."""
    workload = create("glm", options)
    chosen = PreprocessingOptions(scaling)
    model = initial_model(workload, [site.profile() for site in sites], chosen)
    prepared = [prepare(model.metadata, site, to_train=True) for site in sites]
    for number in range(rounds):
        updates = [
            workload.train(model, data, epochs=1, epoch_base=number, seed=0).vector
            for data in prepared
        ]
        vector, metadata = stepped(model.vector, model.layout, model.metadata, updates)
        model = replace(model, vector=vector, metadata=metadata)
        if ENDED in metadata:
            return model, number + 1
    return model, rounds


def figures(found: Coefficients, name: str) -> NDArray[np.float64]:
    return np.array([getattr(one, name) for one in found.of])


@pytest.mark.parametrize("num_sites", [1, 3])
@pytest.mark.parametrize("name", REFERENCES)
def test_coefficients_and_intervals_are_those_of_statsmodels(name, num_sites):
    """However unlike the sites are, and though columns are scaled and one category is left out in
    training."""
    model, rounds = fitted(options_of(name), by_target(study_of(name), num_sites))
    expected, found = REFERENCES[name], coefficients_of(model)
    assert rounds <= 8
    assert found.ended.startswith("converged")
    errors = np.array(expected.error)
    for ours, theirs in (("value", "coef"), ("error", "error"), ("low", "low"), ("high", "high")):
        distance = np.abs(figures(found, ours) - getattr(expected, theirs)) / errors
        assert distance.max() < 1e-6, ours
    np.testing.assert_allclose(figures(found, "p"), expected.p, rtol=1e-6)
    assert found.deviance == pytest.approx(expected.deviance, rel=1e-9)
    assert found.null_deviance == pytest.approx(expected.null, rel=1e-8)
    assert found.aic == pytest.approx(expected.aic, rel=1e-9)
    if name != "linear":
        first = found.of[1]
        assert first.ratio == pytest.approx(np.exp([first.value, first.low, first.high]))


@pytest.mark.parametrize("name", REFERENCES)
def test_coefficients_do_not_depend_on_the_scaling(name):
    """Coefficients are told in the units of the columns."""
    data = study_of(name)
    usual = coefficients_of(fitted(options_of(name), [data])[0])
    for scaling in ("robust", "none"):
        other = coefficients_of(fitted(options_of(name), [data], scaling=scaling)[0])
        for figure in ("value", "low"):
            distance = figures(other, figure) - figures(usual, figure)
            assert np.abs(distance / figures(usual, "error")).max() < 1e-5
        assert other.aic == pytest.approx(usual.aic, rel=1e-9)


@pytest.fixture
def data() -> Table:
    return study_of("logistic")


def test_classes_are_compared_with_the_one_that_is_named(data):
    """The coefficients of the other direction have the other sign."""
    usual = coefficients_of(fitted({"reference_class": "well"}, [data])[0])
    other = coefficients_of(fitted({"reference_class": "ill"}, [data])[0])
    assert {(one.outcome, one.reference) for one in other.of} == {("well", "ill")}
    np.testing.assert_allclose(figures(other, "value"), -figures(usual, "value"), rtol=1e-9)
    stages = study_of("multinomial")
    second = coefficients_of(fitted({"reference_class": "II"}, [stages])[0])
    assert {(one.outcome, one.reference) for one in second.of} == {("I", "II"), ("III", "II")}


def test_columns_without_a_coefficient_are_named():
    """A constant column, one that is a sum of others, and a second coding."""
    whole = study()
    age, ward = whole["age"], whole["ward"]
    values = {
        "age": age,
        "dose": whole["dose"],
        "dead": np.full(len(age), 0.1),
        "sum": 2 * age + whole["dose"],
        "ward": ward,
        "code": np.where(ward == "A", "x", "y").astype(object),
    }
    model, _ = fitted({}, by_target(table_of(values, whole["ill"]), 2))
    told = model.metadata[TOLD].splitlines()
    assert told[0] == "Column 'dead' has no coefficient: it is constant."
    assert told[1].startswith("Column 'sum' has no coefficient: it follows from column 'age', colu")
    assert "'code' (x) has no coefficient: it follows from column 'ward' (A)" in told[2]
    found = {one.term: one for one in coefficients_of(model).of}
    assert found["dead"].value is None
    assert "follows from" in found["sum"].note
    assert found["age"].p is not None


@pytest.mark.parametrize("name", ["logistic", "multinomial", "poisson"])
def test_separation_is_named_and_the_others_are_fitted(name):
    """A ward without an outcome; without its rows the other coefficients are the same."""
    data = study_of(name)
    target = np.array(data.target)
    target[data.values["ward"] == "C"] = {"logistic": "well", "multinomial": "II"}.get(name, 0.0)
    spoilt = replace(data, target=target)
    model, rounds = fitted(options_of(name), by_target(spoilt, 2))
    assert rounds < 25
    assert "column 'ward' (C)" in model.metadata[TOLD].lower().replace("(c)", "(C)")
    found = {(one.outcome, one.term): one for one in coefficients_of(model).of}
    rest = spoilt.subset(np.flatnonzero(spoilt.values["ward"] != "C"))
    for one in coefficients_of(fitted(options_of(name), [rest])[0]).of:
        same = found[one.outcome, one.term]
        assert same.value == pytest.approx(one.value, abs=1e-3)
        assert same.error == pytest.approx(one.error, rel=1e-3)
    for (_, term), one in found.items():
        assert (one.note == SEPARATED) == (term == "ward = C")
        assert (one.p is None) == (term == "ward = C")


@pytest.mark.parametrize("name", ["logistic", "multinomial"])
def test_classes_that_columns_tell_for_every_row_end_the_fit(name):
    """No coefficient is finite, which is told and not shown as a result."""
    data = study_of(name)
    age = data.values["age"]
    parts = np.digitize(age, [60.0] if name == "logistic" else [55.0, 65.0])
    target = np.array(["I", "II", "III"])[parts]
    model, rounds = fitted({}, by_target(table_of(dict(data.values), target), 2))
    assert rounds < 25
    assert model.metadata[ENDED].startswith("stopped: the columns together tell the class of every")
    assert model.metadata[TOLD].startswith("The columns together tell the class of every row")
    found = coefficients_of(model)
    assert {(one.note, one.error) for one in found.of} == {(SEPARATED, None)}


def test_rows_without_a_category_are_a_level_of_their_own(data):
    """A missing category counts as a category with a name of its own."""
    ward = data.values["ward"].copy()
    ward[::9] = None
    named = np.where(np.arange(len(ward)) % 9 == 0, "none", ward).astype(object)
    with_gaps = replace(data, values={**data.values, "ward": ward})
    complete = replace(data, values={**data.values, "ward": named})
    gaps = coefficients_of(fitted(options_of("logistic"), by_target(with_gaps, 2))[0])
    names = coefficients_of(fitted(options_of("logistic"), by_target(complete, 2))[0])
    assert gaps.of[-1].level == "other or missing"
    for figure in ("value", "error"):
        np.testing.assert_allclose(figures(gaps, figure), figures(names, figure), rtol=1e-6)


def test_a_step_too_far_is_halved():
    """One huge count lets the first steps of Poisson regression overshoot."""
    chance = np.random.default_rng(3)
    x = chance.normal(size=200)
    counts = chance.poisson(np.exp(2 * x)).astype(float)
    counts[0] = 1e6
    model, rounds = fitted({"family": "poisson"}, [table_of({"x": x}, counts)])
    assert rounds < 25
    assert model.metadata[ENDED].startswith("converged")


def test_a_perfect_line_ends_too():
    x = np.arange(30.0)
    model, rounds = fitted({"family": "linear"}, [table_of({"x": x}, 2 * x + 1)])
    assert rounds <= 4
    assert [one.value for one in coefficients_of(model).of] == pytest.approx([1, 2])


def test_numbers_are_not_cut_off():
    """A coefficient is of the column as it is, also where a value is far from all others."""
    chance = np.random.default_rng(4)
    x = chance.normal(size=300)
    x[0] = 40.0
    y = 3 * x + chance.normal(size=300)
    model, _ = fitted({"family": "linear"}, [table_of({"x": x}, y)])
    slope, intercept = np.polyfit(x, y, 1)
    assert [one.value for one in coefficients_of(model).of] == pytest.approx([intercept, slope])


@pytest.mark.parametrize("name", REFERENCES)
def test_predictions_are_those_of_the_estimator_of_scikit_learn(name):
    data = study_of(name)
    model, _ = fitted(options_of(name), [data])
    workload = from_metadata(model.metadata)
    features = prepare(model.metadata, data).features
    estimator = workload.to_sklearn(model)
    predicted = workload.predict(model, features)
    if data.task == "regression":
        np.testing.assert_allclose(predicted, estimator.predict(features), rtol=1e-12)
        return
    assert predicted.tolist() == estimator.predict(features).tolist()
    shares = workload.probabilities(model, features)
    np.testing.assert_allclose(shares, estimator.predict_proba(features), rtol=1e-9)


def test_fit_on_one_machine_is_that_of_all_sites(data):
    central = fit_centralised(create("glm", options_of("logistic")), data, epochs=1, seed=0)
    model, _ = fitted(options_of("logistic"), by_target(data, 3))
    np.testing.assert_allclose(central.vector, model.vector, rtol=1e-6, atol=1e-9)


def test_another_set_of_rows_is_not_compared_with_the_last(data):
    """A site that is lost changes the deviance; the fit goes on with the rows of the others."""
    first, second = by_target(data.subset(np.arange(200)), 2)
    workload = create("glm")
    model = initial_model(workload, [first.profile(), second.profile()])
    for sites in ([second, first], *[[data]] * 9):
        updates = [
            workload.train(model, prepare(model.metadata, one), epochs=1, epoch_base=0, seed=0)
            for one in sites
        ]
        vectors = [one.vector for one in updates]
        vector, metadata = stepped(model.vector, model.layout, model.metadata, vectors)
        model = replace(model, vector=vector, metadata=metadata)
    assert ENDED in model.metadata
    assert coefficients_of(model).rows == 240


def test_sites_with_too_few_rows_send_no_sums(data):
    """Sums of fewer rows than parameters would tell each row, unless the site allows it."""
    workload = create("glm")
    assert isinstance(workload, GlmWorkload)
    model = initial_model(workload, [data.profile()])
    few = prepare(model.metadata, data.subset(np.arange(6)))
    with pytest.raises(DataError, match=r"8 parameters, and sums over 6 rows .*min_known = 1$"):
        workload.few_rows(model, few, 5)
    assert workload.few_rows(model, few, 1) == []
    some = prepare(model.metadata, data.subset(np.arange(9)))
    assert workload.few_rows(model, some, 5) != []


def test_wrong_updates_are_refused(data):
    workload = create("glm")
    model = initial_model(workload, [data.profile()])
    update = workload.train(
        model, prepare(model.metadata, data), epochs=1, epoch_base=0, seed=0
    ).vector
    check_sums(update, model.layout)
    fit = Fit.of(update, model.layout)
    spoilt = {
        "no number": replace(fit, score=fit.score * np.nan),
        "above": replace(fit, deviance=1e200),
        "deviance": replace(fit, deviance=-1e9),
        "rows": replace(fit, rows=0.5),
        "negative": replace(fit, information=-fit.information),
        "coefficients": replace(fit, point=fit.point + 1),
    }
    for words, one in spoilt.items():
        with pytest.raises(InvalidContent, match=words.replace("no number", "not finite")):
            check_sums(one.to_vector(), model.layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference_class": "dead"}, "the classes are: 'ill', 'well'"),
        ({"references": {"ward": "Z"}}, "categories are: 'A', 'B', 'C'"),
        ({"references": {"age": "60"}}, "'age', which is no column of categories"),
    ],
)
def test_references_must_be_there(options, message):
    with pytest.raises(DataError, match=message):
        initial_model(create("glm", options), [study_of("logistic").profile()])


def test_models_without_coefficients_say_so():
    profiles = [study_of("logistic").profile()]
    with pytest.raises(NoModel, match="'sgd' has no coefficients"):
        coefficients_of(initial_model(create("sgd"), profiles))
    with pytest.raises(NoModel, match="follow the first round"):
        coefficients_of(initial_model(create("glm"), profiles))


@pytest.mark.parametrize("family", ["logistic", "poisson"])
def test_counts_that_no_rows_have_stop_no_report(family):
    """A wrong update of one site is in the sums that the coefficients are told from."""
    assert null_deviance(family, [-3.0, 0.0, 0.0], 2.0) == 0.0


def test_negative_counts_are_refused():
    workload = create("glm", {"family": "poisson"})
    data = table_of({"x": np.arange(9.0)}, np.arange(9.0) - 1)
    model = initial_model(workload, [data.profile()])
    with pytest.raises(DataError, match="below 0"):
        workload.train(model, prepare(model.metadata, data), epochs=1, epoch_base=0, seed=0)


@pytest.mark.parametrize("df", [1.0, 2.5, 7.0, 234.0, 1e6])
def test_students_t_is_that_of_scipy(df):
    from scipy import stats

    for value in (0.0, 0.3, 1.9, 6.0, 40.0):
        assert two_sided(value, df) == pytest.approx(2 * stats.t.sf(value, df), rel=1e-9)
    assert quantile(0.975, df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-8)
    assert two_sided(1.0, inf) == pytest.approx(2 * stats.norm.sf(1.0))
