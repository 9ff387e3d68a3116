"""`evaluate --url`: a server's answers score as the model's own, and what a server may do wrong is one line."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from accelerate import Accelerator
from click.testing import CliRunner
from conftest import accel_sft
from models import Sums
from reference_job import layout
from served_model import Served, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.cli.group import cli
from accel_sft.evaluation import endpoint as client
from accel_sft.evaluation import evaluator as evaluation
from accel_sft.evaluation.endpoint import Endpoint, EndpointError
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
        done = accel_sft(*ARGUMENTS, "--url", url, "--model", "other", run_dir=tmp_path / "out")
    assert done.status == 0, done.output
    samples = [json.loads(line) for line in (tmp_path / "out/samples-tuned.jsonl").read_text().splitlines()]
    assert samples == RunDir(run.run_dir).read_samples(6)
    expected, result = run.result()["after"], done.result()
    assert (result["model"], result["url"]) == ("other", url)
    assert all(result["after"][name] == expected[name] for name in ("accuracy", "format_rate"))
    bodies = [body for path, _, body in served.asked if path == "/v1/chat/completions"]
    assert {body["model"] for body in bodies} == {"other"}
    assert {*map(len, (body["messages"] for body in bodies))} == {2}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 6 for body in bodies)


def test_the_key_goes_into_the_header_and_nowhere_else(served, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", SECRET)
    with serving(served) as url:
        assert Endpoint(url, None, "OTHER_KEY").model == "tuned"
        assert served.asked[-1][1]["Authorization"] == f"Bearer {SECRET}"
        served.status = [401]
        with pytest.raises(UserError, match=r"401 \(no: Bearer \*\*\*\); export the server's key as ACCEL_SFT_API_KEY"):
            Endpoint(url, None, "OTHER_KEY")
        assert Endpoint(url, None).model == "tuned"
        assert "Authorization" not in served.asked[-1][1]
    with pytest.raises(UserError, match=r"--key-from \*\*\*: this environment variable is not set"):
        Endpoint(url, None, SECRET)
    monkeypatch.setenv("OTHER_KEY", f"{SECRET}\n")
    with pytest.raises(UserError, match="OTHER_KEY: the key has characters that an HTTP header cannot hold") as error:
        Endpoint(url, None, "OTHER_KEY")
    assert SECRET not in str(error.value)


def test_a_prompt_is_tokenized_as_it_is_answered(served):
    tools = [{"type": "function", "function": {"name": "f"}}]
    with serving(served) as url:
        endpoint = Endpoint(url, None)
        endpoint.chat(CHAT, 2, tools, "off")
        endpoint.chat_tokens(CHAT, tools, "off")
    answered, tokenized = (body for _, _, body in served.asked[-2:])
    for key in ("messages", "tools", "chat_template_kwargs"):
        assert answered[key] == tokenized[key]


def test_a_server_that_takes_the_newer_limit_alone_gets_it(served):
    served.newer, served.form = True, "plain"
    with serving(served) as url:
        endpoint = Endpoint(url, "one")
        assert [endpoint.chat(CHAT, most).finish for most in (2, 1)] == ["length"] * 2
    bodies = [body for path, _, body in served.asked if path == "/v1/chat/completions"]
    assert "max_tokens" in bodies[0]
    assert [body["max_completion_tokens"] for body in bodies if "max_tokens" not in body][-2:] == [2, 1]


def test_busy_server_is_retried_and_a_refusal_is_final(served):
    with serving(served) as url:
        endpoint = Endpoint(url, None)
        served.status = [429, 503, 0, 500]
        assert endpoint.chat(CHAT, 3).tokens
        assert [path for path, _, _ in served.asked[1:]] == ["/v1/chat/completions"] * 5
        served.asked.clear()
        for status, problem in (
            (302, r"it redirects to http://127.0.0.1:9/v1"),
            (404, "the server answered 404"),
        ):
            served.status = [status]
            with pytest.raises(UserError, match=problem):
                endpoint.chat(CHAT, 3)
        assert len(served.asked) == 2
        for other in (url.removesuffix("/v1"), f"{url}/chat/completions"):
            with pytest.raises(UserError, match=f"name a model with --model, or give --url {url}"):
                Endpoint(other, None)
        served.asked.clear()
        served.status = [502] * 9
        with pytest.raises(UserError, match="the server answered 502"):
            endpoint.chat(CHAT, 3)
        assert len(served.asked) == client.RETRIES + 1


def test_silence_nobody_and_a_password_are_one_line_each():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(UserError, match=r"no answer within 0.2 s; .* set a longer --timeout"):
            Endpoint(address, None, timeout=0.2)
    with pytest.raises(UserError, match=r"cannot be reached .*; is the server running there"):
        Endpoint(address, None)
    with pytest.raises(UserError, match="put no key or password in it") as error:
        Endpoint(f"http://me:{SECRET}@host/v1", "tuned")
    assert SECRET not in str(error.value)
    with pytest.raises(UserError, match="expected an address"):
        Endpoint("http://host/v1?key=1", "tuned")


def answering(*answers):
    """The address of a server that sends these bytes, each to one request, and closes the connection behind them."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        with server:
            for content in answers:
                with server.accept()[0] as connection:
                    connection.recv(1 << 16)
                    connection.sendall(content)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def response(body, status="200 OK", *headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(content)}", "", ""]).encode() + content


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (response(f"Bearer {SECRET}"), r"answered .Bearer \*\*\*.; is it OpenAI-compatible"),
        (response({}, "302 Found", f"Location: http://x/?k={SECRET}"), r"redirects to http://x/\?k=\*\*\*"),
        (response({"data": [{"id": SECRET}, {"id": "b"}]}), r"the server has \*\*\*, b; name a model with --model"),
        (response(b"what"), "answered what; is it OpenAI-compatible"),
    ],
    ids=["a text with the key", "a redirect with the key", "a name with the key", "no JSON"],
)
def test_what_a_server_says_is_one_line_without_the_key(monkeypatch, answer, problem):
    monkeypatch.setenv(client.KEY, SECRET)
    with pytest.raises(UserError, match=problem) as error:
        Endpoint(answering(answer), None)
    assert SECRET not in str(error.value)


