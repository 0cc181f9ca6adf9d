"""The demo model's corpus, tokenizer, sampling, scoring and export. Run: pytest tests/test_demo_model.py (no torch)."""

import json
import math
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_npumoe.benchmarks.demo_model import corpus, evaluate, export, scoring, tokenizer
from mlx_npumoe.benchmarks.demo_model.cleaning import html_text, is_english, overstrikes_removed, tidy
from mlx_npumoe.benchmarks.demo_model.sampling import Sampler
from mlx_npumoe.benchmarks.demo_model.selection import Document, held_out, ngrams, within_size, without_near_duplicates
from mlx_npumoe.benchmarks.demo_model.shape import CONFIG
from mlx_npumoe.benchmarks.demo_model.sources import COMPANIONS, KINDS, gcide_entries, wordnet_glosses


def words(start: int, count: int) -> str:
    return " ".join(f"word{i}" for i in range(start, start + count))


# Cleaning ----------------------------------------------------------------------------------------------------------


def test_html_keeps_paragraphs_lists_and_code_and_drops_navigation():
    page = """<html><head><title>T</title><style>p {}</style></head><body><div class="navheader"><p>Prev</p></div>
    <h1>Head &amp; tail</h1><p>One
    <b>bold</b> line.<p>Unclosed <ul><li><p>first</p></li><li>second</li></ul>
    <pre>  code
    more</pre><table><tr><td>a</td><td>b</td></tr></table><div class="toc x">gone <div>too</div></div></body></html>"""
    text = html_text(page)
    assert "Head & tail\n\nOne bold line.\n\nUnclosed" in text
    assert "* first\n" in text and "\n* second\n" in text
    assert "  code\n    more\n" in text and "a  b\n" in text
    assert not any(lost in text for lost in ("Prev", "gone", "too", "p {}", "<"))


def test_manual_pages_lose_their_overstrikes():
    assert overstrikes_removed("N\bNA\bAM\bME\bE\n    _\bf_\bo_\bo \n") == "NAME\n    foo\n"


def test_tidy_and_english():
    assert tidy("a\tb \r\n\n\n\nc\x07\u00a0d") == "a       b\n\nc d\n"
    assert is_english("plain text") and not is_english("日本語の文書 text") and not is_english(" \n")


# Selection ---------------------------------------------------------------------------------------------------------


def test_ngrams_know_words_and_their_order_only():
    one = ngrams("The quick, brown fox; jumps over the lazy dog.")
    assert len(one) == 2 and len(ngrams("seven words are one word too few")) == 0
    assert (one == ngrams("the QUICK brown fox jumps\nover the lazy   dog")).all()
    assert not set(one.tolist()) & set(ngrams("quick the brown fox jumps over lazy the dog").tolist())


def test_near_duplicates_go_and_what_trains_is_far_from_what_is_held_out():
    names = [f"d{i}" for i in range(400)]
    held = next(n for n in names if held_out(Document("git", n, "")))
    kept = [n for n in names if not held_out(Document("git", n, ""))]
    shared = words(0, 40)
    near = shared.replace("word20", "changed")  # 8 of 33 n-grams differ
    documents = [
        Document(
            "git", kept[0], f"{shared}\n\n{words(100, 60)}\n"
        ),  # stands first, and yet the held-out one has the block
        Document("git", held, f"{shared}\n\n{words(200, 40)}\n"),
        Document("git", kept[1], f"{near}\n\n{words(300, 60)}\n\n{words(300, 60)}\n"),  # repeats itself
        Document("git", kept[2], f"{words(100, 60)}\n\nshort\n"),
    ]
    found = {d.name: d.text for d in without_near_duplicates(documents)}
    assert found == {
        held: documents[1].text,
        kept[0]: words(100, 60) + "\n",
        kept[1]: f"{words(300, 60)}\n\n{words(300, 60)}\n",
    }


def test_split_is_fixed_by_the_name_and_about_one_in_fifty():
    documents = [Document("git", f"page{i}", "") for i in range(20_000)]
    share = sum(map(held_out, documents)) / len(documents)
    assert 0.017 < share < 0.023
    chosen = [i for i, d in enumerate(documents[:200]) if held_out(d)]
    assert chosen == [i for i, d in enumerate(documents[:200]) if held_out(Document("git", d.name, "other text"))]
    assert [held_out(Document("kernel", d.name, "")) for d in documents] != list(map(held_out, documents))


