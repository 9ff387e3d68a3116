"""Checks what a task gives: the examples of a split, the turns of an example, and which of the turns are learnt."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.api.task import Task
from accel_sft.chat.pictures import IMAGE_MARK, Picture, marks, read_parts, shown, unmarked
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.rows.rows import Rows, with_places

Given = TypeVar("Given")
Turn = dict[str, Any]
"""A turn has `role` and `content`, a text in which IMAGE_MARK stands for an image. An assistant's turn may also have
`tool_calls` and `reasoning_content`."""
Turns = list[Turn]
Tools = list[dict[str, Any]] | None
"""Schemas of tools, for the chat template."""
GUARD, OWN = "\ue008\ue009", "\ue00a\ue00b"
"""In texts that are tokenized, GUARD marks a task's control tokens and OWN the template's: see control_tokens.py."""
_NO_TEXT = re.compile(f"[\ud800-\udfff]|{GUARD}|{OWN}")
_THINKS = re.compile(r"\s*<think>(.*?)</think>\s*", re.S)
_EXPECTED = 'a list of {"role": ..., "content": ...}'
_GIVEN = {
    *("messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
}
"""Names of arguments that the trainer itself passes to `apply_chat_template`, or to the template."""


class Conversation(NamedTuple):
    """A prompt and the answer to it.

    Attributes:
        turns: the turns before the answer; if there are none, the answer is raw text, and every token is learnt.
        answer: the assistant's turn that training learns and evaluation generates.
        learnt: indices in `turns` of earlier answers that are learnt too.
        tools: schemas for the chat template.
        images: the images of `turns`, in their order.
        variables: variables of the chat template other than turns and tools.
        continued: the answer continues the text of the only turn; without a chat template, both are concatenated.
        rejected: the assistant's turn to which training on preferences prefers the answer.
    """

    turns: Turns
    answer: Turn
    learnt: tuple[int, ...] = ()
    tools: Tools = None
    images: tuple[Picture, ...] = ()
    variables: dict[str, Any] | None = None
    continued: bool = False
    rejected: Turn | None = None

    @property
    def offered(self) -> dict[str, Any]:
        """All variables of the chat template other than the turns, by name."""
        return {**({"tools": self.tools} if self.tools else {}), **(self.variables or {})}

    @property
    def target(self) -> str:
        """The answer's text, with its thinking."""
        content, thinking = self.answer["content"], self.answer.get("reasoning_content")
        return content if thinking is None else f"<think>\n{thinking}\n</think>\n\n{content}"

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the answer."""
        return self.answer.get("tool_calls") or []

    @property
    def shown_prompt(self) -> str:
        """The prompt as shown to people, without system turns: a single turn's text, or several turns with roles."""
        turns = [turn for turn in self.turns if turn["role"] != "system"] or self.turns
        if len(turns) == 1:
            return shown(turns[0]["content"])
        return "\n".join(f"{turn['role']}: {shown(_in_words(turn))}" for turn in turns)

    def by_answer(self) -> list["Conversation"]:
        """Return a conversation for each answer that is learnt, in order; each ends with its answer."""
        earlier = [self._replace(turns=self.turns[:at], answer=self.turns[at], learnt=()) for at in self.learnt]
        if self.images:
            earlier = [chat._replace(images=self.images[: marks(chat.turns)]) for chat in earlier]
        return [*earlier, self._replace(learnt=())]

    def texts(self) -> Iterator[str]:
        """Yield every text of the conversation; tool calls and variables (such as schemas) as JSON."""
        for turn in (*self.turns, self.answer, *([self.rejected] if self.rejected else ())):
            yield from (turn[name] for name in ("reasoning_content", "content") if name in turn)
            if turn.get("tool_calls"):
                yield json.dumps(turn["tool_calls"], ensure_ascii=False)
        if self.offered:
            yield json.dumps(self.offered, ensure_ascii=False)


def _in_words(turn: Turn) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    return " ".join([turn["content"], *calls] if turn["content"] else calls)


def split_thinking(target: str) -> tuple[str | None, str]:
    """Return the thinking that a target begins with (None if it has none), and the answer after it."""
    match = _THINKS.match(target)
    return (match[1], target[match.end() :]) if match else (None, target)


def divided(chat: Conversation) -> tuple[str | None, str]:
    """Return the thinking of a conversation's answer (None if it has none), and the answer after it."""
    thinking = chat.answer.get("reasoning_content")
    return split_thinking(chat.target) if thinking is None else (thinking, chat.answer["content"])