def test_broken_answer_is_retried(monkeypatch):
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.01)
    whole = response({"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]})
    broken = response(b"{}").replace(b"Content-Length: 2", b"Content-Length: 9")
    endpoint = Endpoint(answering(response({"data": [{"id": "tuned"}]}), broken, whole), None)
    assert endpoint.chat(CHAT, 3).text == "7"


@pytest.mark.parametrize(
    ("message", "logprobs", "text"),
    [
        ({"content": None}, {"content": 5}, ""),
        ({"content": "\ud800"}, {"tokens": 5, "token_logprobs": [-1.0]}, "?"),
        ("what", {"content": [{"token": "a", "logprob": -1}, {"token": "b", "logprob": float("nan")}]}, ""),
    ],
)
def test_answer_of_another_form_stops_nothing(message, logprobs, text):
    choice = {"message": message, "logprobs": logprobs}
    reply = Endpoint(answering(response({"choices": [choice]})), "m").chat(CHAT, 3)
    assert (reply.text, reply.logprobs) == (text, [])


def test_answer_in_parts_is_refused_and_not_scored():
    message = {"content": [{"type": "text", "text": "a"}]}
    with pytest.raises(EndpointError, match="answer is a list of parts"):
        Endpoint(answering(response({"choices": [{"message": message}]})), "m").chat(CHAT, 3)


def test_answers_that_are_not_whole_are_counted(monkeypatch):
    monkeypatch.setattr(client, "AT_ONCE", 1)
    endings = [(None, "length"), ("the", "length"), ("", "content_filter"), (None, "tool_calls"), (None, "stop")]
    endings += [("<think>\nhm\n</think>\n\n", "stop"), ("the answer is 23 + 23", "stop")]
    choices = [{"message": {"content": text}, "finish_reason": finish} for text, finish in endings]
    address = answering(*(response({"choices": [choice]}) for choice in choices))
    config = EvaluateConfig(url=address, model="m", max_new_tokens=9).resolved({})
    result = evaluation.evaluate_served(Accelerator(cpu=True), Sums(), config, Endpoint(address, "m"))
    assert result.lines == [
        "warning: some of the 7 answers are unusual: 2 cut (raise --max-new-tokens), 1 withheld by the server's "
        "filter, 1 tool calls, 2 empty. All are scored as they are"
    ]


def test_same_data_is_refused_with_url(run):
    command = (*ARGUMENTS, "--url", "http://127.0.0.1:1/v1", "--model", str(run.run_dir), "--same-data")
    with pytest.raises(UserError, match=r"^--same-data: a server records no data; with --url, name the data by"):
        CliRunner().invoke(cli, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"url": None}, "--model: a value is needed"),
        ({"url": None, "model": "m", "key_from": "K"}, "--key-from cannot be used without --url"),
        (
            {"max_length": 9, "seed": 9, "base": "auto", "dtype": "float32"},
            "a server has its own weights and settings; leave --base, --dtype, --max-length, --seed out",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_server_are_refused(more, problem):
    (line,) = EvaluateConfig(**{"url": "http://127.0.0.1:1/v1", **more}).problems()
    assert problem in line


def test_what_a_server_is_not_asked_is_refused(served):
    class Calls(Sums):
        def target(self, example):
            return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]

    class Loss(Sums):
        main_metric = "eval_loss"

    assert evaluation.problems_of_served(Loss()) == [
        "--url: a server cannot return the task's metric eval_loss; choose a metric that scores answers"
    ]
    with serving(served) as url:
        config = EvaluateConfig(url=url, max_new_tokens=3).resolved({})
        with pytest.raises(UserError, match="validation example 0 has images, tool calls"):
            evaluation.evaluate_served(Accelerator(cpu=True), Calls(), config, Endpoint(url, None))
        assert [path for path, _, _ in served.asked] == ["/v1/models"]
