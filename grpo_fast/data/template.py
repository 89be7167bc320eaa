"""Chat templates: rendering, the first time in a process with limits, and the end of a turn."""

from __future__ import annotations

import os
import re
import select
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from grpo_fast.data.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_SECONDS = 10  # of the processor; a template takes a millisecond
LIMIT_BYTES = 1 << 30  # beyond what the process has
LIMIT_CHARACTERS = 1 << 24
MARK = "c41f8e"  # a text that nobody writes by chance
_TRIED: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()  # what each tokenizer's template has ended on


def render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    asks: bool = True,
    begun: bool = False,
    tries: bool = False,
) -> str:
    """Return the text that the chat template makes of a conversation.

    Args:
        options: further variables of the template, `dataset.chat_template_kwargs`.
        asks: the assistant's turn is begun at the end.
        begun: the last message is continued.
        tries: the first time for such turns, render in a process with limits: the template may have no end.

    Raises:
        ValueError: the template exceeds a limit.
        Exception: whatever else the template raises; ValueError from a process.
    """

    def text() -> str:
        return str(
            tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools or ()) or None,
                tokenize=False,
                add_generation_prompt=asks,
                continue_final_message=begun,
                **(options or {}),
            )
        )

    roles = frozenset(turn["role"] for turn in turns)
    form = (template_of(tokenizer), str(options), bool(tools), asks, begun, roles)
    known = _TRIED.setdefault(tokenizer, set())
    if not tries or form in known or not hasattr(os, "fork"):
        return text()
    found = _tried(text)
    known.add(form)
    return found


def _tried(work: Any) -> str:
    """Return what `work` returns in a forked process; raise its error, or its crash, as a ValueError."""
    incoming, outgoing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child needs none of their locks
        child = os.fork()
    if child == 0:
        _work_within_limits(work, outgoing)
    os.close(outgoing)
    reply, deadline = b"", time.monotonic() + 12 * LIMIT_SECONDS
    with open(incoming, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := file.read(1 << 16)):
                break
            reply += part
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kind, text = reply[:1], reply[1:].decode("utf-8", "surrogatepass")
    code = os.waitstatus_to_exitcode(status)
    if kind == b"#" or (not kind and code in (-signal.SIGKILL, -signal.SIGXCPU)):
        raise ValueError(
            f"it takes more than {LIMIT_SECONDS} seconds, {LIMIT_BYTES >> 30} GiB or {LIMIT_CHARACTERS:,} "
            "characters: look for a loop or a macro without end"
        )
    if kind != b"=":
        raise ValueError(text or f"the process that renders it ended with {code} and without a word")
    return text


def _work_within_limits(work: Any, outgoing: int) -> None:
    """Write the result of `work` after a `=`, its error after a `!`, or a `#` where it exceeds a limit."""
    import resource

    def limit(kind: int, wanted: int) -> None:
        hard = resource.getrlimit(kind)[1]
        with suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (most, hard))

    try:
        with suppress(OSError), open("/proc/self/statm", encoding="ascii") as statm:
            size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limit(resource.RLIMIT_AS, size + LIMIT_BYTES)
        limit(resource.RLIMIT_CORE, 0)
        limit(resource.RLIMIT_CPU, LIMIT_SECONDS)
        try:
            reply = f"={work()}"
        except (MemoryError, OverflowError, RecursionError):
            reply = "#"
        except Exception as error:
            reply = f"!{error}"
        with open(outgoing, "wb") as file:
            file.write((reply if len(reply) <= LIMIT_CHARACTERS else "#").encode("utf-8", "surrogatepass"))
    finally:
        os._exit(0)


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja text; of several named templates, all."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def variables_of(template: str) -> set[str]:
    """Return the names that a template reads from `dataset.chat_template_kwargs`."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    plain = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError:  # rendering says where
        return set()
    given = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    return {name for name in meta.find_undeclared_variables(parsed) - given if not name.endswith("_token")}


def state_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a tokenizer's template and added tokens, as a key of caches."""
    tokens = tokenizer.added_tokens_decoder, tokenizer.special_tokens_map
    return (template_of(tokenizer), *map(str, tokens))


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens with which, one upon the other, the chat template ends the assistant's turn."""
    return _turn_ends(tokenizer, state_of(tokenizer))


@lru_cache(maxsize=32)
def _turn_ends(tokenizer: PreTrainedTokenizerBase, state: tuple[str, ...]) -> tuple[int, ...]:
    if not template_of(tokenizer):
        return ()
    after = ""
    for parts in (False, True):  # some templates read text, some a list of parts
        said = [[{"type": "text", "text": text}] if parts else text for text in ("?", MARK)]
        turns = [{"role": role, "content": it} for role, it in zip(("user", "assistant"), said, strict=True)]
        with suppress(Exception):  # it is said where the template is used
            _, shown, after = render(tokenizer, turns, asks=False, tries=True).rpartition(MARK)
            if shown:
                break
    else:
        return ()
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.content}
    after, ends = after.lstrip(), []
    while found := [content for content in added if after.startswith(content)]:
        end = max(found, key=len)
        ends.append(added[end])
        after = after[len(end) :]
    return tuple(ends)