def wanted(chat: Conversation, thinking: str | None) -> str:
    """Return the text to score an answer against: the target; under `--thinking keep`, the target without thinking."""
    return divided(chat)[1] if thinking == "keep" else chat.target


def no_text(text: str) -> bool:
    """Whether a text contains a lone surrogate or the reserved characters of GUARD or OWN."""
    return not text.isprintable() and _NO_TEXT.search(text) is not None


def from_task(failed: str, call: Callable[[], Given]) -> Given:
    """Return the result of `call`, the task's code; if it fails, raise UserError with `failed`, cause and line."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failed}: {one_line(what_and_where(error), LONGEST_ERROR)}") from error


def read_split(task: Task, split: str) -> Sequence[Any]:
    """Return the task's examples of a split; raise UserError unless they are a non-empty sequence."""
    source = f"the task's dataset({split!r})"
    examples = from_task(f"{source} failed", lambda: task.dataset(split))
    indexed = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not indexed or isinstance(examples, (Mapping, str, bytes)):
        raise UserError(f"{source} gave {type(examples).__name__}, expected a sequence of examples")
    if not len(examples):
        raise UserError(f"{source} is empty; it must have at least one example")
    return examples


def limited_examples(examples: Sequence[Any], limit: str | None) -> Sequence[Any]:
    """Return as many of a split's examples as `--train-limit` says: a number, or a share (rounded down, at least one);
    None means all. Rows are sampled, as files are often sorted; other examples are taken from the beginning."""
    if limit is None:
        return examples
    share = limit.endswith("%")
    number = max(int(len(examples) * Decimal(limit[:-1]) / 100), 1) if share else int(limit)
    if number >= len(examples):
        return examples
    # a task's own sequence need not support slices
    return examples.sample(number) if isinstance(examples, Rows) else [examples[at] for at in range(number)]


def conversation(task: Task, examples: Sequence[Any], split: str, index: int) -> Conversation:
    """Return an example's messages and target as a conversation. Errors name the example by split and index, or by file
    and line."""
    try:
        return _conversation(task, examples, f"{split} example {index}", index)
    except UserError as error:
        raise UserError(*with_places(error.problems, examples, split)) from error


def _conversation(task: Task, examples: Sequence[Any], where: str, index: int) -> Conversation:

    def given() -> tuple[Any, Any, Any, Any, Any]:
        example, methods = examples[index], (task.messages, task.target, task.tools, task.chat_template_kwargs)
        turns, target, tools, variables = (method(example) for method in methods)
        return turns, target, tools, variables, task.rejected(example)

    turns, target, tools, variables, rejected = from_task(f"{where}: the task failed", given)
    if not isinstance(target, (str, list)):
        raise UserError(f"{where}: target() gave {type(target).__name__}, expected text, or a list of turns")
    images: list[Picture] = []
    turns = checked_turns(turns, f"{where}: messages()", images)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{where}: tools() gave {str(tools)[:80]!r}, expected a list of schemas, or None")
    if variables is not None and not (isinstance(variables, dict) and all(isinstance(name, str) for name in variables)):
        raise UserError(f"{where}: chat_template_kwargs() gave {str(variables)[:80]!r}, expected an object, or None")
    if own := _GIVEN.intersection(variables or ()):
        raise UserError(f"{where}: chat_template_kwargs() gave {min(own)}, which the trainer sets itself; remove it")
    continued = [turn.pop("continued", False) for turn in turns] == [True] and not tools and not images
    if isinstance(target, list):
        chat = _with_turns(turns, target, where, images)._replace(tools=tools or None)
    else:
        if turns and turns[-1]["role"] == "assistant":
            raise UserError(f"{where}: messages() ends with an assistant turn; the answer belongs in target()")
        answer = {"role": "assistant", "content": unmarked(target, f"{where}: target()")}
        chat = Conversation(turns, answer, tools=tools or None)
    chat = chat._replace(variables=variables or None, continued=continued)
    if rejected is not None:
        chat = chat._replace(rejected=_rejected(chat, rejected, where, images))
    if images:
        chat = _with_images(chat, images, where)
    if any(map(no_text, chat.texts())):
        raise UserError(
            f"{where}: a text has a lone surrogate (\\ud800-\\udfff) or a reserved pair of characters (U+E008 U+E009, "
            "U+E00A U+E00B); remove it"
        )
    return chat