def test_size_of_a_kind_is_bounded():
    documents = [Document("git", f"page{i:02}", "x" * 100) for i in range(50)]
    chosen = within_size(documents, 1050)
    assert len(chosen) == 10 and [d.name for d in chosen] == sorted(d.name for d in chosen)
    assert set(chosen) <= set(within_size(documents, 2000))


def test_corpus_files_read_back(tmp_path):
    documents = [Document(kind, f"{kind}{i}", f"text «{i}»\n") for kind in (*KINDS, *COMPANIONS) for i in range(120)]
    facts = corpus.write(documents, tmp_path)
    back = [
        d for kind in (*KINDS, *COMPANIONS) for part in ("train", "heldout") for d in corpus.read(tmp_path, kind, part)
    ]
    assert sorted(back, key=lambda d: (d.kind, d.name)) == sorted(documents, key=lambda d: (d.kind, d.name))
    assert sum(int(f["bytes"]) for f in facts.values()) == sum(len(d.text.encode()) for d in documents)


# Dictionaries ------------------------------------------------------------------------------------------------------


def test_wordnet_lines_become_glosses(tmp_path):
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        (folder / f"data.{part}").write_text("")
    (folder / "data.adj").write_text(
        "  1 licence | text\n"
        '00001740 00 a 02 able 0 ready_to(p) 0 001 = 05200169 n 0000 | having the means; "able to swim"  \n'
    )
    assert list(wordnet_glosses(tmp_path)) == [
        ("adj-00001740", 'able, ready to (adj): having the means; "able to swim"\n')
    ]


