"""The HTTP server over loopback, beside mlx-lm's own. Run: pytest tests/test_server.py"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import http_servers
from http_servers import Client, until
from mlx_npumoe import phase, serving
from mlx_npumoe.__main__ import run
from prepared_models import Made, Maker

SENTENCE = "Sphinx of black quartz, judge my vow. "
PROMPTS = [SENTENCE * 3, "How vexingly quick daft zebras jump. " * 5, SENTENCE * 2 + "Go.", "Waltz, bad nymph! " * 7]
MESSAGES = [{"role": "system", "content": "Be brief. " * 5}, {"role": "user", "content": SENTENCE * 2}]
FOREVER = {"max_tokens": 10**6, "logit_bias": {"1": -1000}}  # no end of sequence


@pytest.fixture(scope="module")
def made(tiny: Maker) -> Made:
    return tiny("mixtral")


@pytest.fixture(scope="module")
def client(made: Made) -> Iterator[Client]:
    """One server of ours for the tests that leave it as it was."""
    with http_servers.ours("--model", str(made.folder), "--prepared", str(made.prepared.folder)) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(made: Made) -> dict[str, Any]:
    """What mlx-lm's own server answers."""
    with http_servers.stock("--model", str(made.folder)) as stock:
        chat = stock.post("/v1/chat/completions", messages=MESSAGES, max_tokens=12)[1]
        return {
            "texts": [stock.text(p) for p in PROMPTS],
            "chat": chat["choices"][0]["message"],
            "keys": sorted(stock.complete(PROMPTS[0])),
        }


def launches(client: Client) -> int:
    return client.reports()[-1]["totals"]["launches"]


def test_answers_are_mlx_lms(client: Client, wanted: dict[str, Any], made: Made) -> None:
    assert [client.text(p) for p in PROMPTS] == wanted["texts"]
    status, answer = client.post("/v1/chat/completions", messages=MESSAGES, max_tokens=12)
    assert status == 200 and answer["choices"][0]["message"] == wanted["chat"]
    assert sorted(client.complete(PROMPTS[0])) == wanted["keys"]
    (report,) = client.reports()
    assert report["loaded"] and report["device"] == "interpreter" and report["model"] == str(made.folder)
    assert report["totals"]["launches"] >= 5 and report["totals"]["fallbacks"] == report["totals"]["dropped"] == 0
    assert client.leased() == 0


