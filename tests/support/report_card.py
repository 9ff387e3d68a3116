"""A run's model card, made from invented results and settings."""

from accel_sft.results.model_card import model_card

BEFORE = {"accuracy": 0.0, "eval_loss": 4.5, "generate_seconds": 19.7, "generate_tokens_per_second": 20.3}
AFTER = {"accuracy": 1.0, "eval_loss": 0.01, "generate_seconds": 29.55, "generate_tokens_per_second": 12.1}
RESULT = {
    **{"task": "math", "model": "tiny", "status": "finished", "steps": 100},
    "train_seconds": 61.5,
    "tokens_per_second": 12345.6,
    "peak_device_memory_gib": None,
    "peak_host_memory_gib": 1.25,
    "before": BEFORE,
    "after": AFTER,
    "phases": [{"phase": "ready", "rank": 0, "seconds": 3.5, "process_memory_gib": 0.5, "device_peak_gib": None}],
}


def card(**changed):
    usual = {
        "base_model": "org/model-0.5B",
        "task": "math",
        "max_new_tokens": 17,
        "left_out": {},
        "messages": [{"role": "system", "content": "Sum."}, {"role": "user", "content": "```5=```"}],
        "template_arguments": {},
        "prompt_end": "",
        "answer_end": "\n",
        "eos_ids": [2, 0],
        "data": {"train-file": "rows.json", "training examples": 1798},
        "command": "accelerate launch -m accel_sft math --seed 7",
        "settings": {"learning_rate": 1e-4, "output_dir": "/somewhere/run", "max_steps": None},
        "result": RESULT,
        "versions": {"torch": "2.13"},
        "asked": {"task": "math"},
    }
    return model_card(**{**usual, **changed})
