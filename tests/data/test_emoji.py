from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genkit.data import emoji as module
from genkit.data.emoji import Emoji, read_emoji_pack
from genkit.data.make_emoji import box_reduce, emoji_pack, main
from genkit.errors import ConfigError

PACK = Path(__file__).parents[2] / "genkit" / "data" / "tables" / "emoji.npz"
COUNTS = {
    "People & Body": 386,
    "Flags": 270,
    "Objects": 264,
    "Symbols": 224,
    "Travel & Places": 218,
    "Smileys & Emotion": 169,
    "Animals & Nature": 159,
    "Food & Drink": 131,
    "Activities": 85,
    "Component": 5,
}


def everything(data: Emoji) -> torch.Tensor:
    return torch.arange(len(data))


def test_the_shipped_pack_is_the_one_that_was_made():
    assert hashlib.sha256(PACK.read_bytes()).hexdigest() == (
        "13921d11cf99c479d0f185facbec4efa200a8373552cb7fcefa65a739e076381"
    )
    assert PACK.stat().st_size <= 1_100_000


def test_counts_by_category_and_names():
    data = Emoji("all")
    assert dict(zip(data.categories, data.category_counts.tolist(), strict=True)) == COUNTS
    assert list(data.categories) == list(COUNTS)  # in order of size
    assert len(data) == 1911 == len(set(data.names)) == len(set(data.code_points))
    assert all(name == name.lower() and name.strip() for name in data.names)
    assert len(set(data.subcategories)) == 99
    assert data.categories[data.label[data.names.index("rocket")]] == "Travel & Places"
    assert data.code_points[data.names.index("rocket")] == "1f680"
    # the one name that the source gives twice
    assert data.code_points[data.names.index("man in tuxedo")] == "1f935-200d-2642-fe0f"
    assert data.code_points[data.names.index("person in tuxedo")] == "1f935"


def test_pixels_that_nothing_covers_are_zeros_and_images_are_not_empty():
    rgba = Emoji("all").rgba(torch.arange(1911))
    hidden = rgba[:, 3:] == 0
    assert int((rgba[:, :3] * hidden).sum()) == 0 and 0.25 < float(hidden.float().mean()) < 0.35
    assert int(rgba[:, 3].flatten(1).amax(1).min()) == 255
    _, uses = rgba.flatten(1).unique(dim=0, return_counts=True)
    assert (int((uses > 1).sum()), int(uses[uses > 1].sum())) == (10, 43)  # emoji that differ by code points alone


def test_every_sample_is_in_range_and_every_label_names_its_category():
    data = Emoji("all", background=(0.2, 0.7, 1.0))
    batch = data[everything(data)]
    assert batch["sample"].dtype == torch.float32 and batch["sample"].shape == (1911, 3, 32, 32)
    assert float(batch["sample"].min()) >= -1.0 and float(batch["sample"].max()) <= 1.0
    assert torch.equal(batch["label"], data.label) and batch["label"].dtype == torch.int64
    for row, name in ((data.names.index("france flag"), "Flags"), (data.names.index("red apple"), "Food & Drink")):
        assert data.categories[data.label[row]] == name


def test_the_flag_of_japan_has_its_colours():
    flag = Emoji.sprite("Japan Flag")
    assert flag[:, 16, 16].tolist() == [237, 27, 47, 255]  # the disc, #ED1B2F in Twemoji
    assert flag[:, 16, 2].tolist() == [238, 238, 238, 255]  # the cloth, #EEE
    assert flag[:, 0, 0].tolist() == [0, 0, 0, 0]


# splits


def test_splits_are_disjoint_and_know_every_category():
    train, test, both = (Emoji(split) for split in ("train", "test", "all"))
    assert not set(train.names) & set(test.names)
    assert sorted(train.names + test.names) == sorted(both.names)
    assert int(test.category_counts.min()) >= 1 and int(train.category_counts.min()) >= 1
    assert torch.equal(train.category_counts + test.category_counts, both.category_counts)
    assert 0.07 < len(test) / len(both) < 0.13  # 0.1 within four standard deviations of 1911 coins
    for holdout in (0.001, 0.999):
        assert int(Emoji("test", holdout=holdout).category_counts.min()) == (1 if holdout < 0.5 else 4)
        assert int(Emoji("train", holdout=holdout).category_counts.min()) >= 1