def test_a_stream_brings_the_same_text_in_pieces(client: Client, wanted: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "stream_options": {"include_usage": True}}
    lines = [line for line in client.stream("/v1/chat/completions", **body) if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert usage["usage"]["completion_tokens"] == 12 and len(chunks) > 3
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == wanted["chat"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_several_clients_at_once_get_their_own_answers(made: Made, wanted: dict[str, Any]) -> None:
    with (
        http_servers.ours("--model", str(made.folder), "--prepared", str(made.prepared.folder)) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        for _ in range(2):  # the second time out of prompt caches
            assert list(pool.map(client.text, PROMPTS)) == wanted["texts"]
        assert client.leased() == 0 and client.reports()[0]["totals"]["fallbacks"] == 0
        assert launches(client) >= 2


def test_steps_of_a_batch_run_in_the_phase_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that flatten a batch of single tokens cannot tell it from a prompt; prompts set a phase of their own."""
    for name in ("next", "next_generated"):
        monkeypatch.setattr(serving.BatchGenerator.__base__, name, lambda _: phase.current())
    batch = object.__new__(serving.BatchGenerator)
    batch._old_wired_limit = None  # read where it is dropped
    assert batch.next() == batch.next_generated() == phase.Phase(generating=True, decoding=True)
    assert phase.current() == phase.Phase()


def test_padding_of_a_batch_takes_no_rows(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts in one batch: the device and MLX get as many rows as the prompts have tokens, no more."""
    arrived: list[Any] = []
    stock_next = serving.BatchGenerator.next

    def when_all_are_there(self: Any) -> Any:
        arrived.append(len(self._unprocessed_sequences))
        return stock_next(self) if arrived[-1] == 4 or max(arrived) == 4 else ([], [])

    monkeypatch.setattr(serving.BatchGenerator, "next", when_all_are_there)
    with (
        http_servers.ours("--model", str(made.folder), "--prepared", str(made.prepared.folder)) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(lambda p: client.text(p, 2), PROMPTS))
        totals = client.reports()[0]["totals"]
    tokens = sum(len(p) - 1 for p in PROMPTS)  # bytes are tokens; the last one of each is decoded
    assert totals["launches"] == 2 * 2  # layers, chunks of 512 rows with padding
    assert totals["rows"] + totals["spilled"] == 2 * tokens * 2  # layers, experts a token


def test_a_prompt_seen_before_comes_from_the_cache(client: Client) -> None:
    prompt = "Pack my box with five dozen liquor jugs. " * 3
    first, before = client.complete(prompt), launches(client)
    second = client.complete(prompt)
    details = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second)]
    assert details[0] < 40 <= details[1] and launches(client) == before
    assert first["choices"] == second["choices"]


def test_one_at_a_time_with_a_seed_gives_the_same_text(client: Client, wanted: dict[str, Any]) -> None:
    """Requests with a seed are not batched by mlx-lm; their loop is another one."""
    prompt = "A quick movement of the enemy will jeopardize six gunboats. " * 2
    before = launches(client)
    assert client.text(prompt, seed=1) == client.text(prompt)
    assert client.text(PROMPTS[1], seed=1) == wanted["texts"][1] and launches(client) > before


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(
    stream: bool, made: Made, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Any] = []
    init = serving.BatchGenerator.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        batches.append(self)

    monkeypatch.setattr(serving.BatchGenerator, "__init__", noted)

    def busy() -> int:
        return sum(len(b._generation_batch) + len(b._prompt_batch) + len(b._unprocessed_sequences) for b in batches)

    with http_servers.ours("--model", str(made.folder), "--prepared", str(made.prepared.folder)) as client:
        if stream:
            lines = client.stream("/v1/completions", prompt=PROMPTS[0], **FOREVER)
            assert [line for line in (next(lines) for _ in range(6)) if line.startswith("data: ")]
            assert busy() == 1
            lines.close()  # type: ignore[attr-defined]
        else:
            connection = client.connect()
            connection.request("POST", "/v1/completions", json.dumps({"prompt": PROMPTS[0], **FOREVER}))
            assert until(lambda: busy() == 1)
            connection.close()
        assert until(lambda: busy() == 0)
        assert client.text(PROMPTS[1]) == wanted["texts"][1]
        assert client.leased() == 0 and client.get("/health")[0] == 200


def test_a_client_that_leaves_during_its_prompt_ends_the_prompt(made: Made) -> None:
    chunks = 120
    argv = ("--model", str(made.folder), "--prepared", str(made.prepared.folder), "--prefill-step-size", "32")
    with http_servers.ours(*argv) as client:
        lines = client.stream("/v1/completions", prompt="x" * 32 * chunks, seed=1, **FOREVER)
        assert any(line.startswith(": keepalive") for line in lines)
        lines.close()  # type: ignore[attr-defined]
        client.text("short", 1)  # waits its turn
        assert 0 < launches(client) < chunks and client.leased() == 0


def test_models_change_by_request(made: Made, tiny: Maker, wanted: dict[str, Any]) -> None:
    other = tiny("qwen3_moe")
    with http_servers.stock("--model", str(other.folder)) as stock:
        text = stock.text(PROMPTS[0])
    with http_servers.ours("--model", str(made.folder), "--prepared", str(made.prepared.folder)) as client:
        assert client.text(PROMPTS[0]) == wanted["texts"][0]
        assert client.server is not None
        first = client.server.models.model._npumoe_engine
        assert client.text(PROMPTS[0], model=str(other.folder)) == text
        assert first.device is None  # closed with its model
        status, answer = client.post("/v1/completions", prompt="x", model="/nonexistent", max_tokens=1)
        assert status == 404 and "No model at /nonexistent" in answer["error"]
        past, now = client.reports()
        assert (past["loaded"], past["device"], now["loaded"], now["device"]) == (False, "interpreter", True, "off")
        assert past["totals"]["launches"] == 2 and "mlx_npumoe.prepare" in now["layers"][0]["reason"]
        assert client.text(PROMPTS[1], model=str(made.folder)) == wanted["texts"][1]
        assert [r["device"] for r in client.reports()] == ["interpreter", "off", "interpreter"]
        assert client.leased() == 0


def test_a_draft_model_changes_no_text(made: Made, wanted: dict[str, Any]) -> None:
    argv = ("--model", str(made.folder), "--draft-model", str(made.folder), "--prepared", str(made.prepared.folder))
    with http_servers.ours(*argv) as client:
        assert [client.text(p) for p in PROMPTS[:2]] == wanted["texts"][:2]
        assert launches(client) > 0 and client.leased() == 0


def test_what_is_wrong_with_a_request_is_json(client: Client, made: Made) -> None:
    for body in ({"max_tokens": -1, "prompt": "x"}, {"messages": [{"role": "user"}]}, {"prompt": ["x", {}]}, {}):
        status, answer = client.post("/v1/completions", **body)
        assert 400 <= status < 600 and answer["error"]
    status, answer = client.post("/v1/chat/completions", messages=[{"role": "user", "content": 3 * [{"type": "x"}]}])
    assert 400 <= status < 600 and answer["error"]
    assert client.get("/v1/nothing")[0] == 404
    assert client.get("/health") == (200, {"status": "ok"})
    models = client.get("/v1/models")[1]["data"]
    assert str(made.folder) in [m["id"] for m in models]
    assert client.text("x", 1) is not None


def test_without_a_model_each_request_names_one(made: Made) -> None:
    with http_servers.ours() as client:
        assert client.reports() == []
        status, answer = client.post("/v1/completions", prompt="x", max_tokens=1)
        assert status == 404 and "names no model" in answer["error"]
        assert client.text("x", 1, model=str(made.folder)) is not None and len(client.reports()) == 1


def test_stopping_answers_those_who_wait(made: Made) -> None:
    with http_servers.ours("--model", str(made.folder)) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/v1/completions", prompt="x", **FOREVER)
        one_by_one = pool.submit(client.post, "/v1/completions", prompt="x", max_tokens=1)
        assert client.server is not None and until(lambda: client.server.models.model is not None)
        assert until(lambda: client.server._http.answering._count == 1)
        client.server.close()
        assert waiting.result(30)[0] == 500 and "stopping" in waiting.result()[1]["error"]
        with pytest.raises(OSError):
            one_by_one.result(30)


def test_a_port_in_use_is_one_sentence(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = run("server", ["--model", str(made.folder), "--port", str(taken.getsockname()[1])])
    out, err = capsys.readouterr()
    assert code == 1 and out == "" and err.count("\n") == 1 and "Cannot listen on 127.0.0.1:" in err


def test_a_model_that_cannot_be_loaded_ends_the_server(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in made.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[: 2000 if file.suffix == ".safetensors" else None])
    code = run("server", ["--model", str(folder), "--port", "0", "--quiet"])
    err = capsys.readouterr().err
    assert code == 1 and err.count("\n") == 1 and "cannot be loaded by mlx-lm" in err


def test_every_flag_of_mlx_lm_is_there() -> None:
    stock = {o for action in serving.stock_parser()._actions for o in action.option_strings}
    mine = {o for action in http_servers.setup_arg_parser()._actions for o in action.option_strings}
    assert len(stock) > 25 and stock < mine and {"--prepared", "--device", "--report"} <= mine - stock
    assert http_servers.setup_arg_parser().get_default("host") == "127.0.0.1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly(number: int, made: Made, tmp_path: Path) -> None:
    argv = ["--model", str(made.folder), "--prepared", str(made.prepared.folder), "--port", "0", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_npumoe", "server", *argv, "--report", str(tmp_path / "r.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 2}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in err and "Listening at http://127.0.0.1:" in err
    written = json.loads((tmp_path / "r.json").read_text())
    assert json.loads(out) == written and written["models"][0]["totals"]["launches"] == 2
