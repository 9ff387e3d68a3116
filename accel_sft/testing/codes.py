"""Codes of the conformance kit's findings, and how to fix each. docs/writing-a-task.md lists them."""

CODES = {
    "T101": ("the class breaks the contract of tasks", "give it the methods and options that are named here"),
    "T102": ("its options are refused by problems()", "construct it with values that it takes itself"),
    "T103": ("its options do not make the same task again", "keep an option's value as it was given"),
    "T201": ("dataset() fails, or gives no sequence of examples", "return a sequence with at least one example"),
    "T202": ("messages() or target() fails, or gives no conversation", "return chat messages, and a text as target"),
    "T203": ("a target is empty, and training leaves the row out", "write the answer, or take the row out"),
    "T204": ("a method answers otherwise when called again", "draw nothing at random in a call; seed it in dataset()"),
    "T205": ("another process gets other data", "seed random numbers, and sort sets: their order differs by process"),
    "T301": ("prompts of validation are in training", "split by what the prompt says"),
    "T401": ("score() or aggregate() fails on a right answer", "give numbers by name, the main metric among them"),
    "T402": ("a right answer does not score best", "let score() take what target() gives as perfect"),
    "T403": ("score() or aggregate() fails on what a model may write", "score what cannot be read as wrong"),
    "T404": ("what is no answer scores as well as the right one", "score what is not the answer lower"),
    "T405": ("scores cannot be written as JSON", "give numbers, texts, lists and dicts of them; NaN is none"),
}
"""Code -> what is wrong, and how to fix it. A code never changes its meaning."""


def finding(code: str, detail: str) -> str:
    """A finding as a failed test shows it: code, meaning, what was seen, and the fix."""
    what, fix = CODES[code]
    return f"{code} {what}: {detail}; {fix}"
