"""`chat` and `cache_prompt` beside mlx-lm's own. Run: pytest tests/test_chat.py"""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_npumoe.__main__ import run
from prepared_models import Made, Maker

MESSAGES = ["Sphinx of black quartz, judge my vow. " * 3, "h", "Jackdaws love it. " * 4, "r", "Go, wizards! " * 5]

POLICY = {"--overflow", "--saliency", "--prune-renormalise"}
OURS = {"--prepared", "--device", "--report", "--json", "--quiet"} | POLICY


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tiny: Maker) -> Made:
    return tiny("mixtral")


def stock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, *argv: str) -> str:
    """What mlx-lm's own command prints."""
    monkeypatch.setattr(sys, "argv", [command, *argv])
    importlib.import_module(f"mlx_lm.{command}").main()
    return capsys.readouterr().out


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """The lines a user types; then the input ends."""
    left = iter(lines)

    def answer(_: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)


def shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if "tok/s" not in line and not line.startswith("Experts:")]


def test_chat_shows_what_mlx_lm_shows_and_one_line(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(made.folder), "--max-tokens", "10", "--system-prompt", "Be brief."]
    typed(monkeypatch, *MESSAGES, "q")
    wanted = stock(monkeypatch, capsys, "chat", *argv)
    typed(monkeypatch, *MESSAGES)  # the end of the input is as good as q
    assert run("chat", [*argv, "--prepared", str(made.prepared.folder), "--report", "r.json"]) == 0
    out = capsys.readouterr().out
    assert shown(out) == shown(wanted) and out.count(" tokens · ") == 3
    assert out.splitlines()[-1].startswith("Experts: 2 of 3 layers on interpreter")
    assert json.loads(Path("r.json").read_text())["totals"]["launches"] == 6


def test_chat_as_json(made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(made.folder), "--max-tokens", "10"]
    typed(monkeypatch, *MESSAGES, "q")
    wanted = stock(monkeypatch, capsys, "chat", *argv)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(MESSAGES) + "\n"))
    assert run("chat", [*argv, "--prepared", str(made.prepared.folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [t["generation_tokens"] for t in answer["turns"]] == [10] * 3 and answer["report"]["device"] == "interpreter"
    assert all(line in wanted for turn in answer["turns"] for line in turn["text"].splitlines())


def test_chat_interrupted_still_reports_and_releases(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    argv = ["--model", str(made.folder), "--prepared", str(made.prepared.folder), "--report", "r.json"]
    assert run("chat", argv) == 130
    assert Path("r.json").is_file() and "Traceback" not in capsys.readouterr().err


def test_prompt_cache_files_are_interchangeable(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(made.folder), "--prompt", MESSAGES[0]]
    attached = ["--prepared", str(made.prepared.folder)]
    stock(monkeypatch, capsys, "cache_prompt", *argv, "--prompt-cache-file", "theirs.safetensors")
    assert run("cache_prompt", [*argv, *attached, "--prompt-cache-file", "mine", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_cache_file"] == "mine.safetensors" and result["report"]["totals"]["launches"] == 2
    assert result["prompt_tokens"] > len(MESSAGES[0]) - 2
    assert sorted(p.name for p in Path().iterdir() if p.suffix) == ["mine.safetensors", "theirs.safetensors"]

    def continued(file: str) -> list[str]:
        ask = ["--prompt-cache-file", file, "--prompt", "And then?", "--max-tokens", "8", "--temp", "0"]
        texts = [stock(monkeypatch, capsys, "generate", *ask)]
        assert run("generate", [*ask, *attached]) == 0
        texts.append(capsys.readouterr().out)
        return [text.split("==========")[1] for text in texts]

    mine, theirs = continued("mine.safetensors"), continued("theirs.safetensors")
    assert len(set(mine + theirs)) == 1 and mine[0].strip()
    metadata = [_metadata(file) for file in ("mine.safetensors", "theirs.safetensors")]
    assert metadata[0] == metadata[1]


def _metadata(file: str) -> dict[str, Any]:
    import mlx.core as mx

    arrays, metadata = mx.load(file, return_metadata=True)
    return {"names": sorted(arrays), "shapes": [arrays[n].shape for n in sorted(arrays)], **metadata}


def test_cache_prompt_prints_what_mlx_lm_prints(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(made.folder), "--prompt", MESSAGES[0], "--prompt-cache-file", "c.safetensors"]
    wanted = stock(monkeypatch, capsys, "cache_prompt", *argv)
    assert run("cache_prompt", [*argv, "--prepared", str(made.prepared.folder)]) == 0
    out = capsys.readouterr().out

    def shape(text: str) -> list[str]:
        return [line.split("(")[0].split("memory")[0] for line in text.replace("\r", "\n").splitlines()]

    assert shape(out)[:-1] == shape(wanted) and "Experts: 2 of 3 layers" in out.splitlines()[-1]


@pytest.mark.parametrize("command", ["chat", "cache_prompt"])
def test_every_flag_of_mlx_lm_is_there(command: str) -> None:
    stock_parser = importlib.import_module(f"mlx_lm.{command}").setup_arg_parser()
    ours = importlib.import_module(f"mlx_npumoe.commands.{command}")
    mine = ours.setup_arg_parser(importlib.import_module(f"mlx_lm.{command}"))
    flags, more = ({o for a in p._actions for o in a.option_strings} for p in (stock_parser, mine))
    assert len(flags) > 10 and more - flags == OURS
    assert flags <= more


def test_a_lossy_policy_is_passed_on_and_flags_without_effect_are_refused(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(made.folder), "--max-tokens", "5", "--prepared", str(made.prepared.folder), "--json"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(MESSAGES[0] + "\n"))
    assert run("chat", [*argv, "--overflow", "prune", "--saliency", "gate"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["totals"]["launches"] and report["overflow"] == "prune by gate"
    for command, more in (("chat", []), ("cache_prompt", ["--prompt", "a", "--prompt-cache-file", "c.safetensors"])):
        assert run(command, [*argv[:2], *more, "--saliency", "gate"]) == 2
        assert "--overflow prune only" in capsys.readouterr().err
