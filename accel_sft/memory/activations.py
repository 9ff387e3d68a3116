"""Bytes that a forward keeps for its backward: activations of the blocks, and logits.

`forward_bytes` and `logits_bytes` count everything that is held at some time: on a CPU the heap keeps freed memory, so
the parts add up. A GPU's allocator reuses freed memory, so there `peak_bytes` gives the most that is held at one
moment, gradients in flight included; its terms were read off simulations, and benchmarks/plan_simulation.py compares
the two.

What autograd saves was counted tensor by tensor (`saved_tensors_hooks`) on small models of transformers 5.23 in
bfloat16, float32 and float32 under autocast, trained whole or by an adapter; the formulas below agree with the counts
within 1%, and tests/tools/test_plan.py counts again.
"""

from accel_sft.memory.job import Job
from accel_sft.memory.shape import Block
from accel_sft.memory.vision import tower_bytes

_CAPPED = ("gemma2",)
"""Families with soft caps on scores and logits. transformers 5.23 has no fused attention for them: it keeps scores."""
_SCORE, _SCORE_BACKWARD = 8, 6
"""Bytes per attention score where attention is not fused. The forward keeps _SCORE: the capped score, and its softmax
in float32 and in the computing type. The backward needs _SCORE_BACKWARD on top."""
_FLOAT32_NORMS = ("gemma",)
"""Families whose norms multiply by their weight in float32 and keep the float32 values for the backward."""
LOGIT = 12
"""Bytes per logit in the loss's backward: the log-softmax, its gradient and the logit's gradient, all in float32.
Logits in a narrower type are freed by then."""
_NORM_BACKWARD = 16
"""Bytes per element that a norm's backward adds to what the norm has kept; half as many under autocast, which keeps
more."""
_INNER_NORM = 8
"""Bytes per element of a norm that no matrix follows: its input and its normed values, both in float32."""


def block_bytes(job: Job, block: Block) -> float:
    """Bytes that one block keeps for one token, without gradient checkpointing."""
    e, hidden = job.computes_bytes, job.shape.hidden_size
    by_group = {
        group: [m for m in block.matrices if m.group == group]
        for group in ("attention", "recurrent", "feed_forward", "experts")
    }
    kept = _norms(job, block)
    if not block.recurrent:
        kept += e * sum(m.outputs if m.inputs == hidden else m.inputs for m in by_group["recurrent"] if m.is_linear)
    if attention := by_group["attention"]:
        *into, out = attention  # queries, keys and values, then the output projection
        kept += e * (sum(matrix.outputs for matrix in into) + out.inputs)
    for group in ("feed_forward", "experts"):
        inner = [m for m in by_group[group] if m.outputs == hidden and m.name != "gate"]
        wide = [m for m in by_group[group] if m.inputs == hidden and m not in inner and m.outputs > 1]
        for last in inner[:1]:
            copies = last.active
            outputs = sum(m.outputs for m in wide if m.copies == last.copies)
            gated = 2 if outputs >= 2 * last.inputs else 1  # the activated gate, and its product with up
            kept += e * copies * (outputs + gated * last.inputs)
            if last.copies > 1:  # a token's hidden state goes to each of its experts, and comes back
                kept += 2 * e * copies * hidden
    if job.is_frozen:
        kept += _adapter(job, block)
    return kept + 5.25 * job.shape.heads  # attention's normalisers, in float32


def _norms(job: Job, block: Block) -> float:
    hidden, e, each = job.shape.hidden_size, job.computes_bytes, _norm_bytes(job)
    count = block.vectors // hidden
    kept = hidden * (2 * each + max(count - 2, 0) * _INNER_NORM)
    if block.vectors % hidden == 2 * job.shape.head_dim:  # each head's queries and keys are normed
        heads = job.shape.heads + job.shape.key_value_heads
        kept += heads * job.shape.head_dim * (4 + (e if not job.autocast else 2))
    return kept


def _norm_bytes(job: Job) -> int:
    """Bytes per element of a norm that a matrix follows, the matrix's input included."""
    autocast, e = job.autocast and not job.is_frozen, job.computes_bytes
    if job.is_frozen:
        return 9 if job.autocast else 4 + e  # the input in float32, and the matrices' input
    if job.shape.family.startswith(_FLOAT32_NORMS):
        return 13 if autocast else 8 + (e if e < 4 else 4)
    return 13 if autocast else 4 + 2 * e


