"""Digests of rules: each change of code and values is in them, and nothing that differs from start
to start."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xain_session.digests import digest_of

HEAD = """
import enum
import functools
import logging
import threading
from decimal import Decimal

import numpy as np


class Rule:
    def __init__(self, **held):
        vars(self).update(held)

    def combine(self, tile, weights):
        return tile[0]


"""

# Name of the change: the script, with OLD where NEW is after the change.
CHANGES = {
    "number": ("rule = Rule(share=OLD)", "0.1", "0.9"),
    "float32": ("rule = Rule(share=np.float32(OLD))", "0.1", "0.9"),
    "float64": ("rule = Rule(share=np.float64(OLD))", "0.1", "0.9"),
    "int64": ("rule = Rule(k=np.int64(OLD))", "3", "4"),
    "bool_": ("rule = Rule(is_strict=np.bool_(OLD))", "True", "False"),
    "array": ("rule = Rule(shares=np.array([0.1, OLD]))", "0.2", "0.3"),
    "array of objects": ("rule = Rule(shares=np.array([None, OLD], dtype=object))", "2", "3"),
    "array-like": (
        """
class Shares:
    def __init__(self, share):
        self._share = share

    def __array__(self, dtype=None, copy=None):
        return np.array([self._share])

rule = Rule(shares=Shares(OLD))
""",
        "0.1",
        "0.9",
    ),
    "decimal": ("rule = Rule(share=Decimal('OLD'))", "0.1", "0.9"),
    "enum": (
        "class Kind(enum.Enum):\n    MEAN = 1\n    MEDIAN = 2\n\nrule = Rule(kind=Kind.OLD)",
        "MEAN",
        "MEDIAN",
    ),
    "list in a mapping": ("rule = Rule(by_site={'ward-1': [1, {'share': OLD}]})", "0.1", "0.9"),
    "key of a mapping": ("rule = Rule(by_site={('ward', OLD): 1})", "1", "2"),
    "item of a set": ("rule = Rule(sites={'a', 'b', ('c', OLD)})", "1", "2"),
    "slot": (
        "class Slotted:\n"
        "    __slots__ = '__share'\n"
        "    def __init__(self):\n"
        "        self.__share = share\n\n"
        "def made(value):\n"
        "    global share\n"
        "    share = value\n"
        "    one = Slotted()\n"
        "    share = None\n"
        "    return one\n\n"
        "rule = made(float(NUMBERS[OLD]))",
        "0",
        "1",
    ),
    "object of the script's own": (
        "class Limit:\n    def __init__(self, most):\n        self.most = most\n\n"
        "rule = Rule(limit=Limit(OLD))",
        "1",
        "2",
    ),
    "class of an object that is held": (
        "class Limit:\n    def most(self):\n        return OLD\n\nrule = Rule(limit=Limit())",
        "1",
        "2",
    ),
    "attribute of the class": (
        "class Other(Rule):\n    share = NUMBERS[0]\n\nOther.share = OLD\nrule = Other()",
        "0.1",
        "0.9",
    ),
    "function that is held": (
        "def clip(x):\n    return np.minimum(x, OLD)\n\nrule = Rule(clip=clip)",
        "1",
        "2",
    ),
    "function of numpy that is held": ("rule = Rule(better=np.OLD)", "minimum", "maximum"),
    "one of two lambdas of a line": (
        "rule = Rule(clip=(lambda x: x, lambda x: 2 * x)[OLD])",
        "0",
        "1",
    ),
    "default of a function": ("def rule(tile, weights, share=NUMBERS[OLD]): ...", "0", "1"),
    "closure": (
        "def made(share):\n    def rule(tile, weights):\n        return share * tile[0]\n"
        "    return rule\n\nrule = made(OLD)",
        "0.1",
        "0.9",
    ),
    "closure in a closure": (
        "def clipping(most):\n    return lambda x: np.minimum(x, most)\n\n"
        "def made(clip):\n    return lambda tile, weights: clip(tile[0])\n\n"
        "rule = made(clipping(OLD))",
        "1",
        "2",
    ),
    "order of two closures": (
        "def clipping(most):\n    return lambda x: np.minimum(x, most)\n\n"
        "rule = Rule(clips=[clipping(NUMBERS[OLD]), clipping(NUMBERS[1 - OLD])])",
        "0",
        "1",
    ),
    "self of a bound method": ("rule = Rule(share=OLD).combine", "0.1", "0.9"),
    "self of a bound method that is held": (
        "rule = Rule(other=Rule(share=OLD).combine)",
        "0.1",
        "0.9",
    ),
    "partial": ("rule = Rule(clip=functools.partial(min, OLD))", "1", "2"),
    "what a decorator does": (
        "def doubled(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*given):\n"
        "        return OLD * function(*given)\n"
        "    return wrapper\n\n"
        "@doubled\n"
        "def rule(tile, weights):\n    return tile[0]",
        "2",
        "3",
    ),
    "base class": (
        "class Base(Rule):\n    def combine(self, tile, weights):\n        return OLD * tile[0]\n\n"
        "class Other(Base):\n    pass\n\nrule = Other()",
        "1",
        "2",
    ),
    "base of the base class": (
        "class First(Rule):\n    share = OLD\n\nclass Second(First):\n    pass\n\n"
        "class Third(Second):\n    pass\n\nrule = Third()",
        "1",
        "2",
    ),
    "static method": (
        "def made(share):\n    class Other(Rule):\n        @staticmethod\n        def get():\n"
        "            return share\n    return Other()\n\nrule = made(OLD)",
        "1",
        "2",
    ),
    "property": (
        "def made(share):\n    class Other(Rule):\n        @property\n        def get(self):\n"
        "            return share\n    return Other()\n\nrule = made(OLD)",
        "1",
        "2",
    ),
    "constant of the module": (
        "SHARE = OLD\n\ndef rule(tile, weights):\n    return SHARE * tile[0]",
        "0.1",
        "0.9",
    ),
    "constant that an inner function reads": (
        "SHARE = OLD\n\ndef rule(tile, weights):\n    return sum(map(lambda x: SHARE * x, tile))",
        "0.1",
        "0.9",
    ),
    "constant array": (
        "SHARES = np.array([OLD])\n\ndef rule(tile, weights):\n    return SHARES * tile[0]",
        "0.1",
        "0.9",
    ),
    "helper": (
        "def clip(x):\n    return np.minimum(x, OLD)\n\n"
        "def rule(tile, weights):\n    return clip(tile[0])",
        "1",
        "2",
    ),
    "cached helper": (
        "@functools.cache\ndef most():\n    return OLD\n\n"
        "def rule(tile, weights):\n    return most()",
        "1",
        "2",
    ),
    "helper of another module": (
        "import digests_helper\n\nSHARE = OLD\ndigests_helper.clip = lambda x: SHARE * x\n\n"
        "def rule(tile, weights):\n    return digests_helper.clip(tile[0])",
        "1",
        "2",
    ),
    "object that holds itself": (
        "rule = Rule(share=OLD)\nrule.me = [rule]\nrule.method = rule.combine",
        "1",
        "2",
    ),
    "functions that call each other": (
        "def even(n):\n    return n == 0 or odd(n - 1)\n\n"
        "def odd(n):\n    return n != OLD and even(n - 1)\n\n"
        "def rule(tile, weights):\n    return even(len(tile))",
        "0",
        "1",
    ),
}

# Each start of these makes something else that means nothing.
UNCHANGED = {
    "set of texts": "rule = Rule(sites={f'ward-{n}' for n in range(50)})",
    "mapping in the order of a set": (
        "rule = Rule(sites={name: 1 for name in {f'ward-{n}' for n in range(50)}})"
    ),
    "set of functions": "rule = Rule(clips={lambda x: x, lambda x: 2 * x, lambda x: 3 * x})",
    "set in code without a file": (
        "exec(compile('def rule(tile, weights):\\n"
        '    return "a" in {"a", "b", "c", "d", "e"}\', \'<cell>\', \'exec\'))'
    ),
    "objects of libraries": (
        "rule = Rule(lock=threading.Lock(), log=logging.getLogger('rule'), what=object(),"
        " chance=np.random.default_rng())"
    ),
    "session of a notebook": (
        "import os\nopened = object() if 'OPENED' in os.environ else None\n\n"
        "def rule(tile, weights):\n    return opened, session"
    ),
    "chain of many helpers": (
        "def helper_0(x):\n    return x\n\n"
        + "".join(f"def helper_{n}(x):\n    return helper_{n - 1}(x)\n\n" for n in range(1, 2000))
        + "def rule(tile, weights):\n    return helper_1999(tile)"
    ),
}

NUMBERS = "NUMBERS = [0.1, 0.9]\n"


def loaded(folder: Path, script: str) -> object:
    """The rule of a script, which is imported as the module `server`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "server.py"
    path.write_text(HEAD + NUMBERS + script, encoding="utf-8")
    return imported(path)