def test_gcide_entries_follow_the_index(tmp_path):
    import gzip

    folder = tmp_path / "usr/share/dictd"
    folder.mkdir(parents=True)
    entries = ["00-database-info\n", 'Abba \\Ab"ba\\\n   Father.\n', "Abbey\n   A house.\n", "Zoo\n   Animals.\n"]
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    lines, start = [], 0
    for entry in entries:
        word = entry.split()[0].strip("\n")
        number = [digits[n // 64] + digits[n % 64] for n in (start, len(entry))]
        lines += [f"{word}\t{number[0]}\t{number[1]}\n"] * 2  # two names of one entry
        start += len(entry)
    (folder / "gcide.index").write_text("".join(lines))
    (folder / "gcide.dict.dz").write_bytes(gzip.compress("".join(entries).encode()))
    assert [name for name, _ in gcide_entries(tmp_path)] == ["abb", "zoo"]
    assert dict(gcide_entries(tmp_path))["abb"] == "".join(entries[1:2]) + "\n" + entries[2]


# Tokenizer ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt():
    return tokenizer.learn(
        [f"The kernel reads page {i} of the file.\n    indented {words(i, 9)}\n" for i in range(200)], 400
    )


def test_tokenizer_returns_every_text(learnt, tmp_path):
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    tokenizer.save(learnt, tmp_path, 1024)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    loaded = load_tokenizer(tmp_path)
    for text in ("The kernel", "  two  spaces \n\n\ttab", "naïve 日本語 🙂", "a.b,c!  don't 2026-11", "\r\n\x00"):
        ids = learnt.encode(text).ids
        assert learnt.decode(ids) == text
        assert loaded.encode(text) == ids and loaded.decode(ids) == text
    assert loaded.eos_token_id == 0 and learnt.encode(tokenizer.END + "a").ids[0] == 0
    assert len(learnt.encode("1234").ids) == 4  # digits are tokens of their own
    assert len(learnt.encode(" kernel").ids) == 1


# Sampling ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampler(tmp_path):
    for number, kind in enumerate(("git", "kernel")):
        np.save(tmp_path / f"{kind}.npy", np.arange(1000, dtype=np.uint16) + 2000 * number)
    return lambda: Sampler(tmp_path, 3, {"git": 0.25, "kernel": 0.75})


def test_sequences_follow_the_mixture_and_do_not_repeat_within_a_pass(sampler):
    made = sampler()
    batch = made.batch(16, 50)
    assert batch.shape == (16, 51) and (np.diff(batch, axis=1) == 1).all()
    assert (batch[:, 0] < 2000).sum() == 4
    kernel = batch[batch[:, 0] >= 2000]
    assert len(set(kernel[:, 0].tolist())) == 12  # of 18 in a pass
    assert all(b - a >= 50 for a, b in pairwise(sorted(kernel[:, 0].tolist())))
    batches = [batch, *(made.batch(16, 50) for _ in range(3))]
    assert made.taken == {"git/50": 16, "kernel/50": 48}
    again = sampler()
    again.taken = {"git/50": 8, "kernel/50": 24}  # as a checkpoint has it
    assert (again.batch(16, 50) == batches[2]).all()


# Scoring -----------------------------------------------------------------------------------------------------------


def test_windows_cover_each_token_once():
    documents = [(list(range(1, 11)), 35), ([7, 8], 5)]
    found = scoring.windows(documents, 4)
    assert [w.tokens for w in found][:2] == [([0, 1, 2, 3], [1, 2, 3, 4]), ([4, 5, 6, 7], [5, 6, 7, 8])]
    assert [t for w in found for t in w.tokens[1]] == [*range(1, 11), 7, 8]
    assert sum(w.bytes for w in found) == pytest.approx(40)
    cut = scoring.windows(documents, 4, most=6)
    assert [t for w in cut for t in w.tokens[1]] == [1, 2, 3, 4, 5, 6] and sum(w.bytes for w in cut) == pytest.approx(
        21
    )
    assert scoring.bits_per_byte(10 * math.log(2), 5) == pytest.approx(2)


# Export ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights():
    """Random weights under the training model's names."""
    mx.random.seed(1)
    width, experts, hidden = (CONFIG[k] for k in ("hidden_size", "num_experts", "moe_intermediate_size"))
    shapes = {"table": (CONFIG["vocab_size"], width), "norm": (width,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.attention_norm": (width,),
            f"layers.{layer}.query_norm": (CONFIG["head_dim"],),
            f"layers.{layer}.key_norm": (CONFIG["head_dim"],),
            f"layers.{layer}.experts_norm": (width,),
            f"layers.{layer}.qkv": (512, width),
            f"layers.{layer}.out": (width, 256),
            f"layers.{layer}.router": (experts, width),
            f"layers.{layer}.gate_up": (experts, 2 * hidden, width),
            f"layers.{layer}.down": (experts, width, hidden),
        }
    return {n: mx.random.normal(s) * (0.06 if len(s) > 1 else 1.0) for n, s in shapes.items()}


def test_exported_folder_is_mlx_lm_s_and_small_enough(weights, learnt, tmp_path):
    """8 bits fit in 10 MB and stay near float16; a checkpoint with an optimiser exports the same weights."""
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    more = {f"model.{n}": w for n, w in weights.items()} | {f"first.{n}": w for n, w in weights.items()}
    mx.save_safetensors(str(tmp_path / "checkpoint.safetensors"), more)
    tokenizer.save(learnt, tmp_path / "tokenizer", 1024)
    sizes = {
        bits: export.export(tmp_path / f"{name}.safetensors", tmp_path / "tokenizer", tmp_path / f"out{bits}", bits)
        for name, bits in (("model", None), ("checkpoint", 8))
    }
    assert sizes[8] < 10e6 < sizes[None]
    tokens = np.random.default_rng(0).integers(0, 4096, (1, 65))
    lost = [evaluate.through_mlx(tmp_path / f"out{bits}")(tokens[:, :-1], tokens[:, 1:]) for bits in sizes]
    assert lost[0].shape == (1, 64)
    assert np.abs(lost[0] - lost[1]).mean() < 0.05 * lost[0].std()


def test_exported_weights_are_the_model_s_own(weights):
    from mlx_lm.models import qwen3_moe

    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
    named = export.renamed(weights)
    assert {n: v.shape for n, v in tree_flatten(model.parameters())} == {n: v.shape for n, v in named.items()}
    layer = "model.layers.2."
    assert mx.array_equal(named[layer + "self_attn.v_proj.weight"], weights["layers.2.qkv"][384:])
    assert mx.array_equal(named[layer + "mlp.switch_mlp.up_proj.weight"], weights["layers.2.gate_up"][:, 64:])


def test_padding_of_windows_does_not_count():
    def score(tokens, targets):
        return np.where(targets == 0, 1e9, 1.0)  # padding would be seen

    found = scoring.windows([([5, 6, 7, 8, 9], 9), ([3], 2)], 4)
    assert evaluate.nats(score, found, 4) == 6
    low, high = evaluate.interval([6.0, 6.0], [6.0, 6.0])
    assert low == high == pytest.approx(1 / math.log(2))


def test_missing_parts_are_said_in_one_sentence(tmp_path, capsys):
    assert export.main(["--work", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert evaluate.main(["--work", str(tmp_path), "--run", "run"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "train command" in said[0] and "train command" in said[1]
