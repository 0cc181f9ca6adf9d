"""Questions with several answers, and what a model answers. Run: pytest tests/test_tasks.py"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_npumoe.__main__ import run
from mlx_npumoe.errors import UsageError
from mlx_npumoe.tasks import BUILT_IN, Question, make
from mlx_npumoe.tasks.harness import run_tasks
from mlx_npumoe.tasks.scoring import compare_answers
from prepared_models import Maker

RULER = [task for task in BUILT_IN if task.startswith("ruler:")]


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("tokens", [60, 200, 1000])
@pytest.mark.parametrize("task", RULER)
def test_a_prompt_is_as_long_as_asked_for(task: str, tokens: int) -> None:
    for question in make(task, 5, tokens, words):
        assert words(question.prompt) <= tokens
        if task != "ruler:words" or tokens < 80:  # the list of words ends with the words
            assert words(question.prompt) > tokens - 12


@pytest.mark.parametrize("task", BUILT_IN)
def test_questions_are_the_same_again_and_others_with_another_seed(task: str) -> None:
    assert make(task, 10, 200, words) == make(task, 10, 200, words) != make(task, 10, 200, words, seed=1)


@pytest.mark.parametrize("task", BUILT_IN)
def test_the_right_choice_may_be_any(task: str) -> None:
    asked = make(task, 60, 200, words)
    assert len({q.prompt for q in asked}) > 50
    assert set(Counter(q.answer for q in asked)) == set(range(len(asked[0].choices)))
    assert all(len(set(q.choices)) == len(q.choices) for q in asked)


def chosen(question: Question) -> str:
    return question.choices[question.answer].strip()


@pytest.mark.parametrize("task", ["ruler:single", "ruler:multikey"])
def test_a_needle_says_the_answer(task: str) -> None:
    for question in make(task, 20, 200, words):
        text, asked = question.prompt.rsplit("\n", 1)
        name = re.search(r"number for (\w+) mentioned", asked)
        assert name and f"The special number for {name[1]} is {chosen(question)}." in text
        present = [choice for choice in question.choices if f" is{choice}." in text]
        assert len(present) == (1 if task == "ruler:single" else len(question.choices))


def test_following_the_variables_gives_the_answer() -> None:
    for question in make("ruler:variables", 20, 200, words):
        value: dict[str, str] = {}
        for name, given in re.findall(r"VAR (\w+) = (VAR \w+|\d+)\.", question.prompt):
            value[name] = value[given.split()[1]] if given.startswith("VAR") else given
        asked = re.search(r"in VAR (\w+) is$", question.prompt)
        assert asked and value[asked[1]] == chosen(question)
        assert set(value.values()) == {choice.strip() for choice in question.choices}


def test_the_most_common_word_is_the_answer() -> None:
    for question in make("ruler:words", 20, 200, words):
        listed = Counter(re.findall(r"\w+", question.prompt.splitlines()[0].removeprefix("Words:")))
        (first, n), (_, second) = listed.most_common(2)
        assert first == chosen(question) and n > second
        assert all(choice.strip() in listed for choice in question.choices)


@pytest.mark.parametrize("task", RULER)
def test_a_prompt_too_short_for_its_question_is_refused(task: str) -> None:
    with pytest.raises(UsageError, match="8 tokens cannot hold"):
        make(task, 1, 8, words)


def test_no_more_glosses_than_there_are() -> None:
    with pytest.raises(UsageError, match="no more than that"):
        make("glosses", 100_000, 0, words)
    assert len(make("glosses", 400, 0, words)) == 400


class Letters:
    """One token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Liking(nn.Module):
    """Expects the byte `letter` next, everywhere; the others are alike."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.row = mx.zeros(256).at[ord(letter)].add(5.0)

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        return mx.broadcast_to(self.row, (*tokens.shape, 256))


@contextlib.contextmanager
def replaced(model: Liking, letter: str) -> Iterator[None]:
    mine, model.row = model.row, Liking(letter).row
    yield
    model.row = mine


def test_a_choice_is_scored_a_byte() -> None:
    asked = [Question("q", (" aa", " bbbb"), 0), Question("q", (" ab", " b"), 1), Question("q", (" cb", " ca"), 0)]
    model = Liking("a")
    found = compare_answers("letters", model, Letters(), asked, replaced(model, "b"), progress=False)
    assert found.accuracy == 1 / 3 and found.reference_accuracy == 2 / 3  # aa, ab, ca; bbbb, b, cb
    assert found.chance == 0.5 and found.questions == 3 and found.agreement == 0
    assert found.counts and "points" in found.line()


def test_a_task_stock_cannot_do_does_not_count() -> None:
    asked = [Question("q", (" a", " b"), i % 2) for i in range(40)]
    found = compare_answers("coin", Liking("a"), Letters(), asked, contextlib.nullcontext(), progress=False)
    assert not found.counts and "not counted" in found.line()
    assert found.change.value == 0 and not found.change.differs and found.agreement == 1


def test_the_command_asks(tiny: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny("mixtral")
    asked = ["--tasks", "ruler:single", "glosses", "--questions", "3", "--length", "200", "--json", "--quiet"]
    options = ["--model", str(made.folder), "--prepared", str(made.prepared.folder)]
    assert run("evaluate", [*options, *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [t["task"] for t in told["tasks"]] == ["ruler:single", "glosses"]
    assert all(t["questions"] == 3 and t["agreement"] == 1 for t in told["tasks"])
    assert told["report"]["totals"]["launches"] > 0 and "perplexity" not in told


def test_unknown_tasks_are_refused(tiny: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny("mixtral")
    options = ["--model", str(made.folder), "--prepared", str(made.prepared.folder)]
    assert run("evaluate", [*options, "--tasks", "ruler:single", "ruler:no", "--quiet"]) == 2
    assert "ruler:no" in capsys.readouterr().err


def local_task(folder: Path) -> None:
    """A multiple-choice task of the harness over a JSON file."""
    rows = [{"q": f"{i} and {i} is", "choices": [str(2 * i), str(i)], "gold": 0} for i in range(1, 5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(
        f"""task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder / "sums.jsonl"}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - metric: acc
"""
    )


def test_the_harness_asks_the_attached_model(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra evaluate")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    local_task(tmp_path)
    made = tiny("mixtral")
    options = ["--model", str(made.folder), "--prepared", str(made.prepared.folder), "--quiet", "--json"]
    assert run("evaluate", [*options, "--tasks", "sums", "--task-folder", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tasks"]
    assert found["task"] == "sums" and 0 <= found["metrics"]["acc,none"] <= 1
    assert found["metrics"] == found["reference_metrics"]
    with pytest.raises(UsageError, match="knows no task"):
        run_tasks(nn.Linear(1, 1), None, ["no_such_task"], folder=tmp_path)
