"""The commands, as a user meets them. Run: pytest tests/test_commands.py"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_npumoe.__main__ import COMMANDS, main, run
from prepared_models import Maker

PROMPT = "Sphinx of black quartz, judge my vow. " * 6


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ask(capsys: pytest.CaptureFixture[str], command: str, *argv: str) -> tuple[int, str, str]:
    """Run a command: exit code, stdout, stderr."""
    try:
        code = run(command, argv)
    except SystemExit as e:  # argparse
        code = int(e.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_whole_path_by_commands(tiny: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny("qwen3_moe", 4).folder)
    code, out, _ = ask(capsys, "inspect", "--model", model)
    assert code == 0 and "3 expert layers" in out and "affine 4-bit g32" in out and out.count(" yes") == 3
    code, out, _ = ask(capsys, "calibrate", "--model", model, "--max-tokens", "600", "--out", "p.safetensors")
    assert code == 0 and Path("p.safetensors").is_file() and "600 tokens of shipped corpus" in out
    code, out, _ = ask(
        capsys, "plan", "--model", model, "--profile", "p.safetensors", "--chunk", "512", "--hot", "all", "--explain"
    )
    assert code == 0 and "3 of 3 layers offloaded" in out
    code, out, _ = ask(capsys, "programs", "emit", "--model", model, "--plan", "plan.json", "--out", "programs")
    assert code == 0 and len(list(Path("programs").glob("*.mlpackage"))) == 3
    code, out, _ = ask(
        capsys, "prepare", "--model", model, "--profile", "p.safetensors", "--plan", "plan.json", "--json"
    )
    summary = json.loads(out)
    assert code == 0 and summary["programs"] == 3 and 0 < summary["worst_relative_l2"] < 0.05
    code, out, _ = ask(capsys, "programs", "check", summary["folder"], "--json")
    assert code == 0 and [r["relative_l2"] < 0.05 for r in json.loads(out)] == [True] * 3
    code, out, err = ask(
        capsys, "generate", "--model", model, "--prompt", PROMPT, "--max-tokens", "3", "--report", "r.json"
    )
    assert code == 0 and "Generation: 3 tokens" in out and "2 launches" in out and err == ""
    totals = json.loads(Path("r.json").read_text())["totals"]
    assert totals["launches"] == 2 and totals["rows"] + totals["spilled"] > 0
    code, out, _ = ask(
        capsys, "generate", "--model", model, "--prompt", PROMPT, "--max-tokens", "3", "--json", "--prepared", "none"
    )
    assert code == 0 and json.loads(out)["generation_tokens"] == 3
    report = json.loads(out)["report"]
    assert report["device"] == "off" and report["totals"]["launches"] == 0 and len(report["layers"]) == 3


def test_generate_prints_what_mlx_lm_prints_and_one_line(tiny: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny("mixtral")
    argv = ["--model", str(made.folder), "--prompt", "two\\nlines", "--max-tokens", "8", "--temp", "0"]
    stock = subprocess.run([sys.executable, "-m", "mlx_lm", "generate", *argv], capture_output=True, text=True)
    code, out, _ = ask(capsys, "generate", *argv, "--prepared", str(made.prepared.folder))
    assert code == stock.returncode == 0

    def shape(text: str) -> list[str]:
        return [
            line for line in text.splitlines() if not line.startswith(("Prompt:", "Generation:", "Peak", "Experts:"))
        ]

    assert shape(out) == shape(stock.stdout)
    assert [line.split(":")[0] for line in out.splitlines()[-4:]] == ["Prompt", "Generation", "Peak memory", "Experts"]
    code, out, _ = ask(capsys, "generate", *argv, "--verbose", "F", "--quiet")
    assert code == 0 and out.strip() == "\n".join(shape(stock.stdout)[1:-1]).strip()


def test_generate_takes_every_flag_of_mlx_lm(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib

    stock = importlib.import_module("mlx_lm.generate").setup_arg_parser()
    _, out, _ = ask(capsys, "generate", "--help")
    flags = [option for action in stock._actions for option in action.option_strings]
    assert len(flags) > 30 and all(flag in out for flag in flags)


@pytest.mark.parametrize("cached", ["--draft-model", "--kv-bits", "--max-kv-size", "--prefill-step-size"])
def test_generate_with_mlx_lms_options(cached: str, tiny: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny("mixtral")
    value = (
        str(made.folder) if cached == "--draft-model" else {"--kv-bits": "8", "--max-kv-size": "128"}.get(cached, "64")
    )
    argv = [
        "--model",
        str(made.folder),
        "--prepared",
        str(made.prepared.folder),
        "--prompt",
        PROMPT,
        "--max-tokens",
        "4",
    ]
    code, out, _ = ask(capsys, "generate", *argv, cached, value)
    assert code == 0 and "Generation: 4 tokens" in out and "0 fallbacks" in out
    assert ", 0 launches" not in out


def test_a_prompt_cache_file_works(tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny("mixtral")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "mlx_lm",
            "cache_prompt",
            "--model",
            str(made.folder),
            "--prompt",
            PROMPT,
            "--prompt-cache-file",
            "c.safetensors",
        ],
        check=True,
        capture_output=True,
    )
    code, out, _ = ask(
        capsys, "generate", "--prompt-cache-file", "c.safetensors", "--prompt", "go", "--max-tokens", "2"
    )
    assert code == 0 and "Generation: 2 tokens" in out


USAGE = [
    ("generate", ["--device", "gpu"]),
    ("generate", ["--report", "/nonexistent/x.json"]),
    ("generate", ["--max-tokens", "0"]),
    ("generate", ["--max-kv-size", "-1"]),
    ("generate", ["--temp", "warm"]),
    ("server", ["--device", "gpu"]),
    ("server", ["--port", "70000"]),
    ("server", ["--max-tokens", "0"]),
    ("server", ["--prepared", "somewhere"]),
    ("server", ["--report", "/nonexistent/x.json"]),
    ("chat", ["--max-tokens", "0"]),
    ("chat", ["--prefill-step-size", "0"]),
    ("cache_prompt", ["--prompt", "x"]),
    ("cache_prompt", ["--prompt", "x", "--prompt-cache-file", "/nonexistent/x.safetensors"]),
    ("prepare", []),
    ("prepare", ["--model", "x", "--chunk", "0"]),
    ("prepare", ["--model", "x", "--weights", "int3"]),
    ("calibrate", ["--model", "x", "--out", "p.bin"]),
    ("calibrate", ["--model", "x", "--max-tokens", "many"]),
    ("plan", ["--model", "x"]),
    ("plan", ["--model", "x", "--profile", "y", "--hot", "some"]),
    ("programs", []),
    ("programs", ["emit", "--model", "x"]),
    ("inspect", []),
    ("doctor", ["--heal"]),
    ("manage", ["--burn"]),
]
FAILURES = [
    ("generate", ["--model", "/nonexistent"], "No model at"),
    ("generate", ["--model", "demo:none"], "no demo model"),
    ("generate", ["--model", "nobody/nothing-here"], "No model at nobody/nothing-here"),
    ("server", ["--model", "/nonexistent"], "No model at"),
    ("server", ["--model", "demo:none"], "no demo model"),
    ("chat", ["--model", "/nonexistent"], "No model at"),
    ("cache_prompt", ["--model", "/nonexistent", "--prompt", "x", "--prompt-cache-file", "c"], "No model at"),
    ("prepare", ["--model", "."], "no config.json"),
    ("prepare", ["--model", ".", "--profile", "absent.safetensors"], "no routing profile"),
    ("prepare", ["--model", ".", "--plan", "absent.json"], "absent.json"),
    ("prepare", ["--model", ".", "--device-profile", "absent.json"], "absent.json"),
    ("calibrate", ["--model", "/nonexistent"], "No model at"),
    ("plan", ["--model", ".", "--profile", "absent"], "no routing profile"),
    ("programs", ["check", "."], "not a Prepared folder"),
    ("programs", ["emit", "--model", ".", "--plan", "absent.json", "--out", "o"], "absent.json"),
    ("inspect", ["--model", "."], "no config.json"),
]


@pytest.mark.parametrize(("command", "argv"), USAGE)
def test_wrong_usage_is_exit_2_without_a_traceback(
    command: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ask(capsys, command, *argv)
    assert code == 2 and out == "" and "error:" in err and "Traceback" not in err


@pytest.mark.parametrize(("command", "argv", "message"), FAILURES)
def test_failure_is_exit_1_and_one_sentence(
    command: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = ask(capsys, command, *argv)
    assert code == 1 and out == ""
    assert err.count("\n") == 1 and err.startswith(f"mlx_npumoe.{command}: error: ") and message in err
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == []


def test_doctor_tries_each_thing(capsys: pytest.CaptureFixture[str], private_cache: Path) -> None:
    code, out, _ = ask(capsys, "doctor", "--json")
    findings = {f["what"]: f for f in json.loads(out)}
    assert (
        code == 0 and findings["interpreter"]["state"] == "ok" and "int8 program" in findings["interpreter"]["detail"]
    )
    assert not private_cache.exists()


def test_manage_lists_verifies_and_deletes(
    tiny: Maker, private_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = ask(capsys, "manage")
    assert code == 0 and "empty" in out
    root = private_cache / "prepared"
    root.mkdir(parents=True)
    for name, family in (("first", "mixtral"), ("second", "qwen3_moe")):
        shutil.copytree(tiny(family).prepared.folder, root / name)
    (root / ".second.123.tmp").mkdir()
    assert "in use" in ask(capsys, "manage", "--verify", "--pattern", ".tmp")[1]
    os.utime(root / ".second.123.tmp", (0, 0))
    code, out, _ = ask(capsys, "manage", "--scan")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["leftover", "prepared", "prepared"]
    assert ask(capsys, "manage", "--verify", "--pattern", "first")[0] == 0
    next((root / "first").rglob("weight.bin")).write_bytes(b"x")
    code, out, _ = ask(capsys, "manage", "--verify", "--pattern", "first", "--json")
    assert code == 1 and "wrong size" in json.loads(out)["entries"][0]["fault"]
    monkeypatch.setattr("builtins.input", lambda _: "no")
    assert "Deleted 0 of 1" in ask(capsys, "manage", "--delete", "--pattern", "first")[1]
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert "Deleted 1 of 1" in ask(capsys, "manage", "--delete", "--pattern", "first")[1]
    assert sorted(p.name for p in root.iterdir()) == [".second.123.tmp", "second"]
    assert "Deleted 2 of 2" in ask(capsys, "manage", "--delete", "--pattern", "second", "--yes")[1]


def test_the_list_of_commands() -> None:
    assert main(["--help"]) == 0 and main([]) == 2 and main(["fly"]) == 2
    assert main(["inspect", "--model", "/nonexistent"]) == 1


@pytest.mark.parametrize(
    "command", ["prepare", "calibrate", "plan", "programs", "inspect", "evaluate", "manage", "doctor"]
)
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        f"import sys; from mlx_npumoe.__main__ import main\ntry: main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('mlx_lm', 'coremltools', 'transformers', 'mlx.core') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert len(COMMANDS) == 12


def test_an_interrupted_command_ends_quietly(tiny: Maker, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mlx_npumoe",
            "calibrate",
            "--model",
            str(tiny("mixtral").folder),
            "--out",
            "p.safetensors",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    time.sleep(4)
    process.send_signal(2)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 0) and "Traceback" not in err
    assert not list(tmp_path.glob(".p*"))
