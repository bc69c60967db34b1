"""A user's own images: order, squares, values, and what is refused."""

import numpy as np
import pytest
import torch

from genkit.data import ImageFolder
from genkit.errors import ConfigError

Image = pytest.importorskip("PIL.Image")


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.astype(np.uint8)).save(path)


def test_images_are_centred_squares_reduced_by_means(tmp_path):
    """A 4 x 8 image whose middle square has blocks of 2 x 2 known values: the outer columns are cut off."""
    image = np.full((4, 8, 3), 255)
    image[:, 2:6] = np.kron(np.array([[0, 60], [120, 180]]), np.ones((2, 2)))[..., None]
    save(tmp_path / "b" / "1.png", image)
    save(tmp_path / "a" / "2.png", np.zeros((2, 2, 3)))
    data = ImageFolder(tmp_path, 2)
    assert data.classes == ("a", "b") and len(data) == 2
    batch = data[torch.tensor([1, 0])]
    assert batch["label"].tolist() == [1, 0]
    expected = torch.tensor([[0.0, 60.0], [120.0, 180.0]]) / 127.5 - 1.0
    torch.testing.assert_close(batch["sample"][0], expected.expand(3, 2, 2))
    assert bool((batch["sample"][1] == -1).all())


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        ImageFolder(tmp_path / "none", 8)
    with pytest.raises(ConfigError, match="no folders"):
        ImageFolder(tmp_path, 8)
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="'a' has no image"):
        ImageFolder(tmp_path, 8)
    (tmp_path / "a" / "x.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"x\.png cannot be read"):
        ImageFolder(tmp_path, 8)[torch.tensor([0])]
    with pytest.raises(ConfigError, match="out of range|index"):
        ImageFolder(tmp_path, 8)[torch.tensor([3])]