def imported(path: Path) -> object:
    spec = importlib.util.spec_from_file_location("server", path)
    sys.modules["server"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rule


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", None)
    monkeypatch.delitem(sys.modules, "digests_helper", raising=False)
    (tmp_path / "digests_helper.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))


TENSOR = (
    "import torch\n\nrule = Rule(share=torch.tensor([OLD], dtype=torch.KIND, requires_grad=True))"
)
WITH_TORCH = {
    **{kind: (TENSOR.replace("KIND", kind), "0.1", "0.9") for kind in ("float32", "bfloat16")},
    # The weights that a module draws at each start are not in the digest.
    "module": (
        "import torch\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.inner = torch.nn.Linear(2, OLD)\n\n"
        "rule = Rule(net=Net())",
        "1",
        "2",
    ),
}


@pytest.mark.parametrize(
    ("script", "old", "new"),
    [*CHANGES.values(), *WITH_TORCH.values()],
    ids=[*CHANGES, *(f"torch {name}" for name in WITH_TORCH)],
)
def test_change_of_a_rule_is_in_its_digest(script, old, new, tmp_path):
    before = digest_of(loaded(tmp_path / "before", script.replace("OLD", old)))
    again = digest_of(loaded(tmp_path / "again", "\n\n" + script.replace("OLD", old)))
    after = digest_of(loaded(tmp_path / "after", script.replace("OLD", new)))
    assert before == again != after


def test_digests_are_the_same_in_each_process(tmp_path):
    scripts = {name: script.replace("OLD", old) for name, (script, old, _) in CHANGES.items()}
    for number, script in enumerate({**scripts, **UNCHANGED}.values()):
        loaded(tmp_path / f"{number:03}", script)
    program = (
        "import sys\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(tmp_path)!r}]\n"
        "from test_digests import digest_of, imported\n"
        f"for path in sorted(Path({str(tmp_path)!r}).glob('*/server.py')):\n"
        "    print(digest_of(imported(path)))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, **more},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.split()
        for seed, more in (("1", {}), ("2", {"OPENED": "yes"}))
    ]
    assert len(found[0]) == len(scripts) + len(UNCHANGED)
    told = dict(zip([*scripts, *UNCHANGED], zip(*found, strict=True), strict=True))
    assert [name for name, (first, second) in told.items() if first != second] == []
