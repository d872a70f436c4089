import threading

import msgspec
import numpy as np
import pytest

from support.parameter_state import everything, keys_of, pull, push, range_view, send, table
from xain_parameters.errors import Invalid
from xain_parameters.keys import END
from xain_parameters.known import KNOWN_CLOCKS
from xain_parameters.messages import Mark
from xain_parameters.replica import Damaged, Replica
from xain_parameters.specs import Plugin
from xain_parameters.tables.initialisers import Constant, Uniform
from xain_parameters.tables.rules import Adagrad, Adam, Assign

DENSE = table(1, bound=40, dim=3, is_dense=True, update=Adam(0.1))
BOUNDED = table(2, bound=1000, dim=2, update=Adagrad(0.5), init=Uniform(0.5, seed=3))
OPEN = table(3)
TABLES = [DENSE, BOUNDED, OPEN]


@pytest.fixture
def replica():
    return Replica(range_view(1), TABLES, generation=1)


def ones(num_rows, spec):
    return np.ones((num_rows, spec.dim), np.float32)


def push_one(replica, worker="w", key=1, **head):
    """A push of 1 to a row of the open table."""
    return send(replica, worker, push(OPEN, **head), keys_of([key]), ones(1, OPEN))


def value(replica, spec, key):
    return replica.pull(pull(spec), keys_of([key]))[0].tolist()


def test_values_may_come_as_bytes(replica):
    values = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    send(replica, "w", push(DENSE, start=3, stop=5), None, values.reshape(-1).view(np.uint8))
    pulled = replica.pull(pull(DENSE, 2, 6), None)
    assert (pulled != 0).any(axis=1).tolist() == [False, True, True, False]


def test_held_push_of_an_ended_worker_is_dropped_for_good(replica):
    """A worker that comes back goes on at a later clock."""
    push_one(replica, clock=4, is_held=True)
    replica.apply(replica.open(5, {"w": 4}))
    assert value(replica, OPEN, 1) == [0]
    assert push_one(replica, clock=4, is_held=True) is None
    assert value(replica, OPEN, 1) == [0]


def test_held_push_of_an_ended_worker_counts_below_its_ticked_clocks(replica):
    push_one(replica, clock=3, is_held=True)
    replica.apply(replica.open(5, {"w": 4}))
    assert value(replica, OPEN, 1) == [1]


def test_a_push_that_comes_again_changes_nothing(replica):
    head = push(OPEN, clock=2)
    send(replica, "w", head, keys_of([1]), ones(1, OPEN))
    assert replica.prepare("w", head, keys_of([1]), ones(1, OPEN)) is None
    assert replica.prepare("w", push(OPEN, clock=1), keys_of([1]), ones(1, OPEN)) is None
    for clock, part in ((2, 1), (3, 1), (3, 0)):
        assert push_one(replica, clock=clock, part=part) is not None
    assert replica.prepare("w2", head, keys_of([1]), ones(1, OPEN)) is not None


def test_pushes_outside_of_clocks_are_known_by_process_and_part(replica):
    def loose(part, incarnation=1, settled=0):
        process = {"incarnation": incarnation, "settled": settled}
        return push_one(replica, clock=-1, part=part, **process) is not None

    assert [loose(0), loose(2), loose(0), loose(2), loose(1)] == [True, True, False, False, True]
    assert [loose(3, settled=3), loose(2), loose(3)] == [True, False, False]
    assert [loose(0, incarnation=2), loose(0, incarnation=2)] == [True, False]
    with pytest.raises(Invalid, match=r"process of w .*replaced"):
        loose(4)


@pytest.mark.parametrize(
    ("head", "keys", "values", "said"),
    [
        (push(table(9)), [1], [[1.0]], "table number 9, range 1: no such table"),
        (push(BOUNDED), [1, 1000], np.ones((2, 2)), "table 'table2', range 1: key 1000"),
        (push(BOUNDED), [2, 2], np.ones((2, 2)), "table 'table2', range 1: keys .* ascending"),
        (push(OPEN), [3, 2, 1], np.ones((3, 1)), "table 'table3', range 1: keys .* ascending"),
        (push(OPEN, start=1, stop=2), [], np.ones((1, 1)), "table 'table3', range 1: .* no rows"),
        (push(DENSE, start=38, stop=41), [], np.ones((3, 3)), "table 'table1', range 1: rows 38 "),
        (push(DENSE, start=1, stop=3), [], np.ones((1, 3)), "table 'table1', range 1: 2 rows of 3"),
        (push(OPEN), [1], [[np.inf]], "table 'table3', range 1: .* not finite"),
        (push(OPEN), [1], [[np.nan]], "table 'table3', range 1: .* not finite"),
        (push(OPEN, clock=-1, is_held=True), [1], [[1.0]], "table 'table3', .* cannot be held"),
    ],
)
def test_invalid_push_names_table_and_range_and_changes_nothing(replica, head, keys, values, said):
    push_one(replica, part=7)
    before = everything(replica), replica.sequence
    with pytest.raises(Invalid, match=said):
        replica.prepare("w", head, keys_of(keys), np.array(values, np.float32))
    assert (everything(replica), replica.sequence) == before


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_finite_values_are_valid_however_large_and_others_beside_them_are_not(replica, value):
    values = np.full((50, 1), value, np.float32)
    keys = keys_of(range(50))
    assert replica.prepare("w", push(OPEN), keys, values) is not None
    for bad in (np.nan, np.inf, -np.inf):
        values[7] = bad
        with pytest.raises(Invalid, match="not finite"):
            replica.prepare("w", push(OPEN), keys, values)