def _adapter(job: Job, block: Block) -> float:
    """Bytes that an adapter adds for one token of a block: its rank-r states, and with dropout the masks and the
    dropped-out inputs."""
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
    """Bytes of a block's fused experts under an adapter: peft adds the adapter to a copy of their weights, and the copy
    is kept."""
    adapted = {matrix for *_, matrix in job.shape.adapted(job.adapter, job.target_modules)} if job.is_frozen else set()
    return job.computes_bytes * sum(m.parameters for m in block.matrices if m.copies > 1 and m in adapted)


def _scores(job: Job) -> float:
    """Number of attention scores in all heads of one block, rows padded to one length; 0 where attention is fused."""
    return job.shape.heads * job.tokens**2 / max(job.rows, 1) if job.shape.family.startswith(_CAPPED) else 0.0


def _by_rows(job: Job, block: Block) -> float:
    """Bytes that a block keeps by rows, not by tokens: keys and values that attention copies for each row behind a
    prefix, and for every head; and what layers with a state keep."""
    attends = job.copies and any(m.group == "attention" for m in block.matrices)
    kept = 2.0 * job.computes_bytes * job.shape.heads * job.shape.head_dim * job.copied_keys * attends
    for measured in block.recurrent:
        of_prefix, of_row = measured(job.computes_bytes, *job.prefix_and_own)
        kept += of_prefix + job.rows * of_row
    return kept


def forward_bytes(job: Job) -> float:
    """Bytes that all blocks keep at the end of the largest forward, those of a vision tower with them."""
    scores = _SCORE * _scores(job)
    if not job.gradient_checkpointing:
        kept = sum(
            block.count
            * (job.tokens * block_bytes(job, block) + scores + _by_rows(job, block) + _merged_bytes(job, block))
            for block in job.shape.blocks
        )
    else:
        e = 4 if job.autocast and not job.is_frozen else job.computes_bytes
        whole = [
            job.tokens * block_bytes(job, block) + scores + _by_rows(job, block) + _merged_bytes(job, block)
            for block in job.shape.blocks
        ]
        kept = job.tokens * e * job.shape.hidden_size * job.shape.layers + max(whole, default=0.0)
    if job.dense_mask:
        kept += job.computes_bytes * job.tokens**2
    return kept + _tower(job)[0]


def passing_bytes(job: Job) -> float:
    """Bytes that a vision tower holds in the largest forward and has freed at its end, because it is frozen."""
    kept, most = _tower(job)
    return most - kept


def _tower(job: Job) -> tuple[float, float]:
    """`tower_bytes` of the largest forward."""
    return tower_bytes(
        job.shape.family,
        job.shape.tower,
        job.pixels,
        job.only[2] if job.only else 0,
        itemsize=job.computes_bytes,
        autocast=job.autocast and not job.is_frozen,
        recomputed=job.gradient_checkpointing,
    )


