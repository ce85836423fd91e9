#!/usr/bin/env python3
"""Conversations rendered by real chat templates with Jinja, set up as transformers does it (jinja2 only).

usage: make_chat_vectors.py tests/data/chat/templates.json tests/data/chat/golden.json

templates.json: {name: {"template": ..., "bos": ..., "eos": ...}}. golden.json adds to each the list "texts": per
conversation what apply_chat_template(tokenize=False, add_generation_prompt=False) would give, null where the template
raises an exception."""
import json
import sys

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

S, U, A = "system", "user", "assistant"
CONVERSATIONS = [
    [(U, "Hello"), (A, "Hi there")],
    [(S, "Be brief."), (U, "Hello"), (A, "Hi there"), (U, " Who are you? \n"), (A, "  An assistant. ")],
    [(U, "One question")],
    [(S, " Padded \n"), (U, "End with a question")],
    [(U, "a"), (U, "b"), (A, "c")],
    [(A, "Answer first"), (U, "then a question")],
    [(U, "think"), (A, "<think>\nfirst\n\nthen\n</think>\n\nanswer")],
    [(U, "think"), (A, "<think>old</think>\n\nanswer one"), (U, "again"), (A, "a <think>b</think>c</think>\nd"), (A, "plain")],
    [(U, "tool"), (A, "<think>x</think>y"), (U, "<tool_response>\n1\n</tool_response>"), (A, "\n\ndone\n")],
    [(U, ""), (A, "")],
    [(S, ""), (U, "empty system text"), (A, "ok")],
    [(U, "Grüße \u00a0 und 日本"), (A, "\u2003weites Leerzeichen")],
]


def fail(message):
    raise TemplateError(message)


def render(entry, conversation):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.globals["raise_exception"] = fail
    messages = [{"role": role, "content": content} for role, content in conversation]
    try:
        return env.from_string(entry["template"]).render(messages=messages, add_generation_prompt=False,
                                                         bos_token=entry["bos"], eos_token=entry["eos"])
    except TemplateError:
        return None


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        templates = json.load(f)
    for entry in templates.values():
        entry["texts"] = [render(entry, c) for c in CONVERSATIONS]
    conversations = [[{"role": r, "content": c} for r, c in conv] for conv in CONVERSATIONS]
    with open(sys.argv[2], "w", encoding="utf-8") as f:
        json.dump({"conversations": conversations, "templates": templates}, f, ensure_ascii=False, indent=1)
        f.write("\n")


main()
