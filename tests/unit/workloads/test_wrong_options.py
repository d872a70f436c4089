"""Options that a workload cannot be made with."""

from typing import Any

import pytest

from xain_workloads.workload import create

WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "bagging": [
        ({"publish": "no"}, "publish is 'no'"),
        ({"publish": True, "estimator": "os.system"}, "estimator is 'os.system'; choose one of"),
        ({"publish": True, "vote": "loud"}, "vote is 'loud'"),
        ({"fit_rounds": 0}, "fit_rounds is 0"),
        ({"publish": True, "estimators": 0}, "estimators is 0"),
        ({"publish": True, "task": "regression"}, "DecisionTreeClassifier is made for classif"),
        ({"publish": True, "parameters": {"depth": 3}}, "parameters do not fit DecisionTreeC"),
        ({"publish": True, "parameters": {"max_depth": -3}}, "'max_depth' parameter"),
        ({"publish": True, "parameters": {"random_state": 3}}, "set the option seed"),
        ({"publish": True, "parameters": 3}, "parameters is 3; it must be of type dict"),
    ],
    "glm": [
        ({"family": "gamma"}, "family is 'gamma'"),
        ({"family": "poisson", "task": "classification"}, "family is 'poisson'"),
        ({"task": "regression", "reference_class": "a"}, "there are no classes"),
        ({"references": {"ward": 3}}, "must be text"),
        ({"reference_class": 1}, 'is 1; write it as text: reference_class = "1"'),
    ],
    "mlp": [
        ({"hidden_layers": []}, "hidden_layers is"),
        ({"hidden_layers": [0]}, "hidden_layers is 0"),
        ({"hidden_layers": 64}, r"list of whole numbers, such as \[64, 32\]"),
        ({"hidden_layers": [True]}, "must be a list of whole numbers"),
        ({"activation": "step"}, "activation is 'step'"),
        ({"solver": "lbfgs"}, "solver is 'lbfgs'"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"learning_rate_init": 0}, "learning_rate_init is 0"),
        ({"mode": "pipeline"}, "mode is 'pipeline'; choose one of: federated, gradient"),
        ({"mode": "gradient", "momentum": 0.5}, "in mode 'gradient' the coordinator takes"),
        ({"mode": "gradient", "remedy": "proximal"}, "mode 'gradient' has none"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"dropout": 0.5}, "unknown option 'dropout'"),
        ({"proximal_mu": 0.0}, "proximal_mu is 0.0; it must be above 0"),
        ({"remedy": "prox"}, "remedy is 'prox'; choose one of"),
    ],
    "neural": [
        ({"mode": "asynchronous"}, "mode is 'asynchronous'; choose one of: federated, gradient"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"learning_rate": 0}, "learning_rate is 0.0; it must be above 0"),
        ({"momentum": 1}, "momentum is 1.0; it must be below 1"),
        ({"weight_decay": -1}, "weight_decay is -1.0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"mode": "gradient", "optimizer": "adam"}, "in mode 'gradient' the coordinator takes"),
        ({"mode": "gradient", "learning_rate": 0.5}, "set aggregation.options.eta0"),
        ({"builder": "os"}, "builder is 'os'; it must be \"package.module:function\""),
        ({"builder": "a:b", "layers": [{"type": "linear"}]}, "layers is set, and so is builder"),
        ({"stages": 2}, "stages is 2; it is for mode 'pipeline' only"),
        ({"mode": "pipeline", "cuts": [2, 1]}, r"cuts is \(2, 1\); it must rise"),
        ({"mode": "pipeline", "cuts": [3]}, r"cuts is \(3,\); there are 3 layers"),
        ({"mode": "pipeline", "cuts": [1], "stages": 3}, "stages is 3; cuts makes 2 stages"),
        ({"mode": "pipeline", "schedule": "zb"}, "schedule is 'zb'; choose one of: 1f1b, gpipe"),
        ({"mode": "pipeline", "remedy": "proximal"}, "corrects local training"),
        ({"builder": "a.b:c", "remedy": "personal"}, "the last: "),
    ],
    "sgd": [
        ({"e": 3}, "unknown option 'e' of workload 'sgd'; known: alpha, batch_size, class_weight"),
        ({"task": "ranking"}, "task is 'ranking'; choose one of: classification, regression"),
        ({"loss": "squared_error"}, "loss is 'squared_error'; choose one of: hinge"),
        ({"task": "regression", "loss": "log_loss"}, "loss is 'log_loss'"),
        ({"penalty": "l3"}, "penalty is 'l3'"),
        ({"learning_rate": "adaptive"}, "learning_rate is 'adaptive'"),
        ({"eta0": -1}, "eta0 is -1.0; it must be at least 0"),
        ({"eta0": "0.1"}, "eta0 is '0.1'; it must be of type float"),
        ({"eta0": True}, "eta0 is True; it must be of type float"),
        ({"eta0": 10**400}, "eta0 is too large a number"),
        ({"alpha": -1.0}, "alpha is -1.0; it must be at least 0"),
        ({"learning_rate": "optimal", "alpha": 0.0}, "alpha is 0; learning_rate 'optimal'"),
        ({"l1_ratio": 1.5}, "l1_ratio is 1.5; it must be at most 1"),
        ({"fit_intercept": 1}, "fit_intercept is 1; it must be of type bool"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"mode": "gradient", "remedy": "proximal"}, "corrects local training"),
        ({"fit_intercept": False, "remedy": "personal"}, "fit_intercept = false"),
    ],
    "xgboost": [
        ({"eta": 0.0}, "^eta is 0.0; it must be"),
        ({"max_depth": 0}, "^max_depth is 0; it must be"),
        ({"max_depth": 17}, "^max_depth is 17; it must be"),
        ({"subsample": 1.5}, "^subsample is 1.5; it must be"),
        ({"gamma": -1.0}, "^gamma is -1.0; it must be"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [(name, *wrong) for name, known in WRONG.items() for wrong in known],
)
def test_wrong_option_is_named(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        create(name, options)