def test_no_image_is_in_both_splits():
    train, test = (
        {image.tobytes() for image in d.rgba(everything(d)).numpy()} for d in (Emoji("train"), Emoji("test"))
    )
    assert not train & test
    assert torch.equal(Emoji.sprite("norway flag"), Emoji.sprite("svalbard & jan mayen flag"))
    for names in (("spain flag", "ceuta & melilla flag"), ("family: woman, boy", "family: man, girl")):
        assert len({name in Emoji("train").names for name in names}) == 1


def test_a_larger_share_holds_out_what_a_smaller_one_does_and_more():
    small, large = (set(Emoji("test", holdout=h).names) for h in (0.1, 0.3))
    assert small < large


def test_a_split_stays_as_it_is_when_the_pack_grows():
    pack = module.read_emoji_pack()
    whole = module._held_out(pack, 0.1)
    half = torch.arange(0, 1911, 2)
    part = replace(
        pack,
        rgba=pack.rgba[half],
        names=pack.names[::2],
        code_points=pack.code_points[::2],
        label=pack.label[half],
        subcategories=pack.subcategories[::2],
    )
    moved = (module._held_out(part, 0.1) != whole[half]).nonzero().flatten()
    assert all(part.categories[part.label[row]] == "Component" for row in moved)  # three of five: none below a tenth
    assert Emoji("test").names[:3] == ("white smiling face", "dotted line face", "drooling face")


def test_chosen_categories_keep_their_split_order_and_get_labels_without_gaps():
    chosen = Emoji("test", categories=["Food & Drink", "Flags"])
    whole = Emoji("test")
    assert chosen.categories == ("Flags", "Food & Drink")
    names = [whole.categories[k] for k in whole.label]
    assert chosen.names == tuple(n for n, c in zip(whole.names, names, strict=True) if c in chosen.categories)
    assert chosen.label.unique().tolist() == [0, 1]
    rows = torch.tensor([whole.names.index(name) for name in chosen.names])
    assert torch.equal(chosen.rgba(everything(chosen)), whole.rgba(rows))


def test_names_point_at_their_images_in_either_split():
    for split in ("train", "test"):
        data = Emoji(split)
        for row in (0, len(data) // 2, len(data) - 1):
            assert torch.equal(data.rgba(torch.tensor([row]))[0], Emoji.sprite(data.names[row]))
    sprite = Emoji.sprite("rocket")
    sprite.zero_()  # a copy: the pack is shared
    assert int(Emoji.sprite("rocket").sum()) > 0


# made from a small archive

ALPHA = (0, 1, 128, 255)


def picture(seed: int) -> np.ndarray:
    """uint8 (64, 64, 4): random colours under every kind of alpha."""
    generator = np.random.default_rng(seed)
    rgba = generator.integers(0, 256, (64, 64, 4), dtype=np.uint8)
    rgba[..., 3] = np.where(generator.random((64, 64)) < 0.7, generator.choice(ALPHA, (64, 64)), rgba[..., 3])
    rgba[:8, :8, 3] = 0  # hidden, though coloured
    return rgba


def entry(name: str, code: str, category: str, order: int, **changes: str) -> dict:
    facts = {"name": name, "unified": code, "image": f"{code.lower()}.png", "category": category, "sort_order": order}
    return {**facts, "subcategory": f"{category}-x", "short_name": name.lower().replace(" ", "_"), **changes}


ENTRIES = [
    entry("ROCKET", "1F680", "Travel", 3),
    entry("RED APPLE", "1F34E", "Food", 1),
    entry("PEAR", "1F350", "Food", 2),
    entry("PEAR", "1F351", "Food", 4, short_name="green_pear"),
    entry("Åland Flag", "1F1E6-1F1FD", "Travel", 5),
]


def png(rgba: np.ndarray, palette: bool = False) -> bytes:
    out = io.BytesIO()
    image = Image.fromarray(rgba)
    (image.quantize(16, method=Image.Quantize.FASTOCTREE) if palette else image).save(out, "PNG")
    return out.getvalue()


def images() -> dict[str, bytes]:
    """By name; the last one is stored with a palette."""
    return {e["image"]: png(picture(i), palette=i == len(ENTRIES) - 1) for i, e in enumerate(ENTRIES)}


def archive(path: Path, version: str = "16.0.0", entries: list = ENTRIES, pictures: dict | None = None) -> Path:
    package = {"name": "emoji-datasource-twitter", "version": version}
    files = {"package/emoji.json": json.dumps(entries).encode(), "package/package.json": json.dumps(package).encode()}
    for name, data in (images() if pictures is None else pictures).items():
        files[f"package/img/twitter/64/{name}"] = data
    with tarfile.open(path, "w:gz") as out:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def test_making_it_twice_gives_equal_bytes(tmp_path, capsys):
    source = archive(tmp_path / "a.tgz")
    for name in ("x.npz", "y.npz"):
        main([str(source), "--out", str(tmp_path / name)])
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "y.npz").read_bytes()
    size = (tmp_path / "x.npz").stat().st_size
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / n}: {size} bytes" for n in ("x.npz", "y.npz")]


