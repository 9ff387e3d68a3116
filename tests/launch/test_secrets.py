"""Secrets are hidden in commands, settings and launch files that are recorded; what only resembles them is not."""

import re

import pytest
import yaml
from places import CONFIGS

from accel_sft.launch.recordable import command_line, masked, masked_words, recordable, without_secrets

TOKEN = "_".join(("hf", "AbCdEfGhIjKlMnOpQrStUvWx"))
LAUNCH = """
# my token is hunter2
mixed_precision: bf16
hub_token: 11111
api_keys: [hunter2, hunter2]
passwd: hunter2
deepspeed_config: {zero_stage: 2, wandb: {api_key: hunter2, nested: {credentials: {a: hunter2}}}}
tpu_env: [HF_TOKEN=hunter2, "--api-key hunter2", "first\\nPASSWORD: hunter2"]
"""


def test_launch_files_are_recorded_without_secrets():
    for path in CONFIGS.glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        assert yaml.safe_load(without_secrets(content)) == content
    recorded = without_secrets(yaml.safe_load(LAUNCH))
    assert not re.search("hunter2|11111", recorded)
    assert yaml.safe_load(recorded)["mixed_precision"] == "bf16"
    assert yaml.safe_load(recorded)["deepspeed_config"]["zero_stage"] == 2


def test_settings_are_recorded_without_secrets():
    usual = {"tokenizer": "gpt2", "keywords": "a,b", "answer_key": "gold", "max_tokens": 5, "keyboard": "en"}
    usual |= {"answer_token": "<ans>", "loss_per_token": 0.5, "new_tokens": ["a"], "number": 1.5, "api_key": None}
    assert recordable(usual) == usual
    secret = {"hf_token": "x", "aws_secret": "x", "token": 5, "passwd": "a", "access_key_ids": [1], "secret": True}
    assert {*recordable(secret).values()} == {"***"}
    within = {"train_file": f"https://me:{TOKEN}@host/rows.jsonl", "x": ["A_KEY=b", 5]}
    assert recordable(within) == {"train_file": "https://***@host/rows.jsonl", "x": ["A_KEY=***", 5]}


def test_commands_are_shown_without_secrets_and_folders():
    words = ["/opt/env/bin/python", "-m", "accel_sft", "t", "--api-key", "a b", "--max-new-tokens", "7", "--hf-token=x"]
    assert command_line(words) == "python -m accel_sft t --api-key '***' --max-new-tokens 7 '--hf-token=***'"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--hub-tokens a --max-new-tokens 5", "--hub-tokens *** --max-new-tokens 5"),
        ("--hf-token --odd --seed 1", "--hf-token *** --seed 1"),
        ("--tokenizer gpt2 --answer-key gold --eos-token </s> --max_tokens=5 keyboard=en KEYBOARD=en", None),
        (f"--openai-key {'0aB' * 8} --apiKey a", "--openai-key *** --apiKey ***"),
        ("clientSecret=b --backend-token c", "clientSecret=*** --backend-token ***"),
        ("--encryption-key=a COMET_API_KEY2=b", "--encryption-key=*** COMET_API_KEY2=***"),
        ("https://host/rows?sig=a&X-Amz-Signature=b&keyword=c", "https://host/rows?sig=***&X-Amz-Signature=***&keyword=c"),
        ("https://host/b?c=d&key=a https://host/b?hapikey=a", "https://host/b?c=d&key=*** https://host/b?hapikey=***"),
        ("HF_TOKEN=a wandb_api_key=b OMP_NUM_THREADS=1", "HF_TOKEN=*** wandb_api_key=*** OMP_NUM_THREADS=1"),
        ("-i https://u:p@host:8/simple mine@git+https://t@host/x", "-i https://***@host:8/simple mine@git+https://***@host/x"),
        (f"--system-prompt {TOKEN}", "--system-prompt ***"),
        ("--columns prompt=key,completion=token", None),
        ("--control-tokens tokens --control_tokens=text", None),
        ("--train-file /data/hf_questions_and_answers_2024/rows.jsonl --model sk-embeddings-for-finance-v2", None),
        (f"hf_{'aB' * 17} sk-{'0a' * 16} glpat-aB_cD-eF_gH-iJ_kL0", "*** *** ***"),
    ],
)  # fmt: skip
def test_one_mask_hides_secrets_of_every_form(words, shown):
    assert masked_words(words.split()) == (shown or words).split()
    if "://" in words and shown:
        assert masked(words) == shown