def _rejected(chat: Conversation, given: Any, where: str, images: list[Picture]) -> Turn:
    """Return the rejected answer as a turn: `given` is its text, or a list with this one turn."""
    turns = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
    turns = checked_turns(turns, f"{where}: rejected()", images)
    if len(turns) != 1 or turns[0]["role"] != "assistant":
        raise UserError(f"{where}: rejected() gave {len(turns)} turns, expected the text or the turn of one answer")
    if chat.learnt or not chat.turns:
        problem = "several learnt turns" if chat.learnt else "raw text"
        raise UserError(f"{where}: rejected() gave an answer beside {problem}; target() must give one answer")
    if images:
        raise UserError(f"{where}: an example with a rejected answer has images; preferences are learnt from text")
    return turns[0]


def _with_images(chat: Conversation, images: list[Picture], where: str) -> Conversation:
    """Return the conversation with those of the task's images that are in its turns. Images in answers are refused."""
    if any(IMAGE_MARK in turn["content"] for turn in (chat.answer, *(chat.turns[at] for at in chat.learnt))):
        raise UserError(f"{where}: target() gave an answer with an image; answers can only be text")
    numbered = (Picture(picture.given, number) for number, picture in enumerate(images, 1))
    return chat._replace(images=tuple(numbered)[: marks(chat.turns)])


def checked_turns(turns: Any, source: str, images: list[Picture]) -> Turns:
    """Return turns as chat templates expect them: all have a `content`, none has a value of None, and the arguments of
    calls are dicts. Images in contents that are lists of parts are added to `images`."""
    if not isinstance(turns, list):
        raise UserError(f"{source} gave {str(turns)[:80]!r}, expected {_EXPECTED}")
    checked = []
    for turn in turns:
        called = isinstance(turn, dict) and turn.get("role") == "assistant" and bool(turn.get("tool_calls"))
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, list) and content:
            content, pictures = read_parts(content, source)
            images += pictures
        elif isinstance(content, str):
            unmarked(content, source)
        text = isinstance(content, str) or (content is None and called)
        if not text or not isinstance(turn.get("role"), str):
            raise UserError(f"{source} gave {str(turns)[:80]!r}, expected {_EXPECTED}")
        turn = {"role": turn["role"], "content": content or "", **_given(turn)}
        if "tool_calls" in turn:
            if not called:
                raise UserError(f"{source} gave tool_calls in a turn of role {turn['role']!r}; only an assistant calls")
            calls = turn["tool_calls"]
            turn["tool_calls"] = [_call(call, source) for call in (calls if isinstance(calls, list) else [calls])]
        if not isinstance(turn.get("reasoning_content", ""), str):
            raise UserError(f"{source} gave reasoning_content {str(turn['reasoning_content'])[:80]!r}, expected text")
        checked.append(turn)
    return checked


def _given(turn: Turn) -> Turn:
    """Return a turn without role and content, and without null values and empty calls, which some formats have."""
    rest = {name: value for name, value in turn.items() if name not in ("role", "content") and value is not None}
    return {name: value for name, value in rest.items() if name != "tool_calls" or value != []}


def _call(call: Any, source: str) -> dict[str, Any]:
    """Return a tool call with its arguments as a dict; the task may give them as JSON text, as in OpenAI's format."""
    function: Any = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f'{source} gave the call {str(call)[:80]!r}, expected {{"function": {{"name": ..., "arguments": ...}}}} '
            "with arguments as an object, or as its JSON text"
        )
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else {"type": "function", "function": parsed}


def _with_turns(turns: Turns, target: list[Any], where: str, images: list[Picture]) -> Conversation:
    """Return the conversation of messages() and the turns of target(), up to the last turn that is learnt."""
    if any("weight" in turn for turn in turns):
        raise UserError(f'{where}: messages() gave a turn with "weight"; only turns of target() are learnt')
    following = checked_turns(target, f"{where}: target()", images)
    if not following or following[-1]["role"] != "assistant":
        raise UserError(f"{where}: target() gave turns that do not end with an assistant turn")
    for turn in following:
        if (weight := turn.get("weight", 1)) not in (0, 1):
            raise UserError(f'{where}: target() gave a turn with "weight": {str(weight)[:80]}, expected 0 or 1')
    weights = ((turn["role"] == "assistant" and turn.get("weight", 1)) for turn in following)
    learnt = [at for at, weight in enumerate(weights, len(turns)) if weight]
    every = [{name: value for name, value in turn.items() if name != "weight"} for turn in (*turns, *following)]
    if not learnt:
        raise UserError(f'{where}: every assistant turn of target() has "weight": 0; leave the example out')
    if not learnt[0]:
        raise UserError(
            f'{where}: the first turn is an answer to nothing; put a user turn before it, or give it "weight": 0'
        )
    return Conversation(every[: learnt[-1]], every[learnt[-1]], tuple(learnt[:-1]))