def logits_bytes(job: Job) -> float:
    """Bytes that head and loss hold at once: `LOGIT` and those of a soft cap for each logit, and the head's inputs if
    it works in pieces."""
    each = LOGIT + _cap_bytes(job)
    vocabulary, e, hidden = job.shape.vocab_size, job.computes_bytes, job.shape.hidden_size
    if job.head == "everywhere":
        return each * vocabulary * job.tokens
    most = max(job.most_logits // vocabulary, 1)
    if _in_pieces(job):
        return e * hidden * job.supervised_tokens + each * vocabulary * most
    return each * vocabulary * job.supervised_tokens


def peak_bytes(job: Job) -> dict[str, float]:
    """Bytes of `activations` and `logits` at the peak of the largest forward and backward.

    The peak is the largest of five moments: in the head, in the last norm's backward, in a block's backward, where a
    tied head's gradient is added to the embedding's, and in a vision tower's forward, before the language model's.
    """
    found, (of_tower, passing) = _in_text(job), _tower(job)
    if passing > of_tower + sum(found.values()):
        return {"activations": passing, "logits": 0.0}
    return {**found, "activations": found["activations"] + of_tower}


def _in_text(job: Job) -> dict[str, float]:
    """`peak_bytes` of the language model alone."""
    shape, t, e, frozen = job.shape, job.tokens, job.computes_bytes, job.is_frozen
    cast = job.autocast and not frozen
    stream = t * shape.hidden_size * (4 if cast else e)
    head_weights = shape.vocab_size * shape.hidden_size / job.launch.tensor_ranks
    held = 0 if frozen or not shape.tied else (4 if cast else e) * head_weights  # a tied head's gradient
    inside = e * sum(block.count * block.parameters for block in shape.blocks) if cast else 0  # copies by autocast
    casts = {"forward": inside, "backward": inside}
    if job.gradient_checkpointing:
        casts["backward"] = e * shape.largest_block if cast else 0
    mask = e * t**2 if job.dense_mask else 0
    blocks = [
        (t * block_bytes(job, block) + _SCORE * _scores(job) + _by_rows(job, block), _merged_bytes(job, block), block)
        for block in shape.blocks
    ]
    if job.gradient_checkpointing:
        kept: float = stream * shape.layers
        again = max((size + merged + _block_backward(job, block) for size, merged, block in blocks), default=0)
    else:
        kept = sum(block.count * (size + merged) for size, merged, block in blocks)
        again = max((_block_backward(job, block) for *_, block in blocks), default=0)
    at_end = kept + mask + t * shape.hidden_size * _norm_bytes(job) + e * shape.hidden_size * job.supervised_tokens
    before, behind = _head_bytes(job, e * head_weights * (not frozen))
    before, behind = (size + (e * head_weights if cast else 0) for size in (before, behind))
    backward = at_end + (0 if job.gradient_checkpointing else inside)
    norm = t * shape.hidden_size * _NORM_BACKWARD / (2 if cast else 1)
    met = (2 if _in_pieces(job) else 3) * held
    in_head = max(at_end + casts["forward"] + before, backward + behind)
    elsewhere = max(backward + norm + held, kept + mask + casts["backward"] + again + held, met)
    if in_head >= elsewhere:
        activations = backward if in_head == backward + behind else at_end + casts["forward"]
        return {"activations": activations, "logits": in_head - activations}
    return {"activations": elsewhere, "logits": 0.0}


def _head_bytes(job: Job, gradient: float) -> tuple[float, float]:
    """Bytes of head and loss in the forward, and in the backward together with the `gradient` bytes of the head's
    weights. A head in pieces adds the gradients of its first two pieces into a third tensor, and the
    gradients of later pieces to that tensor."""
    vocabulary, e, s = job.shape.vocab_size, job.computes_bytes, job.supervised_tokens
    narrow = e if e < 4 else 0
    most = max(job.most_logits // vocabulary, 1)
    logit = LOGIT + _cap_bytes(job)
    if _in_pieces(job):
        logits = vocabulary * most
        return (8 + narrow) * logits, max(gradient + logit * logits, 2 * gradient + e * logits, 3 * gradient)
    logits, every = vocabulary * s, vocabulary * job.tokens * (job.head == "everywhere")
    return (8 + narrow) * logits + e * every, max(logit * logits, e * logits + e * every + gradient)


def _cap_bytes(job: Job) -> int:
    """Bytes that a soft cap keeps per logit."""
    return job.computes_bytes if job.shape.family.startswith(_CAPPED) else 0


def _in_pieces(job: Job) -> bool:
    return job.head == "pieces" and job.supervised_tokens > max(job.most_logits // job.shape.vocab_size, 1)


def _block_backward(job: Job, block: Block) -> float:
    """Bytes of gradients in the backward of a block's widest part, besides what the block keeps."""
    e, hidden = job.computes_bytes, job.shape.hidden_size
    wide = copied = 0.0
    for group in ("feed_forward", "experts"):
        into = [m for m in block.matrices if m.group == group and m.inputs == hidden and m.name != "gate"]
        out = sum(m.active * m.outputs for m in into if m.outputs > 1)
        # where autocast casts it, an adapter's gradient is added to that of its matrix
        wide = max(wide, out * (2 if job.is_frozen and job.autocast else 1))
        copied = max([copied, *(m.active * hidden for m in into if m.copies > 1)])
    stream = hidden * (4 if job.autocast and not job.is_frozen else e)
    scores = _SCORE_BACKWARD * _scores(job) - 2 * job.tokens * e * wide  # the feed-forward's part is freed by then
    return max(job.tokens * e * (wide + copied), scores) + job.tokens * stream + _experts_gradient(job, block)


def _experts_gradient(job: Job, block: Block) -> float:
    """Bytes of the gradient of a block's largest fused experts, or of their copy under an adapter; the copies of the
    block's other fused experts are freed by then."""
    sizes = sorted(job.computes_bytes * m.parameters for m in block.matrices if m.copies > 1)
    if not sizes or (job.is_frozen and not _merged_bytes(job, block)):
        return 0.0
    return sizes[-1] - (sum(sizes[:-1]) if job.is_frozen else 0)
