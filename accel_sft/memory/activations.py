"""Computes the bytes that a forward keeps for its backward (activations of the blocks, logits), and their peak.

What autograd saves was counted tensor by tensor (`saved_tensors_hooks`) on small models of transformers 5.23 in
bfloat16, float32, and float32 under autocast, training all weights or an adapter. The peak was compared with forwards
simulated on fake tensors (benchmarks/plan_accuracy.py). The formulas leave out what changes a peak by a few percent.
"""

from accel_sft.memory.job import MOST_LOGITS, Job
from accel_sft.memory.shape import Block, Matrix

LOGIT = 12
"""Bytes per logit in the loss's backward: the log-softmax, its gradient and the logit's gradient, all in float32.
Logits in a narrower type have been freed before that."""
_TOWER_KEEPS, _TOWER_HOLDS = 50, 40
"""Bytes per patch and element of a vision tower's `width`, in half precision. A trained block keeps the first number
(measured: 31 to 57); a frozen tower holds the second number at its peak (24 to 44)."""
PIXEL = 4
"""Bytes of a pixel value in the processor's output."""


def block_bytes(job: Job, block: Block) -> float:
    """Bytes that one block keeps for one token, without gradient checkpointing."""
    e, hidden = job.computes_bytes, job.shape.hidden_size
    saved = 2 * hidden * _norm_bytes(job) + 5.25 * job.shape.heads  # attention's normalizers, in float32
    if block.vectors % hidden == 2 * job.shape.head_dim:  # queries and keys of each head are normalized
        saved += (job.shape.heads + job.shape.key_value_heads) * job.shape.head_dim * (4 + e)
    recurrent, attention = ([m for m in block.matrices if m.group == group] for group in ("recurrent", "attention"))
    if not block.recurrent:
        saved += e * sum(m.outputs if m.inputs == hidden else m.inputs for m in recurrent if m.is_linear)
    if attention:  # queries, keys and values, and what the output projection reads
        out = next((m for m in attention if m.name.startswith(("o_", "out"))), attention[-1])
        saved += e * (sum(m.outputs for m in attention if m is not out) + out.inputs)
    for group in ("feed_forward", "experts"):
        into, back = _feed_forward(job, block, group)
        for last in back[:1]:
            outputs = sum(m.outputs for m in into if m.copies == last.copies)
            gated = 2 if outputs >= 2 * last.inputs else 1  # the activated gate, and the gate times up
            saved += e * last.active * (outputs + gated * last.inputs)
            if last.copies > 1:  # each expert of a token gets the hidden state and returns one
                saved += 2 * e * last.active * hidden
    return saved + (_adapter(job, block) if job.is_frozen else 0.0)


def _feed_forward(job: Job, block: Block, group: str) -> tuple[list[Matrix], list[Matrix]]:
    """Divide the matrices of a feed-forward, or of experts, into those that read the hidden state and those that output
    it."""
    hidden = job.shape.hidden_size
    of_group = [m for m in block.matrices if m.group == group and m.name != "gate"]
    into = [m for m in of_group if m.inputs == hidden and m.outputs > 1]
    return into, [m for m in of_group if m.outputs == hidden and m not in into] or into[-1:]


def _norm_bytes(job: Job) -> int:
    """Bytes kept per element for a norm and for the input of the matrices after it."""
    if job.is_frozen:
        return 9 if job.autocast else 4 + job.computes_bytes  # the norm's input in float32, and the matrices' input
    return 13 if job.autocast else 4 + 2 * job.computes_bytes


def _adapter(job: Job, block: Block) -> float:
    """Bytes that an adapter adds for one token of a block: the adapter's states, and dropout's masks and inputs."""
    e, mask = job.computes_bytes, job.computes_bytes if job.on_cpu else 1
    adapted = {matrix for *_, matrix in job.shape.adapted(job.adapter, job.target_modules)}
    inputs = [m.inputs for m in block.matrices if m in adapted and m.is_linear]
    saved = e * job.lora_r * len(inputs)
    if job.lora_dropout:
        saved += (mask + e) * sum(inputs) - e * (2 * job.shape.hidden_size + max(m.inputs for m in block.matrices))
    return float(saved)


def _whole_block(job: Job, block: Block) -> float:
    """Bytes that one block keeps in the largest forward."""
    size = job.tokens * block_bytes(job, block)
    if job.copies and any(m.group == "attention" for m in block.matrices):  # keys and values, for each row and head
        size += 2.0 * job.computes_bytes * job.shape.heads * job.shape.head_dim * job.copied_keys
    prefix, own = job.prefix_and_own
    for measured in block.recurrent:
        size += job.rows * measured(job.computes_bytes, own)
        size += measured(job.computes_bytes, prefix) if prefix else 0.0
    return size + sum(_merged_experts(job, block))


