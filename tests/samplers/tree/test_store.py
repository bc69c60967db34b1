"""The node store: lists of children against Python lists, narrow states, growth, saving."""

import numpy as np
import pytest
import torch

from genkit.errors import ConfigError
from genkit.samplers.tree.store import NodeStore, StateRows, expand_ranges


def crystal(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "lattice": torch.randn(n, 6, generator=g),
        "types": torch.randint(0, 28, (n, 8), generator=g),
        "mask": torch.rand(n, 8, generator=g) < 0.5,
    }


def test_expand_ranges():
    np.testing.assert_array_equal(expand_ranges(np.array([5, 0, 9]), np.array([2, 0, 3])), [5, 6, 9, 10, 11])
    assert len(expand_ranges(np.array([], int), np.array([], int))) == 0


def test_children_lists_equal_python_lists():
    rng, store = np.random.default_rng(0), NodeStore(3, capacity=4)
    lists = {node: [] for node in range(3)}
    for _ in range(200):
        parents = rng.choice(list(lists), size=rng.integers(1, 7))
        new = store.append(parents, store.depth[parents] + 1, np.zeros(len(parents)), torch.zeros(len(parents), 1))
        store.link(new)
        for parent, node in zip(parents, new, strict=True):
            lists[int(parent)].append(int(node))
            if store.depth[node] < 20:
                lists[int(node)] = []
    nodes = np.array(sorted(lists))
    flat, counts = store.children(nodes)
    assert counts.tolist() == [len(lists[n]) for n in nodes]
    assert flat.tolist() == [c for n in nodes for c in lists[n]]
    assert store.children(nodes[:1])[0].tolist() == lists[0]
    some = np.array([n for n in nodes if lists[n]])
    assert store.first_child(some).tolist() == [lists[n][0] for n in some]
    assert (store.tree[flat] == np.repeat(store.tree[nodes], counts)).all()


def test_states_come_back_as_they_were():
    store, parts = NodeStore(1, capacity=2), [crystal(5, seed) for seed in range(9)]
    for part in parts:
        store.append(np.zeros(5, int), np.ones(5, int), np.zeros(5), part)
    back = store.state_of(np.arange(1, 46))
    for name, value in back.items():
        assert value.dtype == parts[0][name].dtype
        assert torch.equal(value, torch.cat([part[name] for part in parts]))
    assert store.states.rows["types"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(255, torch.uint8), (256, torch.int16), (-1, torch.int16), (40_000, torch.int32), (2**40, torch.int64)],
)
def test_integers_widen_when_they_must(value, dtype):
    rows = StateRows(torch.zeros(1, 2, dtype=torch.int64), 4)
    rows.write(0, torch.tensor([[7, 200]]))
    rows.write(1, torch.tensor([[value, 0]]))
    assert rows.rows[""].dtype == dtype
    assert rows.take(np.array([0, 1])).tolist() == [[7, 200], [value, 0]]


def test_other_fields_or_shapes_are_refused():
    rows = StateRows(crystal(1), 4)
    with pytest.raises(ConfigError, match="fields"):
        rows.write(0, {"lattice": torch.zeros(1, 6)})
    with pytest.raises(ConfigError, match="shape"):
        rows.write(0, crystal(1) | {"lattice": torch.zeros(1, 5)})


def test_no_weight_is_nan():
    store = NodeStore()
    new = store.append(np.zeros(2, int), np.ones(2, int), np.array([np.nan, 0.5]), torch.zeros(2, 1))
    assert store.log_weight[new].tolist() == [-np.inf, 0.5]


def test_changes_rebuild_the_store():
    rng, store, copy = np.random.default_rng(3), NodeStore(2, capacity=4), NodeStore(2)
    saved = store.size
    for seed in range(5):
        count = int(rng.integers(1, 9))
        parents = rng.integers(0, store.size, count)
        new = store.append(parents, store.depth[parents] + 1, rng.normal(size=count), crystal(count, seed))
        store.link(rng.permutation(new))
        touched = rng.integers(0, store.size, 4)
        store.visits[touched] += 1
        store.values[touched] = rng.normal(size=(4, 1))
        store.dirty[touched] = True
        copy.apply(store.changes(saved), crystal(0))
        store.saved()
        saved = store.size
    n = store.size
    for name in ("parent", "depth", "tree", "log_weight", "visits", "values", "num_children"):
        np.testing.assert_array_equal(getattr(copy, name)[:n], getattr(store, name)[:n])
    every = np.arange(n)
    np.testing.assert_array_equal(copy.children(every)[0], store.children(every)[0])
    for name, value in store.state_of(every[2:]).items():
        assert torch.equal(value, copy.state_of(every[2:])[name])


def test_bytes_a_node():
    store = NodeStore()
    state = crystal(1000) | {"coordinates": torch.zeros(1000, 8, 3)}  # 136 bytes
    for _ in range(20):
        start = store.size
        store.link(store.append(np.arange(1000) % start, np.ones(1000, int), np.zeros(1000), state))
    assert store.nbytes / store.size <= 400


def test_too_many_trees_are_refused():
    with pytest.raises(ConfigError, match="trees"):
        NodeStore(2**15)
