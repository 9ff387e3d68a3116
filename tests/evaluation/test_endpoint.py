"""`evaluate --url`: a server's answers score as the model's own, and what a server may do wrong is one line."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from conftest import accel_sft
from models import Sums
from reference_job import layout
from served_model import Served, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.evaluation import endpoint as client
from accel_sft.evaluation import served as evaluation
from accel_sft.evaluation.endpoint import Endpoint
from accel_sft.io.run_dir import RunDir

SECRET = "sk-a-secret"
CHAT = [{"role": "user", "content": "31="}]
ARGUMENTS = ("evaluate", "math", "--validation-examples", "7", "--train-examples", "500", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def run(launched):
    return layout(launched, "plain")


@pytest.fixture
def served(run, monkeypatch):
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.01)
    final = str(run.run_dir / "final")
    return Served(AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final))


def test_a_server_scores_as_the_run_scored_itself(run, served, tmp_path):
    served.form, served.names = "plain", ("one", "other")
    with serving(served) as url:
        unnamed = accel_sft(*ARGUMENTS, "--url", url)
        done = accel_sft(*ARGUMENTS, "--url", url, "--model", "other", run_dir=tmp_path / "out")
    assert f"Error: --url {url}: the server has one, other; name one with --model" in unnamed.output
    assert done.status == 0, done.output
    samples = [json.loads(line) for line in (tmp_path / "out/samples-tuned.jsonl").read_text().splitlines()]
    assert samples == RunDir(run.run_dir).read_samples(6)
    expected, result = run.result()["after"], done.result()
    assert (result["model"], result["generate_with"]) == ("other", url)
    assert {name: result["after"][name] for name in ("accuracy", "format_rate")} == {
        name: expected[name] for name in ("accuracy", "format_rate")
    }
    bodies = [body for path, _, body in served.asked if path == "/v1/chat/completions"]
    assert {body["model"] for body in bodies} == {"other"}
    assert {*map(len, (body["messages"] for body in bodies))} == {2}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 6 for body in bodies)


def test_the_key_goes_into_the_header_and_nowhere_else(served, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", SECRET)
    with serving(served) as url:
        assert Endpoint(url, None, "OTHER_KEY").model == "tuned"
        assert served.asked[-1][1]["Authorization"] == f"Bearer {SECRET}"
        served.status = [418]
        with pytest.raises(UserError, match=r"answered 418 \(no: Bearer \*\*\*\)"):
            Endpoint(url, None, "OTHER_KEY")
        assert Endpoint(url, None).model == "tuned"
        assert "Authorization" not in served.asked[-1][1]
    with pytest.raises(UserError, match="--key-from NO_KEY: this environment variable is not set"):
        Endpoint(url, None, "NO_KEY")
    monkeypatch.setenv("OTHER_KEY", f"{SECRET}\n")
    with pytest.raises(UserError, match="OTHER_KEY: the key has characters that no header may have") as error:
        Endpoint(url, None, "OTHER_KEY")
    assert SECRET not in str(error.value)


def test_a_busy_server_is_asked_again_and_a_refusal_is_final(served):
    with serving(served) as url:
        endpoint = Endpoint(url, None)
        served.status = [429, 503, 0, 500]
        assert endpoint.chat(CHAT, 3).tokens
        assert [path for path, _, _ in served.asked[1:]] == ["/v1/chat/completions"] * 5
        served.asked.clear()
        served.status = [401]
        with pytest.raises(UserError, match=r"401 \(no: None\); give the server's key in \$ACCEL_SFT_API_KEY"):
            endpoint.chat(CHAT, 3)
        served.status = [302]
        with pytest.raises(UserError, match=r"redirects to http://127.0.0.1:9/v1, which is not followed"):
            endpoint.chat(CHAT, 3)
        served.status = [404]
        with pytest.raises(UserError, match="the server answered 404"):
            endpoint.chat(CHAT, 3)
        assert len(served.asked) == 3
        served.status = [502] * 9
        with pytest.raises(UserError, match=f"answered 502 after {client.RETRIES + 1} tries"):
            endpoint.chat(CHAT, 3)
        assert len(served.asked) == 3 + client.RETRIES + 1


def test_silence_nobody_and_nonsense_are_one_line_each():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(UserError, match=r"no answer within 0.2 s; .* --timeout gives it longer"):
            Endpoint(address, None, timeout=0.2)

        def nonsense():
            for _ in range(2):  # the first is the silent request's
                connection = silent.accept()[0]
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwhat")

        answering = threading.Thread(target=nonsense, daemon=True)
        answering.start()
        with pytest.raises(UserError, match="the answer is no JSON; is it an OpenAI-compatible server"):
            Endpoint(address, None)
        answering.join()
    with pytest.raises(UserError, match=r"cannot be reached .*; is the server running there"):
        Endpoint(address, None)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("localhost:8000", "expected an address such as http://127.0.0.1:8000/v1"),
        ("file:///etc/passwd", "expected an address"),
        ("http://host:port/v1", "expected an address"),
        ("http://host/v1?key=1", "expected an address"),
        ("http://me:sk-a-secret@host/v1", "a key or password in an address is shown by many programs"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(url, problem):
    with pytest.raises(UserError, match=problem) as error:
        Endpoint(url, "tuned")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"url": None}, "--model: a value is needed"),
        ({"url": None, "model": "m", "key_from": "K"}, "--key-from: goes with --url"),
        ({"base": "auto", "dtype": "float32"}, "a server has its own weights and settings; leave --base, --dtype out"),
        ({"timeout": 0}, "--timeout 0: must be at least 1"),
    ],
)
def test_settings_that_do_not_go_with_a_server_are_refused(more, problem):
    (found,) = EvaluateConfig(**{"url": "http://127.0.0.1:1/v1", **more}).problems()
    assert problem in found


def test_what_a_server_is_not_asked_is_refused(served):
    class Calls(Sums):
        def target(self, example):
            return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]

    class Loss(Sums):
        main_metric = "eval_loss"

    assert evaluation.problems(Loss()) == [
        "--url: the task's metric is eval_loss, which servers do not tell; choose a metric of answers"
    ]
    with serving(served) as url:
        backend = evaluation.ServedBackend(Endpoint(url, None), Calls(), [1], None)
        with pytest.raises(UserError, match="validation example 0 is answered by calling a tool"):
            backend([evaluation.Encoded(0, [], 0)], 3)
        assert [path for path, _, _ in served.asked] == ["/v1/models"]
