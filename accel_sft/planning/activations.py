"""Bytes that a forward keeps for its backward: activations of the blocks, and logits.

What autograd saves was counted tensor by tensor (`saved_tensors_hooks`) on small models of transformers 5.23 in
bfloat16, float32 and float32 under autocast, full and with an adapter; the formulas below meet it to 1%, and
tests/test_plan.py counts again.
"""

from accel_sft.planning.job import MOST_LOGITS, Job
from accel_sft.planning.shape import Block

_FLOAT32_NORMS = ("gemma",)
"""Families whose norms multiply by their weight in float32, and keep that."""
_INNER_NORM = 8
"""Bytes an element of a norm behind which no matrix stands: its input and what it was normed to, in float32."""


def block_bytes(job: Job, block: Block) -> float:
    """Kept by one block for one token, without recomputation."""
    e, hidden = job.computes_bytes, job.shape.hidden_size
    by_group = {
        group: [m for m in block.matrices if m.group == group] for group in ("attention", "feed_forward", "experts")
    }
    kept = _norms(job, block)
    if attention := by_group["attention"]:
        *into, out = attention  # queries, keys and values, then the way out
        kept += e * (sum(matrix.outputs for matrix in into) + out.inputs)
    for group in ("feed_forward", "experts"):
        inner = [m for m in by_group[group] if m.outputs == hidden and m.name != "gate"]
        wide = [m for m in by_group[group] if m.inputs == hidden and m not in inner and m.outputs > 1]
        for last in inner[:1]:
            copies = last.active
            out = sum(m.outputs for m in wide if m.copies == last.copies)
            gated = 2 if out >= 2 * last.inputs else 1  # what the gate passes, and before it
            kept += e * copies * (out + gated * last.inputs)
            if last.copies > 1:  # a token's hidden state goes to each of its experts, and comes back
                kept += 2 * e * copies * hidden
    if job.is_frozen:
        kept += _adapter(job, block)
    return kept + 5.25 * job.shape.heads  # attention's normalisers, in float32


def _norms(job: Job, block: Block) -> float:
    hidden = job.shape.hidden_size
    autocast, e = job.autocast and not job.is_frozen, job.computes_bytes
    if job.is_frozen:
        each = 9 if job.autocast else 4 + e  # the input in float32, and the matrices' input
    elif job.shape.family.startswith(_FLOAT32_NORMS):
        each = 13 if autocast else 8 + (e if e < 4 else 4)
    else:
        each = 13 if autocast else 4 + 2 * e
    count = block.vectors // hidden
    kept = hidden * (2 * each + max(count - 2, 0) * _INNER_NORM)
    if block.vectors % hidden == 2 * job.shape.head_dim:  # of each head's queries and keys
        heads = job.shape.heads + job.shape.key_value_heads
        kept += heads * job.shape.head_dim * (4 + (e if not job.autocast else 2))
    return kept


def _adapter(job: Job, block: Block) -> float:
    """What an adapter keeps besides: the narrow states, and with dropout its masks and the inputs behind them."""
    e, kept = job.computes_bytes, 0.0
    mask = e if job.on_cpu else 1
    adapted = {matrix for *_, matrix in job.shape.adapted(job.adapter, job.target_modules)}
    for matrix in block.matrices:
        if matrix in adapted and matrix.is_linear:
            kept += e * job.lora_r
            if job.lora_dropout:
                kept += (mask + e) * matrix.inputs
    if job.lora_dropout:
        kept -= e * (2 * job.shape.hidden_size + max((m.inputs for m in block.matrices), default=0))
    return kept


def _merged_bytes(job: Job, block: Block) -> float:
    """Of a block's fused experts that an adapter stands on: peft adds it to a copy of their weights, which is kept."""
    adapted = {matrix for *_, matrix in job.shape.adapted(job.adapter, job.target_modules)} if job.is_frozen else set()
    return job.computes_bytes * sum(m.parameters for m in block.matrices if m.copies > 1 and m in adapted)


def forward_bytes(job: Job) -> float:
    """Kept by all blocks for the largest forward, at its end."""
    if not job.gradient_checkpointing:
        kept = sum(
            block.count * (job.tokens * block_bytes(job, block) + _merged_bytes(job, block))
            for block in job.shape.blocks
        )
    else:
        e = 4 if job.autocast and not job.is_frozen else job.computes_bytes
        whole = [job.tokens * block_bytes(job, block) + _merged_bytes(job, block) for block in job.shape.blocks]
        kept = job.tokens * e * job.shape.hidden_size * job.shape.layers + max(whole, default=0.0)
    if job.dense_mask:
        kept += job.computes_bytes * job.tokens**2
    return kept


def logits_bytes(job: Job) -> float:
    """Held at once by head and loss: logits as they are computed, in float32, their softmax and its gradient."""
    each = 12 + (job.computes_bytes if job.computes_bytes < 4 else 0)
    vocabulary, e, hidden = job.shape.vocab_size, job.computes_bytes, job.shape.hidden_size
    if job.head == "fused":
        return e * hidden * job.supervised_tokens
    if job.head == "everywhere":
        return each * vocabulary * job.tokens
    most = max(MOST_LOGITS // vocabulary, 1)
    if job.head == "pieces" and job.supervised_tokens > most:
        return e * hidden * job.supervised_tokens + each * vocabulary * most
    return each * vocabulary * job.supervised_tokens