def _merged_experts(job: Job, block: Block) -> list[float]:
    """Bytes of each copy that peft makes of fused experts' weights to add an adapter; autograd saves these copies."""
    adapted = {matrix for *_, matrix in job.shape.adapted(job.adapter, job.target_modules)} if job.is_frozen else set()
    return [job.computes_bytes * m.parameters for m in block.matrices if m.copies > 1 and m in adapted]


def _saved_and_recomputed(job: Job) -> tuple[float, float]:
    """Bytes that all blocks keep at the end of the largest forward, and bytes of the block being recomputed."""
    blocks = [(block.count, _whole_block(job, block)) for block in job.shape.blocks]
    if not job.gradient_checkpointing:
        return sum(count * size for count, size in blocks), 0.0
    return job.shape.layers * _stream(job), max((size for _, size in blocks), default=0.0)


def _stream(job: Job) -> float:
    """Bytes of the hidden states between two blocks."""
    return job.tokens * job.shape.hidden_size * (4 if job.autocast and not job.is_frozen else job.computes_bytes)


def forward_bytes(job: Job) -> float:
    """Bytes that all blocks keep at some time in the largest forward, a vision tower's included."""
    return sum(_saved_and_recomputed(job)) + tower_bytes(job)[0]


def logits_bytes(job: Job) -> float:
    """Bytes that head and loss hold at one time; if the head works in pieces, with the head's inputs."""
    vocabulary, e = job.shape.vocab_size, job.computes_bytes
    if _in_pieces(job):
        return e * job.shape.hidden_size * job.supervised_tokens + float(LOGIT * max(MOST_LOGITS, vocabulary))
    return float(vocabulary * (LOGIT * job.supervised_tokens + e * job.tokens * (job.head == "everywhere")))


def _in_pieces(job: Job) -> bool:
    vocabulary = job.shape.vocab_size
    return job.head == "pieces" and job.supervised_tokens * vocabulary > max(MOST_LOGITS, vocabulary)


def peak_bytes(job: Job) -> dict[str, float]:
    """Bytes of `activations` and `logits` at the peak of the largest forward and backward. The peak is in the head, in
    a block's backward, or in a vision tower's forward, which comes before the language model's."""
    shape, e, casts = job.shape, job.computes_bytes, job.autocast and not job.is_frozen
    (of_tower, in_tower), (saved, recomputed) = tower_bytes(job), _saved_and_recomputed(job)
    head = 0 if job.is_frozen else e * shape.vocab_size * shape.hidden_size / job.launch.tensor_ranks
    inside = e * sum(block.count * block.parameters for block in shape.blocks) if casts else 0  # copies by autocast
    logits = logits_bytes(job)
    if _in_pieces(job):  # the gradients of the head's first two pieces are added into a third tensor
        logits = max(head + logits, 3 * head)
    logits += head if casts else 0
    tied = head * (2 if casts else 1) * shape.tied  # a tied head's gradient stays until the embedding's backward
    in_head = saved + inside + job.tokens * shape.hidden_size * _norm_bytes(job) + logits
    backward = max((_block_backward(job, block) for block in shape.blocks), default=0.0)
    in_block = max(saved + inside + recomputed + backward + tied, 3 * tied)
    if in_head >= max(in_block, in_tower - of_tower):
        return {"activations": of_tower + in_head - logits, "logits": logits}
    return {"activations": max(of_tower + in_block, in_tower), "logits": 0.0}


def _block_backward(job: Job, block: Block) -> float:
    """Bytes of gradients in the backward of a block's widest part, without the bytes that the block keeps."""
    e, hidden = job.computes_bytes, job.shape.hidden_size
    wide = 0.0
    for group in ("feed_forward", "experts"):
        into, _ = _feed_forward(job, block, group)
        outputs = sum(m.active * m.outputs for m in into)
        wide = max(wide, outputs + max((m.active * hidden for m in into if m.copies > 1), default=0))
    fused = [e * m.parameters for m in block.matrices if m.copies > 1]  # the gradient of the largest fused experts
    merged = _merged_experts(job, block)
    experts = max(fused, default=0) if not job.is_frozen else max(2 * max(merged, default=0) - sum(merged), 0)
    return job.tokens * e * wide + _stream(job) + experts


def tower_bytes(job: Job) -> tuple[float, float]:
    """Bytes that a vision tower keeps for the backward, and the most that it holds during its forward; both include the
    pixels. A frozen tower keeps only the pixels. With `--train-only`, the whole tower counts as trained."""
    pixels, tower = float(PIXEL * job.pixels), job.shape.tower
    if tower is None or not tower.values:
        return pixels, pixels
    width = job.pixels / tower.values * tower.width * (2 if job.computes_bytes == 4 else 1)
    blocks = 1 + tower.depth / 12 if job.gradient_checkpointing else tower.depth  # a block keeps 12 times its input
    saved = width * _TOWER_KEEPS * blocks if job.train_only is not None else 0.0
    return pixels + saved, pixels + max(saved, width * _TOWER_HOLDS)