def test_values_of_another_dtype_are_invalid(replica):
    with pytest.raises(Invalid, match=r".table3., range 1: .*float32 .* 1 float64"):
        replica.prepare("w", push(OPEN), keys_of([1]), np.ones((1, 1)))


def test_pull_of_a_key_of_another_range_is_invalid():
    right = Replica(range_view(4, END // 2, END), TABLES, generation=1)
    with pytest.raises(Invalid, match="table 'table2', range 4: key 499"):
        right.pull(pull(BOUNDED), keys_of([500, 499]))
    with pytest.raises(Invalid, match="'table3', range 4: key 0 "):
        right.pull(pull(OPEN), keys_of([0]))


def test_entries_are_taken_in_their_order_only(replica):
    backup = Replica(range_view(1), [OPEN], generation=1)
    first, second = push_one(replica), push_one(replica, part=1)
    with pytest.raises(Damaged):
        backup.apply(*second)
    backup.apply(*first)
    with pytest.raises(Damaged):
        backup.apply(*first)
    backup.apply(*second)
    assert value(backup, OPEN, 1) == [2]


def test_entry_of_a_table_that_is_not_declared_yet_can_be_applied_later(replica):
    backup = Replica(range_view(1), [], generation=1)
    entry = push_one(replica)
    with pytest.raises(Damaged, match="not been declared"):
        backup.apply(*entry)
    backup.declare(OPEN)
    backup.apply(*entry)
    assert value(backup, OPEN, 1) == [1]


def test_mark_is_an_entry_once_for_each_worker(replica):
    mark = Mark(1, (1, 1), 1, 0, cut=1, clock=3)
    replica.apply(replica.mark("w", mark))
    assert replica.mark("w", mark) is None
    assert replica.mark("w2", mark) is not None


def test_table_that_no_memory_can_hold_is_invalid():
    spec = table(1, bound=1 << 44, dim=8)
    replica = Replica(range_view(1), [spec], generation=1)
    with pytest.raises(Invalid, match="no memory"):
        replica.pull(pull(spec), keys_of([1]))


@pytest.mark.parametrize("bound", [None, 20_000])
def test_pull_of_another_thread_never_sees_garbage_while_a_table_grows(bound):
    """A row is its first values or what was assigned to it, and never goes back."""
    spec = table(1, bound=bound, dim=4, update=Assign(), init=Constant(-1.0))
    replica = Replica(range_view(1), [spec], generation=1)
    order = np.random.default_rng(0).permutation(20_000).astype(np.uint64)
    is_over = threading.Event()
    wrong = []

    def read():
        rng = np.random.default_rng(1)
        latest = np.full(20_000, -1.0)
        while not is_over.is_set():
            keys = rng.choice(20_000, 500, replace=False).astype(np.uint64)
            rows = replica.pull(pull(spec), keys)
            is_good = ((rows == -1) | (rows == keys[:, None])).all()
            went_back = (rows.max(axis=1) < latest[keys]).any()
            latest[keys] = rows.max(axis=1)
            if not is_good or went_back:
                wrong.append(keys)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        keys = np.sort(order[number * 100 : (number + 1) * 100])
        values = np.repeat(keys[:, None], 4, axis=1).astype(np.float32)
        send(replica, "w", push(spec, part=number), keys, values)
    is_over.set()
    reader.join()
    assert not wrong


def test_learner_refuses_entries_and_tiles_that_do_not_follow(replica):
    learner = Replica(range_view(1), TABLES, generation=1, is_whole=False)
    tiles = replica.tiles()
    state = next(tiles)
    entry = push_one(replica)
    with pytest.raises(Damaged):
        learner.apply(*entry)
    with pytest.raises(Damaged, match="not been declared"):
        Replica(range_view(1), [], generation=1, is_whole=False).take(*state)
    learner.take(*state)
    with pytest.raises(Damaged):
        learner.take(*next(tiles))
    learner.apply(*entry)
    for tile in tiles:
        learner.take(*tile)
    assert everything(learner) == everything(replica)


@pytest.mark.parametrize("dim", [1, 64])
def test_open_rows_are_found_wherever_their_keys_collide(dim):
    """Searches of small and of large rows, whose tables have slots of different numbers."""
    spec = table(1, bound=None, dim=dim)
    replica = Replica(range_view(1), [spec], generation=1)
    chance = np.random.default_rng(3)
    keys = np.unique(chance.integers(0, 1 << 63, 30_000, dtype=np.uint64))
    expected = np.arange(1, len(keys) + 1, dtype=np.float32)
    for part, some in enumerate(np.array_split(chance.permutation(len(keys)), 7)):
        some = np.sort(some)
        values = np.repeat(expected[some, None], dim, axis=1)
        send(replica, "w", push(spec, part=part), keys[some], values)
    order = chance.permutation(len(keys))
    assert (replica.pull(pull(spec), keys[order]) == expected[order, None]).all()
    for some in np.array_split(order, 200):  # few keys are searched for in another way
        assert (replica.pull(pull(spec), keys[some]) == expected[some, None]).all()
    assert not replica.pull(pull(spec), keys + np.uint64(1 << 63)).any()


def test_table_that_cannot_be_kept_is_left_out_and_its_requests_are_invalid():
    """A server may lack a plug-in, or memory, that the scheduler does not know of."""
    bad = msgspec.structs.replace(OPEN, number=4, update=Plugin("nosuch"))
    replica = Replica(range_view(1), [OPEN, bad], generation=1)
    assert replica.tables == [OPEN]
    with pytest.raises(Invalid, match="no update rule 'nosuch'"):
        replica.pull(pull(bad), keys_of([1]))
    with pytest.raises(Invalid, match="no update rule 'nosuch'"):
        send(replica, "w", push(bad), keys_of([1]), ones(1, bad))
    push_one(replica)
    assert value(replica, OPEN, 1) == [1]


def test_checkpoint_with_a_table_that_cannot_be_kept_is_not_loaded(replica):
    replica.keeps_cuts = True
    replica.apply(replica.cut(1))
    pieces = [*replica.cuts[1].pieces(), *replica.cuts[1].finish()]
    bad = msgspec.structs.replace(OPEN, update=Plugin("nosuch"))
    other = Replica(range_view(1), [DENSE, BOUNDED, bad], generation=2)
    with pytest.raises(Invalid, match="no update rule 'nosuch'"):
        other.load([pieces])


def test_workers_that_pushed_long_ago_are_forgotten(replica):
    """Each process of a worker may have a name of its own."""
    for clock in range(3 * KNOWN_CLOCKS):
        push_one(replica, f"w{clock}", clock=clock)
        replica.apply(replica.open(clock + 1, {}))
    assert len(replica._known) <= KNOWN_CLOCKS + 1
    assert replica.prepare("w299", push(OPEN, clock=299), keys_of([1]), ones(1, OPEN)) is None
    assert value(replica, OPEN, 1) == [3 * KNOWN_CLOCKS]


def test_open_checkpoint_records_no_push_outside_of_clocks(replica):
    """Senders of such pushes never mark, so a checkpoint that waits for marks would keep all."""
    replica.keeps_cuts = True
    replica.apply(replica.mark("w0", Mark(1, (1, 1), 1, 0, cut=1, clock=3)))
    push_one(replica, "kv", clock=-1, incarnation=1)
    push_one(replica, "w1", key=2, clock=3)
    cut = replica.cuts[1]
    pieces = [*cut.pieces(), *cut.finish()]
    other = Replica(range_view(1), TABLES, generation=2)
    other.load([pieces])
    assert [value(other, OPEN, key) for key in (1, 2)] == [[0], [1]]


@pytest.mark.parametrize("bound", [None, 5_000], ids=["open", "bounded"])
def test_key_lists_that_come_again_find_the_same_rows(bound):
    """After other lists, while the table grows, and in a checkpoint: short lists, whose rows are
    kept, and longer ones."""
    spec = table(1, bound=bound, init=Constant(7.0))
    replica = Replica(range_view(1), [spec], generation=1)
    chance = np.random.default_rng(4)
    every = np.arange(5_000, dtype=np.uint64)
    lists = [np.sort(chance.choice(every, size, replace=False)) for size in (1, 900, 2_000) * 9]
    expected = np.full(len(every), 7.0, np.float32)
    part = 0
    for _ in range(3):
        for keys in lists:
            assert (replica.pull(pull(spec), keys)[:, 0] == expected[keys]).all()
            for _ in range(2):
                send(replica, "w", push(spec, part=part), keys.copy(), ones(len(keys), spec))
                expected[keys] += 1
                part += 1
            backwards = keys[::-1]
            assert (replica.pull(pull(spec), backwards)[:, 0] == expected[backwards]).all()
    replica.keeps_cuts = True
    replica.apply(replica.cut(1))
    for keys in lists:
        send(replica, "w", push(spec, part=part), keys, ones(len(keys), spec))
        part += 1
    restored = Replica(range_view(1), [spec], generation=2)
    restored.load([replica.cuts[1].pieces()])
    assert (restored.pull(pull(spec), every)[:, 0] == expected).all()


@pytest.mark.parametrize("bound", [None, 5_000], ids=["open", "bounded"])
def test_pull_in_any_order_makes_no_push_in_that_order_right(bound):
    spec = table(1, bound=bound)
    replica = Replica(range_view(1), [spec], generation=1)
    keys = keys_of([5, 6, 900])
    send(replica, "w", push(spec), keys, ones(3, spec))
    for wrong in (keys[::-1].copy(), keys_of([5, 5])):
        replica.pull(pull(spec), wrong)
        with pytest.raises(Invalid, match="ascending"):
            replica.prepare("w", push(spec, part=1), wrong, ones(len(wrong), spec))
