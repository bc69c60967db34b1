"""The pictures: what is drawn is what was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search import plots
from genkit.plotting import figure_style
from genkit.rewards import FunctionReward
from genkit.samplers import TreeSearch
from genkit.schedulers import VPScheduler
from tests.toy_crystals import alkali_halides

mpl = pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def result():
    scheduler = VPScheduler(prediction_type="sample")

    def denoiser(x, t, cond=None):
        return scheduler.alpha_sigma(t)[0].reshape(-1, 1).to(x) * x

    search = TreeSearch(
        denoiser, scheduler, FunctionReward(lambda x, context: x[:, 0]), num_inference_steps=6, levels=3, shape=(1,),
        slots=4, trees=2,
    )  # fmt: skip
    return search.run(80, torch.Generator().manual_seed(0))


def test_the_layout_has_every_node_of_the_tree_below_its_parent(result):
    spots = plots._layout(result, 1, 10_000)
    store = result.store
    mine = np.flatnonzero((store.tree[: store.size] == 1) & (store.visits[: store.size] > 0))
    assert spots["node"].tolist() == mine.tolist()
    child = spots["parent"] >= 0
    assert (store.parent[spots["node"][child]] == spots["node"][spots["parent"][child]]).all()
    assert (spots["y"][child] == spots["y"][spots["parent"][child]] - 1).all()
    assert (~child).sum() == 1 and spots["node"][~child] == 1
    leaves = np.sort(spots["x"][~np.isin(spots["node"], store.parent[mine])])
    assert (np.diff(leaves) > 0).all()  # no two leaves on one place
    for node in np.unique(spots["parent"][child]):
        below = spots["x"][spots["parent"] == node]
        assert below.min() <= spots["x"][node] <= below.max()


def test_a_part_of_the_tree_keeps_paths_whole(result):
    spots = plots._layout(result, 0, 25)
    count, store = len(spots["node"]), result.store
    assert 15 <= count <= 25 and set(spots["parent"][spots["parent"] >= 0]) <= set(range(count))
    drawn = spots["value"][store.depth[spots["node"]] == result.policy.leaf_depth]
    mine = (store.tree[: store.size] == 0) & (store.depth[: store.size] == result.policy.leaf_depth)
    best = np.sort(store.values[: store.size, 0][mine])[::-1][: len(drawn)]
    np.testing.assert_array_equal(np.sort(drawn)[::-1], best)
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        plots.draw_tree(result, tree=2)


def test_trees_are_drawn(result):
    with figure_style():
        figure = plots.draw_tree(result)
    points = sum(len(c.get_offsets()) for c in figure.axes[0].collections if hasattr(c, "get_sizes"))
    assert points == len(plots._layout(result, 0, 400)["node"])
    pytest.importorskip("plotly")
    drawn = plots.interactive_tree(result)
    assert len(drawn.data[1].x) == points and "visits" in drawn.data[1].text[0]


def test_curves_count_invalid_crystals_as_failures():
    values = torch.tensor([0.1, 0.3, float("nan"), 0.2])
    with figure_style():
        figure = plots.draw_rewards({"arm": values}, better="lower")
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_xdata(), [0.1, 0.2, 0.3])
    np.testing.assert_allclose(line.get_ydata(), [0.25, 0.5, 0.75])  # never 1: one of four is not valid
    with figure_style():
        figure = plots.draw_rewards({"arm": values})
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [0.75, 0.5, 0.25])
    with pytest.raises(ConfigError, match="'higher' or 'lower'"):
        plots.draw_rewards({}, better="best")


def test_fronts():
    points = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.4, 0.4], [0.2, 0.2], [float("nan"), 9.0]])
    with figure_style():
        figure = plots.draw_fronts({"one": points}, ["a", "b"])
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == pytest.approx([0.0, 0.4, 1.0]) and "3 on the front" in line.get_label()
    with pytest.raises(ConfigError, match=r"expected \(n, 2\)"):
        plots.draw_fronts({"one": points[:, :1]}, ["a", "b"])
    pytest.importorskip("plotly")
    drawn = plots.interactive_front(points, ["a", "b"], list("vwxyz"))
    assert [(trace.name, list(trace.text)) for trace in drawn.data] == [("judged", ["y"]), ("front", ["v", "w", "x"])]


def test_crystals_show_the_images_on_the_cells_faces():
    crystals = {name: value[:3] for name, value in alkali_halides(8).items()}
    corner = np.zeros((1, 3))
    assert len(plots._with_images(corner, [11])[0]) == 8  # a corner belongs to eight
    assert len(plots._with_images(np.array([[0.5, 0.5, 0.0]]), [11])[0]) == 2
    assert len(plots._with_images(np.array([[0.5, 0.5, 0.5], [0.99999, 0.5, 0.5]]), [11, 17])[0]) == 3
    assert len(plots._EDGES) == 12
    with figure_style():
        figure = plots.draw_crystals(crystals, ["a", "b", "c"], columns=2)
    assert all(len(axis.patches) >= 2 for axis in figure.axes[:3])
    assert figure.axes[0].get_title().endswith("a")
    with pytest.raises(ConfigError, match="one title each"):
        plots.draw_crystals(crystals, ["a"])