def independent(rgba: np.ndarray) -> np.ndarray:
    """The mean over 2 x 2 pixels in premultiplied alpha, pixel by pixel in rational numbers of float64."""
    out = np.zeros((32, 32, 4), np.uint8)
    for y in range(32):
        for x in range(32):
            block = rgba[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].reshape(4, 4).astype(np.float64)
            alpha = int(np.floor(block[:, 3].mean() + 0.5))
            if alpha:
                out[y, x, :3] = np.floor((block[:, :3] * block[:, 3:]).sum(0) / block[:, 3].sum() + 0.5)
                out[y, x, 3] = alpha
    return out


def test_made_images_agree_pixel_by_pixel_with_an_independent_reduction(tmp_path):
    (tmp_path / "p.npz").write_bytes(emoji_pack(archive(tmp_path / "a.tgz")))
    pack = read_emoji_pack(tmp_path / "p.npz")
    order = [1, 2, 0, 3, 4]  # Unicode's
    assert pack.names == ("red apple", "pear", "rocket", "green pear", "åland flag")
    assert pack.code_points == tuple(ENTRIES[i]["unified"].lower() for i in order)
    assert pack.categories == ("Food", "Travel") and pack.label.tolist() == [0, 0, 1, 0, 1]
    for row, i in enumerate(order):
        stored = np.asarray(Image.open(io.BytesIO(images()[ENTRIES[i]["image"]])).convert("RGBA"))
        assert np.array_equal(pack.rgba[row].permute(1, 2, 0).numpy(), independent(stored)), ENTRIES[i]["name"]
    assert np.array_equal(stored[:8, :8, 3].max(), 0) and int(pack.rgba[:, :, :4, :4].sum()) == 0


def test_hidden_colours_do_not_leak_and_a_plain_mean_would_let_them():
    block = np.zeros((1, 2, 2, 4), np.uint8)
    block[0, 0] = [[200, 100, 0, 255], [0, 255, 255, 0]]  # one seen, one hidden; two more hidden and black
    assert box_reduce(block)[0, 0, 0].tolist() == [200, 100, 0, 64]
    assert block.mean((1, 2))[0].tolist() == [50, 88.75, 63.75, 63.75]
    block[0, :, :, 3] = [[1, 0], [0, 0]]
    assert box_reduce(block)[0, 0, 0].tolist() == [0, 0, 0, 0]  # a quarter of 1/255 rounds to nothing


def test_a_half_transparent_pixel_over_a_background(monkeypatch):
    pack = module.read_emoji_pack()
    rgba = pack.rgba.clone()
    rgba[:, :, 0, 0] = torch.tensor([255, 51, 0, 102], dtype=torch.uint8)  # colour 1, .2, 0 at alpha .4
    rgba[:, :, 0, 1] = torch.tensor([255, 51, 0, 0], dtype=torch.uint8)
    rgba[:, :, 0, 2] = torch.tensor([255, 51, 0, 255], dtype=torch.uint8)
    monkeypatch.setattr(module, "_shipped_pack", lambda: replace(pack, rgba=rgba))
    sample = Emoji("test", background=(0.5, 0.0, 1.0))[torch.tensor([3])]["sample"][0]
    assert sample[:, 0, 0].tolist() == pytest.approx([0.4, -0.84, 0.2], abs=1e-6)  # 2 (.4 c + .6 g) - 1
    assert sample[:, 0, 1].tolist() == [0.0, -1.0, 1.0]
    assert sample[:, 0, 2].tolist() == pytest.approx([1.0, -0.6, -1.0], abs=1e-7)


# refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "tset"}, "split must be one of train, test, all, got 'tset'. Did you mean 'test'"),
        ({"categories": ["Flag"]}, "no category 'Flag'; it is one of People & Body, .* Did you mean 'Flags'"),
        ({"categories": "Flags"}, "categories='Flags'; expected a list"),
        ({"categories": []}, "expected a list with at least one"),
        ({"background": (1, 1)}, r"background=\(1, 1\); expected \(red, green, blue\)"),
        ({"background": (0, 0, 255)}, r"background\[2\]=255; expected a number from 0"),
        ({"holdout": 1.0}, r"holdout=1.0; expected a share in \(0, 1\)"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Emoji(**options)


def test_unknown_names_and_indices_are_named():
    with pytest.raises(ConfigError, match="no emoji is called 'rockett'. Did you mean 'rocket'.*lists all 1911"):
        Emoji.sprite("rockett")
    data = Emoji("test")
    with pytest.raises(ConfigError, match=f"index {len(data)} is out of range: Emoji has {len(data)} samples"):
        data[torch.tensor([0, len(data)])]
    with pytest.raises(ConfigError, match=r"Emoji takes an int64 tensor \(B,\)"):
        data[0]


def damaged(raw: bytes, how: str) -> bytes:
    if how == "cut":
        return raw[: len(raw) // 2]
    if how == "flipped":
        middle = len(raw) // 2
        return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
    with np.load(io.BytesIO(raw)) as arrays:
        streams = {name: lzma.decompress(arrays[name].tobytes()) for name in arrays.files}
    table = json.loads(streams["table"])
    if how == "repeated":
        table["name"][1] = table["name"][0]
    if how == "uneven":
        table["category"].pop()
    if how == "shorter":
        streams["pixels"] = streams["pixels"][:-4]
    if how == "longer":
        streams["pixels"] += bytes(100)
    if how == "format":
        table["format"] = 2
    streams["table"] = json.dumps(table).encode()
    if how == "nonsense":
        streams["table"] = b"\xff{"
    arrays = {name: np.frombuffer(lzma.compress(data), np.uint8) for name, data in streams.items()}
    if how == "half a stream":
        arrays["pixels"] = arrays["pixels"][:-20]
    if how == "no pixels":
        del arrays["pixels"]
    if how == "objects":
        arrays["table"] = np.array([{}], dtype=object)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "BadZipFile"),
        ("flipped", "CRC|LZMAError"),
        ("half a stream", "cut short"),
        ("shorter", "reshape"),
        ("longer", "holds more than 20480 bytes"),
        ("no pixels", "KeyError"),
        ("nonsense", "UnicodeDecodeError"),
        ("format", "not of format 1"),
        ("repeated", "the column name repeats an entry"),
        ("uneven", "unequal lengths"),
        ("objects", "ValueError: Object arrays"),
    ],
)
def test_a_damaged_pack_is_refused(tmp_path, how, message):
    raw = emoji_pack(archive(tmp_path / "a.tgz"))
    (tmp_path / "p.npz").write_bytes(damaged(raw, how))
    with pytest.raises(ConfigError, match=rf"p\.npz is damaged or no pack of emoji .*{message}.*install genkit again"):
        read_emoji_pack(tmp_path / "p.npz")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").touch()
    for name in ("text.npz", "empty.npz"):
        with pytest.raises(ConfigError, match="is damaged or no pack"):
            read_emoji_pack(tmp_path / name)
    with pytest.raises(ConfigError, match="no file .*gone.npz; make it with"):
        read_emoji_pack(tmp_path / "gone.npz")


def test_a_wrong_archive_is_refused(tmp_path):
    whole = archive(tmp_path / "a.tgz")
    (tmp_path / "cut.tgz").write_bytes(whole.read_bytes()[:-2000])
    (tmp_path / "text.tgz").write_text("no archive")
    some = dict(list(images().items())[:-1])
    small = {**images(), "1f680.png": png(picture(0)[:32, :32])}
    broken = {**images(), "1f680.png": b"no image"}
    twins = [*ENTRIES, entry("PEAR", "1F34E", "Food", 6, short_name="green_pear")]
    cases = [
        (tmp_path / "gone.tgz", "no file .*npm pack emoji-datasource-twitter@16.0.0"),
        (tmp_path / "cut.tgz", "no gzipped tar archive, or is cut short"),
        (tmp_path / "text.tgz", "no gzipped tar archive"),
        (archive(tmp_path / "b.tgz", version="15.1.2"), "twitter 15.1.2, expected emoji-datasource-twitter 16.0.0"),
        (archive(tmp_path / "c.tgz", pictures=some), "holds no package/img/twitter/64/1f1e6-1f1fd.png"),
        (archive(tmp_path / "d.tgz", pictures=small), "1f680.png has 32 x 32 pixels, expected 64 x 64"),
        (archive(tmp_path / "e.tgz", pictures=broken), "1f680.png cannot be read"),
        (archive(tmp_path / "f.tgz", entries=twins), "several emoji are called 'green pear'"),
    ]
    for path, message in cases:
        with pytest.raises(ConfigError, match=message):
            emoji_pack(path)
